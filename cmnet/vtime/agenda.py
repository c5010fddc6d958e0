"""The ordered heap of a node's events: one total order, written once (design 1.4).

Owns the order ``(at_ps, kind, source, sequence)``. Does not own the clock or what an event does. An
event is a tuple of those four integers, then a callable and its one argument, then its *silence*; the
four integers are unique together, so the callable is never compared. The silence is a promise of who
added the event: for so many picoseconds more nothing leaves this process because of it, nor is anything
else known of it elsewhere. The windows of all processes are the wider for it (``horizon``).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from typing import Any

from cmnet.units import NEVER_PS

DELIVERY, PORT, TIMER, CALLBACK = range(4)
"""Kinds in the order in which they run at one instant; ready callbacks (3) live in the loop's deque."""

Event = tuple[int, int, int, int, Callable[[Any], None], Any, int]


class Agenda:
    """Events that are due at instants. ``heap`` is for the loop's drain; others use the methods."""

    __slots__ = ("_created", "heap")

    def __init__(self) -> None:
        self.heap: list[Event] = []
        self._created = 0

    def add_delivery(
        self,
        at_ps: int,
        source: int,
        sequence: int,
        run: Callable[[Any], None],
        item: Any,
        silence_ps: int = 0,
    ) -> None:
        """A message of a source device; (source, sequence) never repeats in this agenda."""
        heapq.heappush(self.heap, (at_ps, DELIVERY, source, sequence, run, item, silence_ps))

    def add_port(self, at_ps: int, port: int, run: Callable[[Any], None], item: Any) -> None:
        """An egress start; ties of one port run in order of creation."""
        self._created += 1
        heapq.heappush(self.heap, (at_ps, PORT, port, self._created, run, item, 0))

    def add_timer(
        self, at_ps: int, run: Callable[[Any], None], item: Any, silence_ps: int = 0
    ) -> None:
        """A timer; ties run in order of creation."""
        self._created += 1
        heapq.heappush(self.heap, (at_ps, TIMER, 0, self._created, run, item, silence_ps))

    def next_at_ps(self) -> int:
        """The instant of the least event, NEVER_PS if there is none."""
        return self.heap[0][0] if self.heap else NEVER_PS

    def reaction_ps(self, cancelled: Callable[[Event], bool]) -> int:
        """The earliest instant at which something may leave because of an event that is not cancelled;
        NEVER_PS if there is none. The same whatever else is in the heap, and where."""
        heap, least_ps, places = self.heap, NEVER_PS, [0]
        for place in places:  # which grows: by the two after an event, unless they cannot be sooner
            if place < len(heap) and heap[place][0] < least_ps:
                event = heap[place]
                if not cancelled(event):
                    least_ps = min(least_ps, event[0] + event[6])
                places += (2 * place + 1, 2 * place + 2)
        return least_ps

    def take_instant(self, instant: deque[Event]) -> None:
        """Move all events of the least instant, in order, to the end of ``instant``.

        What these events add for the same instant is moved by a later call.
        """
        heap, pop = self.heap, heapq.heappop
        at_ps = heap[0][0]
        instant.append(pop(heap))
        while heap and heap[0][0] == at_ps:
            instant.append(pop(heap))

    def drop_head(self) -> None:
        """Remove the least event (the loop does so with timers that were cancelled)."""
        heapq.heappop(self.heap)

    def discard(self, unwanted: Callable[[Event], bool]) -> int:
        """Remove every event that matches; returns how many."""
        kept = [event for event in self.heap if not unwanted(event)]
        removed = len(self.heap) - len(kept)
        if removed:
            self.heap[:] = kept
            heapq.heapify(self.heap)
        return removed
