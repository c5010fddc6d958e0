"""A run stalls by virtual time with work outstanding, whoever asks and how often."""

from __future__ import annotations

import functools

import pytest

from cmnet.units import PS_PER_S
from cmnet.vtime.stall import STALL_PS, Stall


def test_work_after_a_long_time_without_any_is_no_stall() -> None:
    """The last mark is old then, since there was nothing to achieve."""
    stall = Stall()
    assert not stall.due(5, outstanding=1, marked_ps=lambda: 0)
    assert not stall.due(9, outstanding=0, marked_ps=lambda: 8)
    began_ps = 2 * STALL_PS
    assert not stall.due(began_ps, outstanding=1, marked_ps=lambda: 8)
    assert not stall.due(began_ps + STALL_PS, outstanding=1, marked_ps=lambda: 8)
    assert stall.due(began_ps + STALL_PS + 1, outstanding=1, marked_ps=lambda: 8)


@pytest.mark.parametrize("step_s", [1, 7, 100, 599])
def test_marks_put_it_off(step_s: int) -> None:
    """It counts from the last one, however often somebody looked before."""
    stall = Stall()
    marked_ps = 1000 * PS_PER_S
    for at_s in range(0, 1600, step_s):
        at_ps = at_s * PS_PER_S
        last_ps = at_ps if at_ps < marked_ps else marked_ps
        assert not stall.due(at_ps, outstanding=2, marked_ps=functools.partial(int, last_ps))
    assert not stall.due(marked_ps + STALL_PS, outstanding=2, marked_ps=lambda: marked_ps)
    assert stall.due(marked_ps + STALL_PS + 1, outstanding=2, marked_ps=lambda: marked_ps)


def test_the_last_mark_is_asked_for_only_when_it_may_matter() -> None:
    """Every window asks, and there are as many marks to look at as processes."""
    stall = Stall()
    asked: list[int] = []

    def marked_ps() -> int:
        asked.append(1)
        return 900 * PS_PER_S

    for at_s in range(1000):
        stall.due(at_s * PS_PER_S, outstanding=1, marked_ps=marked_ps)
    assert len(asked) == 1
