"""The two ends of a measurement on each plane: how flows are posted, and how their end is seen.

Owns the patterns that the flows carry (about 64 B per chunk, checked at the target). Does not own what is
asked nor the comparison (``planes.measure``).
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import Protocol

import msgspec
import numpy as np

from cmnet.errors import CorruptError, LinkError, OperationError
from cmnet.launch.agent import Context
from cmnet.messages import Payload
from cmnet.topology.machine import Device, Plane
from cmnet.vtime.loop import VirtualLoop
from planes.bulk import chunks_count
from planes.rdma import QueuePair, Rdma, Received
from planes.ub import Message, Ub
from planes.vpc import Vpc

SETTINGS_KEY = "link"
PIECE_BYTES = 64
"""Carried by a chunk (design 2.2)."""
MAILBOX = REGION = 1
STREAM_PORT = 7001
CHARGE_FACTOR_MAX = 1024
"""On VPC: 64 KiB charged for 64 B carried."""

_FLOW = struct.Struct("<II")
"""round, flow."""


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
    """Streams, all opened before the first round; the target answers each flow with one byte."""

    def __init__(self, context: Context, asked: Asked) -> None:
        super().__init__(context, asked)
        self._charge_factor = charge_factor(asked.bytes)
        self._vpc = Vpc(context, charge_factor=self._charge_factor)
        self.pattern = _numbered(asked.bytes // self._charge_factor)
        self._streams: list[_Sender] = []

    def receive(self, seen: Seen) -> None:
        def accept() -> _Counter:
            self._accepted += 1
            return _Counter(self._accepted - 1, seen, self.pattern, self._loop)

        self._accepted = 0
        self._vpc.serve(self._vpc.listen(accept, STREAM_PORT))

    async def prepare(self, posted: Posted) -> None:
        """Open a stream per flow."""
        for _ in range(self.asked.flows):
            try:
                transport = await self._vpc.connect(self.target.process, STREAM_PORT)
            except OSError as error:
                raise LinkError(f"no stream: {error}", definite=True) from None
            sender = _Sender(self._loop.create_future)
            transport.attach(sender)
            self._streams.append(sender)

    async def _transfer(self, number: int, flow: int) -> None:
        await self._streams[flow].send(self.pattern)


class _Sender(asyncio.Protocol):
    """One stream at the source: sends, and waits for the byte that says that all is there."""

    def __init__(self, make_future: Callable[[], asyncio.Future[None]]) -> None:
        self._make_future = make_future
        self._wait: asyncio.Future[None] | None = None
        self._error: Exception | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    async def send(self, data: bytes) -> None:
        """Raises LinkError if the stream ends before the answer."""
        if self._error is None:
            self._wait = self._make_future()
            self._transport.write(data)
            await self._wait
        if self._error is not None:
            raise LinkError(f"the stream ended: {self._error}", definite=False)

    def data_received(self, data: bytes) -> None:
        assert self._wait is not None
        self._wait.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._error = exc or ConnectionResetError("closed")
        if self._wait is not None and not self._wait.done():
            self._wait.set_result(None)


class _Counter(asyncio.Protocol):
    """One stream at the target: checks what comes, and answers when a flow is whole."""

    def __init__(self, flow: int, seen: Seen, pattern: bytes, loop: VirtualLoop) -> None:
        self._flow = flow
        self._seen = seen
        self._pattern = pattern
        self._loop = loop
        self._round = 0
        self._got_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        end = self._got_bytes + len(data)
        _check(self._seen, data, self._pattern[self._got_bytes : end])
        self._got_bytes = end
        if end == len(self._pattern):
            self._seen.delivered(self._round, self._flow, self._loop.now_ps)
            self._round += 1
            self._got_bytes = 0
            self._transport.write(b"!")


def make_ends(context: Context, asked: Asked) -> Ends:
    """The ends on the asked plane, bound to this process."""
    kinds: dict[str, type[_UbEnds | _RdmaEnds | _VpcEnds]] = {
        "ub": _UbEnds,
        "rdma": _RdmaEnds,
        "vpc": _VpcEnds,
    }
    return kinds[asked.plane](context, asked)


def pattern(size_bytes: int, chunk_bytes: int) -> bytes:
    """What a flow carries: 64 B a chunk, or all of a flow that is smaller."""
    return _numbered(min(size_bytes, PIECE_BYTES * chunks_count(size_bytes, chunk_bytes)))


def charge_factor(size_bytes: int) -> int:
    """Charged bytes per carried byte of a stream, which has to divide what a flow charges: 1024 for
    whole KiB of more than a chunk, else a power of two below it, 1 for what is carried as it is.

    >>> charge_factor(1 << 30), charge_factor(32), charge_factor(65_540)
    (1024, 1, 4)
    """
    if size_bytes <= CHARGE_FACTOR_MAX * PIECE_BYTES:
        return 1
    return min(size_bytes & -size_bytes, CHARGE_FACTOR_MAX)


def _numbered(carried_bytes: int) -> bytes:
    """Each 64 B are their own number, over and over."""
    pieces_count = -(-carried_bytes // PIECE_BYTES)
    numbers = np.arange(pieces_count, dtype="<u8").repeat(PIECE_BYTES // 8)
    return numbers.tobytes()[:carried_bytes]


def _check(seen: Seen, payload: Payload, expected: bytes) -> None:
    if payload != expected:
        seen.wrong += 1
