"""One end of a stream of the VPC plane: states, sequence numbers, window, retransmission. Pure.

Owns what makes a stream of lossy, reordered frames: the handshake, the two halves (``vpc_halves``)
joined, the half-close and the reset. Does not own sockets, ports, names or the clock: callers bring
messages and instants, take messages, and call ``on_time`` at ``next_at_ps``.

A stream is an *outgoing* half and an *incoming* half. Bytes are cut into chunks as they leave and never
cut anew, so a chunk is one frame also when it is resent. The end of a half takes one sequence number.
What leaves through a port (chunks) is pulled by ``next_chunk``, one at a time; what is only known at
the other end (handshake, acknowledgements, probes: no bytes) is pushed to ``control``.

Rules, after RFC 9293, 6298 and 1122, made simple because the design says so (section 2.3):

- a lost chunk is found by timeout alone: 200 ms, doubled, and after 6 tries the stream fails;
- whoever hears of progress while chunks of before the timeout are missing resends the next one at once;
- acknowledgements ride on chunks; alone they go after an eighth of the window, after ``ack_delay_ps``,
  or at once for what was resent, filled a gap, came twice, or ended the half;
- a reader that takes nothing closes the window; the sender then probes, as often as it would resend,
  and gives up only when nobody answers.
"""

from __future__ import annotations

import enum

from cmnet.units import NEVER_PS
from planes.vpc_halves import (
    ACK,
    DATA,
    FLAG_FIN,
    FLAG_URGENT,
    PROBE,
    RST,
    SYN,
    SYN_ACK,
    Incoming,
    Limits,
    Message,
    Outgoing,
    Retry,
)


class State(enum.Enum):
    OPENING = "SYN sent"
    ACCEPTING = "SYN received"
    OPEN = "open"
    CLOSED = "over"


class Failure(enum.Enum):
    """Why a stream ended that should not have."""

    REFUSED = "nobody listens"
    UNREACHABLE = "no answer to the SYN"
    RESET = "reset by the peer"
    LOST = "no acknowledgement after all tries"


TRANSITIONS: dict[tuple[State, int], State] = {
    (State.OPENING, SYN_ACK): State.OPEN,
    (State.OPENING, RST): State.CLOSED,
    (State.ACCEPTING, ACK): State.OPEN,
    (State.ACCEPTING, PROBE): State.OPEN,
    (State.ACCEPTING, DATA): State.OPEN,
    (State.ACCEPTING, RST): State.CLOSED,
    (State.OPEN, RST): State.CLOSED,
}
"""Where a message leads; any other changes no state."""


