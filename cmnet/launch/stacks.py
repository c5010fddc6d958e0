"""Where the tasks of a loop wait, and what keeps it from getting on, in words for people.

Owns the words only. Nothing here changes a task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

LINES_MAX = 40
FRAMES_MAX = 4


def waits(loop: asyncio.AbstractEventLoop) -> list[str]:
    """A line for each task: its name and where it waits, innermost call first."""
    tasks = sorted(asyncio.all_tasks(loop), key=hash)
    return [f"{task.get_name()} in {_where(task)}" for task in tasks[:LINES_MAX]]


def spinning(due: list[Callable[..., Any]]) -> list[str]:
    """A line for each task or callback that is due at an instant which does not end."""
    lines: dict[str, None] = {}
    for callback in due:
        owner = getattr(callback, "__self__", None)
        if isinstance(owner, asyncio.Task):
            lines[f"spins: {owner.get_name()} in {_where(owner)}"] = None
        else:
            code = getattr(callback, "__code__", None)
            name = getattr(callback, "__qualname__", repr(callback))
            lines[f"spins: {name}{_place(code, code.co_firstlineno) if code else ''}"] = None
        if len(lines) == LINES_MAX:
            break
    return list(lines)


def _where(task: asyncio.Task[Any]) -> str:
    frames = [f"{code.co_name}{_place(code, line)}" for code, line in _frames(task.get_coro())]
    return ", called by ".join(frames[::-1][:FRAMES_MAX]) or "its start"


def _place(code: CodeType, line: int) -> str:
    return f" at {Path(code.co_filename).name}:{line}"


def _frames(coro: Any) -> Iterator[tuple[CodeType, int]]:
    """Code and line of a suspended coroutine and of all that it awaits, outermost first."""
    while coro is not None:
        frame = getattr(coro, "cr_frame", None) or getattr(coro, "gi_frame", None)
        if frame is None:
            return
        yield frame.f_code, frame.f_lineno
        coro = getattr(coro, "cr_await", None) or getattr(coro, "gi_yieldfrom", None)
