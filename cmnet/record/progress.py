"""A progress bar while a run goes on: on a terminal only, drawn when asked, without a thread.

Owns the counting of finished pieces (lines of a file that the run writes). Standard error, so that
pipes of standard output stay clean.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from cmnet.units import format_ps

if TYPE_CHECKING:
    from rich.progress import Progress as Bar


class Progress:
    """``with Progress(...)``: call ``show`` now and then. No terminal, no bar."""

    def __init__(self, path: Path, *, total: int) -> None:
        self._path = path
        self._total = total
        self._offset = 0
        self._done = 0
        self._bar: Bar | None = None

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
            from rich.progress import Progress as Bar

            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
            console = Console(file=sys.stderr)
            self._bar = Bar(*columns, console=console, auto_refresh=False, transient=True)
            self._bar.start()
            self._task = self._bar.add_task("launching", total=self._total)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, now_ps: int) -> None:
        """Draw it: pieces done, and how far virtual time is."""
        if self._bar is None:
            return
        self._count()
        text = f"{format_ps(now_ps)} of virtual time"
        self._bar.update(self._task, completed=self._done, description=text, refresh=True)

    def _count(self) -> None:
        if self._path.exists():
            with self._path.open("rb") as stream:
                stream.seek(self._offset)
                data = stream.read()
            self._offset += len(data)
            self._done += data.count(b"\n")
