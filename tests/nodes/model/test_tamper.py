"""Tampering: each kind changes something, once, and never what it was given."""

from __future__ import annotations

import numpy as np
import pytest

from cmnet import entropy
from nodes.model.tamper import KINDS, Tamper


@pytest.mark.parametrize("kind", KINDS)
def test_it_changes_exactly_the_pass_asked_for(kind: str) -> None:
    """Passes of another part are not counted, and items are never changed in place."""
    draw = entropy.stream(1, kind)
    tamper = Tamper(kind, passes=2, draw=draw.below)
    part = KINDS[kind][0]
    changed = []
    for step in range(5):
        items = np.arange(4 * step, 4 * step + 4, dtype=np.uint64) + np.uint64(100)
        kept = items.copy()
        assert tamper.touch("another part", items) is items
        changed.append(not np.array_equal(tamper.touch(part, items), items))
        assert np.array_equal(items, kept)
    assert changed == [False, False, True, False, False]
    assert tamper.done


def test_it_waits_for_a_pass_that_can_be_changed() -> None:
    """One item cannot be exchanged with another."""
    tamper = Tamper("results exchanged", passes=0, draw=entropy.stream(1, "x").below)
    one, two = np.array([7], dtype=np.uint64), np.array([7, 8], dtype=np.uint64)
    assert tamper.touch("results", one) is one
    assert not tamper.done
    assert tamper.touch("results", two).tolist() == [8, 7]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_changed_where_there_is_nothing(kind: str) -> None:
    tamper = Tamper(kind, passes=0, draw=entropy.stream(1, "x").below)
    empty = np.empty((0, 8), dtype=np.uint64)
    assert tamper.touch(KINDS[kind][0], empty) is empty
    assert not tamper.done
