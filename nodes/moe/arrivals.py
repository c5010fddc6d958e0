"""What has come to the ranks of one node in one phase of one layer, and which of them have all. Pure.

A rank is *complete* when every source that takes part has set its flag here and as many rows as it
counted have come; that it was then is ``last_ps``, the latest of all those deliveries. A flag that comes
again changes nothing. Does not own what rows mean.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from nodes.model.body import I64

Bools = npt.NDArray[np.bool_]


class Arrivals:
    """Local ranks 0..ranks-1, sources 0..ep_size-1. ``rows`` are whatever ``add_rows`` was given."""

    def __init__(self, *, ranks: int, ep_size: int) -> None:
        self.expected: Bools | None = None
        """[ep_size] sources that take part; None: not known yet."""
        self.flags_ps: I64 = np.full((ranks, ep_size), -1, dtype=np.int64)
        self.began_ps: I64 = np.full(ep_size, -1, dtype=np.int64)
        """When each source's operator began."""
        self.last_ps: I64 = np.zeros(ranks, dtype=np.int64)
        self.rows: list[Any] = []
        self.wanted: Bools = np.zeros(ranks, dtype=np.bool_)
        """Ranks that wait."""
        self.done: Bools = np.zeros(ranks, dtype=np.bool_)
        """Complete, or given up."""
        self._announced: Bools = np.zeros((ranks, ep_size), dtype=np.bool_)
        """Flags that are as good as here."""
        self._due: I64 = np.zeros((ranks, ep_size), dtype=np.int64)
        self._come: I64 = np.zeros((ranks, ep_size), dtype=np.int64)

    def in_time(self, rows: Any, at_ps: I64, *, first: int) -> tuple[Any, I64]:
        """Those rows, with their instants [n], that are of use: nobody takes one whose rank has given up.
        ``first``: local rank 0."""
        late = self.done.take(rows.targets - first)
        if not late.any():
            return rows, at_ps
        kept = np.flatnonzero(~late)
        return rows.chosen(kept), at_ps.take(kept)

    def add_rows(self, ranks: I64, sources: I64, at_ps: I64, rows: Any) -> None:
        """Rows [n] came to local ranks from sources at these instants."""
        ep_size = self._come.shape[1]
        flat = ranks * ep_size + sources
        self._come += np.bincount(flat, minlength=self._come.size).reshape(self._come.shape)
        np.maximum.at(self.last_ps, ranks, at_ps)
        self.rows.append(rows)

    def announce(self, ranks: I64, sources: I64) -> bool:
        """Flags [n] come; whether a rank that waits now has those of all."""
        self._announced[ranks, sources] = True
        return self.all_announced()

    def all_announced(self) -> bool:
        """A rank that waits has the flags of all, as far as they are announced."""
        if self.expected is None:
            return False
        every: Bools = np.logical_and.reduce(self._announced | ~self.expected, axis=1)
        return bool((every & self.wanted & ~self.done).any())

    def add_flags(
        self, ranks: I64, sources: I64, *, at_ps: I64, counts: I64, began_ps: I64
    ) -> None:
        """Flags [n] came, each with the rows that its source sent to this rank."""
        new = self.flags_ps[ranks, sources] < 0
        ranks, sources, at_ps = ranks[new], sources[new], at_ps[new]
        self.flags_ps[ranks, sources] = at_ps
        self._announced[ranks, sources] = True
        self._due[ranks, sources] = counts[new]
        self.began_ps[sources] = began_ps[new]
        np.maximum.at(self.last_ps, ranks, at_ps)

    def missing(self) -> Bools:
        """[ranks, ep_size]: sources whose flag or rows are not all here."""
        late: Bools = (self.flags_ps < 0) | (self._come < self._due)
        return late if self.expected is None else late & self.expected

    def newly_complete(self) -> list[int]:
        """Local ranks that wait, are complete and were not; they are done now."""
        if self.expected is None:
            return []
        complete = ~self.missing().any(axis=1) & ~self.done & self.wanted
        self.done |= complete
        found: list[int] = np.flatnonzero(complete).tolist()
        return found

    def fewer_than(self, rank: int, rows: I64) -> list[int]:
        """Sources from which fewer than these rows [ep_size] have come to a local rank."""
        fewer: list[int] = np.flatnonzero(self._come[rank] < rows).tolist()
        return fewer
