"""A stream of the VPC plane as an asyncio transport.

Owns what asyncio promises of a transport: the order of a protocol's callbacks, flow control by two
marks, closing and aborting. Does not own the stream's rules (``vpc_stream``) nor where its messages go
(the ``Home``, which is the process's ``Vpc``).

What a kernel's send buffer is on a real machine is the port here: a transport keeps one chunk in it and
cuts the next when that one's egress started; what is not yet cut is the write buffer. Bytes are handed
to the protocol at the instant of their delivery; ``connection_lost`` comes by ``call_soon``.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import msgspec

from cmnet.messages import Route
from cmnet.units import NEVER_PS
from cmnet.vtime.loop import VirtualLoop
from planes.vpc_halves import Message
from planes.vpc_stream import Failure, State, Stream

BYTES_HIGH = 64 * 1024
"""asyncio's own high-water mark; the low one is a quarter of the high one."""

Key = tuple[int, int, bool]
"""(peer process, the opener's number of the stream, opened here)"""


class Home(Protocol):
    """The process that a transport lives in."""

    loop: VirtualLoop

    def carry(self, transport: VpcTransport, message: Message) -> None:
        """Send a message to the other end; calls ``chunk_left`` for a chunk."""

    def opened(self, transport: VpcTransport) -> None:
        """The handshake is done."""

    def over(self, transport: VpcTransport) -> None:
        """No message of this stream is awaited any more."""

    def enter(self) -> Any:
        """Callbacks that follow run in this process; give the token to ``leave``."""

    def leave(self, token: Any) -> None:
        """Undo ``enter``."""


class StreamStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of one end of one stream. Bytes are carried ones."""

    bytes_sent: int
    bytes_received: int
    bytes_waiting: int
    chunks_sent: int
    chunks_resent: int
    duplicates: int
    timeouts: int
    window_limited_ps: int
    """How long bytes waited for the other end's window alone."""


