"""A new placement that moves little: only what is in slots that can be spared. Pure.

Owns which expert each spare slot gets. Does not own placements that move anything (``eplb``). A slot is
spare if its expert has another replica that stays: of all replicas of an expert the one in the lowest slot,
of these at the lowest rank, is at home and never moves. So all slots of a rank are refilled one after the
other, each in one round, while every token still finds its expert at home.
"""

from __future__ import annotations

import numpy as np

from nodes.moe.eplb import PARTS
from nodes.moe.placement import EMPTY, I64, Placement


def refilled(old: Placement, loads: I64) -> Placement:
    """Spare slots with replicas for these loads [experts].

    One by one: the fullest rank's heaviest expert (load per replica) gets a replica at the rank that has
    least of those with a spare slot and without that expert; ties: the lower expert, and where it is
    already, then the lower rank. What the fullest rank cannot give away ends it: the slots that are left
    stay as they are.
    """
    home = _homes(old)
    work = _Work(old, loads, home)
    while work.give():
        pass
    return Placement(work.slots(), old.shared)


def _homes(old: Placement) -> dict[tuple[int, int], int]:
    """(rank, slot) -> expert, of all that stay."""
    first: dict[int, tuple[int, int]] = {}
    for rank, row in enumerate(old.slots):
        for slot, expert in enumerate(row):
            if expert != EMPTY and (slot, rank) < first.get(expert, (slot + 1, rank)):
                first[expert] = (slot, rank)
    return {(rank, slot): expert for expert, (slot, rank) in first.items()}


class _Work:
    """Replicas at home, and those that spare slots have got so far."""

    def __init__(self, old: Placement, loads: I64, home: dict[tuple[int, int], int]) -> None:
        self._old, self._home = old, home
        self._loads = loads * PARTS
        self._holds = np.zeros((old.ep_size, len(loads)), dtype=np.bool_)
        for (rank, _), expert in home.items():
            self._holds[rank, expert] = True
        self._free: I64 = np.array(old.rooms, dtype=np.int64)
        np.subtract.at(self._free, [rank for rank, _ in home], 1)
        self._new: list[list[int]] = [[] for _ in old.slots]
        """Experts that each rank's spare slots got."""

    def give(self) -> bool:
        """One replica more, from the fullest rank to the one that has least."""
        parts = self._loads // self._holds.sum(axis=0)
        sums = (self._holds * parts).sum(axis=1)
        full = int(sums.argmax())
        for expert in np.argsort(-parts * self._holds[full], kind="stable").tolist():
            if not self._holds[full, expert]:
                return False
            rank = self._taker(expert, sums)
            if rank >= 0:
                self._holds[rank, expert] = True
                self._free[rank] -= 1
                self._new[rank].append(expert)
                return True
        return False

    def _taker(self, expert: int, sums: I64) -> int:
        """-1: nobody has room."""
        ranks = np.flatnonzero((self._free > 0) & ~self._holds[:, expert]).tolist()
        there = [expert not in self._old.slots[rank] for rank in ranks]
        return min(zip(sums[ranks].tolist(), there, ranks, strict=True), default=(0, True, -1))[2]

    def slots(self) -> tuple[tuple[int, ...], ...]:
        """What a slot has already stays in it, if it is still wanted or nothing else is."""
        found = []
        for rank, row in enumerate(self._old.slots):
            spare = [slot for slot in range(len(row)) if (rank, slot) not in self._home]
            coming = list(self._new[rank])
            now = list(row)
            taken = []
            for slot in spare:
                if row[slot] in coming:
                    coming.remove(row[slot])
                    taken.append(slot)
            for slot, expert in zip((s for s in spare if s not in taken), coming):
                now[slot] = expert
            found.append(tuple(now))
        return tuple(found)
