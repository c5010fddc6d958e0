"""Who is complete: when all flags are here and all rows that they count, in whatever order."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cmnet.errors import FrameError
from nodes.model.body import I64
from nodes.moe.arrivals import Arrivals
from nodes.moe.layer import check_ends

RANKS, EP_SIZE = 2, 4


class Came(NamedTuple):
    """Some rows, or a flag that counts some."""

    rank: int
    source: int
    rows: int
    flag: bool


def array(*values: int) -> I64:
    return np.array(values, dtype=np.int64)


def make(sources: tuple[int, ...] = (0, 1, 2, 3), wanted: tuple[int, ...] = (0, 1)) -> Arrivals:
    arrivals = Arrivals(ranks=RANKS, ep_size=EP_SIZE)
    arrivals.expected = np.isin(np.arange(EP_SIZE), sources)
    arrivals.wanted[list(wanted)] = True
    return arrivals


def take(arrivals: Arrivals, came: Came, at_ps: int) -> list[int]:
    if came.flag:
        arrivals.add_flags(
            array(came.rank),
            array(came.source),
            at_ps=array(at_ps),
            counts=array(came.rows),
            began_ps=array(100 + came.source),
        )
    else:
        count = came.rows
        arrivals.add_rows(
            np.full(count, came.rank), np.full(count, came.source), np.full(count, at_ps), came
        )
    return arrivals.newly_complete()


def everything(counts: dict[tuple[int, int], int]) -> list[Came]:
    """Flags of all pairs, and their rows, in two lots where there are two."""
    found = []
    for rank, source in itertools.product(range(RANKS), range(EP_SIZE)):
        count = counts.get((rank, source), 0)
        found.append(Came(rank, source, count, True))
        parts = [part for part in (count // 2, count - count // 2) if part]
        found += [Came(rank, source, part, False) for part in parts]
    return found


COUNTS = st.dictionaries(
    st.tuples(st.integers(0, RANKS - 1), st.integers(0, EP_SIZE - 1)), st.integers(0, 5)
)


@settings(max_examples=25, deadline=None)
@given(COUNTS, st.randoms(use_true_random=False))
def test_complete_with_the_last_and_not_before(counts: dict, mix) -> None:  # type: ignore[no-untyped-def, type-arg]  # hypothesis has no name for it
    """Any order, flags before rows or behind, rows in lots: once for each rank, at its last arrival."""
    order = everything(counts)
    mix.shuffle(order)
    arrivals, told = make(), {}
    for place, came in enumerate(order):
        for rank in take(arrivals, came, 10 * place):
            assert rank not in told
            told[rank] = place
    last = {rank: max(p for p, c in enumerate(order) if c.rank == rank) for rank in range(RANKS)}
    assert told == last
    assert arrivals.last_ps.tolist() == [10 * last[rank] for rank in range(RANKS)]
    assert not arrivals.missing().any()
    assert arrivals.began_ps.tolist() == [100, 101, 102, 103]


@settings(max_examples=25, deadline=None)
@given(COUNTS, st.data())
def test_one_thing_missing_is_missing(counts: dict, data) -> None:  # type: ignore[no-untyped-def, type-arg]  # hypothesis has no name for it
    """Whichever it is: its rank is not complete, and the source that owes it is known."""
    order = everything(counts)
    lost = order.pop(data.draw(st.integers(0, len(order) - 1)))
    arrivals, told = make(), []
    for place, came in enumerate(order):
        told += take(arrivals, came, place)
    assert told == [1 - lost.rank]
    assert np.argwhere(arrivals.missing()).tolist() == [[lost.rank, lost.source]]


def test_a_flag_that_comes_again_changes_nothing() -> None:
    """Neither its instant nor what it counts: the first one holds."""
    arrivals = make()
    take(arrivals, Came(0, 2, 3, True), 50)
    arrivals.add_flags(array(0), array(2), at_ps=array(90), counts=array(7), began_ps=array(9))
    assert (arrivals.flags_ps[0, 2], arrivals.last_ps[0], arrivals.began_ps[2]) == (50, 50, 102)
    take(arrivals, Came(0, 2, 3, False), 60)
    assert not arrivals.missing()[0, 2]


@pytest.mark.parametrize("flag", [False, True])
def test_the_last_is_the_latest_in_whatever_order_it_is_known(flag: bool) -> None:
    arrivals = make()
    for source, at_ps in enumerate((50, 40)):
        take(arrivals, Came(0, source, 1, flag), at_ps)
    assert arrivals.last_ps.tolist() == [50, 0]


@pytest.mark.parametrize("gone", [0, 3])
def test_who_is_not_expected_is_not_waited_for(gone: int) -> None:
    sources = tuple(source for source in range(EP_SIZE) if source != gone)
    arrivals, told = make(sources), []
    for place, came in enumerate(everything({(0, gone): 4, (1, 1): 2})):
        if came.source != gone:
            told += take(arrivals, came, place)
    assert told == [0, 1]
    assert not arrivals.missing().any()


def test_nobody_is_complete_before_it_is_known_who_takes_part() -> None:
    arrivals = make()
    expected, arrivals.expected = arrivals.expected, None
    for place, came in enumerate(everything({})):
        assert take(arrivals, came, place) == []
        assert not arrivals.announce(array(came.rank))
    arrivals.expected = expected
    assert arrivals.newly_complete() == [0, 1]
    assert arrivals.newly_complete() == []


def test_who_does_not_wait_is_not_told() -> None:
    arrivals = make(wanted=(1,))
    told = [rank for came in everything({}) for rank in take(arrivals, came, 1)]
    assert told == [1]
    arrivals.wanted[0] = True
    assert arrivals.newly_complete() == [0]


def test_the_last_announced_flag_says_that_it_is_time() -> None:
    """Of a rank that waits; and again only for the next one."""
    arrivals = make(wanted=(0,))
    announced = [arrivals.announce(array(0)) for _ in range(EP_SIZE)]
    assert announced == [False, False, False, True]
    for came in everything({}):
        take(arrivals, came, 1)
    arrivals.wanted[1] = True
    assert not arrivals.announce(array(1, 1, 1))
    assert arrivals.announce(array(1))


def test_what_no_rank_sends_is_refused_before_an_index_is_made_of_it() -> None:
    ranks = np.array([0, 1])
    check_ends("dispatch", ranks, ranks + 4, first=4, ranks=2)
    for sources, targets in (
        ([-1, 0], [4, 5]),
        ([0, 1], [4, 6]),
        ([0, 1], [3, 4]),
        ([0, 5], [4, 5]),
    ):
        with pytest.raises(FrameError):
            check_ends("dispatch", np.array(sources), np.array(targets), first=4, ranks=2)
    with pytest.raises(FrameError):
        check_ends("count", ranks, ranks + 4, first=4, ranks=2)
    with pytest.raises(FrameError):
        make().announce(np.array([0, -5]))
