"""The sockets between the processes of a run (design 1.3, 1.8, 4).

Owns connections, their buffers and what is partly written or read. Does not own time: it hands every
frame read to ``on_frame`` and never wakes a task. Connections carry frames one way, so a killed peer
with unread input loses nothing that the kernel had accepted. The sender connects: UB over Unix sockets
at the start, RDMA and VPC over TCP when first used. Writing never blocks: what the kernel does not
take is kept, and a report waits for it (``flushed``).

Frames wait in the kernel until somebody calls ``read``: a process that is woken by each of 47 peers
for each frame spends more on waking than on reading. When the kernel is full, the sender says so
(``on_blocked``) and the receiver reads whenever something comes, by ``watch``.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
from collections.abc import Callable
from typing import Protocol

import msgspec

from cmnet.errors import FrameError, LaunchError, RunError
from cmnet.wire import frames
from cmnet.wire.pool import Pool

SCRATCH_BYTES = 1 << 18
LARGE_BYTES = 1 << 15
"""A payload from here on is read straight into its own buffer."""

LARGE_FIRST_BYTES = 1 << 10
"""After a large frame only so much is read at first, so that the next payload need not be moved."""

IOV_MAX = 1000
JOINED_BYTES_MAX = 1 << 13

SEGMENT_BYTES_LOOPBACK = 65_483
SEGMENT_BYTES_SMALL = 536
"""A buffer below one segment of the loopback makes TCP send only when its persist timer fires, 200 ms
apart (measured: 60 KB/s at 4 KiB). With segments of 536 B, TCP's default, it never does."""
CONNECT_TIMEOUT_S = 10.0

STRANGERS_MAX = 64
"""Connections without a greeting, beyond three of each peer (one a plane): whoever connects to a
listener and says nothing costs a descriptor."""


class Address(msgspec.Struct, frozen=True):
    """Where a process listens: a Unix path for UB, a TCP port on loopback for the other planes."""

    incarnation: int
    unix_path: str
    tcp_port: int


class Reader(Protocol):
    """The part of the loop that the mesh uses."""

    def native_reader(self, fd: int, callback: Callable[..., object], *args: object) -> None: ...
    def native_reader_gone(self, fd: int) -> None: ...
    def native_writer(self, fd: int, callback: Callable[..., object], *args: object) -> None: ...
    def native_writer_gone(self, fd: int) -> None: ...


OnFrame = Callable[[int, tuple[int, ...], bytes, "bytes | memoryview"], None]
"""(peer, unpacked header, body, payload)"""


def listen(unix_path: str, incarnation: int) -> tuple[socket.socket, socket.socket, Address]:
    """Both listeners of a process and its address. The caller made the folder private."""
    unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    unix.bind(unix_path)
    tcp = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    tcp.bind(("127.0.0.1", 0))
    for listener in (unix, tcp):
        listener.listen(512)
        listener.setblocking(False)
    return unix, tcp, Address(incarnation, unix_path, tcp.getsockname()[1])


class _Outgoing:
    """One connection that we write."""

    __slots__ = ("blocked", "parts", "peer", "small", "sock")

    def __init__(self, sock: socket.socket, peer: int) -> None:
        self.sock = sock
        self.peer = peer
        self.parts: list[bytes | bytearray | memoryview] = []
        self.blocked = False
        self.small = True
        """No part that waits is worth sending from where it is."""


class _Incoming:
    """One connection that we read."""

    __slots__ = ("filled", "first_bytes", "header", "partial", "peer", "sock", "target")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.peer = -1
        self.partial = b""
        self.header: tuple[tuple[int, ...], bytes] | None = None
        self.target = memoryview(b"")
        self.filled = 0
        self.first_bytes = 0
        """How much to read at first; 0: as much as there is room for."""


