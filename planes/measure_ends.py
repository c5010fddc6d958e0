"""The two ends of a measurement on each plane: how flows are posted, and how their end is seen.

Owns the patterns that the flows carry (64 B per chunk, checked at the target). Does not own what is
asked nor the comparison (``planes.measure``).
"""

from __future__ import annotations

import asyncio
import struct
from typing import Protocol

import msgspec

from cmnet.errors import CorruptError, LinkError, OperationError, PeerDeadError
from cmnet.launch.agent import Context
from cmnet.messages import ORDERED, Arrival, Payload
from cmnet.topology.machine import Device, Operation, Plane
from cmnet.units import PS_PER_S
from cmnet.wire.frames import FLAG_COPY, FLAG_CORRUPT
from planes import bulk
from planes.bulk import chunks_count
from planes.rdma import QueuePair, Rdma, Received
from planes.ub import Message, Ub

SETTINGS_KEY = "link"
PIECE_BYTES = 64
"""Carried by a chunk (design 2.2)."""
MAILBOX = REGION = 1
CHUNK, DONE = 62, 63
"""Kinds of plain chunks on the VPC plane and of their completion; streams use 48 to 53."""
VPC_TIMEOUT_PS = PS_PER_S
"""Without its completion for so long after its last chunk has left, a flow on VPC counts as lost.
Assumed (0.1 to 10 s): nothing is retransmitted here, so the wait has only to be above any queue."""

_FLOW = struct.Struct("<II")
"""round, flow."""
_NUMBER = struct.Struct("<Q")


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured. Device names as in the topology; bytes of each flow."""

    plane: str
    source: str
    target: str
    bytes: int
    flows: int = 1
    repeat: int = 1


class Seen(msgspec.Struct):
    """At the target: when each flow of each round was delivered."""

    rounds: dict[int, dict[int, int]] = {}
    wrong: int = 0

    def delivered(self, number: int, flow: int, at_ps: int) -> None:
        self.rounds.setdefault(number, {})[flow] = at_ps


class Posted(msgspec.Struct):
    """At the source: when the rounds were posted, when each flow's completion was known."""

    at_ps: list[int] = []
    completed_ps: list[list[int | None]] = []
    errors: list[str] = []
    lone_ps: dict[str, int] = {}
    lone_bytes: dict[str, int] = {}


class Ends(Protocol):
    """One plane's way. ``receive`` at the target, the rest at the source."""

    source: Device
    target: Device

    def receive(self, seen: Seen) -> None: ...

    async def prepare(self, posted: Posted) -> None: ...

    async def round(self, number: int, posted: Posted) -> list[int | None]: ...

    async def lone(self, posted: Posted) -> None: ...


class _Ends:
    """What all planes share: ends, and running a round's flows together."""

    def __init__(self, context: Context, asked: Asked) -> None:
        self.asked = asked
        self.source = context.machine.device(asked.source)
        self.target = context.machine.device(asked.target)
        self._loop = context.loop
        self._fabric = context.fabric
        self._machine = context.machine

    async def prepare(self, posted: Posted) -> None:
        """Before the first round."""

    async def lone(self, posted: Posted) -> None:
        """After the last round."""

    async def round(self, number: int, posted: Posted) -> list[int | None]:
        """Post all flows of a round in order and wait for all; when each was known to be there."""
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._flow(number, flow, posted))
                for flow in range(self.asked.flows)
            ]
        return [task.result() for task in tasks]

    async def _flow(self, number: int, flow: int, posted: Posted) -> int | None:
        try:
            await self._transfer(number, flow)
        except OperationError as error:
            posted.errors.append(f"round {number} flow {flow}: {error.code}: {error}")
            return None
        return self._loop.now_ps

    async def _transfer(self, number: int, flow: int) -> None:
        raise NotImplementedError


