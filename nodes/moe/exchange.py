"""Dispatch and combine of one decode node over UB: bursts of token messages, counts and flags.

Owns the messages of one layer of one step: the source side waits for the results of its tokens, the
expert side for the flags of every source rank, and each gives up after a bounded wait with an error
that names who is missing. Does not own time of computation (the caller sleeps it) nor the step.

A source die writes its token messages in (token, k) order, then one {count, flag} to every node of the
group: its ranks share that node's flag area. Results are written to the slot (token, k) of the source,
so a message that comes twice changes nothing. Whoever begins a step forgets the steps before it, and
what still comes for those is ignored: memory does not grow with what was lost or late.
"""

from __future__ import annotations

import asyncio
import collections
import struct
from array import array
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from cmnet.bursts import Bundle
from cmnet.errors import CorruptError, LinkError, OperationError, PeerDeadError
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


class _Waiting:
    """One end of one layer: what is still to come, and who waits for it."""

    __slots__ = ("began_ps", "ended_ps", "error", "future")

    def __init__(self) -> None:
        self.began_ps = NEVER_PS
        self.ended_ps = 0
        """When the last message came."""
        self.error: LinkError | None = None
        self.future: asyncio.Future[None] | None = None

    def came(self, began_ps: int, now_ps: int) -> None:
        """Messages of an operator that began then are here."""
        self.began_ps = min(self.began_ps, began_ps)
        self.ended_ps = now_ps

    def end(self, error: OperationError | None = None) -> None:
        """Wake who waits, if somebody does."""
        if self.future is None or self.future.done():
            return
        if error is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(error)


class _Expected(_Waiting):
    """What a node's experts wait for."""

    __slots__ = ("counts", "items", "rows_due", "sources")

    def __init__(self) -> None:
        super().__init__()
        self.items: dict[tuple[int, int, int], tuple[int, int, bytes]] = {}
        """(source rank, token, k) -> (device, expert, vector)"""
        self.counts: dict[int, int] = {}
        """Source rank -> rows it sent here."""
        self.rows_due = 0
        """The sum of those."""
        self.sources: tuple[int, ...] = ()

    def flag(self, rank: int, count: int) -> None:
        """A source says how many rows it sent here; again changes nothing."""
        if rank not in self.counts:
            self.counts[rank] = count
            self.rows_due += count

    def complete(self) -> bool:
        """All flags and rows are here. A flag is written after its rows, but UB may deliver late."""
        return len(self.items) >= self.rows_due and all(
            source in self.counts for source in self.sources
        )

    def late(self) -> list[int]:
        """Ranks whose flag or rows are not here."""
        come = collections.Counter(rank for rank, _, _ in self.items)
        return [
            rank
            for rank in self.sources
            if rank not in self.counts or come[rank] < self.counts[rank]
        ]


