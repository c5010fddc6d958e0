"""What a command prints: people and programs each have a stream of their own."""

from __future__ import annotations

import msgspec
import pytest

from cmnet.record.screen import Screen, Table, plain

TABLE = Table(
    title="Planes",
    columns=("plane", ">bytes"),
    rows=[("UB", "1"), ("RDMA", "12345678")],
    note="charged",
)


def test_json_is_alone_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    """One object, so that a program can read it; all else goes to standard error."""
    screen = Screen(json=True)
    screen.line("for people")
    screen.table(TABLE)
    screen.result({"digest": "ab", "n": 2**63})
    told = capsys.readouterr()
    assert msgspec.json.decode(told.out) == {"digest": "ab", "n": 2**63}
    assert told.out.count("\n") == 1
    assert told.err.startswith("for people\nPlanes\n")


def test_people_have_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    """Without --json there is no object, and nothing on standard error."""
    screen = Screen(json=False)
    screen.line("for people")
    screen.result({"digest": "ab"})
    told = capsys.readouterr()
    assert (told.out, told.err) == ("for people\n", "")


def test_a_table_in_a_pipe_is_aligned_text() -> None:
    """Numbers to the right, no trailing blanks, no boxes."""
    assert plain(TABLE) == [
        "Planes",
        "  plane     bytes",
        "  UB            1",
        "  RDMA   12345678",
        "  charged",
    ]


def test_a_table_without_rows_is_its_head() -> None:
    """A run that was ended early still has a report."""
    assert plain(Table(title="", columns=("", ">n"), rows=[])) == ["    n"]