class _UbEnds(_Ends):
    def __init__(self, context: Context, asked: Asked) -> None:
        super().__init__(context, asked)
        self._ub = Ub(context)
        self.pattern = pattern(asked.bytes, context.machine.chunk_bytes[Plane.UB])

    def receive(self, seen: Seen) -> None:
        def arrived(message: Message) -> None:
            number, flow = _FLOW.unpack(message.body)
            _check(seen, message.payload, self.pattern)
            seen.delivered(number, flow, self._loop.now_ps)

        device = self.target.device_id
        self._ub.on_message(device, MAILBOX, arrived)
        charged_bytes = max(self.asked.bytes, self._lone_bytes())
        region = self._ub.memory.register(
            device, REGION, charged_bytes=charged_bytes, carried_bytes=len(self.pattern)
        )
        region.data[:] = self.pattern

    async def _transfer(self, number: int, flow: int) -> None:
        await self._ub.send(
            self.source.device_id,
            self.target.device_id,
            MAILBOX,
            _FLOW.pack(number, flow),
            self.pattern,
            self.asked.bytes,
        )

    def _lone_bytes(self) -> int:
        return self._machine.topology.planes.ub.latency_bytes.amount

    async def lone(self, posted: Posted) -> None:
        """A write and a read of the asked size, then of the size whose latency is published."""
        for suffix, size_bytes in (("", self.asked.bytes), ("_small", self._lone_bytes())):
            for what in ("write", "read"):
                begin_ps = self._loop.now_ps
                try:
                    await self._lone(what, size_bytes)
                except OperationError as error:
                    posted.errors.append(f"lone {what}: {error.code}: {error}")
                    continue
                posted.lone_ps[what + suffix] = self._loop.now_ps - begin_ps
                posted.lone_bytes[what + suffix] = size_bytes

    async def _lone(self, what: str, size_bytes: int) -> None:
        source, target = self.source.device_id, self.target.device_id
        if what == "write":
            await self._ub.write(
                source=source, target=target, region=REGION, charged_bytes=size_bytes
            )
            return
        data = await self._ub.read(
            source=source, target=target, region=REGION, charged_bytes=size_bytes
        )
        if not self.pattern.startswith(data):
            raise CorruptError("what was read is not what is there", definite=True)


class _RdmaEnds(_Ends):
    def __init__(self, context: Context, asked: Asked) -> None:
        super().__init__(context, asked)
        self._rdma = Rdma(context)
        self.pattern = pattern(asked.bytes, context.machine.chunk_bytes[Plane.RDMA])
        self._pairs: list[QueuePair] = []

    def receive(self, seen: Seen) -> None:
        def received(message: Received) -> None:
            number, flow = divmod(message.immediate, 1 << 32)
            _check(seen, message.data, self.pattern)
            seen.delivered(number, flow, self._loop.now_ps)

        device = self.target.device_id
        self._rdma.on_receive(device, received)
        region = self._rdma.memory.register(
            device, REGION, charged_bytes=self.asked.bytes, carried_bytes=len(self.pattern)
        )
        region.data[:] = self.pattern

    async def prepare(self, posted: Posted) -> None:
        """Connect a queue pair per flow."""
        source, target = self.source.device_id, self.target.device_id
        for _ in range(self.asked.flows):
            self._pairs.append(await self._rdma.connect(source, target))

    async def _transfer(self, number: int, flow: int) -> None:
        await self._pairs[flow].write_with_imm(
            self.pattern, immediate=(number << 32) + flow, charged_bytes=self.asked.bytes
        )

    async def lone(self, posted: Posted) -> None:
        """A message and a read, each alone."""
        pair, size_bytes = self._pairs[0], self.asked.bytes
        for what in ("write", "read"):
            begin_ps = self._loop.now_ps
            try:
                if what == "write":
                    number = self.asked.repeat << 32
                    await pair.write_with_imm(
                        self.pattern, immediate=number, charged_bytes=size_bytes
                    )
                else:
                    await pair.read(region=REGION, charged_bytes=size_bytes)
            except OperationError as error:
                posted.errors.append(f"lone {what}: {error.code}: {error}")
                continue
            posted.lone_ps[what] = self._loop.now_ps - begin_ps
            posted.lone_bytes[what] = size_bytes


