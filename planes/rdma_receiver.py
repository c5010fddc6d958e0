"""The receiving half of queue pairs: takes chunks in sequence, acknowledges, hands messages over.

Owns what is expected next on each queue pair that others have connected to this process. A chunk that
is not the expected one is refused: after a loss all later ones are (go-back-N), copies and what was
retransmitted needlessly always are, and so is everything of a connection that was never made *here*,
such as one to this process before its restart. A corrupt chunk counts as lost: the invariant CRC of a
frame covers it. Does not own what is done with a message.
"""

from __future__ import annotations

from collections.abc import Callable

from cmnet.errors import CorruptError, MemoryRangeError
from cmnet.fabric import Fabric
from cmnet.messages import Arrival, Payload
from cmnet.topology.machine import Operation, Plane
from cmnet.wire.frames import FLAG_CORRUPT
from planes import rdma_frames
from planes.bulk import digest_of
from planes.memory import Memory

_OF_A_PAIR = (rdma_frames.CONNECT, rdma_frames.CHUNK, rdma_frames.READ)
"""Frames that name, first, a queue pair of their source."""


class Received:
    """A message as its receiver gets it: a completion with its immediate."""

    __slots__ = ("charged_bytes", "data", "immediate", "source", "target")

    def __init__(
        self, source: int, target: int, data: bytes, charged_bytes: int, immediate: int
    ) -> None:
        self.source = source
        self.target = target
        self.data = data
        self.charged_bytes = charged_bytes
        self.immediate = immediate


class _Pair:
    """One queue pair at its target."""

    __slots__ = ("charged_bytes", "expected", "in_error", "pieces")

    def __init__(self) -> None:
        self.expected = 0
        self.charged_bytes = 0
        self.pieces: list[Payload] = []
        self.in_error = False


class Receiver:
    """All queue pairs that end in this process."""

    def __init__(self, fabric: Fabric, memory: Memory) -> None:
        self._fabric = fabric
        self._memory = memory
        self._acknowledge_chunks = fabric.machine.rdma_retry.acknowledge_chunks
        self._pairs: dict[tuple[int, int], _Pair] = {}
        self.ending: dict[tuple[int, int], int] = {}
        """Queue pairs of dead peers: how many of their frames still come."""
        self.handlers: dict[int, Callable[[Received], None]] = {}
        self.refused = {"copies": 0, "ahead": 0, "corrupt": 0, "unknown": 0}

    def connected(self, source: int, number: int) -> bool:
        """Whether this queue pair was connected to this incarnation of the process."""
        return (source, number) in self._pairs

    def forget(self, sources: set[int], coming: list[Arrival]) -> None:
        """A peer with these devices died: its queue pairs end with the last frame that still comes."""
        left: dict[tuple[int, int], int] = {}
        for arrival in coming:
            if arrival.kind in _OF_A_PAIR:
                key = _key(arrival)
                left[key] = left.get(key, 0) + 1
        self.ending = {k: v for k, v in self.ending.items() if k[0] not in sources} | left
        self._pairs = {
            key: pair for key, pair in self._pairs.items() if key[0] not in sources or key in left
        }

    def handled(self, arrival: Arrival) -> None:
        """A frame of a queue pair is dealt with."""
        key = _key(arrival)
        left = self.ending.get(key)
        if left is None:
            return
        if left > 1:
            self.ending[key] = left - 1
        else:
            del self.ending[key]
            self._pairs.pop(key, None)

    def connect_arrived(self, arrival: Arrival) -> None:
        if arrival.flags & FLAG_CORRUPT:
            self.refused["corrupt"] += 1
            return
        number, before = rdma_frames.CONNECT_HEAD.unpack(arrival.body)
        self._pairs.pop((arrival.source, before), None)
        self._pairs.setdefault((arrival.source, number), _Pair())
        self._signal(arrival, rdma_frames.ACCEPT, rdma_frames.NUMBER.pack(number))

    def chunk_arrived(self, arrival: Arrival) -> None:
        if arrival.flags & FLAG_CORRUPT:
            self.refused["corrupt"] += 1
            return
        head = rdma_frames.CHUNK_HEAD.unpack(arrival.body)
        number, sequence, index, count, digest, immediate, region, offset = head
        pair = self._pairs.get((arrival.source, number))
        if pair is None or pair.in_error:
            self.refused["unknown"] += 1
            return
        if sequence > pair.expected:
            self.refused["ahead"] += 1
            return
        last = index == count - 1
        if sequence < pair.expected:
            self.refused["copies"] += 1
        else:
            _take(arrival, pair, index, digest)
            if last and not self._hand_over(arrival, pair, immediate, region, offset):
                self._refuse(arrival, number, pair)
                return
        if last or (index + 1) % self._acknowledge_chunks == 0:
            body = rdma_frames.ACK_HEAD.pack(number, pair.expected)
            self._signal(arrival, rdma_frames.ACK, body)

    def _hand_over(
        self, arrival: Arrival, pair: _Pair, immediate: int, region: int, offset: int
    ) -> bool:
        """A message is wholly here. False: there is no such memory, or nobody who receives."""
        data = b"".join(pair.pieces)
        charged_bytes = pair.charged_bytes
        pair.pieces = []
        pair.charged_bytes = 0
        handler = self.handlers.get(arrival.target)
        try:
            if region >= 0:
                self._memory.region(arrival.target, region).write(offset, charged_bytes, data)
            elif handler is None:
                return False
        except MemoryRangeError:
            return False
        if handler is not None:
            handler(Received(arrival.source, arrival.target, data, charged_bytes, immediate))
        return True

    def _refuse(self, arrival: Arrival, number: int, pair: _Pair) -> None:
        pair.in_error = True
        what = (number, pair.expected - 1, rdma_frames.REFUSED_WRITE)
        self._signal(arrival, rdma_frames.REFUSED, rdma_frames.REFUSED_HEAD.pack(*what))

    def _signal(self, arrival: Arrival, kind: int, body: bytes) -> None:
        route = self._fabric.route(Plane.RDMA, Operation.WRITE, arrival.target, arrival.source)
        self._fabric.signal(route, kind, delay_ps=route.path.completion_ps, body=body)


def _key(arrival: Arrival) -> tuple[int, int]:
    return arrival.source, rdma_frames.NUMBER.unpack_from(arrival.body)[0]


def _take(arrival: Arrival, pair: _Pair, index: int, digest: int) -> None:
    """The expected chunk. Raises CorruptError if it is not what was sent and no rule marked it."""
    if digest_of(arrival.payload, index) != digest:
        what = f"chunk {index} from device {arrival.source} is not what was sent"
        raise CorruptError(what, definite=False)
    assert len(pair.pieces) == index
    pair.expected += 1
    pair.pieces.append(arrival.payload)
    pair.charged_bytes += arrival.charged_bytes
