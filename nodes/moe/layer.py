"""One layer of one step at one node, and who takes part: the records of ``exchange``.

Owns rows and results while they lie here. Does not own when a rank is complete (``arrivals``), slots
(``detector``) nor messages (``exchange``).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any, Literal

import msgspec
import numpy as np

from cmnet.errors import CorruptError, FrameError
from cmnet.units import NEVER_PS
from nodes.model.body import I64, U64
from nodes.moe import kernels, layout, placement
from nodes.moe.arrivals import Arrivals, Bools
from nodes.moe.layout import TokenRows, Tokens
from nodes.moe.placement import Placement

Key = tuple[int, int, int]
"""(epoch, step, layer)"""
Touch = Callable[[str, Any], Any]
Phase = Literal["count", "dispatch", "combine"]
KINDS: dict[Phase, int] = {"dispatch": 72, "combine": 73, "count": 74}
Complete = Callable[[Key, dict[int, int]], None]
"""(key, rank -> the instant at which it was complete)"""
Late = Callable[[Key, Phase, dict[int, list[int]]], None]
"""(key, phase, rank -> ranks that it still waits for)"""
Lost = Callable[[Key, Phase, list[int]], None]
"""(key, phase, ranks that the link did not reach)"""
Wrong = Callable[[Key, CorruptError], None]
"""(key, what was wrong with messages that came)"""


def ignore(*_: Any) -> None:
    """Nobody asked."""


def end_run(_: Key, error: CorruptError) -> None:
    """Nobody knows better: wrong bytes end the run."""
    raise error


class Group(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """Who takes part in a step."""

    sources: I64
    """Ranks that dispatch, with tokens or without."""
    experts: I64
    """Ranks that serve experts."""
    placements: tuple[Placement, ...]
    """Of each layer; the one of all, if there is one only."""
    batch: int
    """The most tokens of a source."""

    def placement(self, layer: int) -> Placement:
        """Who holds what in this layer."""
        return self.placements[layer % len(self.placements)]

    def without(self, dead: frozenset[int]) -> Group:
        """The same without these ranks (``placement.without``)."""
        gone = np.array(sorted(dead), dtype=np.int64)
        return msgspec.structs.replace(
            self,
            sources=np.setdiff1d(self.sources, gone),
            experts=np.setdiff1d(self.experts, gone),
            placements=tuple(placement.without(each, dead=dead) for each in self.placements),
        )


def check_ends(phase: Phase, sources: I64, targets: I64, *, first: int, ranks: int) -> None:
    """Messages, not flags, came from sources [n] to targets [n]. FrameError at what no rank sends."""
    wrong = kernels.misplaced(sources, targets, first, first + ranks)
    if wrong >= 0 or phase == "count":
        raise FrameError(f"a message of rank {sources[wrong]} to rank {targets[wrong]}")


class Layer:
    """One layer of one step at this node. Local ranks count from 0."""

    __slots__ = (
        "_by_expert",
        "_experts",
        "_ranks",
        "arrivals",
        "filled",
        "results",
        "timers",
        "unread",
        "unsent",
    )

    def __init__(self, *, ranks: int, experts: int) -> None:
        """``experts``: the shared one included."""
        self.arrivals: dict[Phase, Arrivals] = {}
        self.timers: dict[Phase, Any] = {}
        self._ranks, self._experts = ranks, experts
        self._by_expert: I64 | None = None
        """[local ranks, experts] rows that came, if any did."""
        self.results: U64 = np.empty((0, 0, 0, 0), dtype=np.uint64)
        """[local ranks, batch, slots, words], once a rank has dispatched; anything where not ``filled``"""
        self.filled: Bools = np.empty((0, 0, 0), dtype=np.bool_)
        self.unread: set[int] = set()
        """Ranks that dispatched and have not read their results."""
        self.unsent: dict[int, Tokens] = {}
        """Tokens of local ranks that wait for the counts (unfused)."""

    def given_up(self) -> bool:
        """Rows or results lie here that nobody has read."""
        dispatched = self.arrivals.get("dispatch")
        left = dispatched is not None and any(len(rows.sources) for rows in dispatched.rows)
        return left or bool(self.unread)

    def await_results(self, *, batch: int, slots: int, words: int) -> None:
        """Room for the results of all local ranks' tokens."""
        if not self.filled.size:
            self.results = np.empty((self._ranks, batch, slots, words), dtype=np.uint64)
            self.filled = np.zeros((self._ranks, batch, slots), dtype=np.bool_)

    def count_rows(self, local: I64, experts: I64) -> None:
        """Rows [n] for experts of local ranks came."""
        flat = local * self._experts + experts
        counts = np.bincount(flat, minlength=self._ranks * self._experts)
        counts = counts.reshape(self._ranks, self._experts)
        self._by_expert = counts if self._by_expert is None else self._by_expert + counts

    def counts(self) -> list[tuple[int, int]]:
        """[local ranks] rows that came, and the experts that they are for."""
        if self._by_expert is None:
            return [(0, 0)] * self._ranks
        rows, experts = self._by_expert.sum(axis=1), np.count_nonzero(self._by_expert, axis=1)
        return list(zip(rows.tolist(), experts.tolist(), strict=True))

    def take_rows(self, at_ps: I64, *, first: int, vector_words: int) -> TokenRows:
        """Rows for the experts of those local ranks [ranks] whose instant is not -1, by rank, expert,
        source and slot; they are kept no longer. ``first``: the first local rank."""
        arrivals = self.arrivals["dispatch"]
        parts, arrivals.rows = arrivals.rows, []
        if at_ps.min() < 0:
            rows = layout.joined(parts, vector_words)
            chosen = at_ps.take(rows.targets - first) >= 0
            arrivals.rows = [rows.chosen(np.flatnonzero(~chosen))]
            parts = [rows.chosen(np.flatnonzero(chosen))]
        return layout.sorted_rows(parts, vector_words, first=first)

    def refuse_rows(self, *, first: int, vector_words: int) -> TokenRows:
        """Take out, and return, the rows of sources that did not all come: their tokens are lost here."""
        arrivals = self.arrivals["dispatch"]
        rows = layout.joined(arrivals.rows, vector_words)
        refused = arrivals.missing()[rows.targets - first, rows.sources]
        arrivals.rows = [rows.chosen(np.flatnonzero(~refused))]
        rows = rows.chosen(np.flatnonzero(refused))
        if self._by_expert is not None:
            np.subtract.at(self._by_expert, (rows.targets - first, rows.experts), 1)
        return rows

    def put_results(self, local: I64, slots: I64, results: U64) -> None:
        """Results [n, words] came for the slots (token, k) of local ranks."""
        flat = local * self.filled[0].size + slots
        kernels.put(results, flat, self.results.reshape(self.filled.size, -1))
        self.filled.reshape(-1)[flat] = True

    def results_of(self, local: I64, numbers: I64) -> tuple[U64, Bools]:
        """Results [n, slots, words] of tokens [n] of local ranks, and which are here [n, slots]; to be
        read only."""
        ranks, batch, slots = self.filled.shape
        flat, count = local * batch + numbers, len(numbers)
        results = self.results.reshape(ranks * batch, slots, -1)
        filled = self.filled.reshape(-1, slots)
        if count and (flat == np.arange(flat[0], flat[0] + count)).all():
            some = slice(int(flat[0]), int(flat[0]) + count)  # no copy of what lies together
            return results[some], filled[some]
        return results.take(flat, axis=0), filled.take(flat, axis=0)


class Samples:
    """How long operators took here: from the first one's begin to the last row or flag, a sample a layer."""

    def __init__(self) -> None:
        self._ps: dict[Phase, array[int]] = {"dispatch": array("q"), "combine": array("q")}

    def add(self, phase: Phase, arrivals: Arrivals) -> None:
        """All local ranks are complete."""
        began_ps = arrivals.began_ps
        first_ps = int(began_ps.min(where=began_ps >= 0, initial=NEVER_PS))
        if phase in self._ps and first_ps < NEVER_PS:
            last_ps = int(arrivals.last_ps.max(where=arrivals.wanted, initial=0))
            self._ps[phase].append(last_ps - first_ps)

    def statistics(self) -> dict[str, list[int]]:
        """In ps."""
        return {f"{phase}_ps": samples.tolist() for phase, samples in self._ps.items()}
