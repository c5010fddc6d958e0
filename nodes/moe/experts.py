"""The expert side of a node: what its ranks do between a dispatch and a combine.

Owns when each rank's experts are done and what they compute. Does not own messages (``exchange``) nor the
cost of computation (the caller's function). Ranks of one node are computed together, each at its time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from cmnet.vtime.loop import VirtualLoop
from nodes.model.body import Body
from nodes.moe.due import Due
from nodes.moe.exchange import Exchange
from nodes.moe.layer import Key, Touch, ignore
from nodes.moe.layout import no_rows
from nodes.moe.operators import Operators
from nodes.moe.sending import Leg


class ExpertTime(Protocol):
    """How long a rank's experts take."""

    def __call__(self, *, rows: float, experts: int | None) -> int: ...


class Served(NamedTuple):
    """One rank's dispatch and what followed."""

    key: Key
    rank: int
    rows: int
    dispatched_ps: int
    """When its dispatch returned: all rows are in order."""
    combine_began_ps: int
    """When its experts were done."""


class Experts:
    """All experts of one node. ``run`` is for ever."""

    def __init__(
        self,
        loop: VirtualLoop,
        exchange: Exchange,
        body: Body,
        operators: Operators,
        *,
        expert_ps: ExpertTime,
        layer_of: Callable[[Key], int],
        touch: Touch,
    ) -> None:
        self._exchange, self._body, self._touch = exchange, body, touch
        self._operators, self._expert_ps, self._layer_of = operators, expert_ps, layer_of
        self._start_ps = operators.combine_start_ps
        self._times_ps = functools.lru_cache(maxsize=4096)(self._count_times_ps)
        self._due: Due[Served] = Due(loop)
        self.hold_ps: Callable[[Key, int], int] | None = None
        """When a rank's combine begins whose experts are done at an instant, if not then."""
        self.on_served: Callable[[Served], Any] = ignore
        """Told of each rank when its results leave."""
        exchange.on_dispatched = self._dispatched

    def _dispatched(self, key: Key, done_ps: dict[int, int]) -> None:
        counts, first, start_ps = self._exchange.counts(key), self._exchange.first, self._start_ps
        lot = []
        for rank, at_ps in done_ps.items():
            count = counts[rank - first]
            reorder_ps, taken_ps = self._times_ps(*count)
            read_ps = at_ps + reorder_ps
            began_ps = read_ps + taken_ps
            if self.hold_ps is not None:
                began_ps = self.hold_ps(key, began_ps)
            lot.append((began_ps + start_ps, Served(key, rank, count[0], read_ps, began_ps)))
        self._due.add_all(lot, start_ps, at_once=self._exchange.all_dispatched(key))

    def _count_times_ps(self, rows: int, experts: int) -> tuple[int, int]:
        """Of the reordering, and of the experts; many ranks have the same rows, or none."""
        return self._operators.reorder_ps(rows), self._expert_ps(rows=rows, experts=experts)

    def statistics(self) -> dict[str, int]:
        """Of combines that were known late, see ``due``."""
        return self._due.statistics()

    async def run(self) -> None:
        """Serve what becomes due."""
        while True:
            by_key: dict[Key, list[tuple[int, Served]]] = {}
            for first_ps, served in await self._due.take():
                by_key.setdefault(served.key, []).append((first_ps, served))
            for key, lot in by_key.items():
                if self._exchange.is_open(key):
                    await self._serve(key, lot)

    async def _serve(self, key: Key, lot: list[tuple[int, Served]]) -> None:
        rows = no_rows(self._body.vector_words)
        results = np.empty((0, self._body.result_words), dtype=np.uint64)
        if any(served.rows for _, served in lot):
            rows = self._exchange.rows(
                key, {served.rank: served.dispatched_ps for _, served in lot}
            )
            rows = rows._replace(
                experts=self._touch("experts", rows.experts),
                vectors=self._touch("vectors", rows.vectors),
            )
            results = self._body.expert(rows.experts, rows.vectors, layer=self._layer_of(key))
        legs = {served.rank: Leg(served.combine_began_ps, first_ps) for first_ps, served in lot}
        await self._exchange.combine(key, rows, results, legs)
        for _, served in lot:
            self.on_served(served)
