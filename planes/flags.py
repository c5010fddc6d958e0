"""Flags: words of a device's memory that others set and its programs poll.

Owns their values and who waits for them. A poll costs nothing in virtual time: a waiter goes on at the
instant at which the value is visible. Does not own how a flag travels, nor its order after writes
(``planes.ub``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

Accept = Callable[[int], bool]


class Flags:
    """The flags of this process's devices; one that was never set is 0."""

    def __init__(self, make_future: Callable[[], asyncio.Future[int]]) -> None:
        self._make_future = make_future
        self._values: dict[tuple[int, int], int] = {}
        self._waits: dict[tuple[int, int], list[tuple[Accept, asyncio.Future[int]]]] = {}

    def value(self, device: int, flag: int) -> int:
        """What a poll reads now."""
        return self._values.get((device, flag), 0)

    def set(self, device: int, flag: int, value: int) -> None:
        """The value is visible now; whoever waited for such a one goes on at this instant."""
        key = (device, flag)
        self._values[key] = value
        waits = self._waits.get(key)
        if waits is None:
            return
        for accept, future in waits:
            if not future.done() and accept(value):
                future.set_result(value)
        left = [wait for wait in waits if not wait[1].done()]
        if left:
            self._waits[key] = left
        else:
            del self._waits[key]

    async def wait(self, device: int, flag: int, accept: Accept) -> int:
        """Wait until a value is accepted; returns it. No value in between is missed."""
        value = self.value(device, flag)
        if accept(value):
            return value
        future = self._make_future()
        self._waits.setdefault((device, flag), []).append((accept, future))
        return await future
