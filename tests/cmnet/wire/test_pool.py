"""Buffers of large payloads are reused, and never under the feet of somebody who keeps one."""

from __future__ import annotations

import numpy as np
import pytest

from cmnet.wire.pool import POOL_BYTES_MAX, Pool


def test_a_buffer_is_reused_only_when_nobody_refers_to_it() -> None:
    """A payload that a handler keeps, or a view of it, stays what it was."""
    pool = Pool()
    kept, other = pool.take(100), pool.take(100)
    assert kept.obj is not other.obj
    view = np.frombuffer(other, np.uint8)[50:]
    other[:] = b"x" * 100
    del other
    third = pool.take(100)
    third[:] = b"y" * 100
    assert bytes(view) == b"x" * 50
    address = id(third.obj)
    del third
    assert id(pool.take(99).obj) == address
    assert len(pool.take(99)) == 99


@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 100, 4095, 4097, 40_000, 1 << 20, (1 << 20) + 1])
def test_little_of_a_buffer_is_not_used(size: int) -> None:
    taken = Pool().take(size)
    assert len(taken) == size
    assert size <= len(memoryview(taken.obj)) <= size * 5 / 4


def test_what_the_pool_keeps_is_bounded() -> None:
    """Buffers beyond it are ordinary ones that end with their last user."""
    pool = Pool()
    held = [pool.take(POOL_BYTES_MAX // 2) for _ in range(3)]
    assert pool.kept_bytes == POOL_BYTES_MAX
    assert len({id(each.obj) for each in held}) == 3
