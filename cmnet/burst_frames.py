"""The frames of bursts: rows of messages, rows of flags, what the messages carry, what the flags carry.

Owns their bytes at both ends. Does not own when they leave (``bursts``) nor what becomes of their rows
(``burst_arrivals``). A frame has messages or flags or both; one without flags is no event.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from cmnet.errors import FrameError
from cmnet.messages import Payload
from cmnet.topology.machine import Plane
from cmnet.units import NEVER_PS
from cmnet.wire import frames

if TYPE_CHECKING:
    from cmnet.bursts import Burst, Piece

I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]

COLUMNS = 7
"""Of a row: see ``link.port_kernels``."""
ROW_BYTES = 8 * COLUMNS
SEQUENCE_MAX = (1 << 63) - 1
"""The bit above it says that a row is a copy, which takes its time and is handed to nobody."""

MESSAGES_MAX = 8192
DATA_BYTES_MAX = 1 << 27
"""Of one frame, of messages and of flags each; what does not fit goes in a second one. Counts have 16
bits of the header."""


# --- writing --------------------------------------------------------------------------------------


class _Frame(NamedTuple):
    """Where a frame lies in the buffer, and what is in it."""

    pair: int
    """Its messages are of group 2 x pair, its flags of the next."""
    begin: int
    end: int
    messages: int
    flags: int
    part: int
    """The first of its parts, messages before flags."""


def write(burst: Burst, pieces: list[Piece]) -> None:
    """Send on what left: a frame for each process, with its messages and then its flags; and one of flags
    for each delay by rules, lest those set the event of all."""
    from cmnet.link import port_kernels as ports

    groups = 2 * len(burst.fabric.machine.processes) * len(burst.delays)
    counts = np.zeros(groups, np.int64)
    for rows, count in pieces:
        counts += np.bincount(rows[:count, ports.GROUP], minlength=groups)
    data, flag_data = [messages.data for messages in burst.tables]
    repeat = burst.fabric.arriving.repeat_of(burst.kind, data.shape[1])
    planned, parts, part_of, size = _plan(counts, (repeat.carried_bytes, flag_data.shape[1]))
    octets = np.frombuffer(burst.fabric.buffers.take(size), np.uint8)
    words = octets.view(np.int64)
    copies = np.array(repeat, np.int64)
    for rows, count in pieces:
        ports.fill_frames(
            rows, count, burst.index, data, flag_data, copies, part_of, parts, words, octets
        )
    filled = parts.tolist()
    silence_ps = burst.fabric.arriving.silence_ps(burst.kind, burst.head)
    for frame in planned:
        last = frame.part + (frame.messages > 0) + (frame.flags > 0)
        payload = octets[frame.begin : frame.end]
        _send(burst, frame, payload, filled[frame.part : last], silence_ps)


def _plan(counts: I64, widths: tuple[int, int]) -> tuple[list[_Frame], I64, I64, int]:
    """For so many rows of each group: the frames in one buffer, their parts as ``fill_frames`` takes them,
    the first part of each group, bytes of the buffer."""
    planned: list[_Frame] = []
    parts: list[tuple[int, ...]] = []
    part_of = np.zeros(len(counts), np.int64)
    most = [max(min(MESSAGES_MAX, DATA_BYTES_MAX // max(width, 1)), 1) for width in widths]
    size = 0
    left_of = counts.reshape(-1, 2)
    pairs = np.flatnonzero(left_of.any(axis=1))
    for pair, left in zip(pairs.tolist(), left_of.take(pairs, axis=0).tolist()):
        part_of[2 * pair] = len(parts)
        part_of[2 * pair + 1] = len(parts) - (-left[0] // most[0])
        while left[0] or left[1]:
            messages = min(left[0], most[0])
            left[0] -= messages
            flags = 0 if left[0] else min(left[1], most[1])  # with the last of the messages
            left[1] -= flags
            part, rows_at, end = len(parts), size, size + (messages + flags) * ROW_BYTES
            for count, width in zip((messages, flags), widths):
                if count:
                    parts.append((rows_at, end, count, width, 0, NEVER_PS, 0, 0, 0, 0, 0))
                    rows_at += count * ROW_BYTES
                    end += count * width
            planned.append(_Frame(pair, size, end, messages, flags, part))
            size = -(-end // 8) * 8
    return planned, np.array(parts, np.int64).reshape(len(parts), _PART_COLUMNS), part_of, size


_LEAST, _TOTAL = 5, 7
"""Columns of a part, as ``port_kernels`` numbers them."""
_PART_COLUMNS = 11


def _send(
    burst: Burst, frame: _Frame, payload: U8, parts: list[list[int]], silence_ps: int
) -> None:
    """One frame, its parts filled; ``silence_ps`` of the event that its flags are."""
    fabric, head = burst.fabric, burst.head
    peer = frame.pair % len(fabric.machine.processes)
    charged_bytes = sum([part[_TOTAL] for part in parts])
    count, first_ps = frame.messages + frame.flags, min([part[_LEAST] for part in parts])
    statistics = fabric.statistics_of[Plane.UB]
    statistics.frames += count
    statistics.charged_bytes += charged_bytes
    statistics.carried_bytes += len(head) + len(payload)
    _, _, _, flag_width, _, _, at_ps, _, source, target, sequence = parts[-1]
    header = (
        len(head),
        len(payload),
        frames.MAGIC,
        burst.kind,
        Plane.UB,
        frames.FLAG_BUNDLE if frame.flags else frames.FLAG_BUNDLE | frames.FLAG_QUIET,
        fabric.window,
        source,
        target,
        sequence & SEQUENCE_MAX,
        first_ps,
        at_ps + silence_ps if frame.flags else at_ps,
        charged_bytes,
        frame.messages | frame.flags << 16 | flag_width << 32,
    )
    if peer == fabric.process:
        statistics.frames_in_node += count
        # a copy, lest it keep the buffer of all frames
        fabric.arriving.receive(header, head, payload.tobytes())
        return
    statistics.bundles += 1
    if frame.flags:
        fabric.count_send(peer, first_ps, at_ps, at_ps + silence_ps)
    else:
        fabric.count_send(peer, first_ps, NEVER_PS, NEVER_PS)
    fabric.carry(peer, Plane.UB, frames.HEADER.pack(*header), head, payload.data)


# --- reading --------------------------------------------------------------------------------------


def counts_of(header: tuple[int, ...]) -> tuple[int, int, int]:
    """(messages, flags, bytes carried by a flag) of a frame."""
    counts = header[13]
    return counts & 0xFFFF, counts >> 16 & 0xFFFF, counts >> 32


def read(header: tuple[int, ...], payload: Payload) -> tuple[int, I64, U8, U8]:
    """How many messages, the rows of messages and flags [n, 7], what is carried by messages and by flags
    [m, width]. Raises FrameError at a frame that is none."""
    messages, flags, flag_width = counts_of(header)
    count = messages + flags
    flags_at = len(payload) - flags * flag_width
    left = flags_at - count * ROW_BYTES
    width, rest = divmod(left, messages) if messages else (0, left)
    if not count or rest or width < 0 or header[4] != Plane.UB:
        raise FrameError(
            f"a bundle of {messages} messages and {flags} flags in {len(payload)} bytes"
        )
    table = np.frombuffer(payload, np.int64, count * COLUMNS).reshape(count, COLUMNS)
    octets = np.frombuffer(payload, np.uint8)
    data = octets[count * ROW_BYTES : flags_at].reshape(messages, width)
    return messages, table, data, octets[flags_at:].reshape(flags, flag_width)
