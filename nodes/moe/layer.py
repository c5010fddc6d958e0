"""One layer of one step at one node, and who takes part: the records of ``exchange``.

Owns rows and results while they lie here. Does not own when a rank is complete (``arrivals``), slots
(``buffers``) nor messages (``exchange``).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any, Literal

import msgspec
import numpy as np

from cmnet.errors import CorruptError
from nodes.model.body import I64, U64
from nodes.moe import layout
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


class Layer:
    """One layer of one step at this node. Local ranks count from 0."""

    __slots__ = (
        "arrivals",
        "by_expert",
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
        self.by_expert: I64 = np.zeros((ranks, experts), dtype=np.int64)
        """[local ranks, experts] rows that came."""
        self.results: U64 = np.empty((0, 0, 0, 0), dtype=np.uint64)
        """[local ranks, batch, slots, words], once a rank has dispatched"""
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
            ranks = len(self.by_expert)
            self.results = np.zeros((ranks, batch, slots, words), dtype=np.uint64)
            self.filled = np.zeros((ranks, batch, slots), dtype=np.bool_)

    def count_rows(self, local: I64, experts: I64) -> None:
        """Rows [n] for experts of local ranks came."""
        flat = local * self.by_expert.shape[1] + experts
        counts = np.bincount(flat, minlength=self.by_expert.size)
        self.by_expert += counts.reshape(self.by_expert.shape)

    def take_rows(self, at_ps: I64, *, first: int, vector_words: int) -> TokenRows:
        """Rows for the experts of those local ranks [ranks] whose instant is not -1, by rank, expert,
        source and slot; they are kept no longer. ``first``: the first local rank."""
        arrivals = self.arrivals["dispatch"]
        rows = layout.joined(arrivals.rows, vector_words)
        arrivals.rows = []
        if at_ps.min() < 0:
            chosen = at_ps.take(rows.targets - first) >= 0
            arrivals.rows = [rows.chosen(np.flatnonzero(~chosen))]
            rows = rows.chosen(np.flatnonzero(chosen))
        order = layout.order_by(rows.targets - first, rows.experts, rows.sources, rows.slots)
        return rows.chosen(order)

    def refuse_rows(self, *, first: int, vector_words: int) -> TokenRows:
        """Take out, and return, the rows of sources that did not all come: their tokens are lost here."""
        arrivals = self.arrivals["dispatch"]
        rows = layout.joined(arrivals.rows, vector_words)
        refused = arrivals.missing()[rows.targets - first, rows.sources]
        arrivals.rows = [rows.chosen(np.flatnonzero(~refused))]
        rows = rows.chosen(np.flatnonzero(refused))
        np.subtract.at(self.by_expert, (rows.targets - first, rows.experts), 1)
        return rows

    def put_results(self, local: I64, slots: I64, results: U64) -> None:
        """Results [n, words] came for the slots (token, k) of local ranks."""
        flat = local * self.filled[0].size + slots
        self.results.reshape(self.filled.size, -1)[flat] = results
        self.filled.reshape(-1)[flat] = True

    def results_of(self, local: I64, numbers: I64) -> tuple[U64, Bools]:
        """Results [n, slots, words] of tokens [n] of local ranks, and which are here [n, slots]."""
        ranks, batch, slots = self.filled.shape
        flat = local * batch + numbers
        results = self.results.reshape(ranks * batch, slots, -1).take(flat, axis=0)
        return results, self.filled.reshape(-1, slots).take(flat, axis=0)


class Samples:
    """How long operators took here: from the first one's begin to the last row or flag, a sample a layer."""

    def __init__(self) -> None:
        self._ps: dict[Phase, array[int]] = {"dispatch": array("q"), "combine": array("q")}

    def add(self, phase: Phase, arrivals: Arrivals) -> None:
        """All local ranks are complete."""
        began_ps = arrivals.began_ps[arrivals.began_ps >= 0]
        if phase in self._ps and len(began_ps):
            last_ps = arrivals.last_ps[arrivals.wanted].max()
            self._ps[phase].append(int(last_ps - began_ps.min()))

    def statistics(self) -> dict[str, list[int]]:
        """In ps."""
        return {f"{phase}_ps": samples.tolist() for phase, samples in self._ps.items()}
