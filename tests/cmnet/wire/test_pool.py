"""Memory of large payloads is used again, and never under the feet of somebody who keeps some."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cmnet.wire.pool import ARENA_BYTES, ARENAS_MAX, Pool


def address(view: memoryview) -> int:
    """Where it lies."""
    return np.frombuffer(view, np.uint8).ctypes.data


def test_an_arena_is_used_again_only_when_nobody_refers_to_it() -> None:
    """A payload that a handler keeps, or a view of it, stays what it was."""
    pool = Pool()
    first, other = pool.take(100), pool.take(100)
    begin = address(first)
    assert address(other) >= begin + 100
    view = np.frombuffer(other, np.uint8)[50:]
    other[:] = b"x" * 100
    del first, other
    third = pool.take(100)
    third[:] = b"y" * 100
    assert bytes(view) == b"x" * 50
    assert address(third) > begin
    del third, view
    assert address(pool.take(99)) == begin


@given(st.lists(st.tuples(st.integers(1, ARENA_BYTES // 2), st.integers(-60, 40)), max_size=40))
def test_what_is_held_never_overlaps(steps: list[tuple[int, int]]) -> None:
    """Each step takes some and lets go of one, if there are so many."""
    pool, held = Pool(), list[memoryview]()
    for size, gone in steps:
        held.append(pool.take(size))
        assert len(held[-1]) == size
        spans = sorted((address(view), len(view)) for view in held)
        for (begin, length), (after, _) in itertools.pairwise(spans):
            assert begin + length <= after
        if 0 <= gone < len(held):
            held.pop(gone)


@pytest.mark.parametrize("size", [1, 7, 8, 4097, ARENA_BYTES - 1, ARENA_BYTES, ARENA_BYTES + 1])
def test_any_size_is_given(size: int) -> None:
    pool = Pool()
    assert [len(pool.take(size)) for _ in range(3)] == [size] * 3


def test_what_the_pool_keeps_is_bounded() -> None:
    """What is beyond it is ordinary memory that ends with its last user."""
    pool = Pool()
    held = [pool.take(ARENA_BYTES // 2 + 1) for _ in range(ARENAS_MAX + 2)]
    begins = {address(view) for view in held}
    del held
    again = [pool.take(ARENA_BYTES // 2 + 1) for _ in range(ARENAS_MAX)]
    assert {address(view) for view in again} < begins
