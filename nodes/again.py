"""``replay`` and ``report``: whatever a folder holds, its record says which command it was.

Owns that choice. Does not own what the commands do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cmnet.errors import InputError
from cmnet.record import record as records
from cmnet.record.record import Record
from cmnet.record.screen import Screen


def replay(name: str, *, json: bool) -> int:
    """Repeat a recorded run; returns the exit status. Raises InputError."""
    folder = records.find(name)
    old = records.read(folder)
    status: int = _command(folder, old).replay(folder, old, Screen(json=json))
    return status


def report(name: str, *, json: bool) -> int:
    """Print the report of a run again; returns its exit status. Raises InputError."""
    folder = records.find(name)
    status: int = _command(folder, records.read(folder)).report(folder, Screen(json=json))
    return status


def _command(folder: Path, record: Record) -> Any:
    """The module that has ``replay`` and ``report`` for runs of that command; imported here, because each
    brings along all that its runs need."""
    if record.command == "serve":
        from nodes.serving import command as serve

        return serve
    if record.command == "moe":
        from nodes.moe import command as moe

        return moe
    path, expected = str(folder / records.FILE), "serve or moe"
    raise InputError(file=path, key="command", value=record.command, expected=expected)
