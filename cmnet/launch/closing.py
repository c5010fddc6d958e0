"""The last thing that is asked of the processes of a run: that each writes down its statistics. Pure.

Owns who is asked when. Does not own what they write nor what follows.
"""

from __future__ import annotations

from collections.abc import Callable


class Closing:
    """Asks processes one after the other, since what runs beside the run then has a core for itself; or
    all at once, if some may never answer."""

    def __init__(self, ask: Callable[[int], None], done: Callable[[], None]) -> None:
        """``done`` is called when all that were to be asked have answered or died."""
        self._ask, self._done = ask, done
        self._due: list[int] = []
        self.asked: set[int] = set()
        """Of these an answer is due."""

    def begin(self, processes: list[int], *, at_once: bool) -> None:
        """Once, with those that live."""
        self._due = list(processes)
        while at_once and self._due:
            self._ask_next()
        self._go_on()

    def answered(self, process: int) -> None:
        """Or it died: nothing more is due of it."""
        self.asked.discard(process)
        if process in self._due:
            self._due.remove(process)
        self._go_on()

    def _go_on(self) -> None:
        if self.asked:
            return
        if self._due:
            self._ask_next()
        else:
            self._done()

    def _ask_next(self) -> None:
        process = self._due.pop(0)
        self.asked.add(process)
        self._ask(process)
