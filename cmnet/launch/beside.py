"""A helper process beside a run: started early, told when the run is over, waited for.

Owns its start and its end. It is no part of the emulated machine: it sees only files of the run's
folder and ends with the process that started it. Does not own what it does.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

from cmnet.errors import LaunchError
from cmnet.launch import deathsig


class Beside:
    """The handle: ``python -m module arguments``. ``finish`` says that the run is over and waits."""

    def __init__(self, module: str, *arguments: str, root: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, str(os.getpid()), *arguments],
            stdin=subprocess.PIPE,
            cwd=root,
            process_group=0,
        )
        self._module = module

    def finish(self) -> None:
        """Tell it that nothing more will come, and wait. Raises LaunchError if it failed."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        status = self._process.wait()
        if status != 0:
            raise LaunchError(f"{self._module} ended with status {status}")

    def stop(self) -> None:
        """End it now, if it still lives."""
        self._process.kill()
        self._process.wait()


def enter(parent: str) -> None:
    """What the helper does first; ``parent`` is its first argument."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    deathsig.die_with_parent(int(parent))


def told_to_finish(wait_s: float = 0.0) -> bool:
    """In the helper: whether the run is over (or its supervisor is gone), or will be within ``wait_s``."""
    readable, _, _ = select.select([sys.stdin], [], [], wait_s)
    return bool(readable)
