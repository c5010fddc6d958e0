"""Ports for many messages at once: ``Server`` in compiled code, to the same picosecond. Pure.

Owns the arithmetic of bursts: an egress that serves a leg, the order of what arrives at many ports,
and the settling of those. Does not own what a message is; rows are int64 in columns, see the constants.
Importing this module compiles the kernels or loads them from numba's cache, so a program that forks
imports it before. No fastmath, and no constant of another module is compiled in: numba's cache looks
at this file only.

bits x 10^12 / rate is taken in three steps of 10^4 each, on what the step before left over: int64 holds
that for sizes and rates below ``LIMIT``, and the quotient for what takes less than ``SECONDS_MAX``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
from numba import types

Function = TypeVar("Function", bound=Callable[..., Any])

FIRST, LAST, CHARGED, RATE, SOURCE, TARGET, SEQUENCE = range(7)
"""Columns of a message that left: first byte and last byte (ps) at its target, charged bytes, ingress
rate (bit/s), devices, sequence (negative, its top bit set, for a copy)."""
ROW, GROUP = 7, 8
"""Further table at the egress: the message's place in its burst, and the frame that it goes in."""
COLUMNS = 7
BEGIN, DATA, COUNT, WIDTH, FILLED, LEAST, GREATEST, TOTAL, FIRST_SOURCE = range(9)
"""Of a part of a frame that is filled, see ``fill_frames``; then its first row's target and sequence."""

LIMIT = 1 << 49
"""Bits of one message and bits per second are below it."""
SECONDS_BITS = 22
SECONDS_MAX = 1 << SECONDS_BITS
"""One message takes less: 48 days, 4.2 x 10^18 ps of the 9.2 x 10^18 that int64 holds."""
SEQUENCE_MAX = (1 << 63) - 1
NEVER_PS = (1 << 63) - 1

UNSETTLED, SETTLED, HANDED = 0, 1, 2
"""States of a row that has arrived."""

I64 = types.int64
LINE = types.Array(types.int64, 1, "C")
TABLE = types.Array(types.int64, 2, "C")
CUBE = types.Array(types.int64, 3, "C")
OCTETS = FLAGS = types.Array(types.uint8, 1, "C")
READ_DATA = types.Array(types.uint8, 2, "C", readonly=True)
READ_TABLE = types.Array(types.int64, 2, "C", readonly=True)

_COMPILE: Any = numba.njit
_SHARED: Any = numba.njit(inline="always")


def _kernel(result: Any, *arguments: Any) -> Callable[[Function], Function]:
    compiled: Callable[[Function], Function] = _COMPILE(
        result(*arguments), cache=True, fastmath=False, error_model="numpy"
    )
    return compiled


@_SHARED  # type: ignore[untyped-decorator]  # numba has no types
def _loaded(states: Any, at: int) -> Any:
    """A server of states [.., 8]: free, whole, rest, rate; and what the last size took at the last rate,
    since sizes seldom change and divisions are slow. As a tuple it stays in registers."""
    free_ps, whole_ps, rest, rate_bps = states[at, 0], states[at, 1], states[at, 2], states[at, 3]
    last_bytes, last_bps, spent_ps, part = (
        states[at, 4],
        states[at, 5],
        states[at, 6],
        states[at, 7],
    )
    return free_ps, whole_ps, rest, rate_bps, last_bytes, last_bps, spent_ps, part


@_SHARED  # type: ignore[untyped-decorator]  # numba has no types
def _store(states: Any, at: int, server: Any) -> Any:
    states[at, 0], states[at, 1], states[at, 2], states[at, 3] = server[:4]
    states[at, 4], states[at, 5], states[at, 6], states[at, 7] = server[4:]


