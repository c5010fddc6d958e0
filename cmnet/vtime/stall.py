"""When a run that goes on counts as stalled (design 1.7). Pure.

Owns the rule only: work is outstanding, and for long there was neither a mark nor an instant without
any. It knows virtual instants alone, so a run stalls at the same one on every host.
"""

from __future__ import annotations

from collections.abc import Callable

from cmnet.units import PS_PER_S

STALL_PS = 600 * PS_PER_S
"""Virtual time with work outstanding and no application mark (design 1.7)."""


class Stall:
    """Asked whenever time went on or the work outstanding changed."""

    __slots__ = ("_busy", "since_ps")

    def __init__(self) -> None:
        self._busy = False
        self.since_ps = 0
        """The last mark known, or when outstanding work last left 0 if that is later."""

    def due(self, now_ps: int, *, outstanding: int, marked_ps: Callable[[], int]) -> bool:
        """Nothing was achieved for too long. ``marked_ps``, the last mark anywhere, is asked for
        only when it may matter."""
        if outstanding <= 0:
            self._busy = False
            return False
        if not self._busy:
            self._busy = True
            self.since_ps = now_ps
        if now_ps - self.since_ps > STALL_PS:
            self.since_ps = max(self.since_ps, marked_ps())
        return now_ps - self.since_ps > STALL_PS
