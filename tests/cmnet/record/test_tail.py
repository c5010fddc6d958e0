"""Following a file that grows: whole lines, each once, until told that it is all."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from cmnet.record import tail


def script(path: Path, writes: Iterable[bytes]) -> tail.Ended:
    """Writes one piece each time it is asked whether the end has come; says so after the last."""
    pieces = iter(writes)

    def ended(_: float) -> bool:
        piece = next(pieces, None)
        if piece is not None:
            with path.open("ab") as stream:
                stream.write(piece)
        return piece is None

    return ended


def follow(path: Path, *writes: bytes) -> list[bytes]:
    return list(tail.follow(path, ended=script(path, writes), poll_s=0))


def test_lines_come_whole_and_once(tmp_path: Path) -> None:
    """However the writer cuts them."""
    assert follow(tmp_path / "f", b"one\ntw", b"", b"o\n", b"three\n") == [b"one", b"two", b"three"]


def test_a_last_line_that_was_not_finished_is_left_out(tmp_path: Path) -> None:
    """Its writer died in it."""
    assert follow(tmp_path / "f", b"one\n", b"tw") == [b"one"]


def test_a_file_that_never_comes_has_no_lines(tmp_path: Path) -> None:
    """A run can end before its first request does."""
    assert list(tail.follow(tmp_path / "f", ended=lambda _: True)) == []


def test_several_files_are_followed_together(tmp_path: Path) -> None:
    """Lines of each in their order, also of one that is made later; unfinished ones are left out."""
    first, later = tmp_path / "a", tmp_path / "b"
    first.write_bytes(b"1\n2\n3")
    asked = 0

    def ended(_: float) -> bool:
        nonlocal asked
        asked += 1
        if asked == 2:
            later.write_bytes(b"x\ny\n")
            first.write_bytes(b"1\n2\n34\n5")
        return asked == 3

    lines = list(tail.follow_all([first, later], ended=ended, poll_s=0))
    assert lines == [b"1", b"2", b"34", b"x", b"y"]
