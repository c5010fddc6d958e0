"""Buffers for large payloads, used again once nobody refers to them. Pure.

Owns a bounded number of bytes. To fill new memory costs as much as to copy into it (page faults), and
a buffer that was just used is still in the caches.
"""

from __future__ import annotations

import sys

POOL_BYTES_MAX = 1 << 24
"""Buffers of large payloads that are kept for the next: new memory costs as much as filling it."""


class Pool:
    """Buffers by size; one that nobody else refers to any more is given out again."""

    def __init__(self) -> None:
        self._of_size: dict[int, list[bytearray]] = {}
        self.kept_bytes = 0

    def take(self, size: int) -> bytearray:
        """A buffer of exactly this size with anything in it."""
        buffers = self._of_size.setdefault(size, [])
        for index in range(len(buffers)):
            if sys.getrefcount(buffers[index]) == UNUSED_REFERENCES:
                return buffers[index]  # always the first, which the caches still know
        buffer = bytearray(size)
        if self.kept_bytes + size <= POOL_BYTES_MAX:
            self.kept_bytes += size
            buffers.append(buffer)
        return buffer


UNUSED_REFERENCES = 2
"""Of a pool's buffer in ``take``: the list and the argument of ``getrefcount``."""
