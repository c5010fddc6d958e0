"""Ranks of a node that begin to write at instants of their own, taken together ahead of the first.

Owns the order in which they are taken, and what becomes of one that is known late. Does not own what is
done for them. One call for many ranks costs what one for one rank does; each keeps its own instant. What
is taken depends on virtual instants only.

An operator starts before it writes, so a rank is taken ``ahead`` of its instant, or once all ranks of the
node are known: what it writes is made then, and leaves at the instant. Meanwhile its node is silent, which
widens the windows of all (``vtime.agenda``), so that many nodes compute in one.

A rank is known to be complete at the event of a frame of flags, the first byte of its last flag
(``cmnet.burst_arrivals``). Without rules that is little after the rank was complete: the flags of one
source to one process, about 0.1 us, and a propagation delay where its own flag was the one it waited for
(together 0.6 us at most in runs on ``mini``), where operators start for microseconds. After such an event
half of ``ahead`` passes in any case before the rank writes (``silence_ps``). With rules flags of one frame
may lie as far apart as those delay or slow them. Who is known so late that its instant is sooner writes
after that half, and is counted.
"""

from __future__ import annotations

import asyncio
import operator
from typing import Any, Generic, TypeVar

from cmnet.units import NEVER_PS
from cmnet.vtime.loop import VirtualLoop

T = TypeVar("T")

_instant: Any = operator.itemgetter(0)


def silence_ps(ahead_ps: int) -> int:
    """How long after it is known that a rank is complete it writes nothing, at least."""
    return ahead_ps // 2


class Due(Generic[T]):
    """Items, each with the instant at which it begins to write."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._items: list[tuple[int, T]] = []
        self._first_ps = NEVER_PS
        """The least instant of an item."""
        self._take_ps = NEVER_PS
        """When they are taken."""
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.late = 0
        """Items that were known too late for their instant."""
        self.late_ps_max = 0
        """By how much, at most."""

    def add(self, at_ps: int, item: T, ahead_ps: int = 0) -> None:
        """See ``add_all``."""
        self.add_all([(at_ps, item)], ahead_ps)

    def add_all(
        self, items: list[tuple[int, T]], ahead_ps: int = 0, *, at_once: bool = False
    ) -> None:
        """Items to be taken ``ahead_ps`` before their instants, or ``at_once``. One that is ``late`` gets
        the soonest instant that its silence allows."""
        now_ps = self._loop.now_ps
        soonest_ps = now_ps + silence_ps(ahead_ps)
        first_ps = min([at_ps for at_ps, _ in items], default=NEVER_PS)
        if first_ps < soonest_ps:
            items = [self._in_time(at_ps, item, soonest_ps) for at_ps, item in items]
            first_ps = soonest_ps
        self._items += items
        take_ps = now_ps if at_once else max(first_ps - ahead_ps, now_ps)
        if take_ps < self._take_ps or first_ps < self._first_ps:
            self._take_ps = min(self._take_ps, take_ps)
            self._first_ps = min(self._first_ps, first_ps)
            if self._waiter is not None:
                self._arm()

    def _in_time(self, at_ps: int, item: T, soonest_ps: int) -> tuple[int, T]:
        late_ps = soonest_ps - at_ps
        if late_ps <= 0:
            return at_ps, item
        self.late += 1
        self.late_ps_max = max(self.late_ps_max, late_ps)
        return soonest_ps, item

    async def take(self) -> list[tuple[int, T]]:
        """Wait until the first is to be taken; returns all that are known by then, in order of instants
        (equal ones: as they were added). Those may lie ahead."""
        assert self._waiter is None, "one taker"
        self._waiter = self._loop.create_future()
        try:
            if self._items:
                self._arm()
            await self._waiter
        finally:
            self._waiter = None
            self._disarm()
        items = sorted(self._items, key=_instant)
        self._items = []
        self._first_ps = self._take_ps = NEVER_PS
        return items

    def statistics(self) -> dict[str, int]:
        """How many were known late, and by how much at most."""
        return {"late": self.late, "late_ps_max": self.late_ps_max}

    def _arm(self) -> None:
        self._disarm()
        at_ps = max(self._take_ps, self._loop.now_ps)  # due while nobody waited
        left_ps = max(self._first_ps - at_ps, 0)
        self._timer = self._loop.call_at_ps(at_ps, self._wake, silence_ps=left_ps)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
