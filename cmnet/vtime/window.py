"""The node's side of a grant: when it may run, and what it must read first. Pure.

Owns the counts of frames by window and sender. Frames carry the number of the window in which they
were sent: those of the window in progress, or of later ones, may already be read and do not count yet.
"""

from __future__ import annotations


class WindowGate:
    """Counts frames; says whether the pending grant may run."""

    __slots__ = ("_counts", "_past", "frames_expected", "horizon_ps", "window")

    def __init__(self) -> None:
        self.window = 0
        self.horizon_ps = 0
        self.frames_expected = 0
        self._past = 0
        self._counts: dict[int, dict[int, int]] = {}

    def granted(self, window: int, horizon_ps: int, frames_expected: int) -> None:
        """A grant came: frames of windows before it count now."""
        self.window, self.horizon_ps = window, horizon_ps
        self.frames_expected = frames_expected
        if self._counts:
            for earlier in [w for w in self._counts if w < window]:
                self._past += sum(self._counts.pop(earlier).values())

    def frame_read(self, peer: int, window: int) -> None:
        """A frame of a peer's window came in."""
        if window < self.window:
            self._past += 1
        else:
            counts = self._counts.setdefault(window, {})
            counts[peer] = counts.get(peer, 0) + 1

    def forget(self, peer: int, window: int) -> None:
        """Frames of a dead peer from this window on never happened."""
        for later, counts in self._counts.items():
            if later >= window:
                counts.pop(peer, None)

    def open(self) -> bool:
        """All frames that the grant names have been read."""
        assert self._past <= self.frames_expected or not self.window, (
            "a frame was not accounted for"
        )
        return self._past == self.frames_expected
