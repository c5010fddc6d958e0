"""Expert load balancing: a new placement from counted loads. Pure.

Owns which expert gets how many replicas and which rank holds them, and the statistics of loads. Does
not own counting loads, nor the way from the old placement to the new one (``moving``).

The rules are those of xDeepServe (arXiv 2508.02520, 4.5) and of DeepSeek's EPLB: replicas one by one to
the expert with most load per replica; then the heaviest replica first to the least loaded rank with a
free slot that does not have that expert. Hierarchically where groups of experts can be dealt out to
nodes evenly: groups to nodes, and within each node as above, so that the experts of a group stay in one
node; over all ranks otherwise. What is ours: a replica stays on a rank that has that expert already, if
that rank does not get more than the mean by it. Moving costs 42 MiB an expert and layer.

Loads are tokens, counted. An even split is kept in parts of 2^-20 token, as integers: ties are ties on
every machine, and the lower expert or rank wins.
"""

from __future__ import annotations

import collections
import heapq
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from nodes.moe.placement import EMPTY, I64, Placement, contiguous

PARTS = 1 << 20
"""Parts of a token."""

TOLERANCE = 32
"""A rank may have 1/32 more than the mean before replicas are exchanged for it (assumed, range 8 to 128):
counted loads of one step differ more from the next's (8 ranks, 32 experts each: 1.01; 320 ranks, one each:
1.2)."""

HIERARCHY_COST = 8
"""Groups stay in one node unless packing over all ranks has a largest load lower by 1/8 (assumed, range 4
to 32): between nodes the machine's links are as fast as within them (137 and 135 GB/s a die), so it gains
little here."""

_NEVER = np.iinfo(np.int64).max

Kind = Literal["hierarchical", "global", "contiguous", "unchanged"]
Rows = list[list[int]]
Flags = np.typing.NDArray[np.bool_]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one look at the loads."""

    placement: Placement
    kind: Kind
    """How it was packed; unchanged: the old one is as good."""
    imbalance_before: float
    """Largest over mean load of the ranks that have slots."""
    imbalance_after: float


def rebalance(old: Placement, loads: I64, *, groups: int = 1, nodes: tuple[int, ...] = ()) -> Plan:
    """A placement for these loads [experts], with the slots that the old one has.

    ``groups``: experts are in this many groups of equal size, in order; ``nodes``: the node of each
    rank; without them it is packed over all ranks. The largest load of a rank is never above that of
    the old placement, nor above that of experts laid out in order. Less than 1/32 is not worth a move.
    """
    assert len(loads) == old.experts
    assert int(loads.min()) >= 0 and int(loads.sum()) < 2**43
    in_order = Placement(_aligned(old, contiguous(old.rooms, old.experts)), old.shared)
    before = largest_load(old, loads)
    bar = min(before, largest_load(in_order, loads))
    spread = Placement(_aligned(old, _global(old, loads)), old.shared)
    kind: Kind = "global"
    rows = _hierarchical(old, loads, groups, nodes)
    if rows is not None:
        in_nodes = Placement(_aligned(old, rows), old.shared)
        most = largest_load(in_nodes, loads)
        if most <= bar and most - most // HIERARCHY_COST <= largest_load(spread, loads):
            kind, spread = "hierarchical", in_nodes
    most = largest_load(spread, loads)
    if bar == before and most >= before - before // TOLERANCE:
        return _plan(old, old, "unchanged", loads)
    if most <= bar:
        return _plan(old, spread, kind, loads)
    return _plan(old, in_order, "contiguous", loads)


def _plan(old: Placement, new: Placement, kind: Kind, loads: I64) -> Plan:
    return Plan(
        placement=new,
        kind=kind,
        imbalance_before=imbalance(old, loads),
        imbalance_after=imbalance(new, loads),
    )


# --- statistics -----------------------------------------------------------------------------------


def rank_loads(placement: Placement, loads: I64) -> I64:
    """Load of each rank [ranks] in PARTS of a token, every expert's split evenly over its replicas."""
    sums = np.zeros(placement.ep_size, dtype=np.int64)
    for rank in range(placement.ep_size):
        for expert in placement.held(rank):
            sums[rank] += int(loads[expert]) * PARTS // len(placement.replicas(expert))
    return sums


def imbalance(placement: Placement, loads: I64) -> float:
    """Largest over mean load of the ranks that have slots; 1 without any load."""
    sums = rank_loads(placement, loads)[np.array(placement.rooms) > 0]
    return float(sums.max() / sums.mean()) if sums.any() else 1.0


def largest_load(placement: Placement, loads: I64) -> int:
    """Largest load of a rank, in PARTS of a token."""
    return int(rank_loads(placement, loads).max())


# --- replicas and packing -------------------------------------------------------------------------


