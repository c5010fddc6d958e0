"""Reads of a queue pair: the reader asks, the target serves chunks, the reader asks again after a loss.

Owns both ends of a read. A read has no sequence numbers of the queue pair: its chunks are numbered, and
the reader takes only the next one. When none has come for the timeout, it asks again from there; what
the target still has in its port for that read is not sent twice. A target serves only readers that are
connected to its present incarnation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cmnet.errors import CorruptError, MemoryRangeError, OperationError, PeerDeadError
from cmnet.fabric import Fabric
from cmnet.messages import ORDERED, Arrival, Payload, Route
from cmnet.topology.machine import Operation, Plane
from cmnet.units import format_ps
from cmnet.wire.frames import FLAG_CORRUPT
from planes import rdma_frames
from planes.bulk import Piece, chunks_count, digest_of, pieces
from planes.memory import Memory

Key = tuple[int, int, int]
"""reader's device, its queue pair, its read."""


class Reading:
    """One read at its reader."""

    def __init__(
        self, fabric: Fabric, route: Route, *, number: int, read: int, what: tuple[int, int, int]
    ) -> None:
        self._fabric = fabric
        self._loop = fabric.loop
        self._route = route
        self._number = number
        self._read = read
        self._region, self._offset, self._charged_bytes = what
        self._retry = fabric.machine.rdma_retry
        self._tries = 0
        self._pieces: list[Payload] = []
        self._timer: asyncio.TimerHandle | None = None
        self.timeouts = 0
        self.future: asyncio.Future[bytes] = self._loop.create_future()

    def ask(self) -> None:
        """Ask for everything from the next chunk on."""
        body = rdma_frames.READ_HEAD.pack(
            self._number,
            self._read,
            self._region,
            self._offset,
            self._charged_bytes,
            len(self._pieces),
        )
        self._fabric.send(
            self._route,
            rdma_frames.READ,
            charged_bytes=0,
            body=body,
            started=self._started,
            fence=ORDERED,
        )

    def _started(self, _: bool) -> None:
        if not self.future.done():
            self._wait()

    def _wait(self) -> None:
        self.close()
        at_ps = self._loop.now_ps + self._retry.timeout_ps
        self._timer = self._loop.call_at_ps(at_ps, self._timed_out)

    def _timed_out(self) -> None:
        self._timer = None
        self._tries += 1
        self.timeouts += 1
        if self._tries < self._retry.tries:
            self.ask()
            return
        name = self._fabric.machine.devices[self._route.target].name
        waited = f"{self._retry.tries} tries of {format_ps(self._retry.timeout_ps)}"
        self.fail(PeerDeadError(f"read of {name}: no data in {waited}", definite=False))

    def chunk(self, index: int, count: int, piece: Payload) -> None:
        """A chunk is here; only the next one counts."""
        if self.future.done() or index != len(self._pieces):
            return
        self._pieces.append(piece)
        self._tries = 0
        if index + 1 == count:
            self.close()
            self.future.set_result(b"".join(self._pieces))
        else:
            self._wait()

    def fail(self, error: OperationError) -> None:
        """The read ends with an error."""
        self.close()
        if not self.future.done():
            self.future.set_exception(error)

    def close(self) -> None:
        """No timer any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Served:
    """One read at its target: a flow that can go back."""

    __slots__ = ("charged_bytes", "count", "in_port", "next", "piece", "route")

    def __init__(self, route: Route, charged_bytes: int, count: int, piece: Piece) -> None:
        self.route = route
        self.charged_bytes = charged_bytes
        self.count = count
        self.piece = piece
        self.next = 0
        self.in_port = False


class Server:
    """Serves reads of this process's memory."""

    def __init__(
        self, fabric: Fabric, memory: Memory, connected: Callable[[int, int], bool]
    ) -> None:
        self._fabric = fabric
        self._memory = memory
        self._connected = connected
        self._chunk_bytes = fabric.machine.chunk_bytes[Plane.RDMA]
        self._served: dict[Key, _Served] = {}

    def read_arrived(self, arrival: Arrival) -> None:
        number, read, region, offset, charged_bytes, first = rdma_frames.READ_HEAD.unpack(
            arrival.body
        )
        if arrival.flags & FLAG_CORRUPT or not self._connected(arrival.source, number):
            return
        route = self._fabric.route(Plane.RDMA, Operation.WRITE, arrival.target, arrival.source)
        key = (arrival.source, number, read)
        served = self._served.get(key)
        if served is None:
            try:
                data = self._memory.region(arrival.target, region).read(offset, charged_bytes)
            except MemoryRangeError:
                body = rdma_frames.REFUSED_HEAD.pack(number, read, rdma_frames.REFUSED_READ)
                delay_ps = route.path.completion_ps
                self._fabric.signal(route, rdma_frames.REFUSED, delay_ps=delay_ps, body=body)
                return
            chunk_bytes = self._chunk_bytes
            served = self._served[key] = _Served(
                route,
                charged_bytes,
                chunks_count(charged_bytes, chunk_bytes),
                pieces(data, charged_bytes=charged_bytes, chunk_bytes=chunk_bytes),
            )
        if not (served.in_port and served.next - 1 == first):
            served.next = first
            self._pump(key, served)

    def _pump(self, key: Key, served: _Served) -> None:
        if served.in_port:
            return
        index = served.next
        if index == served.count:
            del self._served[key]
            return
        served.next = index + 1
        served.in_port = True
        piece = served.piece(index)
        whole = self._chunk_bytes
        last = index == served.count - 1
        body = rdma_frames.DATA_HEAD.pack(
            key[1], key[2], index, served.count, digest_of(piece, index)
        )

        def started(_: bool) -> None:
            served.in_port = False
            self._pump(key, served)

        self._fabric.send(
            served.route,
            rdma_frames.DATA,
            charged_bytes=served.charged_bytes - index * whole if last else whole,
            body=body,
            payload=piece,
            started=started,
            fence=ORDERED,
        )


def check(arrival: Arrival, index: int, digest: int) -> bool:
    """Whether a chunk is to be taken. Raises CorruptError for one that is wrong and not marked."""
    if arrival.flags & FLAG_CORRUPT:
        return False
    if digest_of(arrival.payload, index) != digest:
        what = f"chunk {index} of a read from device {arrival.source} is not what was sent"
        raise CorruptError(what, definite=False)
    return True
