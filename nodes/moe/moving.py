"""From one placement to another while tokens are decoded: which weights move, in which order. Pure.

Owns the rounds and their four stages. Does not own the new placement (``eplb``), nor time or bytes on
links: whoever carries a stage out moves the weights and makes its placement the one in force.

The stages are xDeepServe's (arXiv 2508.02520, 4.5): prefetch the weights into spare memory, disable the
slot (nobody sends there any more), load it, enable it. A slot is disabled only while its expert has
another enabled replica, so at every stage every expert has one; hence rounds. Where the moves left form
a ring (each waits for another's slot), an expert that has several replicas lends one slot, which it gets
back at the end. With no such expert and no empty slot, nothing can move without a gap: what is left stays
as it is, and is named.
"""

from __future__ import annotations

import collections
import itertools
from typing import Literal

import msgspec

from nodes import constants
from nodes.moe.placement import EMPTY, Placement

Name = Literal["prefetch", "disable", "load", "enable"]
Slot = tuple[int, int]
"""(rank, slot)"""

EXPERT_BYTES = int(constants.EXPERT_WEIGHTS.value)
"""Of the weights of one expert in one layer: INT8, a byte each."""


class Move(msgspec.Struct, frozen=True, kw_only=True):
    """The weights of one expert in one layer, from a rank that has them to a slot."""

    rank: int
    slot: int
    expert: int
    """EMPTY: the slot is only emptied, nothing is copied."""
    source_rank: int
    """``rank`` itself if it has the expert in another slot, or if nothing is copied."""


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a round; the moves of a round are those of each of its stages."""

    placement: Placement
    """In force while the stage lasts; after a disable: from its beginning."""
    name: Name
    moves: tuple[Move, ...]


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """The whole way, four stages a round."""

    stages: tuple[Stage, ...]
    kept: tuple[Move, ...]
    """What was wanted and cannot be done without a gap. Then that is everything: no slot is spare."""

    def reached(self, old: Placement) -> Placement:
        """The placement at the end."""
        return self.stages[-1].placement if self.stages else old


def stages(old: Placement, new: Placement, *, room: int = 1) -> Schedule:
    """The rounds from one placement to the other, with ``room`` experts of spare memory a rank.

    Both have the same slots, as ``eplb.rebalance`` makes them. Sources take turns among the replicas
    that are there when a round begins.
    """
    assert room >= 1
    walk = _Walk(old, room)
    pending = _wanted(old, new)
    while pending:
        pending = walk.go(pending)
        if not walk.moved and not walk.lend([walk.at(at) for at, _ in pending]):
            break
        if not pending:
            pending = walk.loans()
    kept = [(at, expert) for at, expert in pending if expert != EMPTY]
    return Schedule(stages=tuple(walk.stages), kept=_from_sources(walk.now(), kept))


class _Walk:
    """The placement on its way, and the stages so far."""

    def __init__(self, old: Placement, room: int) -> None:
        self._rows = [list(row) for row in old.slots]
        self._shared = old.shared
        self._room = room
        self._enabled = collections.Counter(itertools.chain(*old.slots))
        self._lent: dict[Slot, int] = {}
        """What the owner of a slot on loan has there."""
        self.moved = False
        """The last round moved something."""
        self.stages: list[Stage] = []

    def at(self, slot: Slot) -> int:
        """The expert there."""
        return self._rows[slot[0]][slot[1]]

    def now(self) -> Placement:
        """The placement in force."""
        return Placement(tuple(tuple(row) for row in self._rows), self._shared)

    def go(self, pending: list[tuple[Slot, int]]) -> list[tuple[Slot, int]]:
        """One round with all that can move; returns the rest."""
        chosen, rest = [], []
        used: collections.Counter[int] = collections.Counter()
        for slot, expert in pending:
            if used[slot[0]] < self._room and self._spare(self.at(slot)):
                used[slot[0]] += 1
                self._enabled[self.at(slot)] -= 1
                chosen.append((slot, expert))
            else:
                rest.append((slot, expert))
        self._round(chosen)
        return rest

    def lend(self, stuck: list[int]) -> bool:
        """A round that copies experts that are stuck into slots that are spare; False: there is none.

        Slots that are on loan already come first: what is there may have reached its place.
        """
        slots = [(rank, i) for rank, row in enumerate(self._rows) for i in range(len(row))]
        slots.sort(key=lambda slot: slot not in self._lent)
        experts = iter(dict.fromkeys(stuck))
        chosen: list[tuple[Slot, int]] = []
        used: collections.Counter[int] = collections.Counter()
        for slot in slots:
            held = self.at(slot)
            if used[slot[0]] == self._room or held in stuck or not self._spare(held):
                continue
            expert = next(experts, None)
            if expert is None:
                break
            self._lent.setdefault(slot, held)
            self._enabled[held] -= 1
            used[slot[0]] += 1
            chosen.append((slot, expert))
        self._round(chosen)
        return self.moved

    def loans(self) -> list[tuple[Slot, int]]:
        """What has to be given back."""
        return [(slot, held) for slot, held in sorted(self._lent.items()) if self.at(slot) != held]

    def _spare(self, expert: int) -> bool:
        return expert == EMPTY or self._enabled[expert] > 1

    def _round(self, chosen: list[tuple[Slot, int]]) -> None:
        """Four stages; ``_enabled`` counts the slots chosen as disabled already."""
        self.moved = bool(chosen)
        if not chosen:
            return
        before = self.now()
        todo = _from_sources(before, chosen)
        self._stage("prefetch", todo)
        for (rank, slot), _ in chosen:
            self._rows[rank][slot] = EMPTY
        self._stage("disable", todo)
        self._stage("load", todo)
        for (rank, slot), expert in chosen:
            self._rows[rank][slot] = expert
            self._enabled[expert] += 1
        self._stage("enable", todo)

    def _stage(self, name: Name, todo: tuple[Move, ...]) -> None:
        self.stages.append(Stage(placement=self.now(), name=name, moves=todo))


def _wanted(old: Placement, new: Placement) -> list[tuple[Slot, int]]:
    assert old.rooms == new.rooms and old.shared == new.shared
    return [
        ((rank, slot), expert)
        for rank, (before, after) in enumerate(zip(old.slots, new.slots, strict=True))
        for slot, (held, expert) in enumerate(zip(before, after, strict=True))
        if held != expert
    ]


def _from_sources(old: Placement, wanted: list[tuple[Slot, int]]) -> tuple[Move, ...]:
    turn: collections.Counter[int] = collections.Counter()
    found = []
    for (rank, slot), expert in wanted:
        source = rank
        if expert != EMPTY and expert not in old.held(rank):
            replicas = old.replicas(expert)
            source = replicas[turn[expert] % len(replicas)]
            turn[expert] += 1
        found.append(Move(rank=rank, slot=slot, expert=expert, source_rank=source))
    return tuple(found)
