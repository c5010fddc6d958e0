"""What the conductor decides: reports in, grants out (design 1.3). Pure.

Owns the window number, the horizon, and how many frames each process must have read. Does not own
sockets, processes or the wall clock. The horizon is the least *reaction* to a next event anywhere plus
the lookahead, cut at the next *stop* (an instant at which the supervisor wants a barrier). The reaction
to an event is the earliest instant at which another process could see anything of it leave: the event
itself, or later where its process has promised so (``Agenda``). A frame that a process reported as sent
counts as an event of its receiver from then on, so no window waits for a wire.

The door (design 1.6) is one more peer: what comes from outside is stamped with the last horizon,
counted like a frame and so never passed by.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cmnet.units import NEVER_PS

Send = tuple[int, int, int, int]
"""(peer, frames sent to it in this window, the earliest instant at which one of them matters, the earliest
reaction to one)."""


class Grant(NamedTuple):
    """Leave to run one window. ``frames_expected`` counts frames of earlier windows, ever."""

    process: int
    window: int
    horizon_ps: int
    frames_expected: int
    barrier: bool


@dataclass(frozen=True, slots=True)
class Death:
    """What receivers must know of a death: frames of windows from ``window`` on are discarded."""

    process: int
    at_ps: int
    window: int


class Horizon:
    """The conductor's state. Call ``report`` for each grant, then ``decide`` when ``closed``."""

    def __init__(self, processes: int, lookahead_ps: int) -> None:
        assert lookahead_ps > 0
        self.lookahead_ps = lookahead_ps
        self.window = 0
        self.horizon_ps = 0
        self.grants_count = 0
        self._next_ps = [NEVER_PS] * processes
        self._reaction_ps = [NEVER_PS] * processes
        self._alive = [False] * processes
        self._expected = [0] * processes
        self._running: dict[int, bool] = {}
        self._reports: list[tuple[int, int, int, Sequence[Send]]] = []
        self._stops: list[int] = []
        self._entered: list[tuple[int, int]] = []
        self._window_start_ps = 0

    # --- what comes in ----------------------------------------------------------------------------

    def join(self, process: int, next_at_ps: int) -> None:
        """A process is up (again); it has read no frame."""
        assert not self._alive[process] and self.closed
        self._alive[process] = True
        self._next_ps[process] = self._reaction_ps[process] = next_at_ps
        self._expected[process] = 0

    def report(
        self, process: int, window: int, next_at_ps: int, reaction_ps: int, sends: Sequence[Send]
    ) -> None:
        """The one answer to a grant: the process's next event, the earliest reaction to one that it has,
        what it sent."""
        assert window == self.window and process in self._running, (process, window, self.window)
        del self._running[process]
        self._reports.append((process, next_at_ps, reaction_ps, sends))
        if not self._running:
            self._close()

    def died(self, process: int) -> Death:
        """A process ended, by wish or by itself: what it did in an open window did not happen. One
        that had not joined (again) counts as dead at the last horizon."""
        self._alive[process] = False
        self._next_ps[process] = self._reaction_ps[process] = NEVER_PS
        if self.closed:
            return Death(process, self.horizon_ps, self.window + 1)
        death = Death(process, self._window_start_ps, self.window)
        self._reports = [entry for entry in self._reports if entry[0] != process]
        self._running.pop(process, None)
        if not self._running:
            self._close()
        return death

    def enter(self, process: int, pace_ps: int = 0) -> int:
        """Something from outside for a process: its stamp; the process must be told before it runs."""
        at_ps = max(self.horizon_ps, pace_ps)
        self._entered.append((process, at_ps))
        if self.closed:
            self._take_entered()
        return at_ps

    def stop_at(self, at_ps: int) -> None:
        """Ask for a barrier: no event before this instant is left, none at or after it has run."""
        assert at_ps >= self.horizon_ps, (at_ps, self.horizon_ps)
        bisect.insort(self._stops, at_ps)

    # --- what goes out ----------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """No grant is open."""
        return not self._running

    def running(self) -> Iterable[int]:
        """Processes that have not answered their grant."""
        return self._running.keys()

    def alive(self) -> list[int]:
        """Processes that live, in order."""
        return [process for process, alive in enumerate(self._alive) if alive]

    def least_ps(self) -> int:
        """The least next event of any process."""
        return min(self._next_ps)

    def decide(self) -> list[Grant]:
        """The grants of the next window; empty when nobody has anything to do.

        At a stop these are barrier grants for all; when they are answered, ``take_stop`` is due: at
        once if nobody lives (``stops_left``).
        """
        assert self.closed
        least_ps = self.least_ps()
        stop_ps = self._stops[0] if self._stops else NEVER_PS
        if least_ps == stop_ps == NEVER_PS:
            return []
        if least_ps >= stop_ps:
            return self._open(stop_ps, stop_ps, self.alive(), barrier=True)
        horizon_ps = min(min(self._reaction_ps) + self.lookahead_ps, stop_ps)
        next_ps = self._next_ps
        processes = [p for p in range(len(next_ps)) if next_ps[p] < horizon_ps]
        return self._open(least_ps, horizon_ps, processes, barrier=False)

    @property
    def stops_left(self) -> bool:
        """Stops are to come."""
        return bool(self._stops)

    def take_stop(self) -> int:
        """The stop whose barrier has been answered; forgets it."""
        return self._stops.pop(0)

    def _open(
        self, start_ps: int, horizon_ps: int, processes: list[int], *, barrier: bool
    ) -> list[Grant]:
        self.window += 1
        self._window_start_ps = start_ps
        self.horizon_ps = horizon_ps
        self.grants_count += len(processes)
        self._running = dict.fromkeys(processes, True)
        expected, window = self._expected, self.window
        return [Grant(p, window, horizon_ps, expected[p], barrier) for p in processes]

    def _close(self) -> None:
        next_ps, expected, alive = self._next_ps, self._expected, self._alive
        reactions_ps = self._reaction_ps
        for process, next_at_ps, reaction_ps, _ in self._reports:
            next_ps[process], reactions_ps[process] = next_at_ps, reaction_ps
        for _, _, _, sends in self._reports:
            for peer, frames, earliest_ps, reaction_ps in sends:
                if alive[peer]:
                    expected[peer] += frames
                    if earliest_ps < next_ps[peer]:
                        next_ps[peer] = earliest_ps
                    if reaction_ps < reactions_ps[peer]:
                        reactions_ps[peer] = reaction_ps
        self._reports = []
        if self._entered:
            self._take_entered()

    def _take_entered(self) -> None:
        """As frames that another peer sent in the window that has closed."""
        for process, at_ps in self._entered:
            if self._alive[process]:
                self._expected[process] += 1
                self._next_ps[process] = min(self._next_ps[process], at_ps)
                self._reaction_ps[process] = min(self._reaction_ps[process], at_ps)
        self._entered = []
