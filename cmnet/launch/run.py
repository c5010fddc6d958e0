"""What a run is told and what it was: records that the supervisor takes and returns.

Owns their shape and the making of a run's folder. Does not own what becomes of them.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import msgspec

from cmnet.errors import InputError, LaunchError
from cmnet.link.rules import Rule
from cmnet.units import NEVER_PS

SILENT_TIMEOUT_S = 60.0
"""Wall seconds without an answer to a grant (design 1.7)."""


StartOrder = Literal["listed", "random", "reverse"]


def in_start_order(order: StartOrder, processes: list[int]) -> list[int]:
    """Processes as they are to be forked; at random, another order in each run."""
    if order == "reverse":
        return processes[::-1]
    if order == "random":
        return sorted(processes, key=lambda _: secrets.randbits(64))
    return processes


class NodeFault(msgspec.Struct, frozen=True, kw_only=True):
    """A node dies or comes back at an instant."""

    at_ps: int
    kind: Literal["kill", "restart"]
    process: int
    sudden: bool = False
    """Of a kill: what its process has begun to send leaves nevertheless, up to the end of a slice
    (``cmnet.bursts``), as at a death that nobody planned; else nothing leaves from ``at_ps`` on."""


def known_deaths_ps(faults: Iterable[NodeFault], processes: int) -> list[int]:
    """When the first of these kills each process; NEVER_PS if none does, or it is sudden."""
    deaths_ps: list[int] = [NEVER_PS] * processes
    for fault in sorted(faults, key=lambda fault: fault.at_ps, reverse=True):
        if fault.kind == "kill":
            deaths_ps[fault.process] = NEVER_PS if fault.sudden else fault.at_ps
    return deaths_ps


class DeathRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A death as the run's record keeps it; it replays as a planned kill."""

    process: int
    name: str
    at_ps: int
    planned: bool


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What a run is started with, beside machine and program."""

    seed: int = 0
    start_order: StartOrder = "listed"
    socket_buffer_bytes: int = 4 << 20
    journal: bool = False
    rules: list[Rule] = []
    node_faults: list[NodeFault] = []
    program: dict[str, Any] = {}
    """Handed to every process as it is; JSON-able."""
    silent_timeout_s: float = SILENT_TIMEOUT_S


class RunResult(msgspec.Struct, kw_only=True):
    """What a run was. ``error`` is empty when it reached its purpose."""

    folder: str
    digest: str = ""
    windows: int = 0
    grants: int = 0
    virtual_ps: int = 0
    launch_s: float = 0.0
    wall_s: float = 0.0
    deaths: list[DeathRecord] = []
    not_reached: list[NodeFault] = []
    error: str = ""
    error_code: str = ""
    detail: str = ""
    interrupted: bool = False
    socket_buffer_bytes: int = 0


def make_run_folder(parent: Path, word: str) -> Path:
    """A new private folder runs/<time>-<word>-<n>."""
    try:
        return _make_run_folder(parent, word)
    except OSError as error:
        expected = f"a folder that can be written ({error.strerror}), or another by --out"
        raise InputError(file=str(parent), key="", value=str(parent), expected=expected) from error


def _make_run_folder(parent: Path, word: str) -> Path:
    parent.mkdir(parents=True, exist_ok=True)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for number in range(1000):
        folder = parent / (f"{stamp}-{word}" + (f"-{number}" if number else ""))
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            continue
        for inside in ("disk", "journal", "statistics", "stacks"):
            (folder / inside).mkdir(mode=0o700)
        return folder
    raise LaunchError(f"no free name for a run folder in {parent}")


def granted_buffer_bytes(asked_bytes: int) -> int:
    """What the kernel gives of the socket buffer that is asked for (it may have a cap)."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, asked_bytes)
        # Linux doubles what is asked, for its own accounting (socket(7))
        return probe.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 2
