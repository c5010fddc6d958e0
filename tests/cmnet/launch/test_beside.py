"""A helper beside a run: it is told of the end, and it does not outlive its parent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cmnet.errors import LaunchError
from cmnet.launch.beside import Beside

ROOT = Path(__file__).resolve().parents[3]
HELPER = """
import sys, time
sys.path.insert(0, {root!r})
from cmnet.launch import beside
beside.enter(sys.argv[1])
out = open(sys.argv[2], "w", buffering=1)
out.write("up\\n")
while not beside.told_to_finish():
    time.sleep(0.01)
out.write("told\\n")
sys.exit(int(sys.argv[3]))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "helper_of_test.py").write_text(HELPER.format(root=str(ROOT)))
    return tmp_path


@pytest.mark.slow
def test_it_is_told_of_the_end_and_waited_for(folder: Path) -> None:
    """What it still has to do is done before the report."""
    helper = Beside("helper_of_test", str(folder / "out"), "0", root=str(folder))
    helper.finish()
    helper.stop()
    assert (folder / "out").read_text() == "up\ntold\n"


@pytest.mark.slow
def test_its_failure_is_an_error(folder: Path) -> None:
    """A verifier that died has verified nothing."""
    helper = Beside("helper_of_test", str(folder / "out"), "3", root=str(folder))
    with pytest.raises(LaunchError, match="status 3"):
        helper.finish()


@pytest.mark.slow
def test_it_ends_with_its_parent(folder: Path) -> None:
    """Also if that is killed: its standard input ends, and the kernel sends a signal."""
    parent = (
        "import sys, os; from cmnet.launch.beside import Beside\n"
        f"Beside('helper_of_test', {str(folder / 'out')!r}, '0', root={str(folder)!r})\n"
        "sys.stdout.write('started'); sys.stdout.flush(); os.kill(os.getpid(), 9)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, "-c", parent], stdout=subprocess.PIPE, env=environment, timeout=60
    )  # returns when nobody holds its standard output any more: the helper inherited it
    assert ended.returncode == -9
    assert ended.stdout == b"started"
