"""Bulk: messages larger than a chunk, cut at the sender and put together at the receiver (design 2.1).

Owns flows (a flow keeps one chunk in the port and queues the next behind what waits when that one
starts), the way a payload is spread over chunks, and assembly with its checks: every chunk once, each
with the digest of its piece under its own index. Does not own what a message is (its plane's), nor
loss: a flow whose chunk was dropped at its egress stops and says so.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable

import xxhash

from cmnet.errors import CorruptError
from cmnet.fabric import Fabric
from cmnet.messages import NO_FENCE, Arrival, Payload, Route
from cmnet.topology.machine import Plane

CHUNK = struct.Struct("<QIIQ")
"""flow, index of the chunk, count of chunks, digest of its piece: 24 bytes. The head of the message
follows in every chunk, as chunks may come in any order."""

LOUD_EVERY = 16
"""A chunk in the midst of a message is no event at its target, but for each 16th, so that whoever
waits sees progress. (RDMA acknowledges each 16th anyway, design 2.3.)"""


def is_quiet(index: int, count: int) -> bool:
    """Whether nothing comes of this chunk before a later one is there."""
    return index + 1 < count and (index + 1) % LOUD_EVERY != 0


Piece = Callable[[int], Payload]
"""What the chunk of an index carries."""
Ended = Callable[[bool], None]
"""Called once: True when the last chunk has started, False when a chunk was dropped."""


def chunks_count(charged_bytes: int, chunk_bytes: int) -> int:
    """How many chunks so many bytes make; nothing is one chunk.

    >>> chunks_count(0, 64), chunks_count(64, 64), chunks_count(65, 64)
    (1, 1, 2)
    """
    return max(1, -(-charged_bytes // chunk_bytes))


def pieces(payload: Payload, *, charged_bytes: int, chunk_bytes: int) -> Piece:
    """A payload spread over the chunks in proportion to what they charge."""
    count = chunks_count(charged_bytes, chunk_bytes)
    view = memoryview(payload)
    carried_bytes = len(view)

    def piece(index: int) -> Payload:
        begin = carried_bytes * index * chunk_bytes // max(charged_bytes, 1)
        if index == count - 1:
            return view[begin:]
        return view[begin : carried_bytes * (index + 1) * chunk_bytes // charged_bytes]

    return piece


def digest_of(piece: Payload, index: int) -> int:
    """The check of a chunk; a piece under another index has another one."""
    return xxhash.xxh3_64_intdigest(piece, index)


class Flow:
    """One bulk message on its way out. ``begin`` queues the first chunk."""

    __slots__ = (
        "_charged_bytes",
        "_chunk_bytes",
        "_count",
        "_ended",
        "_fabric",
        "_fence",
        "_head",
        "_index",
        "_kind",
        "_number",
        "_piece",
        "_queued",
        "_rate_bps",
        "_route",
    )

    def __init__(
        self,
        fabric: Fabric,
        route: Route,
        kind: int,
        *,
        number: int,
        head: bytes,
        piece: Piece,
        charged_bytes: int,
        rate_bps: int = 0,
        fence: int = NO_FENCE,
        queued: Callable[[], None] | None = None,
        ended: Ended | None = None,
    ) -> None:
        self._fabric = fabric
        self._route = route
        self._kind = kind
        self._number = number
        self._head = head
        self._piece = piece
        self._charged_bytes = charged_bytes
        self._chunk_bytes = fabric.machine.chunk_bytes[Plane(route.plane)]
        self._rate_bps = rate_bps
        self._fence = fence
        self._queued = queued
        self._ended = ended
        self._count = chunks_count(charged_bytes, self._chunk_bytes)
        self._index = 0

    def begin(self) -> None:
        """Queue the next chunk; the rest follows by itself."""
        index = self._index
        self._index = index + 1
        last = self._index == self._count
        piece = self._piece(index)
        chunk_bytes = self._chunk_bytes
        self._fabric.send(
            self._route,
            self._kind,
            charged_bytes=self._charged_bytes - index * chunk_bytes if last else chunk_bytes,
            body=CHUNK.pack(self._number, index, self._count, digest_of(piece, index)) + self._head,
            payload=piece,
            rate_bps=self._rate_bps,
            started=self._started,
            fence=self._fence,
            quiet=is_quiet(index, self._count),
        )
        if last and self._queued is not None:
            self._queued()

    def _started(self, sent: bool) -> None:
        if sent and self._index < self._count:
            self.begin()
            return
        if not sent and self._index < self._count and self._queued is not None:
            self._queued()
        if self._ended is not None:
            self._ended(sent)


class Assembly:
    """What has come of one bulk message."""

    __slots__ = ("charged_bytes", "head", "missing", "pieces")

    def __init__(self, head: bytes, count: int) -> None:
        self.head = head
        self.missing = count
        self.charged_bytes = 0
        self.pieces: list[Payload | None] = [None] * count

    def payload(self) -> bytes:
        """The whole payload, once nothing is missing."""
        assert not self.missing
        return b"".join(self.pieces)  # type: ignore[arg-type]  # none is None


Key = tuple[int, int]
"""(source device, flow)"""


class Assemblies:
    """Bulk messages that are coming in at one process."""

    def __init__(self) -> None:
        self._open: dict[Key, Assembly] = {}
        self._hopeless: dict[Key, int] = {}
        """Messages that cannot become whole: how many chunks still come, to be ignored."""

    def __len__(self) -> int:
        return len(self._open)

    def add(self, arrival: Arrival) -> Assembly | None:
        """Take a chunk; returns its message if that was the last missing one.

        Raises CorruptError for a piece that is not the one that its index had at the sender.
        """
        flow, index, count, digest = CHUNK.unpack_from(arrival.body)
        if digest_of(arrival.payload, index) != digest:
            what = f"chunk {index} of {count} from device {arrival.source} is not what was sent"
            raise CorruptError(what, definite=False)
        key = (arrival.source, flow)
        if self._hopeless and self._is_hopeless(key):
            return None
        assembly = self._open.get(key)
        if assembly is None:
            assembly = self._open[key] = Assembly(arrival.body[CHUNK.size :], count)
        assert assembly.pieces[index] is None, "the link layer refuses copies"
        assembly.pieces[index] = arrival.payload
        assembly.charged_bytes += arrival.charged_bytes
        assembly.missing -= 1
        if assembly.missing:
            return None
        del self._open[key]
        return assembly

    def _is_hopeless(self, key: Key) -> bool:
        left = self._hopeless.get(key)
        if left is None:
            return False
        if left > 1:
            self._hopeless[key] = left - 1
        else:
            del self._hopeless[key]
        return True

    def forget(self, sources: set[int], coming: Iterable[Arrival]) -> None:
        """A peer with these devices died. Drop its messages that ``coming``, the chunks of it that
        still arrive, do not make whole; of the others nothing is lost."""
        counts: dict[Key, int] = {}
        missing = {key: one.missing for key, one in self._open.items() if key[0] in sources}
        for arrival in coming:
            flow, _, count, _ = CHUNK.unpack_from(arrival.body)
            key = (arrival.source, flow)
            counts[key] = counts.get(key, 0) + 1
            missing.setdefault(key, count)
        for key, chunks in missing.items():
            left = counts.get(key, 0)
            if left < chunks and key not in self._hopeless:
                self._open.pop(key, None)
                if left:
                    self._hopeless[key] = left

    def drop(self, source: int, flow: int) -> None:
        """The sender gave a message up."""
        self._open.pop((source, flow), None)
