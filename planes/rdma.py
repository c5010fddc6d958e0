"""The RDMA plane: queue pairs with verbs semantics between dies (design 2.3).

Owns what a program calls: connecting, messages with an immediate, reads, received messages. Does not
own the halves of a queue pair (``planes.rdma_sender``, ``planes.rdma_receiver``, ``planes.rdma_read``)
nor the bytes (``planes.memory``).

Order: what rules delay arrives in order all the same (the fabric's fence), so a chunk that is not the
expected one means a loss. Lost and corrupt chunks are retransmitted, go-back-N; copies are refused.
After 7 tries of 67 ms without progress the queue pair is in error: everything outstanding ends with
PeerDeadError (definite only for messages of which nothing left), everything later with LinkError
until ``reconnect``. A queue pair belongs to the incarnation of its target to which it was connected; a
restarted target refuses its frames.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cmnet.errors import LinkError, MemoryRangeError, PeerDeadError
from cmnet.fabric import Fabric
from cmnet.launch.agent import Context
from cmnet.messages import ORDERED, Arrival, Payload
from cmnet.topology.machine import Operation, Plane
from cmnet.units import format_ps
from planes import rdma_frames
from planes.memory import Memory
from planes.rdma_read import Reading, Server, check
from planes.rdma_receiver import Received as Received
from planes.rdma_receiver import Receiver
from planes.rdma_sender import Sender

NO_REGION = -1


class QueuePair:
    """One connection from a die to another. Made by ``Rdma.connect``."""

    def __init__(self, rdma: Rdma, fabric: Fabric, source: int, target: int) -> None:
        self.source = source
        self.target = target
        self._rdma = rdma
        self._fabric = fabric
        self._loop = fabric.loop
        self._route = fabric.route(Plane.RDMA, Operation.WRITE, source, target)
        self._retry = fabric.machine.rdma_retry
        self._accepted: asyncio.Future[None] | None = None
        self.sender = Sender(fabric, self._route)
        self.readings: dict[int, Reading] = {}
        self._reads = 0
        self._read_timeouts = 0

    @property
    def connected(self) -> bool:
        """Not in error, as far as is known here."""
        return self.sender.error is None

    async def write_with_imm(
        self,
        data: Payload = b"",
        *,
        immediate: int = 0,
        charged_bytes: int | None = None,
        region: int = NO_REGION,
        offset: int = 0,
    ) -> None:
        """Send a message (or write into a region) with its immediate; returns at its completion.

        Raises PeerDeadError, LinkError (the queue pair is in error), MemoryRangeError.
        """
        await self.post_write_with_imm(
            data, immediate=immediate, charged_bytes=charged_bytes, region=region, offset=offset
        )

    def post_write_with_imm(
        self,
        data: Payload = b"",
        *,
        immediate: int = 0,
        charged_bytes: int | None = None,
        region: int = NO_REGION,
        offset: int = 0,
    ) -> asyncio.Future[None]:
        """As ``write_with_imm``, queued now; the future is the completion."""
        return self.sender.post(
            data,
            charged_bytes=len(data) if charged_bytes is None else charged_bytes,
            immediate=immediate,
            region=region,
            offset=offset,
        )

    async def read(self, *, region: int, offset: int = 0, charged_bytes: int) -> bytes:
        """Read from the target's region. Raises as ``write_with_imm``; reads change nothing."""
        if self.sender.error is not None:
            raise LinkError(f"the queue pair is in error: {self.sender.error}", definite=True)
        self._reads += 1
        what = (region, offset, charged_bytes)
        number = self._reads
        reading = Reading(
            self._fabric, self._route, number=self.sender.number, read=number, what=what
        )
        self.readings[number] = reading
        reading.ask()
        try:
            return await reading.future
        except PeerDeadError as error:
            self.sender.fail(error)
            raise
        finally:
            self._read_timeouts += reading.timeouts
            del self.readings[number]
            reading.close()

    async def reconnect(self) -> None:
        """Connect anew, which ends everything outstanding with LinkError. Raises PeerDeadError."""
        before = self.sender.number
        self.sender.fail(LinkError("reconnected", definite=False))
        for reading in list(self.readings.values()):
            reading.fail(LinkError("reconnected", definite=False))
        number = self._rdma.numbered(self, before)
        for _ in range(self._retry.tries):
            if await self._accept(number, before):
                self.sender.reset(number)
                return
        waited = f"{self._retry.tries} tries of {format_ps(self._retry.timeout_ps)}"
        name = self._fabric.machine.devices[self.target].name
        raise PeerDeadError(f"connect to {name}: no answer in {waited}", definite=False)

    async def _accept(self, number: int, before: int) -> bool:
        self._accepted = self._loop.create_future()
        body = rdma_frames.CONNECT_HEAD.pack(number, before)
        self._fabric.send(
            self._route, rdma_frames.CONNECT, charged_bytes=0, body=body, fence=ORDERED
        )
        at_ps = self._loop.now_ps + self._retry.timeout_ps
        timer = self._loop.call_at_ps(at_ps, _cancel, self._accepted)
        try:
            await asyncio.wait([self._accepted])
            return not self._accepted.cancelled()
        finally:
            timer.cancel()

    def accepted(self) -> None:
        """The target has this connection."""
        if self._accepted is not None and not self._accepted.done():
            self._accepted.set_result(None)

    def statistics(self) -> dict[str, int]:
        """Counters, JSON-able."""
        sender = self.sender
        return {
            "chunks_sent": sender.chunks_sent,
            "chunks_resent": sender.chunks_resent,
            "timeouts": sender.timeouts + self._read_timeouts,
        }


