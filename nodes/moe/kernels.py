"""The inner loops of an exchange's ends in compiled code: who is complete, orders, rows of words. Pure.

Owns loops only: what the arrays mean is in ``arrivals``, ``layout`` and ``layer``, which call these.
Importing this module compiles the kernels or loads them from numba's cache, so a program that forks
imports it before. No fastmath, and no constant of another module is compiled in: numba's cache looks
at this file only. Indices are not checked: what came from elsewhere is looked at before (``misplaced``,
``write_slots``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
from numba import types

Function = TypeVar("Function", bound=Callable[..., Any])

NOTHING, I64 = types.void, types.int64
LINE = types.Array(types.int64, 1, "C")
TABLE = types.Array(types.int64, 2, "C")
BOOLS = types.Array(types.boolean, 1, "C")
WORDS = types.Array(types.uint64, 2, "C")
SOME_WORDS = types.Array(types.uint64, 2, "A")
"""Rows that may lie apart."""

KEY_BITS_MAX = 62
"""Of keys that are sorted as one."""
DIGIT_BITS = 11
"""Of a sort: 16 KiB of places stay in the nearest cache."""

_COMPILE: Any = numba.njit


def _kernel(result: Any, *arguments: Any) -> Callable[[Function], Function]:
    compiled: Callable[[Function], Function] = _COMPILE(
        result(*arguments), cache=True, fastmath=False, error_model="numpy"
    )
    return compiled


@_kernel(I64, LINE, LINE, I64, I64)
def misplaced(sources: Any, targets: Any, first: int, end: int) -> Any:
    """The first message [n] that is not of a rank to another one of ``first`` to ``end``; -1: there is
    none."""
    for at in range(len(sources)):
        inside = sources[at] >= 0 and first <= targets[at] < end
        if not inside or sources[at] == targets[at]:
            return at
    return -1


# --- who is complete ------------------------------------------------------------------------------


@_kernel(I64, LINE, LINE, I64, BOOLS, BOOLS)
def announce(ranks: Any, announced: Any, sources: int, wanted: Any, done: Any) -> Any:
    """Count flags [n] for ``ranks`` in ``announced``; whether a rank that waits has so many as there are
    sources."""
    for at in range(len(ranks)):
        announced[ranks[at]] += 1
    for rank in range(len(announced)):
        if announced[rank] >= sources and wanted[rank] and not done[rank]:
            return 1
    return 0


@_kernel(NOTHING, LINE, LINE, LINE, LINE, LINE, TABLE, LINE, LINE, TABLE, BOOLS, LINE)
def set_flags(
    ranks: Any,
    sources: Any,
    at_ps: Any,
    counts: Any,
    began_ps: Any,
    flags_ps: Any,
    all_began_ps: Any,
    last_ps: Any,
    due: Any,
    expected: Any,
    left: Any,
) -> None:
    """Take flags [n] (the first five) to the tables of ``Arrivals`` (the others), but those that came
    before. ``due`` [0, 0]: they count no rows. ``expected`` [0]: not known yet."""
    for at in range(len(ranks)):
        rank, source = ranks[at], sources[at]
        if flags_ps[rank, source] < 0:
            flags_ps[rank, source] = at_ps[at]
            all_began_ps[source] = began_ps[at]
            last_ps[rank] = max(last_ps[rank], at_ps[at])
            if len(due):
                due[rank, source] = counts[at]
            if len(expected) and expected[source]:
                left[rank] -= 1


@_kernel(NOTHING, LINE, LINE, LINE, TABLE, LINE)
def add_rows(ranks: Any, sources: Any, at_ps: Any, come: Any, last_ps: Any) -> None:
    """Count rows [n] in ``come``."""
    for at in range(len(ranks)):
        rank = ranks[at]
        come[rank, sources[at]] += 1
        last_ps[rank] = max(last_ps[rank], at_ps[at])


@_kernel(I64, LINE, BOOLS, BOOLS, TABLE, TABLE, BOOLS, LINE)
def complete(
    left: Any,
    wanted: Any,
    done: Any,
    come: Any,
    due: Any,
    expected: Any,
    found: Any,
) -> Any:
    """Ranks that wait, have no flag left to come, and of who is expected all rows that are due (both
    tables [0, 0]: none are): they are done now. Their number; they are in ``found`` [ranks]."""
    number = 0
    for rank in range(len(left)):
        if left[rank] or not wanted[rank] or done[rank]:
            continue
        here = True
        if len(due):
            for source in range(len(expected)):
                if expected[source] and come[rank, source] < due[rank, source]:
                    here = False
                    break
        if here:
            done[rank] = True
            found[number] = rank
            number += 1
    return number


# --- slots ----------------------------------------------------------------------------------------


@_kernel(I64, LINE, LINE, LINE, I64, I64, TABLE)
def write_slots(
    ranks: Any, slots: Any, at_ps: Any, sources: int, never_ps: int, taken_ps: Any
) -> Any:
    """Writes [n] to slots, which are busy then: they are taken at ``never_ps``. Returns the first to one
    that is not there or is busy, and then writes none; -1: there is none. In ``taken_ps`` [ranks, slots]
    a slot of a source lies beside those of other sources with the same number: few numbers are in use, so
    little memory is."""
    each = taken_ps.shape[1] // sources
    for at in range(len(slots)):
        slot = slots[at]
        if not 0 <= slot < taken_ps.shape[1]:
            return at
        place = slot % each * sources + slot // each
        if taken_ps[ranks[at], place] > at_ps[at]:
            return at
    for at in range(len(slots)):
        taken_ps[ranks[at], slots[at] % each * sources + slots[at] // each] = never_ps
    return -1


@_kernel(NOTHING, LINE, LINE, LINE, I64, TABLE)
def take_slots(ranks: Any, slots: Any, at_ps: Any, sources: int, taken_ps: Any) -> None:
    """These slots [n] are free from their instants on."""
    each = taken_ps.shape[1] // sources
    for at in range(len(slots)):
        place = slots[at] % each * sources + slots[at] // each
        taken_ps[ranks[at], place] = at_ps[at]


# --- orders ---------------------------------------------------------------------------------------


@_kernel(I64, TABLE, LINE)
def join_keys(keys: Any, out: Any) -> Any:
    """Keys [m, n] as one key each [n], the first one's bits above the second's, and so on. Returns how
    many bits that takes; more than ``KEY_BITS_MAX``: too many, -1: there is a negative key."""
    total = 0
    out[:] = 0
    for key in range(keys.shape[0]):
        most = 0
        for at in range(keys.shape[1]):
            if keys[key, at] < 0:
                return -1
            most = max(most, keys[key, at])
        bits = 0
        while most >> bits:
            bits += 1
        total += bits
        if total > KEY_BITS_MAX:
            return total
        for at in range(keys.shape[1]):
            out[at] = (out[at] << bits) | keys[key, at]
    return total


@_kernel(LINE, LINE, I64)
def order(keys: Any, bits: int) -> Any:
    """The stable order of keys [n] below 2^bits, by digits from the lowest."""
    count, digits = len(keys), 1 << DIGIT_BITS
    found, other = np.arange(count), np.empty(count, np.int64)
    places = np.empty(digits + 1, np.int64)
    for shift in range(0, bits, DIGIT_BITS):
        places[:] = 0
        for at in range(count):
            places[((keys[at] >> shift) & (digits - 1)) + 1] += 1
        for digit in range(digits):
            places[digit + 1] += places[digit]
        for at in range(count):
            row = found[at]
            digit = (keys[row] >> shift) & (digits - 1)
            other[places[digit]] = row
            places[digit] += 1
        found, other = other, found
    return found


@_kernel(LINE, LINE, I64)
def running_index(groups: Any, end: int) -> Any:
    """How many earlier entries [n] are of the same group, of those below ``end``."""
    index, seen = np.empty(len(groups), np.int64), np.zeros(end, np.int64)
    for at in range(len(groups)):
        group = groups[at]
        index[at] = seen[group]
        seen[group] += 1
    return index


# --- rows of words --------------------------------------------------------------------------------


@_kernel(NOTHING, TABLE, WORDS, LINE, WORDS)
def pack(leads: Any, bodies: Any, of: Any, out: Any) -> None:
    """Rows [n] of ``out``: the words of a lead [n], then those of the body ``of`` it."""
    lead, body = leads.shape[1], bodies.shape[1]
    for row in range(len(of)):
        source = of[row]
        for word in range(lead):
            out[row, word] = leads[row, word]
        for word in range(body):
            out[row, lead + word] = bodies[source, word]


@_kernel(NOTHING, SOME_WORDS, LINE, WORDS)
def put(rows: Any, places: Any, out: Any) -> None:
    """Each of the rows [n, words] to its place in ``out``."""
    for row in range(len(places)):
        place = places[row]
        for word in range(out.shape[1]):
            out[place, word] = rows[row, word]
