"""Two ends of a stream and a fake wire between them, for tests of the pure core.

The wire is a function of the message: it says after which delays copies arrive, none if it is lost.
Each end has a port that serves one chunk at a time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from planes.vpc_halves import DATA, PROBE, RST, SYN_ACK, Limits, Message
from planes.vpc_stream import State, Stream

MS = 10**9
PROPAGATION_PS = 10_000_000
CHUNK_PS = 100_000
"""A chunk's time in the port."""

LIMITS = Limits(chunk_bytes=100, window_bytes=1600, timeout_ps=200 * MS, tries=6)

Wire = Callable[[int, Message], list[int]]
"""(sending end, message) -> delays of its copies"""


def clean(_: int, __: Message) -> list[int]:
    return [PROPAGATION_PS]


class End:
    def __init__(self, limits: Limits) -> None:
        self.stream = Stream(limits)
        self.reading = True
        self.received = bytearray()
        self.in_port = False
        self.timer_ps = -1

    @property
    def ended(self) -> bool:
        return self.stream.incoming.finished and not self.stream.incoming.pieces


class Pair:
    """End 0 opens, end 1 accepts. ``sent`` records what was sent: (instant, end, message)."""

    def __init__(self, limits: Limits = LIMITS, *, wire: Wire = clean, other: Limits | None = None):
        self.now_ps = 0
        self.ends = [End(limits), End(other or limits)]
        self.wire = wire
        self.listening = True
        self.sent: list[tuple[int, int, Message]] = []
        self._heap: list[tuple[int, int, str, int, Message | None]] = []
        self._count = 0

    @property
    def opener(self) -> Stream:
        return self.ends[0].stream

    @property
    def accepter(self) -> Stream:
        return self.ends[1].stream

    def open(self) -> Pair:
        """Ask and run until both ends are open."""
        self.ask()
        self.run(self.now_ps + 3 * PROPAGATION_PS)
        return self

    def ask(self) -> None:
        self.opener.open(80, self.now_ps)
        self.poll(0)

    def _add(self, at_ps: int, what: str, end: int, message: Message | None = None) -> None:
        self._count += 1
        heapq.heappush(self._heap, (at_ps, self._count, what, end, message))

    def send(self, end: int, message: Message) -> None:
        self.sent.append((self.now_ps, end, message))
        for delay_ps in self.wire(end, message):
            self._add(self.now_ps + delay_ps, "arrive", 1 - end, message)

    def poll(self, index: int) -> None:
        """Do what a transport does after each change."""
        end = self.ends[index]
        stream = end.stream
        while end.reading and stream.incoming.pieces and not stream.deaf:
            end.received += stream.incoming.take(self.now_ps)
        if not end.in_port and (chunk := stream.next_chunk(self.now_ps)) is not None:
            end.in_port = True
            stream.outgoing.left(self.now_ps)
            self.send(index, chunk)
            self._add(self.now_ps + CHUNK_PS, "left", index)
        if stream.incoming.ack_now:
            stream.acknowledge()
        control, stream.control = stream.control, []
        for message in control:
            self.send(index, message)
        if stream.next_at_ps() < 2**62 and stream.state is not State.CLOSED:
            self._add(stream.next_at_ps(), "time", index)

    def run(self, until_ps: int = 10**15) -> None:
        """Everything up to an instant."""
        while self._heap and self._heap[0][0] <= until_ps:
            at_ps, _, what, index, message = heapq.heappop(self._heap)
            stream = self.ends[index].stream
            if what == "time" and (stream.state is State.CLOSED or stream.next_at_ps() > at_ps):
                continue
            self.now_ps = at_ps
            if what == "time":
                stream.on_time(at_ps)
            elif what == "left":
                self.ends[index].in_port = False
            else:
                assert message is not None
                self._arrive(index, message)
            self.poll(index)
        self.now_ps = max(self.now_ps, until_ps if until_ps < 10**15 else 0)

    def _arrive(self, index: int, message: Message) -> None:
        stream = self.ends[index].stream
        if index == 1 and stream.state is State.OPENING:
            if self.listening:
                stream.accept(message, self.now_ps)
            else:
                self.send(1, Message(RST))
        elif stream.state is State.CLOSED:
            if message.kind in (DATA, PROBE, SYN_ACK):
                self.send(index, Message(RST))
        else:
            stream.receive(message, self.now_ps)

    def write(self, end: int, data: bytes) -> None:
        self.ends[end].stream.write(data)
        self.poll(end)

    def close(self, end: int) -> None:
        self.ends[end].stream.close()
        self.poll(end)

    def finish(self, end: int) -> None:
        self.ends[end].stream.finish()
        self.poll(end)

    def resume(self, end: int) -> None:
        self.ends[end].reading = True
        self.poll(end)

    def chunks(self, end: int) -> list[tuple[int, int, bytes]]:
        """What an end sent of chunks: (instant, sequence, bytes)."""
        return [
            (at_ps, message.sequence, bytes(message.data))
            for at_ps, sender, message in self.sent
            if sender == end and message.kind == DATA
        ]