@_SHARED  # type: ignore[untyped-decorator]  # numba has no types
def _serve(server: Any, start_ps: int, charged_bytes: int, rate_bps: int) -> Any:  # numba infers
    """``Server.serve`` on a loaded server, which is returned; its first is the finish."""
    free_ps, whole_ps, rest, rate, last_bytes, last_bps, spent_ps, part = server
    if not (start_ps <= free_ps and rate_bps == rate):
        whole_ps, rest = start_ps, 0
    if not (charged_bytes == last_bytes and rate_bps == last_bps):
        spent_ps, part = 0, charged_bytes * 8
        for _ in range(3):
            part *= 10_000
            spent_ps = spent_ps * 10_000 + part // rate_bps
            part %= rate_bps
    rest += part
    over = 1 if rest >= rate_bps else 0
    rest -= rate_bps * over
    whole_ps += spent_ps + over
    finish_ps = whole_ps + (1 if rest else 0)
    return finish_ps, whole_ps, rest, rate_bps, charged_bytes, rate_bps, spent_ps, part


@_SHARED  # type: ignore[untyped-decorator]  # numba has no types
def _receive(server: Any, table: Any, row: Any) -> Any:
    """``Server.receive`` on a loaded server: the delivery, and the server after it. What a die has for
    itself passes no port."""
    first_ps, last_ps = table[row, FIRST], table[row, LAST]
    delivered_ps = last_ps
    if table[row, SOURCE] != table[row, TARGET]:
        start_ps = max(first_ps, server[0])
        server = _serve(server, start_ps, table[row, CHARGED], table[row, RATE])
        delivered_ps = server[0]
        if last_ps > delivered_ps:
            _, whole_ps, rest, _, last_bytes, last_bps, spent_ps, part = server
            server = (last_ps, whole_ps, rest, 0, last_bytes, last_bps, spent_ps, part)
            delivered_ps = last_ps
    return delivered_ps, server


@_SHARED  # type: ignore[untyped-decorator]  # numba has no types
def _number(table: Any, row: int) -> Any:
    return table[row, SEQUENCE] & SEQUENCE_MAX


@_SHARED  # type: ignore[untyped-decorator]  # numba has no types
def _comes_before(table: Any, row: int, others: Any, other: int) -> Any:
    """By first byte, source, sequence."""
    for key in (FIRST, SOURCE):
        if table[row, key] != others[other, key]:
            return table[row, key] < others[other, key]
    return _number(table, row) < _number(others, other)


@_SHARED  # type: ignore[untyped-decorator]  # numba has no types
def _bits(value: int) -> Any:
    bits = 0
    while value >> bits:
        bits += 1
    return bits


@_SHARED  # type: ignore[untyped-decorator]  # numba has no types
def _sorted_by_key(order: Any, keys: Any, bits: int) -> Any:
    """Stable, by digits of 11 bits from the lowest."""
    count = len(keys)
    other_order, other_keys = np.empty(count, np.int64), np.empty(count, np.int64)
    for shift in range(0, bits, 11):
        places = np.zeros(2049, np.int64)
        for at in range(count):
            places[((keys[at] >> shift) & 2047) + 1] += 1
        for digit in range(2048):
            places[digit + 1] += places[digit]
        for at in range(count):
            digit = (keys[at] >> shift) & 2047
            place = places[digit]
            places[digit] = place + 1
            other_order[place], other_keys[place] = order[at], keys[at]
        order, other_order = other_order, order
        keys, other_keys = other_keys, keys
    return order, keys


