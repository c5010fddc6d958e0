"""The two halves of a stream of the VPC plane: what is sent and what is received. Pure.

Owns messages and their layout, chunks, sequence numbers, the window, acknowledgements and timeouts
that double. Does not own the handshake nor the ends of a stream (``vpc_stream``), ports or the clock:
callers bring instants.
"""

from __future__ import annotations

import struct
from collections import deque

import msgspec

from cmnet.units import NEVER_PS

Piece = bytes | memoryview

SYN, SYN_ACK, ACK, PROBE, DATA, RST = range(48, 54)
"""Message kinds. The VPC plane's range is 48 to 63."""

HEAD = struct.Struct("<QBQQQ")
"""stream number, flags, sequence, acknowledged, limit: 33 bytes, the body of every message."""

FLAG_FROM_OPENER, FLAG_FIN, FLAG_URGENT = 1, 2, 4
"""Who sent it (numbers are the opener's); the half ends here; acknowledge at once."""

ACK_PARTS = 8
"""A window is acknowledged in eighths: assumed (2 to 64; TCP: every second frame), few enough for
emulation, many enough that a sender whose window covers the round trip never stops."""

ACK_DELAY_PARTS = 5
"""A lone acknowledgement waits a fifth of the timeout: 40 ms of 200 ms, as in Linux TCP."""


