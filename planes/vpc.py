"""The VPC plane: streams between processes, as asyncio knows them (design 2.3).

Owns the streams of one process: who listens, which message belongs to which stream, ports for the eye,
counters. Does not own the rules of a stream (``vpc_stream``), the transport's manners
(``vpc_transport``), names and sockets (``vpc_sockets``) or link timing (the fabric).

Cost, in virtual time: a chunk passes both ports and is charged what it carries times the charge factor
of its side; a half's end and a reset pass the ports with 0 bytes, so they keep their place behind the
chunks. Handshake, acknowledgements and probes take one propagation and no port (``signal``): about 60
bytes in 64 KiB, below 0.1 % of a link. A frame that a rule corrupted fails its checksum: it is lost.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable
from contextvars import Token
from typing import Any

import msgspec

from cmnet.launch.agent import Context
from cmnet.messages import Arrival, Route
from cmnet.topology.machine import Operation, Plane
from cmnet.wire.frames import FLAG_CORRUPT
from planes import vpc_sockets
from planes.vpc_halves import (
    ACK,
    DATA,
    FLAG_FROM_OPENER,
    HEAD,
    PROBE,
    RST,
    SYN,
    SYN_ACK,
    Limits,
    Message,
)
from planes.vpc_sockets import Addresses, FakeSocket, Network
from planes.vpc_stream import Stream
from planes.vpc_transport import Key, StreamStatistics, VpcTransport

KINDS = (SYN, SYN_ACK, ACK, PROBE, DATA, RST)

PORT_FIRST, PORTS = 32768, 28232
"""Linux's ephemeral ports; here they only name an end, streams are told apart by number."""

INCARNATION_SHIFT = 32
"""Stream numbers of incarnation i begin at i << 32: those of a restarted process never repeat."""

LOOPBACK_PS = 5_000_000
"""One way from a process to itself, past all ports: assumed 5 us (1 to 20 us), a kernel's loopback."""

READER_BYTES = 1 << 16
"""asyncio's default for a StreamReader."""

ClientConnected = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None] | None]


class VpcStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of one process on this plane. ``streams`` sums over all ends it ever had."""

    streams_opened: int
    streams_accepted: int
    streams_refused: int
    streams_failed: int
    streams_now: int
    frames_corrupt: int
    frames_stray: int
    """Of streams that are not (any more) here."""
    streams: StreamStatistics


class Server(asyncio.AbstractServer):
    """A port that is listened on. Closing it leaves its streams as they are."""

    def __init__(self, vpc: Vpc, factory: Callable[[], Any], port: int) -> None:
        self.factory = factory
        self.port = port
        self._vpc = vpc
        self._socket = FakeSocket((vpc.addresses.address(vpc.process), port))
        self._closed = vpc.loop.create_future()

    @property
    def sockets(self) -> tuple[FakeSocket, ...]:
        return () if self._closed.done() else (self._socket,)

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._vpc.loop

    def is_serving(self) -> bool:
        return self._vpc.servers.get(self.port) is self

    async def start_serving(self) -> None:
        """Raises OSError if the port is taken."""
        self._vpc.serve(self)

    async def serve_forever(self) -> None:
        """Until cancelled or closed."""
        await self.start_serving()
        try:
            await asyncio.shield(self._closed)
        finally:
            self.close()

    def close(self) -> None:
        if not self._closed.done():
            self._closed.set_result(None)
        if self.is_serving():
            del self._vpc.servers[self.port]

    async def wait_closed(self) -> None:
        """Until ``close``; streams that were accepted are not waited for (as in Python 3.11)."""
        await asyncio.shield(self._closed)


class Vpc:
    """The VPC plane as one process sees it. ``charge_factor``: charged bytes per carried byte."""

    def __init__(self, context: Context, *, charge_factor: int = 1) -> None:
        machine = context.machine
        self.loop = context.loop
        self.process = context.process
        self.addresses = Addresses(machine, context.process)
        self.servers: dict[int, Server] = {}
        self._fabric = context.fabric
        self._machine = machine
        self._device = machine.vpc_port(context.process)
        self._charge_factor = charge_factor
        self._streams: dict[Key, VpcTransport] = {}
        self._routes: dict[int, Route | None] = {self.process: None}
        self._next_number = context.incarnation << INCARNATION_SHIFT
        self._opened = self._accepted = self._refused = self._failed = 0
        self._corrupt = self._stray = 0
        self._past: list[int] = [0] * len(StreamStatistics.__struct_fields__)
        for kind in KINDS:
            self._fabric.bind(kind, self._arrived)
        self.install()

    def install(self) -> None:
        """Be the network of the loop, for this task and what it starts where processes share one."""
        if self.loop.network is None:
            self.loop.network = Network()
        self.loop.network.add(self)
        vpc_sockets.current.set(self)

    # --- asyncio's calls, for this process --------------------------------------------------------

    async def open_connection(
        self, host: str, port: int, *, limit: int = READER_BYTES, charge_factor: int | None = None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """As asyncio.open_connection. Raises socket.gaierror, ConnectionRefusedError, TimeoutError."""
        reader = asyncio.StreamReader(limit=limit, loop=self.loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=self.loop)
        process = self.addresses.process(host)
        transport = await self.connect(process, port, charge_factor=charge_factor)
        transport.attach(protocol)
        return reader, asyncio.StreamWriter(transport, protocol, reader, self.loop)

    async def start_server(
        self, callback: ClientConnected, port: int, *, limit: int = READER_BYTES
    ) -> Server:
        """As asyncio.start_server on every address of this process; port 0 takes a free one."""

        def factory() -> asyncio.StreamReaderProtocol:
            reader = asyncio.StreamReader(limit=limit, loop=self.loop)
            return asyncio.StreamReaderProtocol(reader, callback, loop=self.loop)

        return await self.create_server(factory, port)

    async def create_connection(
        self,
        factory: Callable[[], Any],
        host: str,
        port: int,
        *,
        charge_factor: int | None = None,
    ) -> tuple[VpcTransport, Any]:
        """As loop.create_connection. Raises socket.gaierror, ConnectionRefusedError, TimeoutError."""
        process = self.addresses.process(host)
        transport = await self.connect(process, port, charge_factor=charge_factor)
        protocol = factory()
        transport.attach(protocol)
        return transport, protocol

    async def create_server(self, factory: Callable[[], Any], port: int) -> Server:
        """As loop.create_server on every address of this process. Raises OSError for a taken port."""
        server = self.listen(factory, port)
        await server.start_serving()
        return server

    # --- opening and accepting --------------------------------------------------------------------

    async def connect(
        self, process: int, port: int, *, charge_factor: int | None = None
    ) -> VpcTransport:
        """An open stream without a protocol yet: one round trip."""
        number = self._next_number
        self._next_number += 1
        own = (self.addresses.address(self.process), PORT_FIRST + number % PORTS)
        peer = (self.addresses.address(process), port)
        key = (process, number, True)
        transport = self._make(key, own, peer, charge_factor or self._charge_factor)
        transport.opening = self.loop.create_future()
        transport.stream.open(port, self.loop.now_ps)
        transport.progress()
        try:
            await transport.opening
        except BaseException:
            transport.abort()
            raise
        self._opened += 1
        return transport

    def listen(self, factory: Callable[[], Any], port: int) -> Server:
        """A server that does not serve yet."""
        return Server(self, factory, port or self._free_port())

    def _free_port(self) -> int:
        ports = range(PORT_FIRST, PORT_FIRST + PORTS)
        return next(port for port in ports if port not in self.servers)

    def serve(self, server: Server) -> None:
        """Streams to the server's port are accepted from now on."""
        taken = self.servers.setdefault(server.port, server)
        if taken is not server:
            where = f"port {server.port} of {self.addresses.name(self.process)} is taken"
            raise OSError(errno.EADDRINUSE, where)

    def _make(
        self, key: Key, own: tuple[str, int], peer: tuple[str, int], charge_factor: int
    ) -> VpcTransport:
        retry = self._machine.vpc_retry
        limits = Limits(
            chunk_bytes=self._machine.chunk_bytes[Plane.VPC],
            window_bytes=retry.window_bytes,
            timeout_ps=retry.timeout_ps,
            tries=retry.tries,
            charge_factor=charge_factor,
        )
        extra = {
            "sockname": own,
            "peername": peer,
            "socket": FakeSocket().named(own, peer),
        }
        route = self._route(key[0])
        transport = VpcTransport(
            self, Stream(limits), key=key, route=route, charge_factor=charge_factor, extra=extra
        )
        self._streams[key] = transport
        return transport

    def _route(self, process: int) -> Route | None:
        if process not in self._routes:
            target = self._machine.vpc_port(process)
            self._routes[process] = self._fabric.route(
                Plane.VPC, Operation.WRITE, self._device, target
            )
        return self._routes[process]

    def _syn(self, key: Key, message: Message) -> None:
        port = message.sequence
        server = self.servers.get(port)
        if server is None:
            self._refused += 1
            self._reset(key)
            return
        own = (self.addresses.address(self.process), port)
        peer = (self.addresses.address(key[0]), PORT_FIRST + key[1] % PORTS)
        transport = self._make(key, own, peer, self._charge_factor)
        transport.factory = server.factory
        transport.stream.accept(message, self.loop.now_ps)
        transport.progress()

    def opened(self, transport: VpcTransport) -> None:
        """A handshake is done: the one who asked goes on, or the server gets its protocol."""
        if transport.opening is not None:
            if not transport.opening.done():
                transport.opening.set_result(None)
            return
        self._accepted += 1
        assert transport.factory is not None
        transport.attach(transport.factory())

    def over(self, transport: VpcTransport) -> None:
        """A stream ended here; messages that still come for it are strays."""
        del self._streams[transport.key]
        self._failed += transport.stream.failure is not None
        for index, count in enumerate(msgspec.structs.astuple(transport.statistics())):
            self._past[index] += count

    def close(self) -> None:
        """Listen no more and abort every stream: the peers see resets."""
        for server in list(self.servers.values()):
            server.close()
        for transport in list(self._streams.values()):
            transport.abort()

    # --- messages ---------------------------------------------------------------------------------

    def carry(self, transport: VpcTransport, message: Message) -> None:
        """Send a message of a stream to its other end."""
        route, (_, number, opened_here) = transport.route, transport.key
        if route is None:
            self._loop_back(transport, message)
            return
        kind = message.kind
        flags = message.flags | FLAG_FROM_OPENER if opened_here else message.flags
        body = HEAD.pack(number, flags, message.sequence, message.ack, message.limit)
        if kind == DATA:
            self._fabric.send(
                route,
                DATA,
                charged_bytes=len(message.data) * transport.charge_factor,
                body=body,
                payload=message.data,
                started=transport.chunk_left,
            )
        elif kind == RST:
            self._fabric.send(route, RST, charged_bytes=0, body=body)
        else:
            self._fabric.signal(route, kind, delay_ps=route.path.propagation_ps, body=body)

    def _loop_back(self, transport: VpcTransport, message: Message) -> None:
        _, number, opened_here = transport.key
        key = (self.process, number, not opened_here)
        self.loop.call_at_ps(self.loop.now_ps + LOOPBACK_PS, self._handle, key, message)
        if message.kind == DATA:
            self.loop.call_soon(transport.chunk_left)

    def _arrived(self, arrival: Arrival) -> None:
        if arrival.flags & FLAG_CORRUPT:
            self._corrupt += 1
            return
        number, flags, sequence, ack, limit = HEAD.unpack(arrival.body)
        peer = self._machine.devices[arrival.source].process
        message = Message(arrival.kind, sequence, ack, limit, flags, arrival.payload)
        self._handle((peer, number, not flags & FLAG_FROM_OPENER), message)

    def _handle(self, key: Key, message: Message) -> None:
        token = self.enter()
        try:
            transport = self._streams.get(key)
            if transport is not None:
                transport.receive(message)
            elif message.kind == SYN:
                self._syn(key, message)
            else:
                self._stray += 1
                if message.kind in (DATA, PROBE, SYN_ACK):
                    self._reset(key)
        finally:
            self.leave(token)

    def _reset(self, key: Key) -> None:
        """Tell an end of which we know nothing that its stream is no more."""
        process, number, opened_here = key
        route = self._route(process)
        if route is None:
            back = (process, number, not opened_here)
            at_ps = self.loop.now_ps + LOOPBACK_PS
            self.loop.call_at_ps(at_ps, self._handle, back, Message(RST))
            return
        flags = FLAG_FROM_OPENER if opened_here else 0
        self._fabric.send(route, RST, charged_bytes=0, body=HEAD.pack(number, flags, 0, 0, 0))

    def enter(self) -> Token[Any]:
        """What follows runs in this process (several share a loop in tests)."""
        return vpc_sockets.current.set(self)

    def leave(self, token: Token[Any]) -> None:
        """Undo ``enter``."""
        vpc_sockets.current.reset(token)

    # --- counters ---------------------------------------------------------------------------------

    def statistics(self) -> VpcStatistics:
        """Counters so far, of live streams and past ones."""
        sums = list(self._past)
        for transport in self._streams.values():
            for index, count in enumerate(msgspec.structs.astuple(transport.statistics())):
                sums[index] += count
        fields = StreamStatistics.__struct_fields__
        return VpcStatistics(
            streams_opened=self._opened,
            streams_accepted=self._accepted,
            streams_refused=self._refused,
            streams_failed=self._failed,
            streams_now=len(self._streams),
            frames_corrupt=self._corrupt,
            frames_stray=self._stray,
            streams=StreamStatistics(**dict(zip(fields, sums))),
        )