@_kernel(I64, I64, TABLE, LINE, LINE, LINE, LINE, I64, I64, I64, I64, TABLE, TABLE)
def serve_leg(
    source: int,
    paths: Any,
    targets: Any,
    charged_bytes: Any,
    ready_ps: Any,
    flags: Any,
    begin: int,
    end: int,
    now_ps: int,
    until_ps: int,
    state: Any,
    out: Any,
) -> Any:
    """Serve rows begin..end of a burst back to back, as far as they start before ``until_ps``.

    ``paths`` [3, devices] has rate, propagation and process by target; ``state`` [1, 8] is the
    egress. A row to ``source`` itself is in when its turn comes. Fills ``out`` [end - begin, 9] but for
    its source and sequence; returns the first row that is left, or ~row (negative) at one without a
    path, beyond ``LIMIT`` or ``SECONDS_MAX``.
    """
    server = _loaded(state, 0)
    for row in range(begin, end):
        start_ps = max(now_ps, ready_ps[row], server[0])
        if start_ps >= until_ps:
            _store(state, 0, server)
            return row
        target = targets[row]
        rate_bps, propagation_ps = paths[0, target], paths[1, target]
        bits = charged_bytes[row] * 8
        at = row - begin
        if target == source and bits == 0:
            rate_bps = 1
            out[at, FIRST] = out[at, LAST] = start_ps
        else:
            if not (0 <= bits < LIMIT and bits >> SECONDS_BITS < rate_bps < LIMIT):
                return ~row
            server = _serve(server, start_ps, charged_bytes[row], rate_bps)
            out[at, FIRST], out[at, LAST] = start_ps + propagation_ps, server[0] + propagation_ps
        out[at, CHARGED] = charged_bytes[row]
        out[at, RATE] = rate_bps
        out[at, TARGET] = target
        out[at, ROW] = row
        out[at, GROUP] = paths[2, target] * 2 + flags[row]
    _store(state, 0, server)
    return end


@_kernel(I64, I64, LINE, LINE, LINE, CUBE, LINE, LINE, LINE, LINE, I64, I64, TABLE, TABLE)
def serve_legs(
    first_device: int,
    sources: Any,
    edges: Any,
    lasts: Any,
    paths: Any,
    targets: Any,
    charged_bytes: Any,
    ready_ps: Any,
    flags: Any,
    now_ps: int,
    until_ps: int,
    states: Any,
    out: Any,
) -> Any:
    """``serve_leg`` for all rows of a burst: those of ``sources[i]`` are ``edges[i]`` to ``edges[i + 1]``.

    ``paths`` [devices here, 3, devices] begin with ``first_device``; ``states`` [sources, 8];
    ``lasts`` are the sources' last sequences. Fills ``out`` [rows, 9]; returns 0 if a row is left.
    """
    for leg in range(len(sources)):
        begin, end, source = edges[leg], edges[leg + 1], sources[leg]
        stop = serve_leg(
            source,
            paths[source - first_device],
            targets,
            charged_bytes,
            ready_ps,
            flags,
            begin,
            end,
            now_ps,
            until_ps,
            states[leg : leg + 1],
            out[begin:end],
        )
        if stop != end:
            return 0
        for row in range(begin, end):
            out[row, SOURCE] = source
            out[row, SEQUENCE] = lasts[leg] + 1 + row - begin
    return 1


@_kernel(I64, READ_TABLE, I64, I64, I64, I64, I64, LINE)
def look(
    table: Any, messages: int, ran_to_ps: int, first: int, devices: int, sources: int, found: Any
) -> Any:
    """The first row that no sender of ours makes, -1 if there is none: a target that is not here (so many
    ``devices`` from the ``first``), a source that is nowhere, a size or rate beyond ``LIMIT`` or
    ``SECONDS_MAX``, a first byte before ``ran_to_ps``. Of the rows, so many are messages and the others
    flags; ``found`` [4] gets the least first byte of each, the greatest of flags, and how many flags are
    copies."""
    found[0] = found[1] = NEVER_PS
    found[2] = found[3] = 0
    for row in range(len(table)):
        target, source = table[row, TARGET] - first, table[row, SOURCE]
        bits, rate_bps = table[row, CHARGED] * 8, table[row, RATE]
        if not (0 <= target < devices and 0 <= source < sources):
            return row
        if not (0 <= bits < LIMIT and bits >> SECONDS_BITS < rate_bps < LIMIT):
            return row
        first_ps = table[row, FIRST]
        if first_ps < ran_to_ps or table[row, LAST] < first_ps:
            return row
        if row < messages:
            found[0] = min(found[0], first_ps)
        else:
            found[1], found[2] = min(found[1], first_ps), max(found[2], first_ps)
            if table[row, SEQUENCE] < 0:
                found[3] += 1
    return -1


