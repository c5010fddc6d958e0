"""Seeded faults of transport, for tests: what a lost, doubled or exchanged message does to data.

A test hook: code under test passes what it received through ``touch(part, items)``, and a
``Tamper`` changes one of them once. Nothing but tests makes one. The parts are those of ``Body``:
"seeds" and "places" of a prompt, "vectors", "experts", "weights", "results", "shared", KV "rows",
and "slots", the indexes of those results that are combined. Items count along the first axis.

Owns the kinds of faults; who must see them is the oracle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Items = npt.NDArray[Any]
Draw = Callable[[int], int]
"""An integer below the one given, from a named stream: ``cmnet.entropy.Stream.below``."""
Change = Callable[[Items, Items, Draw], Items | None]
"""(items, items of the pass before, draw) -> changed items, or None where it cannot be done."""


def flip_bit(items: Items, _before: Items, draw: Draw) -> Items | None:
    """One bit anywhere."""
    if not items.size:
        return None
    changed = items.copy()
    words = changed.reshape(-1).view(np.uint64)
    words[draw(words.size)] ^= np.uint64(1 << draw(64))
    return changed


def drop(items: Items, _before: Items, draw: Draw) -> Items | None:
    """One item never arrived: its memory is still zero."""
    return _put(items, draw, lambda item: np.zeros_like(item))


def leave_out(items: Items, _before: Items, draw: Draw) -> Items | None:
    """One item fewer."""
    return np.delete(items, draw(len(items)), axis=0) if len(items) else None


def double(items: Items, _before: Items, draw: Draw) -> Items | None:
    """One item more: one of them is there twice."""
    if not len(items):
        return None
    index = draw(len(items))
    return np.concatenate([items, items[index : index + 1]])


def copy_over(items: Items, _before: Items, draw: Draw) -> Items | None:
    """One item also lies where another should be."""
    if len(items) < 2:
        return None
    first = draw(len(items))
    changed = items.copy()
    changed[(first + 1 + draw(len(items) - 1)) % len(items)] = items[first]
    return changed


def raise_by_one(items: Items, _before: Items, draw: Draw) -> Items | None:
    """One item is its neighbour's number."""
    return _put(items, draw, lambda item: item + item.dtype.type(1))


def lower_or_raise(items: Items, _before: Items, draw: Draw) -> Items | None:
    """One number is off by one and still valid: an even one goes up, an odd one down."""
    flat = items.reshape(-1)
    changed = _put(flat, draw, lambda item: item ^ item.dtype.type(1))
    return None if changed is None else changed.reshape(items.shape)


def swap(items: Items, _before: Items, draw: Draw) -> Items | None:
    """Two items in each other's place."""
    if len(items) < 2:
        return None
    first = draw(len(items))
    second = (first + 1 + draw(len(items) - 1)) % len(items)
    changed = items.copy()
    changed[[first, second]] = items[[second, first]]
    return changed


def shift(items: Items, _before: Items, _draw: Draw) -> Items | None:
    """Every item one place on, the last first: a list that is read from the wrong beginning."""
    return None if len(items) < 2 else np.roll(items, 1, axis=0)


def stale(items: Items, before: Items, draw: Draw) -> Items | None:
    """One item is what lay there before it was overwritten."""
    count = min(len(items), len(before))
    if not count or items.shape[1:] != before.shape[1:]:
        return None
    index = draw(count)
    changed = items.copy()
    changed[index] = before[index]
    return changed


def _put(items: Items, draw: Draw, change: Callable[[Items], Items]) -> Items | None:
    if not len(items):
        return None
    index = draw(len(items))
    changed = items.copy()
    changed[index] = change(items[index])
    return changed


KINDS: dict[str, tuple[str, Change]] = {
    "wrong prompt row": ("seeds", flip_bit),
    "prompt rows exchanged": ("seeds", swap),
    "wrong block": ("seeds", stale),
    "place off by one": ("places", raise_by_one),
    "dispatched bit flipped": ("vectors", flip_bit),
    "dispatch lost": ("vectors", drop),
    "dispatches exchanged": ("vectors", swap),
    "stale dispatch": ("vectors", stale),
    "wrong expert": ("experts", lower_or_raise),
    "gate weight off by one": ("weights", lower_or_raise),
    "result bit flipped": ("results", flip_bit),
    "result lost": ("results", drop),
    "result in two places": ("results", copy_over),
    "results exchanged": ("results", swap),
    "stale result": ("results", stale),
    "contribution left out": ("slots", leave_out),
    "contribution counted twice": ("slots", double),
    "shared expert missing": ("shared", drop),
    "KV bit flipped": ("rows", flip_bit),
    "KV row lost": ("rows", drop),
    "KV rows exchanged": ("rows", swap),
    "KV rows misplaced": ("rows", shift),
    "stale KV row": ("rows", stale),
}
"""Kind -> the part it hits, and how."""


class Tamper:
    """Changes one pass of one part: the ``passes``-th (from 0), or the next that can be changed."""

    def __init__(self, kind: str, *, passes: int, draw: Draw) -> None:
        self.kind, self.done = kind, False
        self._part, self._change = KINDS[kind]
        self._passes, self._draw = passes, draw
        self._before: Items = np.empty(0, dtype=np.uint64)

    def touch(self, part: str, items: Items) -> Items:
        """The items, changed if it is their turn; never in place."""
        if self.done or part != self._part:
            return items
        self._passes -= 1
        changed = self._change(items, self._before, self._draw) if self._passes < 0 else None
        self._before = items.copy()
        if changed is None or np.array_equal(changed, items):
            return items
        self.done = True
        return changed
