"""Runs of the emulator for the bench: machines of any size, one run each, what it used."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from cmnet.launch.agent import Program
from cmnet.launch.supervisor import RunResult, Settings, Supervisor, make_run_folder
from cmnet.topology.load import load
from cmnet.topology.machine import Machine

TOPOLOGIES = Path(__file__).resolve().parents[2] / "topologies"
SOURCE = "{kind: assumed, source: bench, range: [2, 1000], value: "


@dataclass(frozen=True)
class Measured:
    """A run and what its nodes wrote at the end."""

    result: RunResult
    private_bytes: list[int]
    cpu_s: float
    """Of the nodes from the start of their program, and of the conductor."""

    @property
    def grants_per_s(self) -> float:
        return self.result.grants / self.result.wall_s


@functools.cache
def machine_of(nodes: int) -> Machine:
    """CloudMatrix384 with another number of nodes."""
    if nodes == 48:
        return load(str(TOPOLOGIES / "cloudmatrix384.yaml"))
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        shutil.copy(TOPOLOGIES / "cloudmatrix384.yaml", name)
        file = Path(name, "other.yaml")
        file.write_text(
            "base: cloudmatrix384.yaml\n"
            f"name: bench{nodes}\nabout: a size of the bench\n"
            f"machine: {{nodes: {SOURCE}{nodes}}}}}\n"
            f"roles: {{prefill: [[node00]], decode: [node01], ems: [node00..node{nodes - 1:02}]}}\n"
        )
        return load(str(file))


def run(program: Program, *, nodes: int = 48, **settings: Any) -> Measured:
    """One run from start to end; its folder is thrown away."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = make_run_folder(Path(name), "bench")
        supervisor = Supervisor(
            machine=machine_of(nodes),
            program=program,
            settings=Settings(program=settings),
            folder=folder,
        )
        began_s = time.process_time()
        result = supervisor.run()
        conductor_s = time.process_time() - began_s
        assert not result.error, f"{result.error}\n{result.detail}"
        used = [_used(path) for path in sorted((folder / "statistics").glob("node*.json"))]
    return Measured(
        result,
        [each["private_bytes"] for each in used],
        conductor_s + sum(each["cpu_s"] for each in used),
    )


def _used(path: Path) -> dict[str, Any]:
    used: dict[str, Any] = msgspec.json.decode(path.read_bytes())["program"]
    return used


def bare_pythons_s(count: int) -> float:
    """Wall seconds until so many plain Python processes have imported numpy."""
    begin = time.perf_counter()
    children = [
        subprocess.Popen(
            [sys.executable, "-c", "import numpy; print(1, flush=True); input()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for _ in range(count)
    ]
    for child in children:
        assert child.stdout is not None and child.stdout.readline()
    wall_s = time.perf_counter() - begin
    for child in children:
        child.communicate(b"\n")
    return wall_s
