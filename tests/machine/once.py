"""``python -m tests.machine.once PROGRAM FOLDER [SETTINGS as JSON]``: one run as a process of its own.

Prints ``up <zygote> <pids...>`` once all are up, and the result as JSON.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec

from cmnet.launch.supervisor import Settings, Supervisor, make_run_folder
from tests.machine import programs
from tests.rig import machine


class Announcing(Supervisor):
    """Says who is up before the first window."""

    def _begin(self) -> None:
        print("up", self._zygote.pid, *self.pids.values(), flush=True)
        super()._begin()


def main(program: str, folder: str, settings: str = "{}") -> None:
    told: dict[str, Any] = msgspec.json.decode(settings)
    supervisor = Announcing(
        machine=machine("mini"),
        program=getattr(programs, program),
        settings=msgspec.convert(told, Settings),
        folder=make_run_folder(Path(folder), "once"),
    )
    print(msgspec.json.encode(supervisor.run()).decode(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
