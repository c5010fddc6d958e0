"""Memory of large payloads, used again once nobody refers to it. Pure.

Owns a bounded number of bytes, in *arenas*. To fill new memory costs as much as to copy into it (page
faults), and memory that was just used is still in the caches: so payloads that are read and those that are
written take theirs from one pool, one beside the other, and from the front again when all are gone.
"""

from __future__ import annotations

import sys

import numpy as np
import numpy.typing as npt

ARENA_BYTES = 1 << 23
"""Of one: what a node writes of a collective of the default scale fits, or what it reads."""
ARENAS_MAX = 2
"""More are not kept."""
ALIGNED_BYTES = 64


class Pool:
    """Gives memory out, and takes an arena back whole."""

    def __init__(self) -> None:
        self._arenas: list[npt.NDArray[np.uint8]] = []
        self._used: list[int] = []
        """Bytes of each arena that were given out since it was last free."""

    def take(self, size: int) -> memoryview:
        """Memory of exactly this size with anything in it; who keeps a view of it keeps the memory."""
        for index in range(len(self._arenas)):
            if sys.getrefcount(self._arenas[index]) == FREE_REFERENCES:
                self._used[index] = 0
            if self._used[index] + size <= ARENA_BYTES:
                return self._part(index, size)
        if size > ARENA_BYTES or len(self._arenas) == ARENAS_MAX:
            return np.empty(size, np.uint8).data
        self._arenas.append(np.empty(ARENA_BYTES, np.uint8))  # touched as it is used
        self._used.append(0)
        return self._part(len(self._arenas) - 1, size)

    def _part(self, index: int, size: int) -> memoryview:
        begin = self._used[index]
        self._used[index] = begin + -(-size // ALIGNED_BYTES) * ALIGNED_BYTES
        return self._arenas[index].data[begin : begin + size]


FREE_REFERENCES = 2
"""Of an arena in ``take`` that nobody else refers to: the list and the argument of ``getrefcount``."""
