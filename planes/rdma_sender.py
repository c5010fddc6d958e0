"""The sending half of a queue pair: a sequence of chunks, go-back-N (design 2.3).

Owns sequence numbers, what is not acknowledged, the timeout and its tries. Does not own the receiving
half (``planes.rdma_receiver``) nor the connection (``planes.rdma``).

The unit of sequence, loss and retransmission is the chunk. The receiver acknowledges each message and,
within one, every 16th chunk: the *asking* chunks. The timer runs while an asking chunk has left the port
and is not acknowledged; progress starts it anew. At a timeout everything from the first chunk that is
not acknowledged goes again; the tries (7, the first transmission counted) are per progress.
"""

from __future__ import annotations

import asyncio
from collections import deque

from cmnet.errors import LinkError, MemoryRangeError, OperationError, PeerDeadError
from cmnet.fabric import Fabric
from cmnet.messages import ORDERED, Payload, Route
from cmnet.topology.machine import Plane
from cmnet.units import format_ps
from planes import rdma_frames
from planes.bulk import Piece, chunks_count, digest_of, pieces


class Sending:
    """One message that is not wholly acknowledged."""

    __slots__ = (
        "charged_bytes",
        "count",
        "first",
        "future",
        "immediate",
        "offset",
        "piece",
        "region",
        "started",
    )

    def __init__(
        self,
        *,
        first: int,
        count: int,
        piece: Piece,
        charged_bytes: int,
        immediate: int,
        region: int,
        offset: int,
        future: asyncio.Future[None],
    ) -> None:
        self.first = first
        self.count = count
        self.piece = piece
        self.charged_bytes = charged_bytes
        self.immediate = immediate
        self.region = region
        self.offset = offset
        self.future = future
        self.started = False


class Sender:
    """Messages of one queue pair, in order. ``error`` is None while it works."""

    def __init__(self, fabric: Fabric, route: Route) -> None:
        machine = fabric.machine
        self._fabric = fabric
        self._loop = fabric.loop
        self._route = route
        self._chunk_bytes = machine.chunk_bytes[Plane.RDMA]
        self._retry = machine.rdma_retry
        self._peer = machine.devices[route.target].name
        self.error: OperationError | None = None
        self.chunks_sent = self.chunks_resent = self.timeouts = 0
        self._messages: deque[Sending] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._in_port = False
        self._stale = False
        self.reset(0)
        self.error = LinkError("never connected", definite=True)

    def reset(self, number: int) -> None:
        """A new connection: sequence numbers begin at 0."""
        assert not self._messages
        self.number = number
        self.error = None
        self._end = self._next = self._acknowledged = self._asked = 0
        self._reached = 0
        self._cursor = self._tries = 0
        self._stale = self._in_port

    # --- what the queue pair asks -----------------------------------------------------------------

    def post(
        self, data: Payload, *, charged_bytes: int, immediate: int, region: int, offset: int
    ) -> asyncio.Future[None]:
        """Queue a message; the future is done when it is acknowledged."""
        future: asyncio.Future[None] = self._loop.create_future()
        if self.error is not None:
            what = f"queue pair to {self._peer} is in error: {self.error}"
            _fail(future, LinkError(what, definite=True))
            return future
        count = chunks_count(charged_bytes, self._chunk_bytes)
        self._messages.append(
            Sending(
                first=self._end,
                count=count,
                piece=pieces(data, charged_bytes=charged_bytes, chunk_bytes=self._chunk_bytes),
                charged_bytes=charged_bytes,
                immediate=immediate,
                region=region,
                offset=offset,
                future=future,
            )
        )
        self._end += count
        self._pump()
        return future

    def acknowledged(self, until: int) -> None:
        """The receiver has everything before this sequence number."""
        if until <= self._acknowledged or self.error is not None:
            return
        self._acknowledged = until
        self._tries = 0
        messages = self._messages
        while messages and messages[0].first + messages[0].count <= until:
            _set(messages.popleft().future)
            self._cursor = max(self._cursor - 1, 0)
        if self._next < until:
            self._next, self._cursor = until, 0
        self._stop_timer()
        if self._asked > until:
            self._start_timer()

    def refused(self, sequence: int) -> None:
        """The target has no such memory: the queue pair is in error, as in verbs."""
        for message in self._messages:
            if message.first <= sequence < message.first + message.count:
                what = f"write to {self._peer}: outside of what it has registered"
                _fail(message.future, MemoryRangeError(what, definite=True))
        self.fail(LinkError("a remote access error", definite=False))

    def fail(self, error: OperationError) -> None:
        """The error state: every message that is not acknowledged ends with an error."""
        if self.error is not None:
            return
        self.error = error
        self._stop_timer()
        for message in self._messages:
            definite = not message.started
            _fail(
                message.future,
                type(error)(f"queue pair to {self._peer}: {error}", definite=definite),
            )
        self._messages.clear()

    # --- chunks -----------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Queue the next chunk if none waits in the port."""
        if self._in_port or self._next == self._end or self.error is not None:
            return
        message = self._messages[self._cursor]
        index = self._next - message.first
        if index == message.count:
            self._cursor += 1
            message, index = self._messages[self._cursor], 0
        self._in_port = True
        self._send(message, index)

    def _send(self, message: Sending, index: int) -> None:
        sequence = self._next
        self._next = sequence + 1
        self.chunks_sent += 1
        if sequence < self._reached:
            self.chunks_resent += 1
        else:
            self._reached = self._next
        last = index == message.count - 1
        asks = last or (index + 1) % self._retry.acknowledge_chunks == 0
        whole = self._chunk_bytes
        piece = message.piece(index)
        head = rdma_frames.CHUNK_HEAD.pack(
            self.number,
            sequence,
            index,
            message.count,
            digest_of(piece, index),
            message.immediate,
            message.region,
            message.offset,
        )
        message.started = True
        self._fabric.send(
            self._route,
            rdma_frames.CHUNK,
            charged_bytes=message.charged_bytes - index * whole if last else whole,
            body=head,
            payload=piece,
            started=self._started,
            fence=ORDERED,
            quiet=not asks,
        )
        if asks:
            self._asking = self._next
        else:
            self._asking = 0

    def _started(self, _: bool) -> None:
        """A chunk left the port; whether a rule dropped it, the sender cannot know."""
        self._in_port = False
        if self._stale:
            self._stale = False
        elif self._asking and self.error is None:
            self._asked = max(self._asked, self._asking)
            if self._timer is None and self._asked > self._acknowledged:
                self._start_timer()
        self._pump()

    # --- the timer --------------------------------------------------------------------------------

    def _start_timer(self) -> None:
        at_ps = self._loop.now_ps + self._retry.timeout_ps
        self._timer = self._loop.call_at_ps(at_ps, self._timed_out)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _timed_out(self) -> None:
        self._timer = None
        self.timeouts += 1
        self._tries += 1
        if self._tries == self._retry.tries:
            waited = f"{self._retry.tries} tries of {format_ps(self._retry.timeout_ps)}"
            self.fail(PeerDeadError(f"no acknowledgement in {waited}", definite=False))
            return
        self._next, self._cursor = self._acknowledged, 0
        self._asked = 0
        self._stale = self._in_port
        self._pump()


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _fail(future: asyncio.Future[None], error: OperationError) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # whoever does not look learns of it from the queue pair
