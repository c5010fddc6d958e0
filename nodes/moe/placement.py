"""Which rank of an expert-parallel group holds which expert, and where each token goes. Pure.

Owns the first placement, what becomes of it when ranks are gone, and the choice of a replica for each
token. Does not own loads and new placements (``eplb``), nor how weights move (``moving``).

The deployment of 320 dies (arXiv 2506.12708, section 3.1 of the public readings): one expert a die,
ranks 0-255 the routed ones, 256-287 replicas of the shared expert, 288-319 redundant. Other groups:
routed experts contiguous, and every rank computes the shared expert of its own tokens. What lay only
on ranks that are gone goes, piece by piece, to the living rank that has least: redundant ranks first.
Nothing else moves.

Replicas of one expert take turns by token index (as xDeepServe does, arXiv 2508.02520, 4.5), so every
rank knows without a message where each token goes.
"""

from __future__ import annotations

import collections
import functools
import heapq
import itertools
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]

EMPTY = -1
"""In a slot: no expert, or one to which nobody sends now."""


class Placement(msgspec.Struct, frozen=True):
    """Who holds what. Made by ``initial``, ``without`` and ``eplb.rebalance``."""

    slots: tuple[tuple[int, ...], ...]
    """For each rank its routed experts, slot by slot; EMPTY where there is none. A rank that is gone,
    or that only has the shared expert, has no slots."""
    shared: tuple[int, ...]
    """The tokens of rank r have their shared expert at rank ``shared[r]``; r itself: no message."""

    @property
    def ep_size(self) -> int:
        """Ranks of the group, those that are gone included."""
        return len(self.slots)

    @property
    def experts(self) -> int:
        """Routed experts."""
        return len(_replicas(self).counts)

    @property
    def rooms(self) -> tuple[int, ...]:
        """Slots of each rank."""
        return tuple(len(row) for row in self.slots)

    def replicas(self, expert: int) -> tuple[int, ...]:
        """The ranks that hold it, rising; a rank that holds it twice counts once."""
        table = _replicas(self)
        first, count = int(table.firsts[expert]), int(table.counts[expert])
        return tuple(table.ranks[first : first + count].tolist())

    def held(self, rank: int) -> tuple[int, ...]:
        """The experts of a rank to which tokens are sent, each once, in the order of its slots."""
        return tuple(dict.fromkeys(expert for expert in self.slots[rank] if expert != EMPTY))


class Replicas(msgspec.Struct, frozen=True):
    """Expert e is at ``ranks[firsts[e] : firsts[e] + counts[e]]``."""

    firsts: I64
    counts: I64
    ranks: I64