@_kernel(LINE, TABLE, FLAGS, I64, LINE)
def settling_order(table: Any, states: Any, first_device: int, begins: Any) -> Any:
    """Indices of the unsettled rows by (target, first byte, source, sequence).

    ``begins`` [ports + 1] is filled with where each target's begin. Rows whose order does not fit one
    int64 (days apart) are not sorted: then ``begins[0]`` is -1.
    """
    count, base_ps, last_ps = 0, NEVER_PS, 0
    begins[:] = 0
    for row in range(len(table)):
        if states[row] == UNSETTLED:
            count += 1
            base_ps = min(base_ps, table[row, FIRST])
            last_ps = max(last_ps, table[row, FIRST])
            begins[table[row, TARGET] - first_device + 1] += 1
    for port in range(1, len(begins)):
        begins[port] += begins[port - 1]
    order, keys = np.empty(count, np.int64), np.empty(count, np.int64)
    if count == 0:
        return order
    time_bits = _bits(last_ps - base_ps)
    bits = time_bits + _bits(len(begins))
    filled = 0
    for row in range(len(table)):
        if states[row] == UNSETTLED:
            port = table[row, TARGET] - first_device
            keys[filled] = (port << time_bits) | (table[row, FIRST] - base_ps)
            order[filled] = row
            filled += 1
    if bits > 62:
        begins[0] = -1
        return order
    order, keys = _sorted_by_key(order, keys, bits)
    for place in range(1, count):  # equal so far are few, or frames of sources in their order
        back = place
        while back > 0 and keys[back - 1] == keys[place]:
            row, before = order[back], order[back - 1]
            if not _comes_before(table, row, table, before):
                break
            order[back - 1], order[back] = row, before
            back -= 1
    return order


@_kernel(I64, I64, LINE, LINE, LINE, LINE, TABLE, LINE, FLAGS, TABLE, TABLE, LINE, LINE, LINE)
def settle(
    now_ps: int,
    ports: Any,
    order: Any,
    cursors: Any,
    ends: Any,
    table: Any,
    delivered_ps: Any,
    states: Any,
    servers: Any,
    others: Any,
    others_begin: Any,
    others_ps: Any,
    next_ps: Any,
) -> Any:
    """Settle all with a first byte up to ``now_ps`` at some ports; returns how many rows.

    ``order`` lists rows of ``table`` [n, 7] as ``settling_order`` does; port p has those from
    ``cursors[p]``, which moves, up to ``ends[p]``. ``others`` [m, 7] are messages beside those rows, at
    the i-th of ``ports`` the ones from ``others_begin[i]`` to the next, in order; all are settled, into
    ``others_ps``. ``servers`` [devices, 8] are the ingresses; ``next_ps`` [len(ports)] gets the first
    byte of each port's next row.
    """
    settled = 0
    for at in range(len(ports)):
        port = ports[at]
        cursor, end = cursors[port], ends[port]
        other, other_end = others_begin[at], others_begin[at + 1]
        server = _loaded(servers, port)
        while True:
            until = cursor
            while cursor < end:
                row = np.uint64(order[cursor])  # unsigned: no index wraps
                if table[row, FIRST] > now_ps:
                    break
                if other < other_end and not _comes_before(table, row, others, other):
                    break
                delivered_ps[row], server = _receive(server, table, row)
                states[row] = SETTLED
                cursor += 1
            settled += cursor - until
            if other == other_end:
                break
            others_ps[other], server = _receive(server, others, other)
            other += 1
        _store(servers, port, server)
        cursors[port] = cursor
        next_ps[at] = table[order[cursor], FIRST] if cursor < end else NEVER_PS
    return settled


