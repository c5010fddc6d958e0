"""Frames: a fixed header, a small body, a raw payload (design 4, "Wire"). Pure.

Owns the byte layout and its limits. A connection carries frames one way: first a hello that says who
sends and on which plane, then frames until it ends. Lengths are checked before anything is allocated;
a kind that nobody bound is refused by the fabric.
"""

from __future__ import annotations

import struct

from cmnet.errors import FrameError

HEADER = struct.Struct("<IIBBBBIIIQqqQQ")
"""body bytes, payload bytes, magic, message kind, plane, flags, window, source device, target device,
sequence, first byte (ps), last byte (ps), charged bytes, ingress rate (bit/s): 64 bytes."""

HELLO = struct.Struct("<4sBBHI16s")
"""tag, version, plane, sending process, its incarnation, the run's token: 28 bytes."""

MAGIC = 0xC3
TAG = b"cmnt"
VERSION = 1
BODY_BYTES_MAX = 1 << 20
PAYLOAD_BYTES_MAX = 1 << 30

FLAG_CORRUPT = 1
"""A rule flipped a bit of what this frame carries."""
FLAG_SIGNAL = 2
"""The message passes no port: it is known at its first byte's instant."""
FLAG_COPY = 4
"""A rule doubled the frame and this is the second; planes that number their frames refuse it."""
FLAG_BUNDLE = 8
"""Many messages and flags of a burst, see ``cmnet.burst_frames``: counts and a width are where the rate else
is, and the reaction to its flags is where the last byte else is. Source, target and sequence are of one."""
FLAG_QUIET = 16
"""Nothing comes of the message by itself: it is handed over with a later one to its port."""


def hello(*, plane: int, process: int, incarnation: int, token: bytes) -> bytes:
    """The first bytes of a connection."""
    return HELLO.pack(TAG, VERSION, plane, process, incarnation, token)


def read_hello(data: bytes | memoryview, token: bytes) -> tuple[int, int, int]:
    """(plane, process, incarnation) of a hello. Raises FrameError for a stranger."""
    tag, version, plane, process, incarnation, given = HELLO.unpack(data)
    if tag != TAG or version != VERSION or given != token:
        raise FrameError("a connection that does not belong to this run")
    return plane, process, incarnation


def check_lengths(body_bytes: int, payload_bytes: int, magic: int) -> None:
    """Raises FrameError if a header is none, before anything is allocated for it."""
    if magic != MAGIC:
        raise FrameError(f"a frame begins with {magic:#x}, not {MAGIC:#x}")
    if body_bytes > BODY_BYTES_MAX or payload_bytes > PAYLOAD_BYTES_MAX:
        raise FrameError(f"a frame of {body_bytes} + {payload_bytes} bytes is above the limit")
