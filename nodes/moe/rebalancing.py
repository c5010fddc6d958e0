"""Re-placement while tokens are decoded: which stage each pass is in, and where experts are in it. Pure.

Owns the way from the loads counted in pass 0 to the placement of every layer in every later pass, and what
nodes tell each other at the end of a pass. Does not own new placements (``eplb``), rounds (``moving``),
messages (``passes``) nor weights (``weights``).

A pass is all layers once, with the same tokens. Every node gets the same messages of all nodes at the end
of a pass and follows the same rule, so all have the same placement in the next one, and none leads:

    before     the first placement; loads are counted
    prefetch   weights come into spare memory; again until every node has its own
    disable    nobody sends to the slots that are to be loaded
    load       from spare memory into the slots; again until every node is done
    enable     tokens go there; the next round begins with a prefetch
    after      the same placement, nothing moves: what it brought is measured

All layers move side by side, stage by stage; one whose rounds are over waits for the others. Where a node
cannot fetch its weights, or misses ranks before it has them, all give up: they go on with the placement in
force, in which nothing is missing.

Two ways are looked at (``find_way``). A new placement of everything takes many rounds, as few slots can be
spared at a time: of a skewed layer at EP 8 with 8 replicas 75, to a largest load of 1.10 of the mean (from
1.43). To refill spare slots takes one for each slot of a rank, and gives 1.14 there. At EP 320 with 32
replicas both are the same. So the first is taken only where it is better by 1/8 after few rounds (EP 128
with 128 replicas: from 7.84 to 1.02 in 7, and to 1.40 in 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from nodes.moe import eplb, moving, refill
from nodes.moe.moving import Move, Schedule
from nodes.moe.placement import I64, Placement

StageName = Literal["", "before", "prefetch", "disable", "load", "enable", "after", "stopped"]
"""``""``: of a run that re-places nothing. ``stopped``: a rank that has given up has no pass there."""

FOLLOWERS: dict[str, tuple[str, ...]] = {
    "before": ("prefetch", "after"),
    "prefetch": ("prefetch", "disable", "after"),
    "disable": ("load",),
    "load": ("load", "enable"),
    "enable": ("prefetch", "after"),
    "after": (),
}
"""What the next pass may be."""

Kind = eplb.Kind | Literal["refilled"]

ROUND: tuple[moving.Name, ...] = ("prefetch", "disable", "load", "enable")

PREFETCHES_MAX = 64
"""Passes in a row after which a prefetch is given up. A pass of one layer takes about 0.2 ms, the weights of
one expert and layer 0.4 ms over an idle link; so links may be 30 times slower (assumed, 16 to 256)."""


ROUNDS_MAX = 8
"""Rounds of a re-placement: each costs four passes or more (assumed, range 1 to 64)."""

ENOUGH = 8
"""A new placement of everything must lower the largest load by 1/8 more (assumed, range 4 to 32)."""


PASSES_MAX = 2 + ROUNDS_MAX * (2 * PREFETCHES_MAX + 2)
"""No run has more: a load is done sooner than a prefetch."""


class PassDone(msgspec.Struct, frozen=True, kw_only=True):
    """A node's ranks have finished a pass."""

    number: int
    """Of the pass, from 0."""
    node: int
    """Its process."""
    loads: bytes = b""
    """int32 [layers, experts], of pass 0: tokens of this node for each expert. See ``summed``."""
    ready: bool = True
    """What the stage asks of this node is done."""
    failed: str = ""
    """Why it will not be."""


class Pass(msgspec.Struct, frozen=True, kw_only=True):
    """What is in force in a pass."""

    stage: StageName
    placements: tuple[Placement, ...]
    """Of each layer."""
    moves: tuple[tuple[Move, ...], ...] = ()
    """Of each layer, those of the round; none before and after."""


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """How one layer is re-placed. Imbalances: largest over mean load of ranks, as counted in pass 0."""

    kind: Kind
    schedule: Schedule
    imbalance_before: float
    imbalance_predicted: float
    """At its end."""


class Course(msgspec.Struct, frozen=True, kw_only=True):
    """The way of all layers, side by side."""

    first: tuple[Placement, ...]
    ways: tuple[Way, ...]

    @property
    def stages(self) -> int:
        """Of the layer that takes longest."""
        return max(len(way.schedule.stages) for way in self.ways)

    @property
    def moves(self) -> int:
        """Weights of an expert in a layer that are copied."""
        stages = (stage for way in self.ways for stage in way.schedule.stages)
        return sum(len(stage.moves) for stage in stages if stage.name == "enable")

    def at(self, index: int) -> Pass:
        """Stage ``index`` of all layers."""
        placements, moves = [], []
        for old, way in zip(self.first, self.ways, strict=True):
            schedule = way.schedule
            over = index >= len(schedule.stages)
            placements.append(schedule.reached(old) if over else schedule.stages[index].placement)
            moves.append(() if over else schedule.stages[index].moves)
        name = ROUND[index % len(ROUND)]
        return Pass(stage=name, placements=tuple(placements), moves=tuple(moves))


