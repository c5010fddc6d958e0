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


def test_a_slot_outside_is_seen_before_a_busy_one() -> None:
    """As both were looked for one after the other; nothing is written meanwhile."""
    busy_ps: I64 = np.full((2, 3), -1, dtype=np.int64)
    ranks, slots = np.array([0, 1, 1, 0]), np.array([0, 2, 1, 2])
    at_ps = np.array([5, 6, 7, 8])
    assert kernels.first_busy(ranks, slots, at_ps, busy_ps) == -1
    kernels.fill(ranks[1:3].copy(), slots[1:3].copy(), 7, busy_ps)
    assert busy_ps.tolist() == [[-1, -1, -1], [-1, 7, 7]]
    assert kernels.first_busy(ranks, slots, at_ps, busy_ps) == 1
    assert kernels.first_busy(ranks, slots, at_ps + 1, busy_ps) == -1
    assert kernels.first_busy(ranks, slots, at_ps - 1, busy_ps) == 1, "the first of two"
    slots[3] = 3
    assert kernels.first_busy(ranks, slots, at_ps, busy_ps) == 3
