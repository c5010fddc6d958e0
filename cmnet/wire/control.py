"""Control messages between the conductor and its processes, one SEQPACKET packet each. Pure.

Owns their layout. Grants and reports are the hot pair and fixed structs; everything rare is JSON
behind a zero byte.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from cmnet.vtime.horizon import Grant, Send

GRANT = 1
REPORT = 2
RARE = 0

PACKET_BYTES_MAX = 1 << 16

_GRANT = struct.Struct("<BIqQ?")
_REPORT = struct.Struct("<BIqqqqi16sH")
_SEND = struct.Struct("<HIqq")


class Report(msgspec.Struct, frozen=True):
    """The one answer to a grant. Instants are NEVER_PS where there is none."""

    window: int
    next_at_ps: int
    reaction_ps: int
    """The earliest reaction to an event that the process has (``vtime.horizon``)."""
    finished_at_ps: int
    marked_at_ps: int
    outstanding: int
    digest: bytes
    sends: list[Send]


def encode_grant(grant: Grant) -> bytes:
    return _GRANT.pack(GRANT, grant.window, grant.horizon_ps, grant.frames_expected, grant.barrier)


def decode_grant(data: bytes | bytearray) -> tuple[int, int, int, bool]:
    """(window, horizon_ps, frames_expected, barrier)."""
    _, window, horizon_ps, frames_expected, barrier = _GRANT.unpack_from(data)
    return window, horizon_ps, frames_expected, barrier


def encode_report(report: Report) -> bytes:
    head = _REPORT.pack(
        REPORT,
        report.window,
        report.next_at_ps,
        report.reaction_ps,
        report.finished_at_ps,
        report.marked_at_ps,
        report.outstanding,
        report.digest,
        len(report.sends),
    )
    return head + b"".join([_SEND.pack(*send) for send in report.sends])


def decode_report(data: bytes) -> Report:
    fields = _REPORT.unpack_from(data)
    _, window, next_at_ps, reaction_ps, finished, marked, outstanding, digest, _ = fields
    sends = list(_SEND.iter_unpack(memoryview(data)[_REPORT.size :]))
    return Report(window, next_at_ps, reaction_ps, finished, marked, outstanding, digest, sends)


def encode_rare(what: str, /, **fields: Any) -> bytes:
    """A message that is not hot: its name and JSON-able fields."""
    return b"\0" + msgspec.json.encode({"what": what, **fields})


def decode_rare(data: bytes) -> dict[str, Any]:
    message: dict[str, Any] = msgspec.json.decode(data[1:])
    return message