class Rdma:
    """The RDMA plane of one process. Make one before anything is sent to the process."""

    def __init__(self, context: Context, memory: Memory | None = None) -> None:
        self.memory = Memory() if memory is None else memory
        self._fabric = context.fabric
        self._number = context.incarnation << 40
        self._pairs: dict[int, QueuePair] = {}
        self._shared: dict[tuple[int, int], tuple[QueuePair, asyncio.Lock]] = {}
        self._receiver = Receiver(self._fabric, self.memory)
        self._server = Server(self._fabric, self.memory, self._receiver.connected)
        for kind, handler in (
            (rdma_frames.CHUNK, self._of_a_pair(self._receiver.chunk_arrived)),
            (rdma_frames.CONNECT, self._of_a_pair(self._receiver.connect_arrived)),
            (rdma_frames.ACK, self._ack_arrived),
            (rdma_frames.ACCEPT, self._accept_arrived),
            (rdma_frames.READ, self._of_a_pair(self._server.read_arrived)),
            (rdma_frames.DATA, self._data_arrived),
            (rdma_frames.REFUSED, self._refused_arrived),
        ):
            self._fabric.bind(kind, handler)
        self._fabric.on_forgotten(self._receiver.forget)

    def _of_a_pair(self, handler: Callable[[Arrival], None]) -> Callable[[Arrival], None]:
        """Frames of queue pairs that end here, whose peer may be dead by now."""
        receiver = self._receiver

        def handle(arrival: Arrival) -> None:
            handler(arrival)
            if receiver.ending:
                receiver.handled(arrival)

        return handle

    async def connect(self, source: int, target: int) -> QueuePair:
        """A new queue pair from an own die. Raises PeerDeadError."""
        pair = QueuePair(self, self._fabric, source, target)
        await pair.reconnect()
        return pair

    async def pair(self, source: int, target: int) -> QueuePair:
        """The queue pair that this process shares between two dies: connected at its first use, anew
        if it is in error. Who waits for that goes on in order. Raises PeerDeadError."""
        key = (source, target)
        shared = self._shared.get(key)
        if shared is None:
            pair = QueuePair(self, self._fabric, source, target)
            shared = self._shared[key] = (pair, asyncio.Lock())
        pair, connecting = shared
        if not pair.connected:
            async with connecting:
                if not pair.connected:
                    await pair.reconnect()
        return pair

    def on_receive(self, device: int, handler: Callable[[Received], None]) -> None:
        """Messages to an own device go to ``handler`` when wholly delivered, in order per pair."""
        assert device not in self._receiver.handlers, device
        self._receiver.handlers[device] = handler

    def completions(self, device: int) -> asyncio.Queue[Received]:
        """A queue of the messages to an own device, in place of a handler."""
        queue: asyncio.Queue[Received] = asyncio.Queue()
        self.on_receive(device, queue.put_nowait)
        return queue

    def numbered(self, pair: QueuePair, before: int) -> int:
        """A new number for a queue pair."""
        self._pairs.pop(before, None)
        self._number += 1
        self._pairs[self._number] = pair
        return self._number

    def statistics(self) -> dict[str, int]:
        """Counters, JSON-able: sums over the queue pairs, and chunks that were refused here."""
        pairs = [pair.statistics() for pair in self._pairs.values()]
        sums = {
            name: sum(pair[name] for pair in pairs)
            for name in ("chunks_sent", "chunks_resent", "timeouts")
        }
        refused = {f"refused_{why}": count for why, count in self._receiver.refused.items()}
        return sums | refused

    # --- arriving ---------------------------------------------------------------------------------

    def _ack_arrived(self, arrival: Arrival) -> None:
        number, until = rdma_frames.ACK_HEAD.unpack(arrival.body)
        pair = self._pairs.get(number)
        if pair is not None:
            pair.sender.acknowledged(until)

    def _accept_arrived(self, arrival: Arrival) -> None:
        pair = self._pairs.get(rdma_frames.NUMBER.unpack(arrival.body)[0])
        if pair is not None:
            pair.accepted()

    def _data_arrived(self, arrival: Arrival) -> None:
        number, read, index, count, digest = rdma_frames.DATA_HEAD.unpack(arrival.body)
        pair = self._pairs.get(number)
        reading = None if pair is None else pair.readings.get(read)
        if reading is not None and check(arrival, index, digest):
            reading.chunk(index, count, arrival.payload)

    def _refused_arrived(self, arrival: Arrival) -> None:
        number, which, what = rdma_frames.REFUSED_HEAD.unpack(arrival.body)
        pair = self._pairs.get(number)
        if pair is None:
            return
        if what == rdma_frames.REFUSED_WRITE:
            pair.sender.refused(which)
        elif which in pair.readings:
            error = MemoryRangeError(
                "read outside of what the target has registered", definite=True
            )
            pair.readings[which].fail(error)


def _cancel(future: asyncio.Future[None]) -> None:
    future.cancel()
