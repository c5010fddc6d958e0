"""Buffers of large payloads are reused, and never under the feet of somebody who keeps one."""

from __future__ import annotations

from cmnet.wire.pool import POOL_BYTES_MAX, Pool


def test_a_buffer_is_reused_only_when_nobody_refers_to_it() -> None:
    """A payload that a handler keeps, or a view of it, stays what it was."""
    pool = Pool()
    kept, other = pool.take(100), pool.take(100)
    assert kept is not other
    view = memoryview(other)
    other[:] = b"x" * 100
    del other
    third = pool.take(100)
    third[:] = b"y" * 100
    assert bytes(view) == b"x" * 100
    address = id(third)
    del third
    assert id(pool.take(100)) == address
    assert len(pool.take(99)) == 99


def test_what_the_pool_keeps_is_bounded() -> None:
    """Buffers beyond it are ordinary ones that end with their last user."""
    pool = Pool()
    held = [pool.take(POOL_BYTES_MAX // 2) for _ in range(3)]
    assert pool.kept_bytes == POOL_BYTES_MAX
    assert len({id(each) for each in held}) == 3
