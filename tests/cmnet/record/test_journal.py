"""Journals of two runs: the first event that differs is named, and only that."""

from __future__ import annotations

from pathlib import Path

import pytest

from cmnet.errors import InputError
from cmnet.record import journal

EVENTS = ["5 mark a b", "7 delivery 0 1 1 16 512", "9 drop 1 0 2 16"]


def run(folder: Path, **journals: list[str]) -> Path:
    (folder / "journal").mkdir(parents=True)
    for name, events in journals.items():
        text = "".join(f"{event}\n" for event in events)
        (folder / "journal" / f"{name.replace('_', '.')}.txt").write_text(text)
    return folder


def test_equal_journals_have_no_difference(tmp_path: Path) -> None:
    """Also when some process had nothing to tell."""
    first = run(tmp_path / "a", node00_0=EVENTS, node01_0=[])
    second = run(tmp_path / "b", node00_0=EVENTS, node01_0=[])
    assert journal.first_difference(first, second) is None
    assert journal.events_count(first) == 3


def test_the_earliest_of_all_processes_is_named(tmp_path: Path) -> None:
    """What comes later may follow from it; ties go by name."""
    first = run(tmp_path / "a", node00_0=[*EVENTS, "90 mark x"], node01_0=["20 mark y"])
    second = run(tmp_path / "b", node00_0=[*EVENTS, "91 mark x"], node01_0=["20 mark z"])
    found = journal.first_difference(first, second)
    assert found == journal.Difference(
        at_ps=20, process="node01.0", number=1, first="20 mark y", second="20 mark z"
    )


@pytest.mark.parametrize("shorter", [True, False])
def test_a_journal_that_ends_early_differs_there(shorter: bool, tmp_path: Path) -> None:
    """The instant is the other's event."""
    first = run(tmp_path / "a", node00_0=EVENTS[:2] if shorter else EVENTS)
    second = run(tmp_path / "b", node00_0=EVENTS if shorter else EVENTS[:2])
    found = journal.first_difference(first, second)
    assert found is not None
    assert (found.at_ps, found.number) == (9, 3)
    assert {found.first, found.second} == {EVENTS[2], journal.END}


def test_a_process_of_one_run_alone_differs(tmp_path: Path) -> None:
    """Such as the second life of a node that was restarted."""
    first = run(tmp_path / "a", node00_0=EVENTS)
    second = run(tmp_path / "b", node00_0=EVENTS, node00_1=["30 mark up"])
    found = journal.first_difference(first, second)
    assert found is not None
    assert (found.process, found.first) == ("node00.1", journal.END)


def test_a_run_without_journals_is_refused(tmp_path: Path) -> None:
    """Nothing differs between nothings: that would be a lie."""
    first, second = run(tmp_path / "a", node00_0=EVENTS), run(tmp_path / "b")
    with pytest.raises(InputError, match="--journal"):
        journal.first_difference(first, second)


def test_events_are_told_with_the_names_of_devices() -> None:
    """Ids are for machines."""
    told = [journal.in_words(event, ["node00/npu0/die0", "node00"]) for event in EVENTS]
    assert told == [
        "5 ps: a b",
        "7 ps: 512 B node00/npu0/die0 -> node00, message 1 of kind 16",
        "9 ps: dropped node00 -> node00/npu0/die0, message 2 of kind 16",
    ]
    assert journal.in_words(journal.END, []) == journal.END
