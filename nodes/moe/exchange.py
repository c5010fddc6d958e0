"""Dispatch and combine of one decode node over UB: bursts of token messages, counts and flags.

Owns the messages of one layer of one step: the source side waits for the results of its tokens, the
expert side for the flags of every source rank, and each gives up after a bounded wait with an error
that names who is missing. Does not own time of computation (the caller sleeps it) nor the step.

A source die writes its token messages in (token, k) order, then one {count, flag} to every node of the
group: its ranks share that node's flag area. Results are written to the slot (token, k) of the source,
so a message that comes twice changes nothing.
"""

from __future__ import annotations

import collections
import struct
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from cmnet.bursts import Bundle
from cmnet.errors import CorruptError, LinkError, PeerDeadError
from cmnet.launch.agent import Context
from cmnet.messages import Payload
from cmnet.topology.machine import Operation, Plane
from cmnet.units import NEVER_PS
from nodes.model import tiles
from nodes.model.body import Array, Body
from nodes.moe.placement import ExpertPlacement

DISPATCH_KIND = 72
COMBINE_KIND = 73

FLAG_BYTES = 32
"""Charged for a count and flag: xDeepServe's metadata field (arXiv 2508.02520, section 3.2)."""

_HEAD = struct.Struct("<IIHq")
"""epoch, step, layer, when the operator began"""
_TOKEN = struct.Struct("<iHHH")
"""expert (-1: a flag), token index, k, source rank; before the vector"""
_FLAG = struct.Struct("<iIHH")
"""-1, count, 0, source rank"""
_RESULT = struct.Struct("<HH")
"""token index, k; before the result"""

Key = tuple[int, int, int]
"""(epoch, step, layer)"""
Touch = Callable[[str, Any], Any]


class _Expected:
    """What a node's experts wait for in one layer."""

    __slots__ = ("began_ps", "counts", "future", "items", "sources")

    def __init__(self) -> None:
        self.began_ps = NEVER_PS
        self.items: dict[tuple[int, int, int], tuple[int, int, bytes]] = {}
        """(source rank, token, k) -> (device, expert, vector)"""
        self.counts: dict[int, int] = {}
        """Source rank -> rows it sent here."""
        self.sources: tuple[int, ...] = ()
        self.future: Any = None

    def complete(self, sources: tuple[int, ...]) -> bool:
        return all(source in self.counts for source in sources) and (
            len(self.items) >= sum(self.counts.values())
        )

    def late(self) -> list[int]:
        """Ranks whose flag or rows are not here."""
        come = collections.Counter(rank for rank, _, _ in self.items)
        return [r for r in self.sources if come[r] < self.counts.get(r, 1 << 30)]


class _Awaited:
    """What a source waits for in one layer."""

    __slots__ = ("began_ps", "error", "future", "missing", "results")

    def __init__(self, results: Array, missing: dict[tuple[int, int, int], int]) -> None:
        self.began_ps = NEVER_PS
        self.error: LinkError | None = None
        self.results = results
        self.missing = missing
        """(source device, token, k) -> rank that owes it"""
        self.future: Any = None


class Rows(msgspec.Struct, frozen=True, eq=False):
    """What arrived at a node's experts: row by row, and whom the results are for."""

    experts: Array
    vectors: Array
    targets: list[int]
    """Device of the expert of each row."""
    sources: list[int]
    """Rank that each row came from."""
    slots: list[tuple[int, int]]
    """(token, k) of each row."""