class Message(msgspec.Struct, frozen=True, gc=False):
    """What one end says to the other. SYN: ``sequence`` is the port. SYN and SYN_ACK: ``ack`` is the
    sender's charge factor."""

    kind: int
    sequence: int = 0
    ack: int = 0
    limit: int = 0
    flags: int = 0
    data: bytes | bytearray | memoryview = b""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one end. Sizes are charged bytes; ``charge_factor`` is this end's."""

    chunk_bytes: int
    window_bytes: int
    timeout_ps: int
    tries: int
    charge_factor: int = 1

    def carried_chunk_bytes(self) -> int:
        """What one chunk of this end carries."""
        return max(self.chunk_bytes // self.charge_factor, 1)

    def carried_window_bytes(self, peer_factor: int) -> int:
        """What the window holds of a peer's bytes: at least one of its chunks."""
        return max(self.window_bytes, self.chunk_bytes, peer_factor) // peer_factor


class Retry:
    """A deadline that doubles: try 1 at the start, the last wait ends in giving up."""

    __slots__ = ("at_ps", "_timeout_ps", "_tries", "_tries_max", "_wait_ps")

    def __init__(self, *, timeout_ps: int, tries: int) -> None:
        self.at_ps = NEVER_PS
        self._timeout_ps = timeout_ps
        self._tries_max = tries
        self._tries = 0
        self._wait_ps = 0

    def start(self, now_ps: int) -> None:
        """The first try leaves now."""
        self._tries = 1
        self._wait_ps = self._timeout_ps
        self.at_ps = now_ps + self._wait_ps

    def again(self, now_ps: int) -> bool:
        """The wait is over: another try leaves now, or False if that was the last."""
        if self._tries >= self._tries_max:
            self.at_ps = NEVER_PS
            return False
        self._tries += 1
        self._wait_ps = min(2 * self._wait_ps, self._timeout_ps << (self._tries_max - 1))
        self.at_ps = now_ps + self._wait_ps
        return True

    def heard(self, now_ps: int) -> None:
        """The peer lives but there is no progress: tries count anew, waits stay long."""
        self._tries = 1
        self.at_ps = now_ps + self._wait_ps

    def stop(self) -> None:
        self.at_ps = NEVER_PS


class Chunk:
    """Bytes on their way, kept until acknowledged."""

    __slots__ = ("data", "end", "fin", "sequence")

    def __init__(self, sequence: int, data: Piece, fin: bool) -> None:
        self.sequence = sequence
        self.data = data
        self.fin = fin
        self.end = sequence + len(data) + fin


class Outgoing:
    """The half that sends."""

    __slots__ = (
        "acked",
        "chunks_resent",
        "chunks_sent",
        "cut",
        "fin_cut",
        "flight",
        "limit",
        "resend",
        "retry",
        "timeouts",
        "waiting_bytes",
        "_blocked_at_ps",
        "_blocked_ps",
        "_chunk_bytes",
        "_fin_wanted",
        "_recover",
        "_waiting",
    )

    def __init__(self, limits: Limits) -> None:
        self.acked = 0
        self.cut = 0
        self.limit = 0
        self.waiting_bytes = 0
        self.fin_cut = False
        self.resend = False
        self.flight: deque[Chunk] = deque()
        self.retry = Retry(timeout_ps=limits.timeout_ps, tries=limits.tries)
        self.chunks_sent = self.chunks_resent = self.timeouts = self._blocked_ps = 0
        self._chunk_bytes = limits.carried_chunk_bytes()
        self._waiting: deque[Piece] = deque()
        self._fin_wanted = False
        self._recover = 0
        self._blocked_at_ps = -1

    def write(self, data: bytes) -> None:
        self._waiting.append(data)
        self.waiting_bytes += len(data)

    def finish(self) -> None:
        """The half ends after what was written."""
        self._fin_wanted = True

    def over(self) -> bool:
        """The other end knows that this half ended."""
        return self.fin_cut and self.acked == self.cut

    def next_chunk(self, now_ps: int) -> Chunk | None:
        """What may leave now: what must be resent, else new bytes that the window admits."""
        if self.resend:
            self.resend = False
            self.chunks_resent += 1
            return self.flight[0]
        if self.waiting_bytes:
            room = self.limit - self.cut
            if room > 0:
                return self._cut(min(room, self._chunk_bytes, self.waiting_bytes))
            self._block(now_ps)
        elif self._fin_wanted and not self.fin_cut:
            return self._cut(0)
        return None

    def _cut(self, size: int) -> Chunk:
        self.waiting_bytes -= size
        self.fin_cut = self._fin_wanted and not self.waiting_bytes
        chunk = Chunk(self.cut, self._take(size), self.fin_cut)
        self.cut = chunk.end
        self.flight.append(chunk)
        self.chunks_sent += 1
        return chunk

    def _take(self, size: int) -> Piece:
        waiting = self._waiting
        if not size:
            return b""
        first = waiting.popleft()
        if len(first) == size:
            return first
        parts = [first]
        size -= len(first)
        while size > 0:
            parts.append(waiting.popleft())
            size -= len(parts[-1])
        if size < 0:
            view = memoryview(parts[-1])
            parts[-1] = view[:size]
            waiting.appendleft(view[size:])
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _block(self, now_ps: int) -> None:
        if self._blocked_at_ps < 0:
            self._blocked_at_ps = now_ps
            if not self.flight:
                self.retry.start(now_ps)

    def limited_ps(self, now_ps: int) -> int:
        """How long the window has kept waiting bytes from leaving."""
        since_ps = now_ps - self._blocked_at_ps if self._blocked_at_ps >= 0 else 0
        return self._blocked_ps + since_ps

    def left(self, now_ps: int) -> None:
        """A chunk's egress started."""
        if self.retry.at_ps == NEVER_PS and self.flight:
            self.retry.start(now_ps)

    def acknowledged(self, ack: int, limit: int, now_ps: int) -> None:
        """The other end has everything below ``ack`` and takes what is below ``limit``."""
        if limit > self.limit:
            self._widen(limit, now_ps)
        flight = self.flight
        if ack > self.acked:
            self.acked = ack
            while flight and flight[0].end <= ack:
                flight.popleft()
            self.resend = bool(flight) and ack < self._recover
            if flight or self._blocked_at_ps >= 0:
                self.retry.start(now_ps)
            else:
                self.retry.stop()
        elif self._blocked_at_ps >= 0 and not flight:
            self.retry.heard(now_ps)

    def _widen(self, limit: int, now_ps: int) -> None:
        self.limit = limit
        if self._blocked_at_ps >= 0:
            self._blocked_ps += now_ps - self._blocked_at_ps
            self._blocked_at_ps = -1
            if not self.flight:
                self.retry.stop()

    def timed_out(self) -> bool:
        """The deadline came: what is missing is resent, or True: the window is closed, so ask."""
        self.timeouts += 1
        self._recover = self.cut
        self.resend = bool(self.flight)
        return not self.flight


class Incoming:
    """The half that receives."""

    __slots__ = (
        "ack_at_ps",
        "ack_now",
        "duplicates",
        "expected",
        "finished",
        "pieces",
        "taken",
        "window_bytes",
        "_ack_delay_ps",
        "_early",
        "_told_ack",
        "_told_limit",
    )

    def __init__(self, limits: Limits) -> None:
        self.window_bytes = limits.window_bytes
        self.expected = 0
        self.taken = 0
        self.finished = False
        self.pieces: deque[bytes] = deque()
        self.ack_now = False
        self.ack_at_ps = NEVER_PS
        self.duplicates = 0
        self._ack_delay_ps = limits.timeout_ps // ACK_DELAY_PARTS
        self._early: dict[int, Message] = {}
        self._told_ack = 0
        self._told_limit = 0

    def chunk(self, message: Message, now_ps: int) -> None:
        """A chunk arrived: in order, early, or once more."""
        sequence = message.sequence
        if sequence < self.expected or sequence in self._early:
            self.duplicates += 1
            self.ack_now = True
        elif sequence > self.expected:
            if sequence + len(message.data) <= self.taken + self.window_bytes:
                self._early[sequence] = message
        else:
            self._append(message)
            while (early := self._early.pop(self.expected, None)) is not None:
                self._append(early)
                self.ack_now = True
            if self.expected - self._told_ack >= self.window_bytes // ACK_PARTS:
                self.ack_now = True
            if self.ack_at_ps == NEVER_PS:
                self.ack_at_ps = now_ps + self._ack_delay_ps

    def _append(self, message: Message) -> None:
        data = message.data
        if data:
            self.pieces.append(data if type(data) is bytes else bytes(data))
            self.expected += len(data)
        if message.flags & FLAG_FIN:
            self.expected += 1
            self.finished = True
        if message.flags & (FLAG_FIN | FLAG_URGENT):
            self.ack_now = True

    def take(self, now_ps: int) -> bytes:
        """The next bytes in order, which the reader now has."""
        piece = self.pieces.popleft()
        self.taken += len(piece)
        if self.finished:
            return piece
        room = self.taken + self.window_bytes - self._told_limit
        if room >= self.window_bytes // ACK_PARTS:
            self.ack_now = True
        elif self.ack_at_ps == NEVER_PS:
            self.ack_at_ps = now_ps + self._ack_delay_ps
        return piece

    def tell(self) -> tuple[int, int]:
        """(acknowledged, limit) for a message that leaves now."""
        self.ack_now = False
        self.ack_at_ps = NEVER_PS
        self._told_ack = self.expected
        self._told_limit = self.taken + self.window_bytes
        return self._told_ack, self._told_limit