@functools.lru_cache(maxsize=64)
def _replicas(placement: Placement) -> Replicas:
    holders = np.repeat(np.arange(placement.ep_size), placement.rooms)
    experts = np.array(list(itertools.chain(*placement.slots)), dtype=np.int64)
    full = experts != EMPTY
    pairs = np.unique(experts[full] * placement.ep_size + holders[full])
    counts = np.bincount(pairs // placement.ep_size)
    assert len(counts) and counts.all(), "an expert is nowhere"
    return Replicas(np.cumsum(counts) - counts, counts, pairs % placement.ep_size)


def targets(placement: Placement, experts: I64, index: I64) -> I64:
    """The rank to which each (token, expert) goes.

    ``experts`` [n, k]: the choices of n tokens; ``index`` [n]: the number of each token in the group's
    batch (rank x places + place), the same for all its experts; returns [n, k].
    """
    table = _replicas(placement)
    turns = index[:, None] % table.counts[experts]
    return table.ranks[table.firsts[experts] + turns]


def initial(
    *,
    experts: int,
    ep_size: int,
    redundant: int = 0,
    shared_ranks: int = 0,
    alive: frozenset[int] | None = None,
) -> Placement:
    """The placement before loads are known, over the ranks that live (all, unless said).

    ``redundant`` slots take second replicas of experts spread evenly, and ``shared_ranks`` ranks, after
    those of the routed experts, hold the shared expert only, for rank r the one number r modulo
    ``shared_ranks``. ValueError, with what would be right, if the experts cannot be dealt out evenly.
    """
    ranks, slots = ep_size - shared_ranks, experts + redundant
    if experts < 1 or redundant < 0 or shared_ranks < 0 or ranks < 1:
        raise ValueError(
            f"{experts} experts, {redundant} redundant and {shared_ranks} shared ranks of {ep_size}: "
            f"at least one expert and one rank that is not a shared one, nothing below 0"
        )
    if slots % ranks:
        right = -experts % ranks
        raise ValueError(
            f"{experts} experts and {redundant} redundant replicas cannot be dealt out evenly to "
            f"{ranks} ranks; redundant replicas that can: {right}, {right + ranks} ..."
        )
    each = slots // ranks
    first = ranks if experts % ranks == 0 else -(-experts // each)
    rooms = [each] * first + [0] * shared_ranks + [each] * (ranks - first)
    shared = [first + r % shared_ranks if shared_ranks else r for r in range(ep_size)]
    placement = Placement(contiguous(rooms, experts), tuple(shared))
    if alive is None:
        return placement
    return without(placement, dead=frozenset(range(ep_size)) - alive)


def contiguous(rooms: Sequence[int], experts: int) -> tuple[tuple[int, ...], ...]:
    """Slots filled with all experts in their order, then with replicas of experts spread evenly.

    Each rank takes the same number of experts if that comes out even (and its other slots replicas),
    else the first ranks are filled. No rank has an expert twice unless it has more slots than there
    are experts.
    """
    ranks = sum(room > 0 for room in rooms)
    assert sum(rooms) >= experts
    even = experts // ranks if experts % ranks == 0 else max(rooms)
    if min(room for room in rooms if room) < even:
        even = max(rooms)
    ids = iter(range(experts))
    rows = [list(itertools.islice(ids, min(room, even))) for room in rooms]
    _fill(rows, rooms, experts)
    return tuple(tuple(row) for row in rows)


def _fill(rows: list[list[int]], rooms: Sequence[int], experts: int) -> None:
    """Replicas for the slots that are left: those with fewest first, of these one in so many."""
    left = sum(rooms) - sum(len(row) for row in rows)
    spread = dict.fromkeys(i * experts // left for i in range(min(left, experts)))
    turn = {expert: i for i, expert in enumerate(dict.fromkeys([*spread, *range(experts)]))}
    counts = [1] * experts
    for row, room in zip(rows, rooms, strict=True):
        while len(row) < room:
            others = set(range(experts)).difference(row) or range(experts)
            chosen = min(others, key=lambda expert: (counts[expert], turn[expert]))
            counts[chosen] += 1
            row.append(chosen)


def without(placement: Placement, *, dead: frozenset[int]) -> Placement:
    """The placement once ranks are gone.

    An expert with another living replica needs nothing. Any other goes to the living rank that has
    fewest pieces (slots in use and ranks whose shared expert it computes), of these to one whose own
    experts have other replicas, of these to the lowest: into an empty slot or a new one. A rank whose
    shared expert is gone turns to the living replica that serves fewest; without any, all at home.
    """
    alive = sorted(set(range(placement.ep_size)) - dead)
    assert alive
    rows = [[] if r in dead else list(row) for r, row in enumerate(placement.slots)]
    living = collections.Counter(itertools.chain(*rows))
    served = collections.Counter(placement.shared[rank] for rank in alive)
    least = []
    for rank in alive:
        held = [expert for expert in rows[rank] if expert != EMPTY]
        alone = sum(living[expert] == 1 for expert in held)
        least.append((len(held) + served[rank], alone, rank))
    heapq.heapify(least)
    for expert in range(placement.experts):
        if expert not in living:
            pieces, alone, rank = least[0]
            heapq.heapreplace(least, (pieces + 1, alone + 1, rank))
            _put(rows[rank], expert)
    shared = _shared_without(placement.shared, dead, alive)
    return Placement(tuple(tuple(row) for row in rows), shared)


def _put(row: list[int], expert: int) -> None:
    if EMPTY in row:
        row[row.index(EMPTY)] = expert
    else:
        row.append(expert)


def _shared_without(
    shared: tuple[int, ...], dead: frozenset[int], alive: list[int]
) -> tuple[int, ...]:
    if dead.issuperset(shared):
        shared = tuple(range(len(shared)))
    holders = sorted({rank for rank in shared if rank not in dead})
    served = collections.Counter(shared[rank] for rank in alive)
    least = [(served[rank], rank) for rank in holders]
    heapq.heapify(least)
    now = list(shared)
    for source in (*alive, *sorted(dead.intersection(range(len(shared))))):
        if shared[source] in dead:
            count, now[source] = least[0]
            heapq.heapreplace(least, (count + 1, now[source]))
    return tuple(now)
