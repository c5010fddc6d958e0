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

All layers move side by side, stage by stage; one whose rounds are over waits for the others. Rounds end
where what is left would bring too little (``worthwhile``): of 75 rounds of a skewed layer at EP 8 with 8
replicas the first takes the largest load from 1.43 to 1.21 of the mean, the other 74 to 1.10. Where a node
cannot fetch its weights, all give up: they go on with the placement in force, in which nothing is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from nodes.moe import eplb, moving
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

ROUND: tuple[moving.Name, ...] = ("prefetch", "disable", "load", "enable")

PREFETCHES_MAX = 64
"""Passes in a row after which a prefetch is given up. A pass of one layer takes about 0.2 ms, the weights of
one expert and layer 0.4 ms over an idle link; so links may be 30 times slower (assumed, 16 to 256)."""


ENOUGH = 8
"""A further round must be able to lower the largest load of a rank by 1/8: it costs four passes (assumed;
with 1/16, 1 to 11 rounds of the 34 to 75 in four cases, with 1/8, 1)."""


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


class Course(msgspec.Struct, frozen=True, kw_only=True):
    """The whole way of all layers."""

    first: tuple[Placement, ...]
    loads: I64
    """[layers, experts]"""
    plans: tuple[eplb.Plan, ...]
    schedules: tuple[Schedule, ...]
    """Cut where it is not worth going on."""

    @property
    def stages(self) -> int:
        """Of the layer that takes longest."""
        return max(len(schedule.stages) for schedule in self.schedules)

    @property
    def moves(self) -> int:
        """Weights of an expert in a layer that are copied, loans included."""
        stages = (stage for schedule in self.schedules for stage in schedule.stages)
        return sum(len(stage.moves) for stage in stages if stage.name == "enable")

    @property
    def reached(self) -> tuple[Placement, ...]:
        """The placement of each layer at the end."""
        pairs = zip(self.first, self.schedules, strict=True)
        return tuple(schedule.reached(old) for old, schedule in pairs)

    def at(self, index: int) -> Pass:
        """Stage ``index`` of all layers."""
        placements, moves = [], []
        for old, schedule in zip(self.first, self.schedules, strict=True):
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
        if self.now.stage != "prefetch":  # from there on nothing comes from others
            return
        failed = [each.failed for each in done if each.failed]
        if failed:
            self.gave_up = failed[0]
        elif self._again == PREFETCHES_MAX and not all(each.ready for each in done):
            self.gave_up = f"weights were not all there after {PREFETCHES_MAX} passes"

    def _plan(self, done: Sequence[PassDone]) -> Course:
        first = self.now.placements
        loads = summed([each.loads for each in done], experts=first[0].experts)
        plans = tuple(
            eplb.rebalance(old, of_layer, groups=self._groups, nodes=self._nodes)
            for old, of_layer in zip(first, loads, strict=True)
        )
        schedules = tuple(
            worthwhile(old, moving.stages(old, plan.placement), of_layer)
            for old, plan, of_layer in zip(first, plans, loads, strict=True)
        )
        return Course(first=first, loads=loads, plans=plans, schedules=schedules)


def worthwhile(old: Placement, schedule: Schedule, loads: I64) -> Schedule:
    """The rounds up to the first that is better than ``old`` and within 1/8 of the best at the end.

    ``loads`` [experts]. The placement after any round is whole, so the way may end there.
    """
    most = [
        int(eplb.rank_loads(stage.placement, loads).max())
        for stage in schedule.stages
        if stage.name == "enable"
    ]
    bar = int(eplb.rank_loads(old, loads).max())
    for number, of_round in enumerate(most, 1):
        if of_round < bar and of_round - of_round // ENOUGH <= most[-1]:
            stages = schedule.stages[: number * len(ROUND)]
            return Schedule(stages=stages, kept=schedule.kept)
    return schedule


def described(course: Course) -> list[dict[str, Any]]:
    """For the report, of each layer: largest over mean load of ranks as counted in pass 0 before, as it
    will be after the rounds, and at the end of the plan; moves of the plan that are left out."""
    return [
        {
            "layer": layer,
            "kind": plan.kind,
            "rounds": len(schedule.stages) // len(ROUND),
            "imbalance_before": plan.imbalance_before,
            "imbalance_predicted": eplb.imbalance(reached, loads),
            "imbalance_of_plan": plan.imbalance_after,
            "left_out": len(moving.moves(reached, plan.placement)),
        }
        for layer, (plan, schedule, reached, loads) in enumerate(
            zip(course.plans, course.schedules, course.reached, course.loads, strict=True)
        )
    ]


def packed(loads: I64) -> bytes:
    """Loads [layers, experts] as they travel."""
    return loads.astype("<i4").tobytes()


def summed(loads: Sequence[bytes], *, experts: int) -> I64:
    """The loads of all nodes [layers, experts]."""
    parts = [np.frombuffer(each, dtype="<i4").astype(np.int64) for each in loads]
    total: I64 = np.sum(parts, axis=0)
    return total.reshape(-1, experts)