class VpcTransport(asyncio.Transport):
    """One end of a stream. ``attach`` gives it its protocol once the stream is open.

    ``route`` None: both ends are in this process. ``opening`` is awaited by who opened the stream;
    ``factory`` makes the protocol of one that was accepted.
    """

    def __init__(
        self,
        home: Home,
        stream: Stream,
        *,
        key: Key,
        route: Route | None,
        charge_factor: int,
        extra: dict[str, Any],
    ) -> None:
        super().__init__(extra)
        self.home = home
        self.stream = stream
        self.key = key
        self.route = route
        self.charge_factor = charge_factor
        self.factory: Callable[[], asyncio.BaseProtocol] | None = None
        self.opening: asyncio.Future[None] | None = None
        self.open_told = False
        self._loop = home.loop
        self._protocol: asyncio.BaseProtocol | None = None
        self._buffered = False
        self._reading = True
        self._eof_told = False
        self._eof_written = False
        self._closing = False
        self._lost = False
        self._ended = False
        self._in_port = False
        self._writing_paused = False
        self._bytes_high = BYTES_HIGH
        self._bytes_low = BYTES_HIGH // 4
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_ps = NEVER_PS

    def __repr__(self) -> str:
        sockname, peername = self.get_extra_info("sockname"), self.get_extra_info("peername")
        return f"<VpcTransport {self.stream.state.value} {sockname} {peername}>"

    # --- what the home calls ----------------------------------------------------------------------

    def attach(self, protocol: asyncio.BaseProtocol) -> None:
        """The protocol's life begins; what has already arrived follows in a callback of its own."""
        self.set_protocol(protocol)
        try:
            protocol.connection_made(self)
        except Exception as error:  # the edge to a protocol: asyncio's transports end with it
            self._fail(error, "connection_made")
            return
        if self.stream.incoming.pieces or self.stream.incoming.finished:
            self._loop.call_soon(self.progress)

    def receive(self, message: Message) -> None:
        """A message arrived."""
        self.stream.receive(message, self._loop.now_ps)
        self.progress()

    def chunk_left(self, _: bool = True) -> None:
        """The chunk in the port has left it."""
        token = self.home.enter()
        try:
            self._in_port = False
            self.stream.outgoing.left(self._loop.now_ps)
            self._pump()
            self._settle()
        finally:
            self.home.leave(token)

    def progress(self) -> None:
        """Something changed: tell the protocol, send what may be sent, set the timer."""
        if not self.open_told and self.stream.state is State.OPEN:
            self.open_told = True
            self.home.opened(self)
        if self._protocol is not None and not self._closing:
            self._deliver()
        self._pump()
        self._settle()

    def statistics(self) -> StreamStatistics:
        """Counters so far."""
        outgoing, incoming = self.stream.outgoing, self.stream.incoming
        return StreamStatistics(
            bytes_sent=outgoing.cut - outgoing.fin_cut,
            bytes_received=incoming.expected - incoming.finished,
            bytes_waiting=outgoing.waiting_bytes,
            chunks_sent=outgoing.chunks_sent,
            chunks_resent=outgoing.chunks_resent,
            duplicates=incoming.duplicates,
            timeouts=outgoing.timeouts,
            window_limited_ps=outgoing.limited_ps(self._loop.now_ps),
        )

    # --- reading ----------------------------------------------------------------------------------

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        if not self._reading and not self._closing:
            self._reading = True
            self._loop.call_soon(self.progress)

    def is_reading(self) -> bool:
        return self._reading and not self._closing

    def _deliver(self) -> None:
        incoming = self.stream.incoming
        pieces = incoming.pieces
        try:
            while pieces and self._reading and not self._closing:
                self._feed(incoming.take(self._loop.now_ps))
            if incoming.finished and not pieces and self._reading and not self._eof_told:
                self._tell_eof()
        except Exception as error:  # the edge to a protocol: asyncio's transports end with it
            self._fail(error, "data_received or eof_received")

    def _feed(self, data: bytes) -> None:
        protocol: Any = self._protocol
        if not self._buffered:
            protocol.data_received(data)
            return
        view = memoryview(data)
        while view:
            buffer = memoryview(protocol.get_buffer(len(view)))
            size = min(len(buffer), len(view))
            if not size:
                raise RuntimeError("get_buffer() returned an empty buffer")
            buffer[:size] = view[:size]
            protocol.buffer_updated(size)
            view = view[size:]

    def _tell_eof(self) -> None:
        if self._closing:
            return
        self._eof_told = True
        protocol: Any = self._protocol
        if not protocol.eof_received():
            self.close()

    # --- writing ----------------------------------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        if type(data) is not bytes:
            if not isinstance(data, bytes | bytearray | memoryview):
                raise TypeError(f"data is bytes-like, not {type(data).__name__}")
            data = bytes(data)
        if self._eof_written:
            raise RuntimeError("write() after write_eof()")
        if not data or self._closing:
            return
        outgoing = self.stream.outgoing
        outgoing.write(data)
        if not self._in_port:
            self._pump()
            self._settle()
        if outgoing.waiting_bytes > self._bytes_high and not self._writing_paused:
            self._writing_paused = True
            self._call_protocol("pause_writing")

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview[Any]]) -> None:
        self.write(b"".join(list_of_data))

    def write_eof(self) -> None:
        if not self._eof_written and not self._closing:
            self._eof_written = True
            self.stream.finish()
            self._pump()
            self._settle()

    def can_write_eof(self) -> bool:
        return True

    def get_write_buffer_size(self) -> int:
        return self.stream.outgoing.waiting_bytes

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._bytes_low, self._bytes_high

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        if high is None:
            high = BYTES_HIGH if low is None else 4 * low
        if low is None:
            low = high // 4
        if not high >= low >= 0:
            raise ValueError(f"high ({high!r}) must be >= low ({low!r}) must be >= 0")
        self._bytes_high, self._bytes_low = high, low

    def _pump(self) -> None:
        stream = self.stream
        while not self._in_port:
            message = stream.next_chunk(self._loop.now_ps)
            if message is None:
                break
            self._in_port = True
            self.home.carry(self, message)
        if self._writing_paused and stream.outgoing.waiting_bytes <= self._bytes_low:
            self._writing_paused = False
            self._call_protocol("resume_writing")
        if self._closing and stream.outgoing.fin_cut:
            self._lose(None)

    def _call_protocol(self, name: str) -> None:
        try:
            getattr(self._protocol, name)()
        except Exception as error:  # the edge to a protocol: asyncio reports and goes on
            self._report(error, name)

    # --- ending -----------------------------------------------------------------------------------

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        """What was written still goes; ``connection_lost(None)`` comes when all of it was cut."""
        if not self._closing:
            self._closing = True
            self.stream.close()
            self._pump()
            self._settle()

    def abort(self) -> None:
        """End at once: what was written and has not left is lost, the peer sees a reset."""
        self.stream.abort()
        self._settle()
        self._lose(None)

    def _lose(self, error: Exception | None) -> None:
        if not self._lost:
            self._lost = self._closing = True
            if self._protocol is not None:
                self._loop.call_soon(self._protocol.connection_lost, error)

    def _fail(self, error: Exception, where: str) -> None:
        self._report(error, where)
        self._lose(error)
        self.stream.abort()
        self._settle()

    def _report(self, error: Exception, where: str) -> None:
        self._loop.call_exception_handler(
            {
                "message": f"protocol.{where}() failed",
                "exception": error,
                "transport": self,
                "protocol": self._protocol,
            }
        )

    def _settle(self) -> None:
        """Send what needs no port, end what is over, keep the one timer at the next deadline."""
        stream = self.stream
        if stream.incoming.ack_now:
            stream.acknowledge()
        if stream.control:
            control, stream.control = stream.control, []
            for message in control:
                self.home.carry(self, message)
        if stream.state is State.CLOSED and not self._ended:
            self._ended = True
            self._end()
        at_ps = stream.next_at_ps()
        if at_ps != self._timer_at_ps:
            self._set_timer(at_ps)

    def _set_timer(self, at_ps: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_at_ps = at_ps
        if at_ps != NEVER_PS:
            self._timer = self._loop.call_at_ps(at_ps, self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        self._timer_at_ps = NEVER_PS
        self.stream.on_time(self._loop.now_ps)
        self.progress()

    def _end(self) -> None:
        self.home.over(self)
        error = failure_error(self.stream.failure, self.get_extra_info("peername"))
        if self.opening is not None and not self.opening.done():
            self.opening.set_exception(
                error or ConnectionAbortedError(errno.ECONNABORTED, "aborted")
            )
        else:
            self._lose(error)

    # --- protocol ---------------------------------------------------------------------------------

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol
        self._buffered = isinstance(protocol, asyncio.BufferedProtocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        assert self._protocol is not None
        return self._protocol


_ERRORS: dict[Failure, tuple[type[OSError], int]] = {
    Failure.REFUSED: (ConnectionRefusedError, errno.ECONNREFUSED),
    Failure.UNREACHABLE: (TimeoutError, errno.ETIMEDOUT),
    Failure.RESET: (ConnectionResetError, errno.ECONNRESET),
    Failure.LOST: (ConnectionResetError, errno.ECONNRESET),
}


def failure_error(failure: Failure | None, peername: object) -> OSError | None:
    """The exception that the application sees, as an operating system would raise it."""
    if failure is None:
        return None
    kind, number = _ERRORS[failure]
    return kind(number, f"{os.strerror(number)}: {failure.value} ({peername})")
