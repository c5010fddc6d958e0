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
from planes.vpc_transport import BYTES_HIGH, VpcTransport

OnMessage = Callable[[int, int, bytes, bytes], None]
"""(source device, target device, body, payload)"""

MAILBOX = 1
"""Of every die and CPU, on UB."""
VPC_PORT = 7000
WAITING_BYTES_MAX = 1024 * 1024
"""Of messages to one peer, beyond what its transport took: hundreds of the largest (assumed)."""

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


class _Stream(asyncio.Protocol):
    """Our stream to a peer: what waits for it, and what is not known to have arrived."""

    def __init__(self, hello: bytes, broke: Callable[[_Stream], None]) -> None:
        self._broke = broke
        self._hello = hello
        self._paused = True
        """Until it is open; then as the transport says."""
        self._written_bytes = 0
        self._unknown: deque[tuple[int, bytes]] = deque()
        """(where it ends in the stream, body) of what was written, until acknowledged."""
        self._waiting: deque[tuple[bytes, bytes]] = deque()
        """(body, all of it) of what is not written yet."""
        self.waiting_bytes = 0
        self.transport: VpcTransport | None = None

    def send(self, body: bytes, data: bytes) -> bool:
        """Write or wait; False where too much waits already."""
        if self.waiting_bytes and self.waiting_bytes + len(data) > WAITING_BYTES_MAX:
            return False
        self._waiting.append((body, data))
        self.waiting_bytes += len(data)
        self._write()
        return True

    def open(self, transport: VpcTransport) -> None:
        self.transport = transport
        transport.attach(self)
        self._paused = False
        self._write()

    def _write(self) -> None:
        """All that the transport takes, so much at a time that a chunk is full."""
        if self.transport is None:
            return
        self._forget_arrived(self.transport)
        while self._waiting and not self._paused:
            parts, size = [self._hello], len(self._hello)
            self._hello = b""
            while self._waiting and size < BYTES_HIGH:
                body, data = self._waiting.popleft()
                self.waiting_bytes -= len(data)
                parts.append(data)
                size += len(data)
                self._unknown.append((self._written_bytes + size, body))
            self._written_bytes += size
            self.transport.write(b"".join(parts))

    def _forget_arrived(self, transport: VpcTransport) -> None:
        acked, unknown = transport.stream.outgoing.acked, self._unknown
        while unknown and unknown[0][0] <= acked:
            unknown.popleft()

    def end(self) -> list[bytes]:
        """It is over; the bodies that are not known to have arrived."""
        if self.transport is not None:
            self._forget_arrived(self.transport)
        lost = [*(body for _, body in self._unknown), *(body for body, _ in self._waiting)]
        self._unknown.clear()
        self._waiting.clear()
        self.waiting_bytes = 0
        return lost

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._write()

    def connection_lost(self, exc: Exception | None) -> None:
        self._broke(self)


class VpcCarrier:
    """Messages over one stream to each peer process, opened when first used.

    All that goes here is control: some bytes to some kilobytes. What the transport does not take waits,
    up to ``WAITING_BYTES_MAX`` for each peer; a message beyond that is lost at once. What waits when a
    stream breaks, or was written and not acknowledged, counts as lost too: it may have arrived. Lost
    messages are counted and told to who asked (``on_lost``); nothing is sent again.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._vpc = Vpc(context)
        self._device = context.machine.vpc_port(context.process)
        self._process_of = [device.process for device in context.machine.devices]
        self._streams: dict[int, _Stream] = {}
        """By peer process."""
        self._vpc.serve(self._vpc.listen(lambda: _Inbound(self), VPC_PORT))
        self._handler: OnMessage | None = None
        self._on_lost: Callable[[bytes], None] | None = None
        self._lost = 0

    def on_message(self, handler: OnMessage) -> None:
        self._handler = handler

    def on_lost(self, handler: Callable[[bytes], None]) -> None:
        """Call ``handler(body)`` for each message that is not known to have arrived."""
        self._on_lost = handler

    def arrived(self, source: int, body: bytes, payload: bytes) -> None:
        """A whole message came."""
        assert self._handler is not None
        self._handler(source, self._device, body, payload)

    def send(
        self, source: int, target: int, body: bytes, payload: Payload, charged_bytes: int
    ) -> None:
        """``charged_bytes`` is what is carried: this plane has no other (design 2.2)."""
        peer = self._process_of[target]
        stream = self._streams.get(peer)
        if stream is None:
            hello = _LENGTHS.pack(self._device, 0)
            stream = _Stream(hello, functools.partial(self._broken, peer))
            self._streams[peer] = stream
            self._context.spawn(self._open(peer, stream), f"stream to {peer}")
        data = _LENGTHS.pack(len(body), len(payload)) + body + bytes(payload)
        if not stream.send(body, data):
            self._lose([body])

    async def _open(self, peer: int, stream: _Stream) -> None:
        try:
            transport = await self._vpc.connect(peer, VPC_PORT)
        except OSError:
            self._broken(peer, stream)
            return
        if self._streams.get(peer) is not stream:  # forgotten meanwhile
            transport.abort()
            return
        stream.open(transport)

    def forget(self, peer: int) -> None:
        """Drop the stream to a peer; the next message opens a new one."""
        stream = self._streams.get(peer)
        if stream is not None:
            self._broken(peer, stream)
            if stream.transport is not None:
                stream.transport.abort()

    def _broken(self, peer: int, stream: _Stream) -> None:
        """A stream ended; a newer one may already be there."""
        if self._streams.get(peer) is stream:
            del self._streams[peer]
            self._lose(stream.end())

    def _lose(self, bodies: list[bytes]) -> None:
        self._lost += len(bodies)
        if self._on_lost is not None:
            for body in bodies:
                self._on_lost(body)

    def statistics(self) -> dict[str, Any]:
        statistics = self._vpc.statistics()
        counters = {name: getattr(statistics, name) for name in statistics.__struct_fields__[:-1]}
        return counters | {"messages_lost": self._lost}