def replicate(loads: I64, *, slots: int, ranks: int) -> I64:
    """Replicas of each expert [experts], all slots together.

    One by one to the expert with most load per replica (ties: fewest replicas, then the lower expert);
    none gets more than there are ranks before all have as many.
    """
    assert slots >= len(loads) and ranks >= 1
    counts = np.ones(len(loads), dtype=np.int64)
    limit = ranks
    heap = [(-int(load) * PARTS, 1, expert) for expert, load in enumerate(loads.tolist())]
    heapq.heapify(heap)
    for _ in range(slots - len(loads)):
        while heap and counts[heap[0][2]] >= limit:
            heapq.heappop(heap)
        if not heap:
            limit += ranks
            heap = [(_key(loads, counts, e), int(counts[e]), e) for e in range(len(loads))]
            heapq.heapify(heap)
        expert = heap[0][2]
        counts[expert] += 1
        heapq.heapreplace(heap, (_key(loads, counts, expert), int(counts[expert]), expert))
    return counts


def _key(loads: I64, counts: I64, expert: int) -> int:
    return -(int(loads[expert]) * PARTS // int(counts[expert]))


def pack(loads: I64, counts: I64, *, rooms: Sequence[int], stay: Sequence[frozenset[int]]) -> Rows:
    """The experts of each rank: heaviest replica first to the least loaded rank with a free slot.

    ``loads`` and ``counts`` [experts]; ``rooms``: slots of each rank, together as many as replicas;
    ``stay``: what each rank has already. As long as a rank gets no more than the mean (or than the
    heaviest replica) by it, a replica stays, else takes a slot that nothing else stays in. Then
    replicas are exchanged while a rank has too much. No rank gets an expert twice where that can be
    avoided.
    """
    assert sum(rooms) == int(counts.sum())
    parts = loads * PARTS // counts
    order = np.argsort(-parts, kind="stable")
    limit = max(int(parts.max()), int((parts * counts).sum()) // max(sum(r > 0 for r in rooms), 1))
    table = _Ranks(parts, rooms)
    owed = _owed(counts, stay)
    for expert in order.tolist():
        for _ in range(int(counts[expert])):
            free = table.free > 0
            new = free & ~table.holds[:, expert]
            if not new.any():
                new = table.free_without(expert) if table.make_room(expert) else free
            light = new & (table.sums + parts[expert] <= limit)
            same = light & owed[:, expert]
            spare = light & (table.free > owed.sum(axis=1))
            chosen = same if same.any() else spare if spare.any() else new
            rank = int(np.where(chosen, table.sums, _NEVER).argmin())
            table.add(rank, expert)
            owed[rank, expert] = False
        owed[:, expert] = False
    table.even_out(limit + limit // TOLERANCE)
    return table.rows


def _owed(counts: I64, stay: Sequence[frozenset[int]]) -> Flags:
    """What may stay [ranks, experts]: of each expert no more replicas than there will be."""
    owed = np.zeros((len(stay), len(counts)), dtype=bool)
    for rank, experts in enumerate(stay):
        owed[rank, sorted(experts)] = True
    owed &= owed.cumsum(axis=0) <= counts
    return owed


class _Ranks:
    """What each rank has got so far. ``holds`` is ``rows`` as a table, unless an expert is there twice."""

    def __init__(self, parts: I64, rooms: Sequence[int]) -> None:
        self._parts = parts
        self.rows: Rows = [[] for _ in rooms]
        self.free = np.array(rooms, dtype=np.int64)
        self.sums = np.zeros(len(rooms), dtype=np.int64)
        self.holds = np.zeros((len(rooms), len(parts)), dtype=bool)

    def add(self, rank: int, expert: int) -> None:
        """One replica more."""
        self.rows[rank].append(expert)
        self.free[rank] -= 1
        self.sums[rank] += self._parts[expert]
        self.holds[rank, expert] = True

    def take(self, rank: int, expert: int) -> None:
        """One replica less."""
        self.rows[rank].remove(expert)
        self.free[rank] += 1
        self.sums[rank] -= self._parts[expert]
        self.holds[rank, expert] = expert in self.rows[rank]

    def free_without(self, expert: int) -> Flags:
        """Ranks with a free slot that do not have it."""
        return (self.free > 0) & ~self.holds[:, expert]

    def even_out(self, enough: int) -> None:
        """Exchange a replica of the fullest rank for a lighter one until none has more than ``enough``.

        Of all exchanges the one that leaves the two ranks lowest; it stops where none helps.
        """
        ranks = np.repeat(np.arange(len(self.rows)), [len(row) for row in self.rows])
        experts = np.array([expert for row in self.rows for expert in row], dtype=np.int64)
        while (most := int(self.sums.max())) > enough:
            full = int(self.sums.argmax())
            mine = np.flatnonzero(ranks == full)
            less = self._parts[experts[mine]][:, None] - self._parts[experts]
            after = np.maximum(most - less, self.sums[ranks] + less)
            barred = self.holds[ranks][:, experts[mine]].T | self.holds[full, experts]
            after[barred | (less <= 0)] = most
            if after.min() >= most:
                return
            i, other = np.unravel_index(int(after.argmin()), after.shape)
            one, rank, another = int(experts[mine[i]]), int(ranks[other]), int(experts[other])
            self.take(full, one)
            self.take(rank, another)
            self.add(full, another)
            self.add(rank, one)
            experts[mine[i]], experts[other] = another, one

    def make_room(self, expert: int) -> bool:
        """Get a free slot on a rank that does not have this expert, by moving others on; if possible.

        The free slots are on ranks that have the expert. The shortest chain of moves is looked for,
        lower ranks and experts first: if there is one that avoids having an expert twice, it is found.
        """
        came: dict[int, tuple[int, int]] = {}
        queue = collections.deque([expert])
        while queue:
            moved = queue.popleft()
            open_ranks = np.flatnonzero(self.free_without(moved))
            if len(open_ranks):
                self._move_on(moved, int(open_ranks[0]), came, expert)
                return True
            for rank in np.flatnonzero(~self.holds[:, moved]).tolist():
                for other in sorted(set(self.rows[rank])):
                    if other != expert and other not in came:
                        came[other] = (moved, rank)
                        queue.append(other)
        return False

    def _move_on(
        self, moved: int, to_rank: int, came: dict[int, tuple[int, int]], expert: int
    ) -> None:
        while moved != expert:
            before, rank = came[moved]
            self.take(rank, moved)
            self.add(to_rank, moved)
            moved, to_rank = before, rank


def _global(old: Placement, loads: I64) -> Rows:
    ranks = sum(room > 0 for room in old.rooms)
    counts = replicate(loads, slots=sum(old.rooms), ranks=ranks)
    stay = [frozenset(old.held(rank)) for rank in range(old.ep_size)]
    return pack(loads, counts, rooms=old.rooms, stay=stay)


def _hierarchical(old: Placement, loads: I64, groups: int, nodes: tuple[int, ...]) -> Rows | None:
    """None where groups cannot be dealt out evenly to nodes, or would be too few experts for a rank."""
    by_node: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        if old.rooms[rank]:
            by_node.setdefault(node, []).append(rank)
    members = [by_node[node] for node in sorted(by_node)]
    rooms = {sum(old.rooms[rank] for rank in ranks) for ranks in members}
    if len(members) < 2 or groups % len(members) or len(loads) % groups or len(rooms) > 1:
        return None
    size = len(loads) // groups
    in_node = size * groups // len(members)
    if rooms.pop() < in_node or max(old.rooms) > in_node:
        return None
    of_node = _groups_of_nodes(old, loads.reshape(groups, size), members)
    rows: Rows = [[] for _ in old.slots]
    for ranks, chosen in zip(members, of_node, strict=True):
        experts = np.concatenate([np.arange(size) + group * size for group in sorted(chosen)])
        place_of = {expert: i for i, expert in enumerate(experts.tolist())}
        node_rooms = [old.rooms[rank] for rank in ranks]
        counts = replicate(loads[experts], slots=sum(node_rooms), ranks=len(ranks))
        stay = [frozenset(place_of[e] for e in old.held(r) if e in place_of) for r in ranks]
        packed = pack(loads[experts], counts, rooms=node_rooms, stay=stay)
        for rank, row in zip(ranks, packed, strict=True):
            rows[rank] = experts[row].tolist()
    return rows


def _groups_of_nodes(old: Placement, loads: I64, members: list[list[int]]) -> Rows:
    """Groups [groups, size] to nodes, each as many; a group stays where most of its experts are."""
    groups, size = loads.shape
    there = np.zeros((groups, len(members)), dtype=np.int64)
    for node, ranks in enumerate(members):
        held = {expert for rank in ranks for expert in old.held(rank)}
        there[:, node] = np.bincount(np.array(sorted(held)) // size, minlength=groups)
    most = there.argmax(axis=1)
    stay = [frozenset(np.flatnonzero(most == node).tolist()) for node in range(len(members))]
    ones = np.ones(groups, dtype=np.int64)
    rooms = [groups // len(members)] * len(members)
    return pack(loads.sum(axis=1), ones, rooms=rooms, stay=stay)


def _aligned(old: Placement, rows: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """The same experts for each rank, those that it has already in the slots where they are."""
    slots = []
    for before, row in zip(old.slots, rows, strict=True):
        coming = list(row)
        kept = []
        for expert in before:
            stays = expert in coming
            kept.append(expert if stays else EMPTY)
            if stays:
                coming.remove(expert)
        fill = iter(coming)
        slots.append(tuple(next(fill) if expert == EMPTY else expert for expert in kept))
    return tuple(slots)
