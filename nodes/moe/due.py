"""Ranks of a node that become ready at instants of their own, taken together when the first is.

Owns the order in which they are taken, and what becomes of one that is known late. Does not own what is
done for them. One call for many ranks costs what one for one rank does; each keeps its own instant. What
is taken depends on virtual instants only.

A rank is known to be complete at the event of a frame of flags, the first byte of its last flag
(``cmnet.burst_arrivals``). Without rules that is little after the rank was complete: the flags of one
source to one process, about 0.1 us, and a propagation delay where its own flag was the one it waited for
(together 0.6 us at most in runs on ``mini``). An operator that follows takes microseconds before it
writes, so none is late; after the last layer none follows. With rules flags of one frame may lie as far
apart as those delay or slow them. What is known late is due at once, and counted.
"""

from __future__ import annotations

import asyncio
import operator
from typing import Any, Generic, TypeVar

from cmnet.units import NEVER_PS
from cmnet.vtime.loop import VirtualLoop

T = TypeVar("T")

_instant: Any = operator.itemgetter(0)


class Due(Generic[T]):
    """Items, each with the instant at which it is due."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._items: list[tuple[int, T]] = []
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ps = NEVER_PS
        self.late = 0
        """Items whose instant had passed when they were added."""
        self.late_ps_max = 0
        """By how much, at most."""

    def add(self, at_ps: int, item: T) -> None:
        """An instant that has passed is now, and ``late``."""
        self.add_all([(at_ps, item)])

    def add_all(self, items: list[tuple[int, T]]) -> None:
        """As ``add``, one after the other."""
        now_ps = self._loop.now_ps
        first_ps = min([at_ps for at_ps, _ in items], default=NEVER_PS)
        if first_ps < now_ps:
            items = [self._in_time(at_ps, item, now_ps) for at_ps, item in items]
            first_ps = now_ps
        self._items += items
        if self._waiter is not None and first_ps < self._timer_ps:
            self._arm(first_ps)

    def _in_time(self, at_ps: int, item: T, now_ps: int) -> tuple[int, T]:
        late_ps = now_ps - at_ps
        if late_ps <= 0:
            return at_ps, item
        self.late += 1
        self.late_ps_max = max(self.late_ps_max, late_ps)
        return now_ps, item

    async def take(self) -> list[tuple[int, T]]:
        """Wait for the first that is due; returns all that are known by then, in order of instants
        (equal ones: as they were added)."""
        assert self._waiter is None, "one taker"
        self._waiter = self._loop.create_future()
        try:
            if self._items:
                first_ps = min(at_ps for at_ps, _ in self._items)
                self._arm(max(first_ps, self._loop.now_ps))  # due while nobody waited
            await self._waiter
        finally:
            self._waiter = None
            self._disarm()
        items = sorted(self._items, key=_instant)
        self._items = []
        return items

    def statistics(self) -> dict[str, int]:
        """How many were known late, and by how much at most."""
        return {"late": self.late, "late_ps_max": self.late_ps_max}

    def _arm(self, at_ps: int) -> None:
        self._disarm()
        self._timer_ps = at_ps
        self._timer = self._loop.call_at_ps(at_ps, self._wake)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_ps = None, NEVER_PS

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