class _Awaited(_Waiting):
    """What a source waits for."""

    __slots__ = ("missing", "results")

    def __init__(self, results: Array, missing: dict[tuple[int, int, int], int]) -> None:
        super().__init__()
        self.results = results
        self.missing = missing
        """(source device, token, k) -> rank that owes it"""

    def late(self) -> list[int]:
        """Ranks that owe results."""
        return sorted(set(self.missing.values()))


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
        self._ranks_per_node = context.machine.dies_per_node
        self._step: tuple[int, int] = (0, 0)
        """(epoch, step): what comes for an earlier one is ignored."""
        self._expected: dict[Key, _Expected] = {}
        self._awaited: dict[Key, _Awaited] = {}
        self.dispatch_ps = array("q")
        """From the first source's operator start to the last row or flag here, a sample a layer."""
        self.combine_ps = array("q")
        """From the first expert die's operator start to the last result here, a sample a layer."""
        context.fabric.bind(DISPATCH_KIND, self._dispatched)
        context.fabric.bind(COMBINE_KIND, self._combined)

    def begin(self, epoch: int, step: int) -> None:
        """A step begins here: those before it are over, wherever they were."""
        self._step = (epoch, step)
        self._expected = {k: v for k, v in self._expected.items() if k[:2] >= self._step}
        self._awaited = {k: v for k, v in self._awaited.items() if k[:2] >= self._step}

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
        tiling = self._scale.vector
        item_bytes = tiling.item_bytes
        data = bytes(tiles.tile(vectors, tiling)) if len(vectors) else b""
        model = self._body.settings
        items, counts = [], dict.fromkeys(nodes_first_ranks, 0)
        shared = placement.shared[rank]
        for token, chosen in enumerate(experts.tolist()):
            vector = data[token * item_bytes : (token + 1) * item_bytes]
            for k, expert in enumerate([*chosen, model.shared_expert]):
                target = shared if k == model.top_k else placement.ranks[expert]
                counts[target - target % self._ranks_per_node] += 1
                head = _TOKEN.pack(expert, first_token + token, k, rank)
                items.append((self._devices[target], model.dispatch_bytes, head + vector))
        for first_rank, count in counts.items():
            flag = _FLAG.pack(-1, count, 0, rank)
            items.append((self._devices[first_rank], FLAG_BYTES, flag))
        self._burst(key, DISPATCH_KIND, self._devices[rank], items, began_ps)

    async def room_to_dispatch(self, rank: int, tokens: int, nodes: int) -> None:
        """Wait, in virtual time, until the rank's port takes so much more (design 2.1). A port takes
        more than one collective, so this waits only behind other traffic."""
        model = self._body.settings
        rows_bytes = tokens * (model.top_k + 1) * model.dispatch_bytes
        await self._room(self._devices[rank], rows_bytes + nodes * FLAG_BYTES)

    async def room_to_combine(self, device: int, rows: int) -> None:
        """As ``room_to_dispatch``, for the results of so many rows."""
        await self._room(device, rows * self._body.settings.combine_bytes)

    async def _room(self, device: int, charged_bytes: int) -> None:
        other = next((each for each in self._devices if each != device), None)
        if other is not None:  # a route to anyone: room is the port's
            route = self._fabric.route(Plane.UB, Operation.WRITE, device, other)
            await self._fabric.room(route, charged_bytes)

    def _burst(
        self,
        key: Key,
        kind: int,
        source: int,
        items: list[tuple[int, int, bytes]],
        began_ps: int,
    ) -> None:
        head = _HEAD.pack(*key, began_ps)
        self._keep_own(kind, source, head, [item for item in items if item[0] == source])
        items = [item for item in items if item[0] != source]

        def lost(indices: list[int]) -> None:
            self._lost(key, [items[index][0] for index in indices])

        self._fabric.send_burst(
            source=source,
            plane=Plane.UB,
            operation=Operation.WRITE,
            kind=kind,
            head=head,
            items=items,
            lost=lost,
        )

    def _keep_own(
        self, kind: int, source: int, head: bytes, items: list[tuple[int, int, bytes]]
    ) -> None:
        """A die's messages to itself pass no link."""
        if items:
            now_ps = self._loop.now_ps
            own: list[tuple[int, Payload, int]] = [(to, data, now_ps) for to, _, data in items]
            handler = self._dispatched if kind == DISPATCH_KIND else self._combined
            self._loop.call_soon(handler, Bundle(source, head, own, 0))

    def _lost(self, key: Key, targets: list[int]) -> None:
        """The link gave up on messages of ours: the layer cannot be completed."""
        awaited = self._awaited.get(key)
        if awaited is None:
            return  # results to another node: it waits for them and gives up
        devices = self._fabric.machine.devices
        names = sorted({devices[target].name for target in targets})
        awaited.error = LinkError(f"no path to {', '.join(names[:3])}", definite=True)
        awaited.end(awaited.error)

    async def results(self, key: Key) -> Array:
        """Results [tokens, top_k + 1, words] of the node's tokens. Raises PeerDeadError, LinkError."""
        awaited = self._awaited[key]
        try:
            if awaited.error is not None:
                raise awaited.error
            if awaited.missing:
                await self._wait(awaited, "results of")
            self.combine_ps.append(awaited.ended_ps - awaited.began_ps)
            return awaited.results
        finally:
            self._awaited.pop(key, None)

    def _combined(self, bundle: Bundle) -> None:
        *key, began_ps = _HEAD.unpack(bundle.head)
        awaited = self._awaited.get(tuple(key))
        if awaited is None:
            return  # of a step that was given up
        awaited.came(began_ps, self._loop.now_ps)
        tiling = self._scale.result
        for target, data, _ in bundle.items:
            token, k = _RESULT.unpack_from(data)
            result = tiles.untile(data[_RESULT.size :], tiling)
            awaited.results[token, k] = result[0]
            awaited.missing.pop((target, token, k), None)
        if not awaited.missing:
            awaited.end()

    # --- expert side ------------------------------------------------------------------------------

    async def rows(self, key: Key, sources: tuple[int, ...]) -> Rows:
        """All rows for this node's experts in this layer. Raises PeerDeadError, CorruptError."""
        expected = self._expected.setdefault(key, _Expected())
        expected.sources = sources
        try:
            if not expected.complete():
                await self._wait(expected, "rows or flags of")
            self.dispatch_ps.append(expected.ended_ps - expected.began_ps)
            return self._unpack(expected)
        finally:
            self._expected.pop(key, None)

    def _dispatched(self, bundle: Bundle) -> None:
        epoch, step, layer, began_ps = _HEAD.unpack(bundle.head)
        if (epoch, step) < self._step:
            return  # of a step that was given up
        expected = self._expected.setdefault((epoch, step, layer), _Expected())
        expected.came(began_ps, self._loop.now_ps)
        for target, data, _ in bundle.items:
            expert, token, k, rank = _TOKEN.unpack_from(data)
            if expert < 0:
                _, count, _, rank = _FLAG.unpack(data)
                expected.flag(rank, count)
            else:
                expected.items[rank, token, k] = (target, expert, bytes(data)[_TOKEN.size :])
        if expected.future is not None and expected.complete():
            expected.end()

    def _unpack(self, expected: _Expected) -> Rows:
        order = sorted(expected.items)
        parts = [expected.items[slot] for slot in order]
        if not parts:
            empty = np.empty(0, dtype=np.int64)
            return Rows(experts=empty, vectors=empty, targets=[], sources=[], slots=[])
        joined = b"".join([data for _, _, data in parts])
        vectors = tiles.untile(joined, self._scale.vector)
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
        tiling = self._scale.result
        item_bytes = tiling.item_bytes
        data = bytes(tiles.tile(results[chosen], tiling))
        charged_bytes = self._body.settings.combine_bytes
        items = []
        for number, index in enumerate(chosen):
            result = data[number * item_bytes : (number + 1) * item_bytes]
            head = _RESULT.pack(*rows.slots[index])
            items.append((self._devices[rows.sources[index]], charged_bytes, head + result))
        self._burst(key, COMBINE_KIND, device, items, began_ps)

    async def _wait(self, waiting: _Expected | _Awaited, what: str) -> None:
        waiting.future = self._loop.create_future()

        def give_up() -> None:
            ranks = ", ".join(map(str, waiting.late()[:8]))
            waiting.end(PeerDeadError(f"no {what} ranks {ranks}", definite=False))

        timer = self._loop.call_at_ps(self._loop.now_ps + self._timeout_ps, give_up)
        try:
            await waiting.future
        finally:
            timer.cancel()
            waiting.future = None

    def statistics(self) -> dict[str, Any]:
        """Samples for the report."""
        return {
            "dispatch_ps": self.dispatch_ps.tolist(),
            "combine_ps": self.combine_ps.tolist(),
        }