class _VpcEnds(_Ends):
    """Plain chunks: no stream, nothing retransmitted; a flow of which a chunk is lost has failed."""

    def __init__(self, context: Context, asked: Asked) -> None:
        super().__init__(context, asked)
        self._incoming: dict[int, int] = {}
        self._waits: dict[int, asyncio.Future[None]] = {}
        if context.process == self.source.process:
            context.fabric.bind(DONE, self._done_arrived)

    def receive(self, seen: Seen) -> None:
        self._seen = seen
        self._fabric.bind(CHUNK, self._chunk_arrived)

    def _chunk_arrived(self, arrival: Arrival) -> None:
        if arrival.flags & (FLAG_COPY | FLAG_CORRUPT):
            return
        key, index, count, digest = bulk.CHUNK.unpack(arrival.body)
        if index != self._incoming.get(key, 0):
            return
        if bulk.digest_of(arrival.payload, index) != digest:
            self._seen.wrong += 1
        self._incoming[key] = index + 1
        if index + 1 == count:
            del self._incoming[key]
            self._seen.delivered(key >> 32, key & 0xFFFF_FFFF, self._loop.now_ps)
            ends = (arrival.target, arrival.source)
            route = self._fabric.route(Plane.VPC, Operation.WRITE, *ends)
            delay_ps = route.path.completion_ps
            self._fabric.signal(route, DONE, delay_ps=delay_ps, body=_NUMBER.pack(key))

    def _done_arrived(self, arrival: Arrival) -> None:
        wait = self._waits.pop(_NUMBER.unpack(arrival.body)[0], None)
        if wait is not None and not wait.done():
            wait.set_result(None)

    async def _transfer(self, number: int, flow: int) -> None:
        key = (number << 32) + flow
        done = self._waits[key] = self._loop.create_future()
        ends = (self.source.device_id, self.target.device_id)
        piece = pattern(min(self.asked.bytes, PIECE_BYTES), PIECE_BYTES)

        def ended(sent: bool) -> None:
            if sent:
                self._loop.call_at_ps(self._loop.now_ps + VPC_TIMEOUT_PS, self._silent, key)
            elif not done.done():
                done.set_exception(LinkError("a chunk was lost", definite=True))

        bulk.Flow(
            self._fabric,
            self._fabric.route(Plane.VPC, Operation.WRITE, *ends),
            CHUNK,
            number=key,
            head=b"",
            piece=lambda _: piece,
            charged_bytes=self.asked.bytes,
            fence=ORDERED,
            ended=ended,
        ).begin()
        await done

    def _silent(self, key: int) -> None:
        wait = self._waits.pop(key, None)
        if wait is not None and not wait.done():
            wait.set_exception(PeerDeadError("no completion in 1 s", definite=False))


def make_ends(context: Context, asked: Asked) -> Ends:
    """The ends on the asked plane, bound to this process."""
    kinds: dict[str, type[_UbEnds | _RdmaEnds | _VpcEnds]] = {
        "ub": _UbEnds,
        "rdma": _RdmaEnds,
        "vpc": _VpcEnds,
    }
    return kinds[asked.plane](context, asked)


def pattern(size_bytes: int, chunk_bytes: int) -> bytes:
    """What a flow carries: each 64 B are their own number, over and over."""
    count = chunks_count(size_bytes, chunk_bytes)
    whole = b"".join(index.to_bytes(8, "little") * (PIECE_BYTES // 8) for index in range(count))
    return whole[: min(size_bytes, len(whole))]


def _check(seen: Seen, payload: Payload, expected: bytes) -> None:
    if payload != expected:
        seen.wrong += 1
