"""Runs of real processes, and a check that nothing of them is left behind."""

from __future__ import annotations

import gc
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from cmnet.launch import agent
from cmnet.launch.supervisor import RunResult, Settings, Supervisor, make_run_folder
from tests.rig import machine

Interfere = Callable[[Supervisor], None]
"""Runs on a thread beside the run."""


class Runner:
    """Starts runs in the test's folder. ``last`` is the supervisor of the last one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.last: Supervisor | None = None

    def __call__(
        self,
        program: agent.Program,
        /,
        *,
        topology: str = "mini",
        interfere: Interfere | None = None,
        **settings: Any,
    ) -> RunResult:
        supervisor = self.last = Supervisor(
            machine=machine(topology),
            program=program,
            settings=Settings(**settings),
            folder=make_run_folder(self.folder, "test"),
        )
        thread = threading.Thread(target=interfere, args=(supervisor,)) if interfere else None
        if thread is not None:
            thread.start()
        try:
            return supervisor.run()
        finally:
            if thread is not None:
                thread.join()
            assert [pid for pid in supervisor.pids.values() if lives(pid)] == []


def lives(pid: int) -> bool:
    """A process that runs; a zombie does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """On the wall clock: what is waited for happens in another process or thread."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.0005)


def sockets() -> int:
    """How many sockets, pidfds and polls this process has open."""
    links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
    targets = [os.readlink(link) for link in links if os.path.lexists(link)]
    return sum(target.startswith(("socket:", "anon_inode:")) for target in targets)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runner]:
    """A runner; afterwards no process and no socket folder may be left."""
    monkeypatch.setattr(tempfile, "tempdir", tempfile.mkdtemp(prefix="test-", dir="/tmp"))
    gc.collect()
    before = sockets()
    yield Runner(tmp_path)
    gc.collect()
    assert tempfile.tempdir is not None
    assert os.listdir(tempfile.tempdir) == []
    os.rmdir(tempfile.tempdir)
    assert [child for child in psutil.Process().children() if lives(child.pid)] == []
    assert sockets() == before