class Mesh:
    """All connections of one process."""

    def __init__(
        self,
        *,
        loop: Reader,
        process: int,
        incarnation: int,
        token: bytes,
        addresses: list[Address | None],
        socket_buffer_bytes: int,
        on_frame: OnFrame,
        on_broken: Callable[[Exception], None],
    ) -> None:
        self._loop = loop
        self._process = process
        self._incarnation = incarnation
        self._token = token
        self._addresses = addresses
        self._socket_buffer_bytes = socket_buffer_bytes
        self._on_frame = on_frame
        self._on_broken = on_broken
        self._outgoing: dict[int, _Outgoing] = {}
        self._dirty: list[_Outgoing] = []
        self._blocked = 0
        self._poller = select.epoll()
        self.watched = False
        self._incoming: dict[int, _Incoming] = {}
        self._ungreeted: dict[int, _Incoming] = {}
        """By descriptor, the oldest first."""
        self._listeners: dict[int, socket.socket] = {}
        self._incarnations = [0] * len(addresses)
        self._scratch = bytearray(SCRATCH_BYTES)
        self._view = memoryview(self._scratch)
        self.buffers = Pool()
        self.on_flushed: Callable[[], None] = lambda: None
        self.on_read: Callable[[], None] = lambda: None
        """Called after what came while watching has been read."""
        self.on_blocked: Callable[[int], None] = lambda peer: None
        """The kernel is full of what this peer has not read."""
        self.frames_lost = 0
        self.bytes_written = 0

    # --- connections ------------------------------------------------------------------------------

    def serve(self, *listeners: socket.socket) -> None:
        """Accept on listeners that are already bound, when reading."""
        for listener in listeners:
            self._listeners[listener.fileno()] = listener
            self._poller.register(listener.fileno(), select.EPOLLIN)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    raise
                if not _readable_now(listener):
                    return  # Linux looks for a descriptor first, for a connection then
                if self._drop_stranger():
                    continue
                self._on_broken(RunError(f"no descriptor is free for a connection: {error}"))
                return
            self._greet_later(sock)

    def _greet_later(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._buffer(sock, socket.SO_RCVBUF)
        incoming = _Incoming(sock)
        self._incoming[sock.fileno()] = self._ungreeted[sock.fileno()] = incoming
        self._poller.register(sock.fileno(), select.EPOLLIN)
        if len(self._ungreeted) > 3 * len(self._addresses) + STRANGERS_MAX:
            self._drop_stranger()

    def _drop_stranger(self) -> bool:
        """Hang up on the oldest connection that has not greeted; False if all have."""
        while self._ungreeted:
            oldest = next(iter(self._ungreeted.values()))
            self._readable(oldest)  # its greeting may wait in the kernel
            if oldest.peer < 0:
                self._drop_incoming(oldest)
                return True
        return False

    def _buffer(self, sock: socket.socket, option: int) -> None:
        sock.setsockopt(socket.SOL_SOCKET, option, self._socket_buffer_bytes)

    def connect(self, peer: int, plane: int) -> None:
        """Open our connection to a peer; a peer that is gone is no error (its frames are lost)."""
        address = self._addresses[peer]
        if address is None:
            return
        with contextlib.suppress(ConnectionError, FileNotFoundError):  # killed before, or just now
            self._outgoing[peer * 4 + plane] = _Outgoing(self._open(address, plane), peer)

    def _open(self, address: Address, plane: int) -> socket.socket:
        family = socket.AF_INET if plane else socket.AF_UNIX
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._buffer(sock, socket.SO_SNDBUF)
            sock.settimeout(CONNECT_TIMEOUT_S)
            if plane:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self._socket_buffer_bytes < SEGMENT_BYTES_LOOPBACK:
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT_BYTES_SMALL)
                sock.connect(("127.0.0.1", address.tcp_port))
            else:
                sock.connect(address.unix_path)
            sock.sendall(
                frames.hello(
                    plane=plane,
                    process=self._process,
                    incarnation=self._incarnation,
                    token=self._token,
                )
            )
            sock.setblocking(False)
        except TimeoutError as error:
            sock.close()
            raise LaunchError(f"no connection to {address} in {CONNECT_TIMEOUT_S} s") from error
        except BaseException:
            sock.close()
            raise
        return sock

    def peer_down(self, peer: int) -> None:
        """A peer died: nothing is sent to it any more."""
        self._addresses[peer] = None
        for plane in range(3):
            self._drop_outgoing(peer * 4 + plane)

    def peer_up(self, peer: int, address: Address) -> None:
        """A peer is back as a new incarnation."""
        self.peer_down(peer)
        self._addresses[peer] = address
        self._incarnations[peer] = address.incarnation

    def _drop_outgoing(self, key: int) -> None:
        outgoing = self._outgoing.pop(key, None)
        if outgoing is None:
            return
        if outgoing.blocked:
            self._loop.native_writer_gone(outgoing.sock.fileno())
            outgoing.blocked = False
            self._blocked -= 1
        outgoing.parts = []
        outgoing.sock.close()

    def close(self) -> None:
        """Close every connection."""
        for key in list(self._outgoing):
            self._drop_outgoing(key)
        for incoming in list(self._incoming.values()):
            self._drop_incoming(incoming)
        self.unwatch()
        self._poller.close()

    # --- writing ----------------------------------------------------------------------------------

    def write(
        self,
        peer: int,
        plane: int,
        head: bytes,
        body: bytes,
        payload: bytes | bytearray | memoryview,
    ) -> None:
        """Queue a frame; ``flush`` writes it. Frames to a peer that is gone are lost."""
        outgoing = self._outgoing.get(peer * 4 + plane)
        if outgoing is None:
            self.connect(peer, plane)
            outgoing = self._outgoing.get(peer * 4 + plane)
            if outgoing is None:
                self.frames_lost += 1
                return
        parts = outgoing.parts
        if not parts:
            self._dirty.append(outgoing)
        parts.append(head)
        if body:
            parts.append(body)
        if payload:
            parts.append(payload)
            if len(payload) > JOINED_BYTES_MAX:
                outgoing.small = False

    def flush(self) -> bool:
        """Write what waits, one call a peer; True if the kernel took all of it."""
        dirty, self._dirty = self._dirty, []
        for outgoing in dirty:
            if not outgoing.blocked:
                self._write(outgoing)
        return not self._blocked

    def flushed(self) -> bool:
        """Nothing waits for the kernel."""
        return not self._blocked and not self._dirty

    def _write(self, outgoing: _Outgoing) -> None:
        parts, sock = outgoing.parts, outgoing.sock
        try:
            while parts:
                if len(parts) > 1 and outgoing.small:
                    parts[:] = [b"".join(parts)]  # copying is cheaper than a list for the kernel
                if len(parts) == 1:
                    sent = sock.send(parts[0])
                else:
                    sent = sock.sendmsg(parts[:IOV_MAX])
                self.bytes_written += sent
                if sent == len(parts[0]):
                    del parts[0]
                else:
                    _consume(parts, sent)
            outgoing.small = True
        except BlockingIOError:
            if not outgoing.blocked:
                outgoing.blocked = True
                self._blocked += 1
                self._loop.native_writer(outgoing.sock.fileno(), self._writable, outgoing)
                self.on_blocked(outgoing.peer)
            return
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN):
                raise
            self.frames_lost += 1
            parts.clear()
        if outgoing.blocked:
            outgoing.blocked = False
            self._blocked -= 1
            self._loop.native_writer_gone(outgoing.sock.fileno())

    def _writable(self, outgoing: _Outgoing) -> None:
        self._write(outgoing)
        if self.flushed():
            self.on_flushed()

    # --- reading ----------------------------------------------------------------------------------

    def read(self) -> bool:
        """Read and accept what waits in the kernel, once per connection; False if nothing did."""
        incoming_of, ready = self._incoming, self._poller.poll(0)
        for fd, _ in ready:
            incoming = incoming_of.get(fd)
            if incoming is not None:
                self._readable(incoming)
            elif fd in self._listeners:
                self._accept(self._listeners[fd])
        return bool(ready)

    def watch(self) -> None:
        """Read whenever something comes, until ``unwatch``."""
        if not self.watched:
            self.watched = True
            self._loop.native_reader(self._poller.fileno(), self._read_watched)

    def unwatch(self) -> None:
        """Leave what comes in the kernel."""
        if self.watched:
            self.watched = False
            self._loop.native_reader_gone(self._poller.fileno())

    def _read_watched(self) -> None:
        if self.read():
            self.on_read()

    def _readable(self, incoming: _Incoming) -> None:
        try:
            if incoming.header is not None:
                self._fill(incoming)
                return
            count = incoming.sock.recv_into(self._scratch, incoming.first_bytes)
            if count == 0:
                self._drop_incoming(incoming)
                return
            data = self._view[:count]
            if incoming.partial:
                data = memoryview(incoming.partial + data)
            if incoming.peer < 0:
                self._greet(incoming, data)
            else:
                self._parse(incoming, data, 0)
        except BlockingIOError:
            return
        except ConnectionResetError:
            self._drop_incoming(incoming)
        except Exception as error:  # uvloop closes the poll handle of a callback that raises
            self._drop_incoming(incoming)
            self._on_broken(error)

    def _greet(self, incoming: _Incoming, data: memoryview) -> None:
        incoming.partial = bytes(data)
        if len(data) < frames.HELLO.size:
            return
        try:
            _, peer, incarnation = frames.read_hello(data[: frames.HELLO.size], self._token)
            if peer >= len(self._incarnations) or incarnation < self._incarnations[peer]:
                raise FrameError(f"an older incarnation ({incarnation}) of process {peer}")
        except FrameError:
            self._drop_incoming(incoming)
            return
        self._incarnations[peer] = incarnation
        incoming.peer = peer
        del self._ungreeted[incoming.sock.fileno()]
        incoming.partial = b""
        if len(data) > frames.HELLO.size:
            self._parse(incoming, data, frames.HELLO.size)

    def _parse(self, incoming: _Incoming, data: memoryview, at: int) -> None:
        """Hand on what is whole; ``data`` is read over by the next call."""
        end, size = len(data), frames.HEADER.size
        first_bytes = 0
        unpack, on_frame, peer = frames.HEADER.unpack_from, self._on_frame, incoming.peer
        while end - at >= size:
            header = unpack(data, at)
            body_end = at + size + header[0]
            payload_end = body_end + header[1]
            if header[0] | header[1] or header[2] != frames.MAGIC:
                frames.check_lengths(header[0], header[1], header[2])
            if payload_end > end:
                if header[1] >= LARGE_BYTES and body_end <= end:
                    self._begin_large(incoming, header, data, at + size)
                    return
                break
            body, payload = data[at + size : body_end], data[body_end:payload_end]
            on_frame(peer, header, bytes(body), bytes(payload))
            at = payload_end
            if header[1] >= LARGE_BYTES:
                first_bytes = LARGE_FIRST_BYTES  # another one may follow
        incoming.partial = bytes(data[at:])
        incoming.first_bytes = first_bytes

    def _begin_large(
        self, incoming: _Incoming, header: tuple[int, ...], data: memoryview, body_at: int
    ) -> None:
        body_end = body_at + header[0]
        rest = data[body_end:]
        incoming.header = (header, bytes(data[body_at:body_end]))
        incoming.target = self.buffers.take(header[1])
        incoming.target[: len(rest)] = rest
        incoming.filled = len(rest)
        incoming.partial = b""
        incoming.first_bytes = LARGE_FIRST_BYTES
        self._fill(incoming)

    def _fill(self, incoming: _Incoming) -> None:
        count = incoming.sock.recv_into(incoming.target[incoming.filled :])
        if count == 0:
            self._drop_incoming(incoming)
            return
        incoming.filled += count
        if incoming.filled == len(incoming.target):
            assert incoming.header is not None
            header, body = incoming.header
            incoming.header = None
            target, incoming.target = incoming.target, memoryview(b"")
            self._on_frame(incoming.peer, header, body, target)

    def _drop_incoming(self, incoming: _Incoming) -> None:
        if self._incoming.pop(incoming.sock.fileno(), None) is not None:
            self._ungreeted.pop(incoming.sock.fileno(), None)
            incoming.sock.close()  # which takes it out of the poller as well


def _readable_now(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock.fileno(), select.POLLIN)
    return bool(poll.poll(0))


def _consume(parts: list[bytes | bytearray | memoryview], sent: int) -> None:
    done = 0
    for part in parts:
        if sent < len(part):
            break
        sent -= len(part)
        done += 1
    del parts[:done]
    if sent:
        parts[0] = memoryview(parts[0])[sent:]