@_kernel(LINE, FLAGS, LINE, LINE, LINE, I64)
def take_settled(states: Any, edges: Any, left: Any, taken: Any, settled: int) -> Any:
    """Mark all rows that are settled, so many, as handed over and return them, in order.

    ``edges`` [frames + 1] are the frames' first rows; ``left`` [frames] says how many of each were not
    handed over, and goes down; ``taken`` [frames + 1] is filled with each frame's first place in what
    is returned.
    """
    rows = np.empty(settled, np.int64)
    count = 0
    for frame in range(len(left)):
        taken[frame] = count
        if left[frame]:
            for row in range(edges[frame], edges[frame + 1]):
                if states[row] == SETTLED:
                    states[row] = HANDED
                    rows[count] = row
                    count += 1
            left[frame] -= count - taken[frame]
    taken[len(left)] = count
    return rows


@_kernel(I64, LINE, TABLE, LINE, TABLE)
def gather(rows: Any, table: Any, delivered_ps: Any, columns: Any) -> Any:
    """Of some rows of a table, into ``columns`` [5, n]: sources, targets, deliveries, charged bytes,
    sequences without their top bit. Returns how many are copies."""
    copies = 0
    for at in range(len(rows)):
        row = np.uint64(rows[at])
        sequence = table[row, SEQUENCE]
        copies += 1 if sequence < 0 else 0
        columns[0, at], columns[1, at] = table[row, SOURCE], table[row, TARGET]
        columns[2, at], columns[3, at] = delivered_ps[row], table[row, CHARGED]
        columns[4, at] = sequence & SEQUENCE_MAX
    return copies


@_kernel(types.void, TABLE, I64, LINE, READ_DATA, READ_DATA, LINE, LINE, TABLE, LINE, OCTETS)
def fill_frames(
    rows: Any,
    count: int,
    index: Any,
    data: Any,
    flag_data: Any,
    repeat: Any,
    part_of: Any,
    parts: Any,
    words: Any,
    octets: Any,
) -> None:
    """Put the first ``count`` of an egress's rows and their data where their frames are in a buffer.

    ``words`` and ``octets`` are the buffer; ``parts`` [m, 11] says of each part of a frame, its
    messages or its flags, where its rows and where their data begin, and how many rows of which width
    it takes; then how many it has, and of those the least and the greatest first byte, the sum of
    charged bytes, and source, target and sequence of the first. ``part_of`` is the first part of each
    group that is not full; the next one follows. ``index`` says where a row of the burst has its data
    in ``data``, or ``flag_data`` if its group is odd. ``repeat`` [5] says how often parts of ``data``
    are carried, as ``messages.Repeat`` does.
    """
    lead, body, copies = np.uint64(repeat[0]), np.uint64(repeat[1]), np.uint64(repeat[2])
    tail, tail_copies = np.uint64(repeat[3]), np.uint64(repeat[4])
    for at in range(count):
        group = rows[at, GROUP]
        part = part_of[group]
        if parts[part, FILLED] == parts[part, COUNT]:
            part += 1
            part_of[group] = part
        place, width = parts[part, FILLED], parts[part, WIDTH]
        if place == 0:
            for column in range(3):
                parts[part, FIRST_SOURCE + column] = rows[at, SOURCE + column]
        parts[part, FILLED] = place + 1
        word = (parts[part, BEGIN] >> 3) + place * COLUMNS
        for column in range(COLUMNS):
            words[word + column] = rows[at, column]
        parts[part, LEAST] = min(parts[part, LEAST], rows[at, FIRST])
        parts[part, GREATEST] = max(parts[part, GREATEST], rows[at, FIRST])
        parts[part, TOTAL] += rows[at, CHARGED]
        begin = np.uint64(parts[part, DATA] + place * width)
        row = np.uint64(index[rows[at, ROW]])  # unsigned: eight times as fast, as no index wraps
        if group & 1:
            for octet in range(np.uint64(width)):
                octets[begin + octet] = flag_data[row, octet]
        else:
            for octet in range(lead):
                octets[begin + octet] = data[row, octet]
            begin += lead
            for _ in range(copies):
                for octet in range(body):
                    octets[begin + octet] = data[row, lead + octet]
                begin += body
            for _ in range(tail_copies):
                for octet in range(tail):
                    octets[begin + octet] = data[row, lead + body + octet]
                begin += tail
