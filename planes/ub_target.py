"""The UB plane at a target: serves operations on its memory, flags and mailboxes.

Owns what happens at a delivery, without the target's program. Does not own frames or the initiator.
"""

from __future__ import annotations

from collections.abc import Callable

from cmnet.errors import MemoryRangeError
from cmnet.fabric import Fabric
from cmnet.messages import Arrival, Payload, Route
from cmnet.topology.machine import Plane
from planes import ub_frames
from planes.bulk import Flow, pieces
from planes.flags import Flags
from planes.memory import Memory
from planes.ub_frames import LINK, OK, RANGE, Message
from planes.ub_order import UbPair

Handler = Callable[[Message], None]


class Target:
    """Serves all devices of one process."""

    def __init__(
        self,
        fabric: Fabric,
        *,
        memory: Memory,
        flags: Flags,
        pair: Callable[[int, int], UbPair],
        next_number: Callable[[], int],
    ) -> None:
        self._fabric = fabric
        self._memory = memory
        self._flags = flags
        self._pair = pair
        self._next_number = next_number
        self._chunk_bytes = fabric.machine.chunk_bytes[Plane.UB]
        retry = fabric.machine.ub_retry
        self._give_up_ps = retry.tries * retry.delay_ps
        self.mailboxes: dict[tuple[int, int], Handler] = {}
        self.refused = 0

    # --- writes -----------------------------------------------------------------------------------

    def write_arrived(self, arrival: Arrival) -> None:
        self.store(
            arrival.source, arrival.target, arrival.body, arrival.payload, arrival.charged_bytes
        )

    def store(
        self, source: int, target: int, head: bytes, data: Payload, charged_bytes: int
    ) -> None:
        """A write is wholly here: visible now, or refused."""
        operation, number, offset = ub_frames.WRITE_HEAD.unpack(head)
        status = OK
        try:
            self._memory.region(target, number).write(offset, charged_bytes, data)
        except MemoryRangeError:
            status = RANGE
        self._complete(source, target, operation, status)

    def message_arrived(self, arrival: Arrival) -> None:
        self.hand_over(
            arrival.source, arrival.target, arrival.body, arrival.payload, arrival.charged_bytes
        )

    def hand_over(
        self, source: int, target: int, head: bytes, payload: Payload, charged_bytes: int
    ) -> None:
        """A message is wholly here: to its mailbox, or refused."""
        operation, mailbox = ub_frames.MESSAGE_HEAD.unpack_from(head)
        handler = self.mailboxes.get((target, mailbox))
        if handler is not None:
            body = head[ub_frames.MESSAGE_HEAD.size :]
            handler(Message(source, target, body, payload, charged_bytes))
        if operation or handler is None:
            self._complete(source, target, operation, RANGE if handler is None else OK)

    def flag_arrived(self, arrival: Arrival) -> None:
        flag, value = ub_frames.FLAG_HEAD.unpack(arrival.body)
        self._flags.set(arrival.target, flag, value)

    def _complete(self, source: int, target: int, operation: int, status: int) -> None:
        if status != OK:
            self.refused += 1
        if operation:
            route = self._pair(target, source).writes
            self._done(route, operation, status, route.path.completion_ps)

    def _done(self, route: Route, operation: int, status: int, delay_ps: int) -> None:
        body = ub_frames.DONE_HEAD.pack(operation, status)
        self._fabric.signal(route, ub_frames.DONE, delay_ps=delay_ps, body=body)

    # --- reads ------------------------------------------------------------------------------------

    def read_arrived(self, arrival: Arrival) -> None:
        head = ub_frames.READ_HEAD.unpack(arrival.body)
        operation, number, offset, charged_bytes, rate_bps = head
        try:
            data = self._memory.region(arrival.target, number).read(offset, charged_bytes)
        except MemoryRangeError:
            self._complete(arrival.source, arrival.target, operation, RANGE)
            return
        self._answer(arrival, operation, data, charged_bytes, rate_bps)

    def atomic_arrived(self, arrival: Arrival) -> None:
        operation, number, offset, amount = ub_frames.ATOMIC_HEAD.unpack(arrival.body)
        word = ub_frames.WORD
        try:
            region = self._memory.region(arrival.target, number)
            old = region.read(offset, word.size)
            if len(old) != word.size:
                raise MemoryRangeError("a word that is not wholly carried", definite=True)
        except MemoryRangeError:
            self._complete(arrival.source, arrival.target, operation, RANGE)
            return
        total = (word.unpack(old)[0] + amount + 2**63) % 2**64 - 2**63
        region.write(offset, word.size, word.pack(total))
        self._answer(arrival, operation, old, word.size, 0)

    def _answer(
        self, asked: Arrival, operation: int, data: bytes, charged_bytes: int, rate_bps: int
    ) -> None:
        pair = self._pair(asked.target, asked.source)
        head = ub_frames.NUMBER.pack(operation)

        def ended(sent: bool) -> None:
            if not sent:
                delay_ps = max(self._give_up_ps, pair.writes.path.propagation_ps)
                self._done(pair.writes, operation, LINK, delay_ps)

        if charged_bytes <= self._chunk_bytes:
            self._fabric.send(
                pair.reads,
                ub_frames.DATA,
                charged_bytes=charged_bytes,
                body=head,
                payload=data,
                rate_bps=rate_bps,
                started=ended,
            )
            return
        Flow(
            self._fabric,
            pair.reads,
            ub_frames.BULK,
            number=self._next_number(),
            head=bytes((ub_frames.DATA,)) + head,
            piece=pieces(data, charged_bytes=charged_bytes, chunk_bytes=self._chunk_bytes),
            charged_bytes=charged_bytes,
            rate_bps=rate_bps,
            ended=ended,
        ).begin()