class Exchange:
    """One decode node's end of all exchanges."""

    def __init__(
        self,
        context: Context,
        body: Body,
        scale: tiles.Scale,
        *,
        devices: tuple[int, ...],
        timeout_ps: int,
        touch: Touch,
    ) -> None:
        self._loop = context.loop
        self._fabric = context.fabric
        self._body = body
        self._scale = scale
        self._devices = devices
        """Device of each decode rank."""
        self._timeout_ps = timeout_ps
        self._touch = touch
        self._expected: dict[Key, _Expected] = {}
        self._awaited: dict[Key, _Awaited] = {}
        self.dispatch_ps: list[int] = []
        """From the first source's operator start to the last row or flag here, a sample a layer."""
        self.combine_ps: list[int] = []
        """From the first expert die's operator start to the last result here, a sample a layer."""
        self._process_of = [device.process for device in context.machine.devices]
        context.fabric.bind(DISPATCH_KIND, self._dispatched)  # type: ignore[arg-type]
        context.fabric.bind(COMBINE_KIND, self._combined)  # type: ignore[arg-type]

    # --- source side ------------------------------------------------------------------------------

    def expect_results(self, key: Key, tokens: int, owed: dict[tuple[int, int, int], int]) -> None:
        """Before dispatching: ``owed`` is (source device, token, k) -> rank, all of the node's."""
        slots = self._body.settings.top_k + 1
        results = np.zeros((tokens, slots, self._body.result_words), dtype=np.uint64)
        self._awaited[key] = _Awaited(results, owed)

    def dispatch(
        self,
        key: Key,
        rank: int,
        *,
        first_token: int,
        vectors: Array,
        experts: Array,
        placement: ExpertPlacement,
        nodes_first_ranks: list[int],
        began_ps: int,
    ) -> None:
        """Write a rank's tokens to their experts, then its counts to every node."""
        item_bytes = self._scale.vector_bytes
        data = bytes(tiles.tile(vectors, item_bytes=item_bytes)) if len(vectors) else b""
        model = self._body.settings
        items, counts = [], dict.fromkeys(nodes_first_ranks, 0)
        ranks_per_node = self._ranks_per_node(nodes_first_ranks)
        shared = placement.shared[rank]
        for token, chosen in enumerate(experts.tolist()):
            vector = data[token * item_bytes : (token + 1) * item_bytes]
            for k, expert in enumerate([*chosen, model.shared_expert]):
                target = shared if k == model.top_k else placement.ranks[expert]
                counts[target - target % ranks_per_node] += 1
                head = _TOKEN.pack(expert, first_token + token, k, rank)
                items.append((self._devices[target], model.dispatch_bytes, head + vector))
        for first_rank, count in counts.items():
            flag = _FLAG.pack(-1, count, 0, rank)
            items.append((self._devices[first_rank], FLAG_BYTES, flag))
        self._burst(key, DISPATCH_KIND, self._devices[rank], items, began_ps)

    def _ranks_per_node(self, firsts: list[int]) -> int:
        process = self._process_of[self._devices[firsts[0]]]
        return sum(self._process_of[device] == process for device in self._devices)

    def _burst(
        self,
        key: Key,
        kind: int,
        source: int,
        items: list[tuple[int, int, bytes]],
        began_ps: int,
    ) -> None:
        own: list[tuple[int, Payload, int]] = [
            (target, data, self._loop.now_ps) for target, _, data in items if target == source
        ]
        if own:  # a die's messages to itself pass no link
            handler = self._dispatched if kind == DISPATCH_KIND else self._combined
            bundle = Bundle(source, _HEAD.pack(*key, began_ps), own, 0)
            self._loop.call_soon(handler, bundle)
            items = [item for item in items if item[0] != source]
            if not items:
                return

        def lost(indices: list[int]) -> None:
            awaited = self._awaited.get(key)
            names = sorted({self._fabric.machine.devices[items[i][0]].name for i in indices})
            error = LinkError(f"no path to {', '.join(names[:3])}", definite=True)
            if awaited is not None:
                awaited.error = error
                if awaited.future is not None and not awaited.future.done():
                    awaited.future.set_exception(error)

        self._fabric.send_burst(
            source=source,
            plane=Plane.UB,
            operation=Operation.WRITE,
            kind=kind,
            head=_HEAD.pack(*key, began_ps),
            items=items,
            lost=lost,
        )

    async def results(self, key: Key) -> Array:
        """Results [tokens, top_k + 1, words] of the node's tokens. Raises PeerDeadError, LinkError."""
        awaited = self._awaited[key]
        try:
            if awaited.error is not None:
                raise awaited.error
            if awaited.missing:
                await self._wait(
                    awaited, "results of", lambda: sorted(set(awaited.missing.values()))
                )
            self.combine_ps.append(self._loop.now_ps - awaited.began_ps)
            return awaited.results
        finally:
            del self._awaited[key]

    def _combined(self, bundle: Bundle) -> None:
        *key, began_ps = _HEAD.unpack(bundle.head)
        awaited = self._awaited.get(tuple(key))
        if awaited is None:
            return  # of a step that was given up
        awaited.began_ps = min(awaited.began_ps, began_ps)
        words = self._body.result_words
        for target, data, _ in bundle.items:
            token, k = _RESULT.unpack_from(data)
            result = tiles.untile(
                data[_RESULT.size :], words=words, item_bytes=self._scale.result_bytes
            )
            awaited.results[token, k] = result[0]
            awaited.missing.pop((target, token, k), None)
        if not awaited.missing and awaited.future is not None and not awaited.future.done():
            awaited.future.set_result(None)

    # --- expert side ------------------------------------------------------------------------------

    async def rows(self, key: Key, sources: tuple[int, ...]) -> Rows:
        """All rows for this node's experts in this layer. Raises PeerDeadError."""
        expected = self._expected.setdefault(key, _Expected())
        try:
            if not expected.complete(sources):
                expected.sources = sources
                await self._wait(expected, "rows or flags of", lambda: expected.late())
            self.dispatch_ps.append(self._loop.now_ps - expected.began_ps)
            return self._unpack(expected)
        finally:
            self._expected.pop(key, None)

    def _dispatched(self, bundle: Bundle) -> None:
        *key, began_ps = _HEAD.unpack(bundle.head)
        expected = self._expected.setdefault(tuple(key), _Expected())
        expected.began_ps = min(expected.began_ps, began_ps)
        for target, data, _ in bundle.items:
            expert, token, k, rank = _TOKEN.unpack_from(data)
            if expert < 0:
                _, count, _, rank = _FLAG.unpack(data)
                expected.counts[rank] = count
            else:
                expected.items[rank, token, k] = (target, expert, bytes(data)[_TOKEN.size :])
        future = expected.future
        if future is not None and not future.done() and expected.complete(expected.sources):
            future.set_result(None)

    def _unpack(self, expected: _Expected) -> Rows:
        order = sorted(expected.items)
        parts = [expected.items[slot] for slot in order]
        if not parts:
            empty = np.empty(0, dtype=np.int64)
            return Rows(experts=empty, vectors=empty, targets=[], sources=[], slots=[])
        vectors = tiles.untile(
            b"".join([data for _, _, data in parts]),
            words=self._body.vector_words,
            item_bytes=self._scale.vector_bytes,
        )
        experts = np.array([expert for _, expert, _ in parts], dtype=np.int64)
        if experts.max() > self._body.settings.shared_expert:
            raise CorruptError(f"a token for expert {experts.max()}", definite=True)
        return Rows(
            experts=self._touch("experts", experts),
            vectors=self._touch("vectors", vectors),
            targets=[target for target, _, _ in parts],
            sources=[rank for rank, _, _ in order],
            slots=[(token, k) for _, token, k in order],
        )

    def combine(
        self,
        key: Key,
        device: int,
        rows: Rows,
        results: Array,
        chosen: list[int],
        *,
        began_ps: int,
    ) -> None:
        """Write one expert die's results (those at ``chosen``) back to their sources."""
        item_bytes = self._scale.result_bytes
        data = bytes(tiles.tile(results[chosen], item_bytes=item_bytes))
        charged_bytes = self._body.settings.combine_bytes
        items = []
        for number, index in enumerate(chosen):
            result = data[number * item_bytes : (number + 1) * item_bytes]
            head = _RESULT.pack(*rows.slots[index])
            items.append((self._devices[rows.sources[index]], charged_bytes, head + result))
        self._burst(key, COMBINE_KIND, device, items, began_ps)

    def forget(self, epoch: int) -> None:
        """Messages of earlier epochs are of no more use."""
        for key in [key for key in self._expected if key[0] < epoch]:
            del self._expected[key]

    async def _wait(self, waiting: Any, what: str, missing: Callable[[], list[int]]) -> None:
        future = waiting.future = self._loop.create_future()

        def give_up() -> None:
            if not future.done():
                ranks = ", ".join(map(str, missing()[:8]))
                error = PeerDeadError(f"no {what} ranks {ranks}", definite=False)
                future.set_exception(error)

        timer = self._loop.call_at_ps(self._loop.now_ps + self._timeout_ps, give_up)
        try:
            await future
        finally:
            timer.cancel()
            waiting.future = None
