"""Repeated data of many messages looked at, in compiled code. Pure.

Owns the comparison of copies; ``port_kernels.fill_frames`` makes them. Importing this module compiles
the kernel or loads it from numba's cache.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import types

_OCTETS = types.Array(types.uint8, 2, "C")
_READ_OCTETS = types.Array(types.uint8, 2, "C", readonly=True)
_REPEAT = types.Array(types.int64, 1, "C")


@numba.njit(
    types.int64(_READ_OCTETS, _REPEAT, _OCTETS), cache=True, fastmath=False, error_model="numpy"
)
def first_copies(data: Any, repeat: Any, first: Any) -> Any:
    """Data [n, width] as it was before its parts were repeated, into ``first``; returns the number of
    the first row of which a copy differs from the first, -1 if there is none."""
    lead, body, copies = np.uint64(repeat[0]), np.uint64(repeat[1]), np.uint64(repeat[2])
    tail, tail_copies = np.uint64(repeat[3]), np.uint64(repeat[4])
    wrong = -1
    for row in range(len(data)):
        differs = np.uint8(0)
        for octet in range(lead + body):
            first[row, octet] = data[row, octet]
        begin = lead + body
        for _ in range(np.uint64(1), copies):
            for octet in range(body):
                differs |= data[row, begin + octet] ^ data[row, lead + octet]
            begin += body
        for octet in range(tail):
            first[row, lead + body + octet] = data[row, begin + octet]
        last = begin + tail
        for _ in range(np.uint64(1), tail_copies):
            for octet in range(tail):
                differs |= data[row, last + octet] ^ data[row, begin + octet]
            last += tail
        if differs and wrong < 0:
            wrong = row
    return wrong
