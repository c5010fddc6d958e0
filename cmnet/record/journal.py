"""Journals: where two runs first differ.

Owns the reading of what ``cmnet.record.digest`` writes: one file a process and incarnation, one event
a line, its instant first. Does not own what an event means to the program.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from cmnet.errors import InputError
from cmnet.units import NEVER_PS

FOLDER = "journal"
END = "(no more events)"


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The first event of one process that is not the same in both runs."""

    at_ps: int
    process: str
    """Name and incarnation, such as node03.0."""
    number: int
    """Of the event in its journal, from 1."""
    first: str
    second: str


def first_difference(first: Path, second: Path) -> Difference | None:
    """The earliest event that differs between two run folders. Raises InputError without journals.

    Each process's journals are compared line by line; of their first differences the one with the
    least instant is named, for what comes later may follow from it.
    """
    names = sorted({*_names(first), *_names(second)})
    found = (_compare(first / FOLDER / name, second / FOLDER / name) for name in names)
    differing = [difference for difference in found if difference is not None]
    return min(differing, key=lambda each: (each.at_ps, each.process), default=None)


def events_count(folder: Path) -> int:
    """Events in all journals of a run."""
    return sum(sum(1 for _ in _lines(folder / FOLDER / name)) for name in _names(folder))


def in_words(event: str, devices: Sequence[str]) -> str:
    """An event with the devices' names for their ids."""
    match event.split(" "):
        case [at_ps, "delivery", source, target, sequence, kind, charged_bytes]:
            ends = f"{devices[int(source)]} -> {devices[int(target)]}"
            return f"{at_ps} ps: {charged_bytes} B {ends}, message {sequence} of kind {kind}"
        case [at_ps, "drop", source, target, sequence, kind]:
            ends = f"{devices[int(source)]} -> {devices[int(target)]}"
            return f"{at_ps} ps: dropped {ends}, message {sequence} of kind {kind}"
        case [at_ps, "mark", *words]:
            return f"{at_ps} ps: {' '.join(words)}"
    return event


def _names(folder: Path) -> list[str]:
    names = [path.name for path in (folder / FOLDER).glob("*.txt")]
    if not names:
        expected = "a run that was started with --journal"
        raise InputError(file=str(folder), key="journal", value="none", expected=expected)
    return names


def _lines(path: Path) -> Iterator[str]:
    if path.exists():
        with path.open(encoding="utf-8") as stream:
            for line in stream:
                yield line.rstrip("\n")


def _compare(first: Path, second: Path) -> Difference | None:
    pairs = itertools.zip_longest(_lines(first), _lines(second), fillvalue=END)
    for number, (one, other) in enumerate(pairs, 1):
        if one != other:
            at_ps = min(_at_ps(one), _at_ps(other))
            return Difference(
                at_ps=at_ps, process=first.stem, number=number, first=one, second=other
            )
    return None


def _at_ps(event: str) -> int:
    text = event.split(" ", 1)[0]
    return int(text) if text.isdigit() else NEVER_PS
