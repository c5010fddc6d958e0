"""Buffers for large payloads, used again once nobody refers to them. Pure.

Owns a bounded number of bytes. To fill new memory costs as much as to copy into it (page faults), and
a buffer that was just used is still in the caches.
"""

from __future__ import annotations

import sys

POOL_BYTES_MAX = 1 << 24
"""Buffers of large payloads that are kept for the next: new memory costs as much as filling it."""


class Pool:
    """Buffers by size class; one that nobody else refers to any more is given out again."""

    def __init__(self) -> None:
        self._of_size: dict[int, list[bytearray]] = {}
        self.kept_bytes = 0

    def take(self, size: int) -> memoryview:
        """Exactly this size of a buffer, with anything in it; who keeps a view of it keeps the buffer."""
        step = 1 << max(size.bit_length() - STEP_BITS, 0)
        room = -(-size // step) * step
        buffers = self._of_size.setdefault(room, [])
        for index in range(len(buffers)):
            if sys.getrefcount(buffers[index]) == UNUSED_REFERENCES:
                return memoryview(buffers[index])[:size]  # always the first, the caches know it
        buffer = bytearray(room)
        if self.kept_bytes + room <= POOL_BYTES_MAX:
            self.kept_bytes += room
            buffers.append(buffer)
        return memoryview(buffer)[:size]


STEP_BITS = 3
"""Sizes are rounded up to one of 4 steps a doubling: at most a fifth of a buffer is not used."""
UNUSED_REFERENCES = 2
"""Of a pool's buffer in ``take``: the list and the argument of ``getrefcount``."""
