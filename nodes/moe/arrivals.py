"""What has come to the ranks of one node in one phase of one layer, and which of them have all. Pure.

A rank is *complete* when every source that takes part has set its flag here and as many rows as it
counted have come; that it was then is ``last_ps``, the latest of all those deliveries. A flag that comes
again changes nothing. Does not own what rows mean.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cmnet.errors import FrameError
from nodes.model.body import I64
from nodes.moe import kernels

Bools = npt.NDArray[np.bool_]

_NOBODY: Bools = np.zeros(0, dtype=np.bool_)
_NO_ROWS: I64 = np.zeros((0, 0), dtype=np.int64)


class Arrivals:
    """Local ranks 0..ranks-1, sources 0..ep_size-1. ``rows`` are whatever ``add_rows`` was given."""

    __slots__ = (
        "_announced",
        "_come",
        "_due",
        "_expected",
        "_flagged",
        "_flags_left",
        "_sources",
        "began_ps",
        "done",
        "flags_ps",
        "last_ps",
        "rows",
        "wanted",
    )

    def __init__(self, *, ranks: int, ep_size: int) -> None:
        self.flags_ps: I64 = np.full((ranks, ep_size), -1, dtype=np.int64)
        self.began_ps: I64 = np.full(ep_size, -1, dtype=np.int64)
        """When each source's operator began."""
        self.rows: list[Any] = []
        self.wanted: Bools
        """Ranks that wait."""
        self.done: Bools
        """Complete, or given up."""
        self.wanted, self.done = np.zeros((2, ranks), dtype=np.bool_)
        self._expected: Bools | None = None
        self._sources = 0
        """How many are expected."""
        self.last_ps: I64
        """[ranks] the latest of what came."""
        self._announced: I64
        """[ranks] flags that are as good as here."""
        self._flags_left: I64
        """[ranks] flags of those that are expected which have not come."""
        self.last_ps, self._announced, self._flags_left = np.zeros((3, ranks), dtype=np.int64)
        self._flagged = False
        """Some flag came."""
        self._due = self._come = _NO_ROWS
        """[ranks, ep_size] rows that flags counted, and that came; nothing before there are any."""

    @property
    def expected(self) -> Bools | None:
        """[ep_size] sources that take part; None: not known yet."""
        return self._expected

    @expected.setter
    def expected(self, expected: Bools | None) -> None:
        self._expected = expected
        if expected is not None:
            self._sources = int(np.count_nonzero(expected))
            if self._flagged:
                self._flags_left = np.count_nonzero(self.flags_ps[:, expected] < 0, axis=1)
            else:
                self._flags_left.fill(self._sources)

    def in_time(self, rows: Any, at_ps: I64, *, first: int) -> tuple[Any, I64]:
        """Those rows, with their instants [n], that are of use: nobody takes one whose rank has given up.
        ``first``: local rank 0."""
        if not self.done.any():
            return rows, at_ps
        late = self.done.take(rows.targets - first)
        if not late.any():
            return rows, at_ps
        kept = np.flatnonzero(~late)
        return rows.chosen(kept), at_ps.take(kept)

    def add_rows(self, ranks: I64, sources: I64, at_ps: I64, rows: Any) -> None:
        """Rows [n] came to local ranks from sources at these instants."""
        self._count_rows()
        kernels.add_rows(ranks, sources, at_ps, self._come, self.last_ps)
        self.rows.append(rows)

    def _count_rows(self) -> None:
        if not len(self._due):
            self._due, self._come = np.zeros((2, *self.flags_ps.shape), dtype=np.int64)

    def announce(self, ranks: I64) -> bool:
        """Flags [n] come, each once; whether a rank that waits now has those of all, as far as they are
        announced. (Also too early, where some are of who is not expected any more.) Raises FrameError at
        one for no rank."""
        if len(ranks) and ranks.min() < 0:
            raise FrameError("a flag for a device without a rank")
        every = kernels.announce(ranks, self._announced, self._sources, self.wanted, self.done)
        return self._expected is not None and bool(every)

    def add_flags(
        self, ranks: I64, sources: I64, *, at_ps: I64, counts: I64, began_ps: I64
    ) -> None:
        """Flags [n] came, each with the rows that its source sent to this rank."""
        if counts.any():
            self._count_rows()
        kernels.set_flags(
            ranks,
            sources,
            at_ps,
            counts,
            began_ps,
            self.flags_ps,
            self.began_ps,
            self.last_ps,
            self._due,
            _NOBODY if self._expected is None else self._expected,
            self._flags_left,
        )
        self._flagged = True

    def missing(self) -> Bools:
        """[ranks, ep_size]: sources whose flag or rows are not all here."""
        late: Bools = self.flags_ps < 0
        if len(self._due):
            late |= self._come < self._due
        return late if self._expected is None else late & self._expected

    def newly_complete(self) -> list[int]:
        """Local ranks that wait, are complete and were not; they are done now."""
        if self._expected is None:
            return []
        found = np.empty(len(self.done), dtype=np.int64)
        count = kernels.complete(
            self._flags_left,
            self.wanted,
            self.done,
            self._come,
            self._due,
            self._expected,
            found,
        )
        complete: list[int] = found[:count].tolist()
        return complete

    def fewer_than(self, rank: int, rows: I64) -> list[int]:
        """Sources from which fewer than these rows [ep_size] have come to a local rank."""
        self._count_rows()
        fewer: list[int] = np.flatnonzero(self._come[rank] < rows).tolist()
        return fewer