class Stream:
    """One end of one stream."""

    __slots__ = (
        "control",
        "deaf",
        "failure",
        "incoming",
        "outgoing",
        "state",
        "_greeting",
        "_limits",
        "_opening",
    )

    def __init__(self, limits: Limits) -> None:
        self.state = State.OPENING
        self.failure: Failure | None = None
        self.control: list[Message] = []
        self.deaf = False
        self.outgoing = Outgoing(limits)
        self.incoming = Incoming(limits)
        self._limits = limits
        self._greeting = Message(SYN)
        self._opening = Retry(timeout_ps=limits.timeout_ps, tries=limits.tries)

    # --- handshake --------------------------------------------------------------------------------

    def open(self, port: int, now_ps: int) -> None:
        """Ask the other end's port."""
        self._opening.start(now_ps)
        self._greet(SYN, sequence=port)

    def accept(self, syn: Message, now_ps: int) -> None:
        """Answer a SYN; the stream is open when the opener says that it knows."""
        self.state = State.ACCEPTING
        self.incoming.window_bytes = self._limits.carried_window_bytes(syn.ack)
        self._opening.start(now_ps)
        self._greet(SYN_ACK, sequence=0)

    def _greet(self, kind: int, *, sequence: int) -> None:
        _, limit = self.incoming.tell()
        self._greeting = Message(kind, sequence, self._limits.charge_factor, limit)
        self.control.append(self._greeting)

    # --- the application --------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        self.outgoing.write(data)

    def finish(self) -> None:
        """No more will be written (half-close)."""
        self.outgoing.finish()

    def close(self) -> None:
        """No more will be written nor read: bytes that come from now on are answered by a reset."""
        self.deaf = True
        self.incoming.pieces.clear()
        self.outgoing.finish()
        self._end_if_over()

    def abort(self) -> None:
        """End at once; the other end is told by a reset."""
        if self.state is not State.CLOSED:
            self.state = State.CLOSED
            self.control.append(Message(RST))

    # --- the wire ---------------------------------------------------------------------------------

    def receive(self, message: Message, now_ps: int) -> None:
        """A message of the other end arrived whole."""
        state, kind = self.state, message.kind
        next_state = TRANSITIONS.get((state, kind))
        if next_state is not None:
            self.state = next_state
            self._moved(state, message)
        if self.state is State.OPEN:
            if kind == DATA:
                self._receive_chunk(message, now_ps)
            elif kind in (ACK, PROBE):
                self.outgoing.acknowledged(message.ack, message.limit, now_ps)
                self.incoming.ack_now |= kind == PROBE
                self._end_if_over()
            elif kind == SYN_ACK:
                self.incoming.ack_now = True
        elif self.state is State.ACCEPTING and kind == SYN:
            self.control.append(self._greeting)

    def _moved(self, state: State, message: Message) -> None:
        self._opening.stop()
        if message.kind == SYN_ACK:
            self.outgoing.limit = message.limit
            self.incoming.window_bytes = self._limits.carried_window_bytes(message.ack)
        elif message.kind == RST:
            both_ended = self.outgoing.fin_cut and self.incoming.finished
            if state is State.OPENING:
                self.failure = Failure.REFUSED
            elif state is State.OPEN and not both_ended:
                self.failure = Failure.RESET

    def _receive_chunk(self, message: Message, now_ps: int) -> None:
        self.outgoing.acknowledged(message.ack, message.limit, now_ps)
        if self.deaf and message.data and message.sequence >= self.incoming.expected:
            self.abort()
            return
        self.incoming.chunk(message, now_ps)
        if self.deaf:
            self._end_if_over()

    def _end_if_over(self) -> None:
        if self.deaf and self.outgoing.over() and self.state is State.OPEN:
            if self.incoming.ack_now:
                self.control.append(Message(ACK, 0, *self.incoming.tell()))
            self.state = State.CLOSED

    def next_chunk(self, now_ps: int) -> Message | None:
        """The next chunk for the port, with the news of the other half; None if nothing may leave."""
        if self.state is not State.OPEN:
            return None
        resent = self.outgoing.resend
        chunk = self.outgoing.next_chunk(now_ps)
        if chunk is None:
            return None
        flags = (FLAG_FIN if chunk.fin else 0) | (FLAG_URGENT if resent else 0)
        return Message(DATA, chunk.sequence, *self.incoming.tell(), flags, chunk.data)

    def acknowledge(self) -> None:
        """Push an acknowledgement to ``control`` if one must go alone and now."""
        if self.incoming.ack_now and self.state is State.OPEN:
            self.control.append(Message(ACK, 0, *self.incoming.tell()))

    # --- time -------------------------------------------------------------------------------------

    def next_at_ps(self) -> int:
        """When ``on_time`` must be called, NEVER_PS if nothing is awaited."""
        if self.state is State.OPEN:
            return min(self.outgoing.retry.at_ps, self.incoming.ack_at_ps)
        return NEVER_PS if self.state is State.CLOSED else self._opening.at_ps

    def on_time(self, now_ps: int) -> None:
        """The instant of ``next_at_ps`` came."""
        if self.state is State.OPEN:
            if self.incoming.ack_at_ps <= now_ps:
                self.incoming.ack_now = True
            if self.outgoing.retry.at_ps <= now_ps:
                self._outgoing_timed_out(now_ps)
        elif self._opening.at_ps <= now_ps:
            self._opening_timed_out(now_ps)

    def _outgoing_timed_out(self, now_ps: int) -> None:
        if not self.outgoing.retry.again(now_ps):
            self.state, self.failure = State.CLOSED, Failure.LOST
        elif self.outgoing.timed_out():
            self.control.append(Message(PROBE, 0, *self.incoming.tell()))

    def _opening_timed_out(self, now_ps: int) -> None:
        if self._opening.again(now_ps):
            self.control.append(self._greeting)
        else:
            self.state, self.failure = State.CLOSED, Failure.UNREACHABLE