class Rebalancing:
    """Where all nodes are on the way: ``now`` is in force."""

    def __init__(
        self, placements: tuple[Placement, ...], *, groups: int, nodes: tuple[int, ...]
    ) -> None:
        """``placements``: of each layer. ``groups`` of experts and ``nodes`` of ranks: as ``eplb``."""
        self.now = Pass(stage="before", placements=placements)
        self.course: Course | None = None
        """Known when pass 0 is done."""
        self.gave_up = ""
        """Why, if the new placement was not reached."""
        self._groups, self._nodes = groups, nodes
        self._index = -1
        self._again = 0

    def go_on(self, done: Sequence[PassDone]) -> bool:
        """The pass is done at all nodes; False: it was the last. ``done`` has each node once."""
        if self.now.stage == "after":
            return False
        if self.course is None:
            self.course = self._plan(done)
        self._give_up(done)
        if self.gave_up or (all(each.ready for each in done) and not self._next()):
            self.now = Pass(stage="after", placements=self.now.placements)
        return True

    def _next(self) -> bool:
        """The next stage, if there is one."""
        assert self.course is not None
        self._index, self._again = self._index + 1, 0
        if self._index == self.course.stages:
            return False
        self.now = self.course.at(self._index)
        return True

    def _give_up(self, done: Sequence[PassDone]) -> None:
        self._again += 1
        if self.now.stage not in ("before", "prefetch"):  # from there on nothing comes from others
            return
        failed = [each.failed for each in done if each.failed]
        if failed:
            self.gave_up = failed[0]
        elif self._again == PREFETCHES_MAX and not all(each.ready for each in done):
            self.gave_up = f"weights were not all there after {PREFETCHES_MAX} passes"

    def _plan(self, done: Sequence[PassDone]) -> Course:
        first = self.now.placements
        loads = summed([each.loads for each in done], experts=first[0].experts)
        ways = tuple(
            find_way(old, of_layer, groups=self._groups, nodes=self._nodes)
            for old, of_layer in zip(first, loads, strict=True)
        )
        return Course(first=first, ways=ways)


def find_way(old: Placement, loads: I64, *, groups: int = 1, nodes: tuple[int, ...] = ()) -> Way:
    """From ``old`` to a better placement for these loads [experts]; ``groups`` and ``nodes`` as ``eplb``."""
    before = eplb.largest_load(old, loads)
    kind: Kind = "refilled"
    best = worthwhile(old, moving.stages(old, refill.refilled(old, loads)), loads)
    most = eplb.largest_load(best.reached(old), loads)
    least = int(loads.sum()) * eplb.PARTS // sum(room > 0 for room in old.rooms)
    if most - most // ENOUGH > least:
        plan = eplb.rebalance(old, loads, groups=groups, nodes=nodes)
        schedule = worthwhile(old, moving.stages(old, plan.placement), loads)
        if eplb.largest_load(schedule.reached(old), loads) < most - most // ENOUGH:
            kind, best = plan.kind, schedule
            most = eplb.largest_load(schedule.reached(old), loads)
    if most >= before - before // eplb.TOLERANCE:
        kind, best = "unchanged", Schedule(stages=(), kept=())
    return Way(
        kind=kind,
        schedule=best,
        imbalance_before=eplb.imbalance(old, loads),
        imbalance_predicted=eplb.imbalance(best.reached(old), loads),
    )


def worthwhile(old: Placement, schedule: Schedule, loads: I64) -> Schedule:
    """The rounds up to the best of the first ``ROUNDS_MAX``, or the first that is nearly as good.

    ``loads`` [experts]. The placement after any round is whole, so the way may end there; no round is
    left if none is better than ``old``.
    """
    enabled = [stage.placement for stage in schedule.stages if stage.name == "enable"]
    most = [eplb.largest_load(each, loads) for each in enabled[:ROUNDS_MAX]]
    before = eplb.largest_load(old, loads)
    enough = min([before, *most])
    for rounds, reached in enumerate(most, 1):
        if reached < before and reached - reached // eplb.TOLERANCE <= enough:
            return Schedule(stages=schedule.stages[: rounds * len(ROUND)], kept=())
    return Schedule(stages=(), kept=())


def described(course: Course) -> list[dict[str, Any]]:
    """For the report, of each layer."""
    return [
        {
            "layer": layer,
            "kind": way.kind,
            "rounds": len(way.schedule.stages) // len(ROUND),
            "imbalance_before": way.imbalance_before,
            "imbalance_predicted": way.imbalance_predicted,
        }
        for layer, way in enumerate(course.ways)
    ]


def packed(loads: I64) -> bytes:
    """Loads [layers, experts] as they travel."""
    return loads.astype("<i4").tobytes()


def summed(loads: Sequence[bytes], *, experts: int) -> I64:
    """The loads of all nodes [layers, experts]."""
    parts = [np.frombuffer(each, dtype="<i4").astype(np.int64) for each in loads]
    total: I64 = np.sum(parts, axis=0)
    return total.reshape(-1, experts)
