"""How the serving system's messages travel: mailboxes on UB, queue pairs on RDMA, streams on VPC.

Owns one carrier per plane: which connections are open, and how a message (body and payload) lies in
what the plane moves. Does not own what messages mean (``nodes.post``) nor what a plane promises.
"""

from __future__ import annotations

import asyncio
import functools
import struct
from collections import deque
from collections.abc import Callable
from typing import Any

from cmnet.launch.agent import Context
from cmnet.messages import Payload
from planes.rdma import Rdma, Received
from planes.ub import Message, Ub
from planes.vpc import Vpc
from planes.vpc_transport import VpcTransport

OnMessage = Callable[[int, int, bytes, bytes], None]
"""(source device, target device, body, payload)"""

MAILBOX = 1
"""Of every die and CPU, on UB."""
VPC_PORT = 7000

_LENGTH = struct.Struct("<I")
_LENGTHS = struct.Struct("<II")


class UbCarrier:
    """Messages into mailboxes of dies and CPUs."""

    def __init__(self, context: Context) -> None:
        self._ub = Ub(context)
        machine = context.machine
        self._devices = [*machine.dies(context.process), *machine.cpus(context.process)]

    def on_message(self, handler: OnMessage) -> None:
        for device in self._devices:
            self._ub.on_message(device, MAILBOX, functools.partial(_of_ub, handler))

    def send(
        self, source: int, target: int, body: bytes, payload: Payload, charged_bytes: int
    ) -> None:
        self._ub.post(source, target, MAILBOX, body, payload, charged_bytes)

    async def complete(
        self, source: int, target: int, body: bytes, payload: Payload, charged_bytes: int
    ) -> None:
        """Send and wait for the completion. Raises OperationError."""
        await self._ub.send(source, target, MAILBOX, body, payload, charged_bytes)

    def statistics(self) -> dict[str, int]:
        return self._ub.statistics()


def _of_ub(handler: OnMessage, message: Message) -> None:
    handler(message.source, message.target, message.body, bytes(message.payload))


class RdmaCarrier:
    """Messages over one queue pair for each (source die, target die), connected when first used."""

    def __init__(self, context: Context) -> None:
        self._rdma = Rdma(context)
        self._devices = list(context.machine.dies(context.process))

    def on_message(self, handler: OnMessage) -> None:
        for device in self._devices:
            self._rdma.on_receive(device, functools.partial(_of_rdma, handler))

    async def complete(
        self, source: int, target: int, body: bytes, payload: Payload, charged_bytes: int
    ) -> None:
        """Send and wait for the completion. Raises OperationError; the next try reconnects."""
        data = _LENGTH.pack(len(body)) + body + bytes(payload)
        pair = await self._rdma.pair(source, target)
        await pair.write_with_imm(data, charged_bytes=charged_bytes)

    def statistics(self) -> dict[str, int]:
        return self._rdma.statistics()


def _of_rdma(handler: OnMessage, received: Received) -> None:
    data = received.data
    (length,) = _LENGTH.unpack_from(data)
    body_end = _LENGTH.size + length
    handler(received.source, received.target, data[_LENGTH.size : body_end], data[body_end:])


class _Inbound(asyncio.Protocol):
    """What a peer's stream brings, cut into messages."""

    def __init__(self, carrier: VpcCarrier) -> None:
        self._carrier = carrier
        self._data = bytearray()
        self._source = -1

    def data_received(self, data: bytes) -> None:
        self._data += data
        while len(self._data) >= _LENGTHS.size:
            first, payload_bytes = _LENGTHS.unpack_from(self._data)
            if self._source < 0:  # a stream begins with who sends
                self._source = first
                del self._data[: _LENGTHS.size]
                continue
            body_end = _LENGTHS.size + first
            end = body_end + payload_bytes
            if len(self._data) < end:
                return
            body, payload = (
                bytes(self._data[_LENGTHS.size : body_end]),
                bytes(self._data[body_end:end]),
            )
            del self._data[:end]
            self._carrier.arrived(self._source, body, payload)


class _Outbound(asyncio.Protocol):
    """Our stream to a peer. What waits when it breaks is lost."""

    def __init__(self, carrier: VpcCarrier, peer: int, transport: VpcTransport) -> None:
        self._carrier = carrier
        self._peer = peer
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._carrier.broken(self._peer, self._transport)


class VpcCarrier:
    """Messages over one stream to each peer process, opened when first used."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._vpc = Vpc(context)
        self._device = context.machine.vpc_port(context.process)
        self._process_of = [device.process for device in context.machine.devices]
        self._streams: dict[int, VpcTransport | deque[bytes]] = {}
        """By peer process; a deque while the stream opens."""
        self._vpc.serve(self._vpc.listen(lambda: _Inbound(self), VPC_PORT))
        self._handler: OnMessage | None = None

    def on_message(self, handler: OnMessage) -> None:
        self._handler = handler

    def arrived(self, source: int, body: bytes, payload: bytes) -> None:
        """A whole message came."""
        assert self._handler is not None
        self._handler(source, self._device, body, payload)

    def send(
        self, source: int, target: int, body: bytes, payload: Payload, charged_bytes: int
    ) -> None:
        """``charged_bytes`` is what is carried: this plane has no other (design 2.2)."""
        peer = self._process_of[target]
        data = _LENGTHS.pack(len(body), len(payload)) + body + bytes(payload)
        stream = self._streams.get(peer)
        if stream is None:
            waiting = self._streams[peer] = deque([_LENGTHS.pack(self._device, 0) + data])
            self._context.spawn(self._open(peer, waiting), f"stream to {peer}")
        elif isinstance(stream, deque):
            stream.append(data)
        else:
            stream.write(data)

    async def _open(self, peer: int, waiting: deque[bytes]) -> None:
        try:
            transport = await self._vpc.connect(peer, VPC_PORT)
        except OSError:
            if self._streams.get(peer) is waiting:
                del self._streams[peer]
            return
        if self._streams.get(peer) is not waiting:  # forgotten meanwhile
            transport.abort()
            return
        transport.attach(_Outbound(self, peer, transport))
        transport.writelines(waiting)
        self._streams[peer] = transport

    def forget(self, peer: int) -> None:
        """Drop the stream to a peer; the next message opens a new one."""
        stream = self._streams.pop(peer, None)
        if isinstance(stream, VpcTransport):
            stream.abort()

    def broken(self, peer: int, transport: VpcTransport) -> None:
        """A stream ended; a newer one may already be there."""
        if self._streams.get(peer) is transport:
            del self._streams[peer]

    def statistics(self) -> dict[str, Any]:
        statistics = self._vpc.statistics()
        return {name: getattr(statistics, name) for name in statistics.__struct_fields__[:-1]}
