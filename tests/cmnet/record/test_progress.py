"""The progress bar: on a terminal only, and it counts finished lines."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from cmnet.record.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_pipe_sees_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Logs stay readable."""
    with Progress(tmp_path / "f", total=3) as progress:
        progress.show(10**12)
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", "")


def test_a_terminal_sees_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts only what was written since it last looked."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    path = tmp_path / "f"
    with Progress(path, total=3) as progress:
        progress.show(0)
        path.write_bytes(b"one\ntwo\n")
        progress.show(2 * 10**12)
        progress.show(2 * 10**12)
    assert "2/3" in terminal.getvalue()
    assert "4/3" not in terminal.getvalue()
    assert "2 s of virtual time" in terminal.getvalue()
