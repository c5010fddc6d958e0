"""Reading a file of lines while another process writes it.

Owns the wait for more. Wall time, so for checkers beside a run, never for a node of it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from io import FileIO
from pathlib import Path

POLL_S = 0.01

Ended = Callable[[float], bool]
"""Whether nothing more will be written; waits up to so many seconds for that."""


def follow(path: Path, *, ended: Ended, poll_s: float = POLL_S) -> Iterator[bytes]:
    """Whole lines of a file as they come, without their newline.

    Goes on until ``ended`` has said that nothing more will be written and all was read. A last line
    without newline was not finished and is left out. The file need not exist yet.
    """
    return follow_all([path], ended=ended, poll_s=poll_s)


def follow_all(paths: Sequence[Path], *, ended: Ended, poll_s: float = POLL_S) -> Iterator[bytes]:
    """As ``follow``, for several files; lines of one keep their order."""
    streams: list[FileIO | None] = [None] * len(paths)
    begun = [b""] * len(paths)
    wait_s = 0.0
    with contextlib.ExitStack() as stack:
        while True:
            last, idle = ended(wait_s), True
            for index, path in enumerate(paths):
                stream = streams[index]
                if stream is None and path.exists():
                    stream = streams[index] = stack.enter_context(path.open("rb", buffering=0))
                data = stream.read() if stream is not None else b""
                if data:
                    *lines, begun[index] = (begun[index] + data).split(b"\n")
                    idle = idle and not lines
                    yield from lines
            if last:
                return
            wait_s = poll_s if idle else 0.0


def wall_s() -> float:
    """Seconds of a clock that all processes of this host share."""
    return time.perf_counter()
