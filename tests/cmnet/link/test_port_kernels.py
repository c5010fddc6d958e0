"""Kernels against ``Server``, message by message."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cmnet.link import port_kernels as ports
from cmnet.link.port import Server

RATES = (1_000, 999_983, 400 * 10**9, 164 * 8 * 10**9, 97 * 10**12)
SIZES = st.one_of(st.integers(0, 1 << 22), st.sampled_from([0, 32, 7680]))
GAPS = st.one_of(st.just(0), st.integers(0, 10**8))


def kernel_state(server: Server) -> np.ndarray:
    return np.array([[*server.state, 0, 0, 0, 0]])


@settings(deadline=None, max_examples=15)
@given(
    st.lists(st.tuples(GAPS, SIZES, st.integers(0, 4)), min_size=1, max_size=40),
    st.integers(0, 10**9),
    st.integers(0, 10**12),
)
def test_a_leg_is_served_as_its_messages_one_by_one(
    messages: list[tuple[int, int, int]], slice_ps: int, last_ps: int
) -> None:
    """In any number of slices, by gaps of readiness, behind what the port served before."""
    alone = Server()
    alone.serve(0, 12_345, RATES[4])
    together = kernel_state(alone)
    paths = np.array([RATES, [7 * n for n in range(5)], range(5)], np.int64)
    ready_ps = np.cumsum([gap for gap, _, _ in messages])
    sizes = np.array([size for _, size, _ in messages])
    targets = np.array([target for _, _, target in messages])
    begin, count = 0, len(messages)
    while begin < count:
        out = np.full((count - begin, 9), -1, np.int64)
        start_ps = max(int(ready_ps[begin]), int(together[0, 0]))
        stop = ports.serve_leg(
            7,
            paths, targets, sizes, ready_ps, targets % 2, begin, count, 0,
            start_ps + slice_ps + 1, together, out,
        )  # fmt: skip  # one line a thing
        assert stop > begin
        for row in range(begin, stop):
            target, size = int(targets[row]), int(sizes[row])
            at_ps = max(int(ready_ps[row]), alone.free_ps)
            assert at_ps <= start_ps + slice_ps
            finish_ps = alone.serve(at_ps, size, RATES[target])
            expected = [at_ps + 7 * target, finish_ps + 7 * target, size, RATES[target]]
            assert out[row - begin, :4].tolist() == expected
            assert out[row - begin, [5, 7, 8]].tolist() == [target, row, 2 * target + target % 2]
        assert tuple(together[0, :4].tolist()) == alone.state
        begin = stop


@pytest.mark.parametrize(
    ("size", "rate_bps"), [(1 << 46, 1), (-1, 1), (1, 0), (1, 1 << 49), (1 << 20, 2)]
)
def test_what_int64_cannot_hold_is_refused(size: int, rate_bps: int) -> None:
    one = np.array([size])
    paths, out = np.array([[rate_bps], [0], [0]]), np.zeros((1, 9), np.int64)
    zero = np.zeros(1, np.int64)
    state = kernel_state(Server())
    assert ports.serve_leg(7, paths, zero, one, zero, zero, 0, 1, 0, 1, state, out) == ~0
    row = np.array([[0, 9, size, rate_bps, 1, 0, 1]])
    assert ports.look(row, 1, 0, 0, 1, 2, np.zeros(4, np.int64)) == 0


@st.composite
def arrivals(draw: st.DrawFn, *, apart_ps: int = 10**6) -> np.ndarray:
    """[n, 7] at three ports, with many equal instants, each (source, sequence) once."""
    rows = []
    for number in range(draw(st.integers(0, 12))):
        first_ps = draw(st.sampled_from([0, 1, 5, 10**5, apart_ps]))
        rows.append(
            (
                first_ps,
                first_ps + draw(GAPS),
                draw(SIZES),
                draw(st.sampled_from(RATES)),
                draw(st.integers(0, 3)),
                10 + draw(st.integers(0, 2)),
                number + draw(st.sampled_from([0, -ports.SEQUENCE_MAX - 1])),
            )
        )
    rows = draw(st.permutations(rows))
    return np.array(rows, np.int64).reshape(len(rows), 7)


def order_of(table: np.ndarray, rows: np.ndarray) -> list[tuple[int, ...]]:
    return [
        (
            int(table[row, ports.TARGET]),
            int(table[row, ports.FIRST]),
            int(table[row, ports.SOURCE]),
            int(table[row, ports.SEQUENCE]) & ports.SEQUENCE_MAX,
        )
        for row in rows.tolist()
    ]


@settings(deadline=None, max_examples=15)
@given(arrivals())
def test_rows_settle_by_first_byte_source_and_sequence(table: np.ndarray) -> None:
    states = np.arange(len(table), dtype=np.uint8) % 4 // 3
    begins = np.zeros(4, np.int64)
    order = ports.settling_order(table, states, 10, begins)
    expected = order_of(table, np.flatnonzero(states == 0))
    assert order_of(table, order) == sorted(expected)
    for port in range(3):
        ours = order_of(table, order[begins[port] : begins[port + 1]])
        assert ours == sorted(one for one in expected if one[0] == 10 + port)


def test_rows_too_far_apart_for_one_key_are_left_to_others() -> None:
    table = np.zeros((2, 7), np.int64)
    table[:, ports.FIRST] = [1 << 62, 0]
    begins = np.zeros(4, np.int64)
    ports.settling_order(table, np.zeros(2, np.uint8), 0, begins)
    assert begins.tolist() == [-1, 2, 2, 2]


@settings(deadline=None, max_examples=15)
@given(arrivals(), st.data())
def test_ports_settle_rows_and_single_messages_in_one_order(
    table: np.ndarray, data: st.DataObject
) -> None:
    """Up to two instants, one after the other; what is a single message is drawn."""
    count = len(table)
    single = np.array(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)), bool)
    states = single.astype(np.uint8)
    begins = np.zeros(4, np.int64)
    order = ports.settling_order(table, states, 10, begins)
    cursors, ends = begins[:3].copy(), begins[1:].copy()
    servers, delivered_ps = np.zeros((3, 8), np.int64), np.full(count, -1)
    alone = [Server() for _ in range(3)]
    expected = np.full(count, -1)
    ranked = sorted(range(count), key=lambda row: order_of(table, np.array([row])))
    done_ps = -1
    for now_ps in (7, 10**6):
        due = [row for row in ranked if done_ps < table[row, ports.FIRST] <= now_ps]
        done_ps = now_ps
        others = np.array([row for row in due if single[row]], np.int64)
        at = np.searchsorted(table[others, ports.TARGET], [10, 11, 12, 13])
        others_ps, next_ps = np.empty(len(others), np.int64), np.empty(3, np.int64)
        settled = ports.settle(
            now_ps, np.arange(3), order, cursors, ends, table, delivered_ps, states, servers,
            table[others], at, others_ps, next_ps,
        )  # fmt: skip  # one line a thing
        delivered_ps[others] = others_ps
        for row in due:
            first_ps, last_ps, size, rate_bps = table[row, :4].tolist()
            port = alone[table[row, ports.TARGET] - 10]
            expected[row] = port.receive(first_ps, last_ps, size, rate_bps)
        assert settled == len(due) - len(others)
        assert delivered_ps.tolist() == expected.tolist()
        later = [table[order[c:e], ports.FIRST] for c, e in zip(cursors, ends)]
        assert next_ps.tolist() == [int(f.min()) if len(f) else ports.NEVER_PS for f in later]
