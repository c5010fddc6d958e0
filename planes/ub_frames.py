"""Frames of the UB plane: kinds, layouts, statuses and what they charge.

Owns the bytes that initiators and targets agree on. A bulk message carries, in every chunk, the kind
that it would have as a single frame and then that frame's head.
"""

from __future__ import annotations

import struct

from cmnet.messages import Route
from cmnet.topology.machine import Engine

WRITE, MESSAGE, FLAG, READ, ATOMIC, BULK, DATA, DONE, ABORT = range(16, 25)
"""Kinds of frames. The UB plane's range is 16 to 31."""

WRITE_HEAD = struct.Struct("<QIQ")
"""operation (0: nobody waits), region, offset."""
MESSAGE_HEAD = struct.Struct("<QI")
"""operation (0: nobody waits), mailbox; the program's body follows."""
FLAG_HEAD = struct.Struct("<Qq")
"""flag, value."""
READ_HEAD = struct.Struct("<QIQQQ")
"""operation, region, offset, charged bytes, rate (0: the path's)."""
ATOMIC_HEAD = struct.Struct("<QIQq")
"""operation, region, offset, amount."""
NUMBER = struct.Struct("<Q")
"""operation (of data) or flow (that is given up)."""
DONE_HEAD = struct.Struct("<QB")
"""operation, status."""
WORD = struct.Struct("<q")
"""What an atomic adds to."""

OK, RANGE, LINK = range(3)
"""Status of a completion."""

FLAG_BYTES = 8
"""A flag is a write of one word."""


class Message:
    """A message as its mailbox gets it."""

    __slots__ = ("body", "charged_bytes", "payload", "source", "target")

    def __init__(
        self,
        source: int,
        target: int,
        body: bytes,
        payload: bytes | bytearray | memoryview,
        charged_bytes: int,
    ) -> None:
        self.source = source
        self.target = target
        self.body = body
        self.payload = payload
        self.charged_bytes = charged_bytes


def engine_rate_bps(engine: Engine, route: Route) -> int:
    """What this engine makes of the path's rate; 0 means the path's own."""
    if engine.rate_num == engine.rate_den:
        return 0
    return engine.rate_bps(route.path.rate_bps)
