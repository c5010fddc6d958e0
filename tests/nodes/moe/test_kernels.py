"""Compiled loops give what numpy gives; who is complete is with ``arrivals``, busy slots with ``buffers``."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodes.model.body import I64, U64
from nodes.moe import kernels


def drawn(count: int, end: int, number: int) -> I64:
    raw = np.random.Philox(key=number).random_raw(count) % np.uint64(end)
    return raw.astype(np.int64)


def words(rows: int, width: int, number: int) -> U64:
    return np.random.Philox(key=number).random_raw(rows * width).reshape(rows, width)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 300), st.sampled_from([0, 1, 3, 11, 12, 22, 30, 61]), st.integers(0, 9))
def test_an_order_is_the_stable_one(count: int, bits: int, number: int) -> None:
    """One digit or many, whose last is whole or not, and keys that are often equal."""
    keys = drawn(count, 1 << bits, number)
    keys[::3] &= 1
    assert kernels.order(keys, bits).tolist() == np.argsort(keys, kind="stable").tolist()


@pytest.mark.parametrize(("lead", "body"), [(1, 4), (2, 7), (2, 0)])
def test_rows_are_packed_and_put_to_their_places(lead: int, body: int) -> None:
    """There and back, also from rows that lie apart, as those of a frame do behind their leads."""
    leads, bodies = words(9, lead, 1).view(np.int64), words(5, body, 2)
    of = drawn(9, 5, 3)
    out: U64 = np.empty((9, lead + body), dtype=np.uint64)
    kernels.pack(leads, bodies, of, out)
    assert (out == np.concatenate([leads.view(np.uint64), bodies[of]], axis=1)).all()
    places, back = np.arange(9)[::-1].copy(), np.zeros((10, body), dtype=np.uint64)
    kernels.put(out[:, lead:], places, back)
    assert (back[:9] == bodies[of][::-1]).all() and not back[9].any()


def test_slots_of_one_number_lie_together() -> None:
    """Of 3 sources with 2 slots each: slot 0 of each, then slot 1 of each."""
    taken_ps: I64 = np.full((2, 6), -1, dtype=np.int64)
    ranks, slots, at_ps = np.array([0, 1, 1]), np.array([0, 2, 5]), np.array([5, 6, 7])
    assert kernels.write_slots(ranks, slots, at_ps, 3, 99, taken_ps) == -1
    assert taken_ps.tolist() == [[99, -1, -1, -1, -1, -1], [-1, 99, -1, -1, -1, 99]]
    kernels.take_slots(ranks, slots, at_ps, 3, taken_ps)
    assert taken_ps.tolist() == [[5, -1, -1, -1, -1, -1], [-1, 6, -1, -1, -1, 7]]


def test_the_first_write_to_a_slot_that_is_busy_or_not_there_is_found() -> None:
    """And nothing is written then."""
    ranks, slots, at_ps = np.array([0, 1, 1, 0]), np.array([0, 2, 1, 2]), np.array([5, 6, 7, 8])
    for change, wrong in (({}, -1), ({1: 3}, 1), ({3: -1}, 3)):
        taken_ps: I64 = np.full((2, 3), -1, dtype=np.int64)
        some = slots.copy()
        some[list(change)] = list(change.values())
        assert kernels.write_slots(ranks, some, at_ps, 1, 99, taken_ps) == wrong
        assert (taken_ps == 99).any() == (wrong < 0)
    taken_ps = np.full((2, 3), 7, dtype=np.int64)
    assert kernels.write_slots(ranks, slots, at_ps + 1, 1, 99, taken_ps) == 0
    assert kernels.write_slots(ranks, slots, at_ps + 2, 1, 99, taken_ps) == -1
