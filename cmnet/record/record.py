"""What a run was, on disk: enough to repeat it and to print its report again.

Owns the run's folder names, ``record.json`` in it, and how a run is named on
the command line. Written once before the run, so that a run whose supervisor was killed still says
what it was, and again at its end. Does not own the journals, the statistics, nor what the program
writes beside them.
"""

from __future__ import annotations

import hashlib
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from cmnet.errors import InputError
from cmnet.topology import document, load
from cmnet.topology.machine import Machine

T = TypeVar("T")

FILE = "record.json"
RUNS = Path("runs")
"""Runs go to the folder where the user is."""
INSIDE = ("disk", "journal", "statistics", "stacks")
"""Folders that the processes of a run write to."""
_PACKAGES = ("uvloop", "numpy", "msgspec", "lmdb", "xxhash")
FORMAT = 1


class Death(msgspec.Struct, frozen=True, kw_only=True):
    """A node's death; an unplanned one replays as a planned kill at this instant."""

    node: str
    at_ps: int
    planned: bool


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How it ended. ``error`` is empty if it reached its purpose."""

    digest: str = ""
    windows: int = 0
    grants: int = 0
    virtual_ps: int = 0
    launch_s: float = 0.0
    wall_s: float = 0.0
    deaths: list[Death] = []
    not_reached: list[str] = []
    """Node faults of the plan that were later than the end, in words."""
    error: str = ""
    error_code: str = ""
    detail: str = ""
    interrupted: bool = False
    socket_buffer_bytes: int | None = None
    """What the kernel allowed, where it is known."""

    def ended_like(self, other: Outcome) -> bool:
        """Whether both did the same things and ended in the same way."""
        return (self.digest, self.error_code) == (other.digest, other.error_code)


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    command: str
    command_line: list[str]
    topology_file: str
    topology_text: str
    seed: int
    plan: dict[str, Any]
    options: dict[str, Any]
    """Of the command; it alone knows their meaning."""
    versions: dict[str, str] = {}
    started: str = ""
    """Wall time, for people."""
    outcome: Outcome | None = None
    format: int = FORMAT


def versions() -> dict[str, str]:
    """What this Python and the packages under a run are."""
    import importlib.metadata  # which only the run itself needs, not who reads its record

    found = {"python": platform.python_version(), "system": platform.platform()}
    return found | {name: importlib.metadata.version(name) for name in _PACKAGES}


def wall_text() -> str:
    """Now, for people."""
    return time.strftime("%Y-%m-%d %H:%M:%S%z")


def write(folder: Path, record: Record) -> None:
    """Write ``record.json`` whole or not at all."""
    text = msgspec.json.format(msgspec.json.encode(record), indent=1)
    draft = folder / f"{FILE}.draft"
    draft.write_bytes(text)
    draft.replace(folder / FILE)


def read(folder: Path) -> Record:
    """The record of a run's folder. Raises InputError."""
    path = folder / FILE
    try:
        record = msgspec.json.decode(path.read_bytes(), type=Record)
    except OSError as error:
        value = error.strerror or str(error)
        expected = "the folder of a run, with its record"
        raise InputError(file=str(path), key="", value=value, expected=expected) from None
    except msgspec.DecodeError as error:
        expected = "a whole record of a run"
        raise InputError(file=str(path), key="", value=str(error), expected=expected) from None
    if record.format != FORMAT:
        expected = f"{FORMAT}, as this version writes it"
        raise InputError(file=str(path), key="format", value=record.format, expected=expected)
    return record


def decoded(path: Path, kind: type[T], *, expected: str) -> T:
    """A JSON file of a run's folder. Raises InputError, with what was ``expected``, where it is damaged."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(file=str(path), key="", value=str(error), expected=expected) from None


def find(name: str) -> Path:
    """The folder of a run that is named on the command line. Raises InputError."""
    for folder in (Path(name), RUNS / name):
        if name and (folder / FILE).is_file():
            return folder
    known = sorted(path.parent.name for path in RUNS.glob(f"*/{FILE}"))
    expected = "the folder of a run, or its name in runs/"
    expected += f" (the last is {known[-1]})" if known else " (there is none)"
    raise InputError(file="RUN", key="", value=name, expected=expected)


def claim(folder: Path) -> Path:
    """Make a folder that the user named into one for a run: it must be new or empty."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise InputError(file="--out", key="", value=str(folder), expected="an empty folder")
        for inside in INSIDE:
            (folder / inside).mkdir(mode=0o700)
    except OSError as error:
        value = f"{folder}: {error.strerror}"
        expected = "a folder that can be written"
        raise InputError(file="--out", key="", value=value, expected=expected) from None
    return folder


def machine(
    record: Record, *, extensions: Mapping[str, type[msgspec.Struct]] | None = None
) -> Machine:
    """The machine of a run, from the record's own text. Raises InputError."""
    file, text = record.topology_file, record.topology_text
    data = document.parse(file, text)
    read_again = document.Document(file=file, text=text, data=data, origins={})
    return load.build(read_again, extensions=extensions or {})


def differences(first: Record, second: Record) -> list[str]:
    """What the two were told differently: the names of parts."""
    parts: Sequence[str] = ("command", "topology_text", "seed", "plan", "options")
    return [name for name in parts if getattr(first, name) != getattr(second, name)]


def sha256(path: str | Path) -> str:
    """Of a file's content. Raises InputError where it cannot be read."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        value = error.strerror or str(error)
        raise InputError(file=str(path), key="", value=value, expected="a readable file") from None
