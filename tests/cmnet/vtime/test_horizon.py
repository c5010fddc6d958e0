"""The conductor's decision: the same run however messages, frames and deaths fall."""

from __future__ import annotations

import pytest

from cmnet import entropy
from cmnet.units import NEVER_PS
from cmnet.vtime.horizon import Death, Grant, Horizon
from tests.cmnet.vtime.schedules import LOOKAHEAD_PS, Crash, Entry, Fault, Result, Run

FEW = range(25)
MANY = [range(25, 250), pytest.param(range(25, 700), marks=pytest.mark.soak)]


def plan(behaviour: int) -> tuple[int, tuple[Fault, ...], tuple[Entry, ...]]:
    """(processes, faults, entries), drawn."""
    draws = entropy.stream(behaviour, "plan")
    processes = 2 + draws.below(5)
    kinds = ("kill", "restart")
    faults = tuple(
        Fault(draws.below(300), kinds[draws.below(2)], draws.below(processes))
        for _ in range(draws.below(6))
    )
    windows = sorted(1 + draws.below(25) for _ in range(draws.below(4)))
    entries = tuple(Entry(window, draws.below(processes)) for window in windows)
    return processes, faults, entries


def check_interleavings(behaviour: int) -> Result:
    """Several orders of everything, one result: events, windows and grants."""
    processes, faults, entries = plan(behaviour)
    results = [
        Run(
            processes=processes,
            behaviour=behaviour,
            interleaving=interleaving,
            faults=faults,
            entries=entries,
        ).result()
        for interleaving in range(3)
    ]
    assert results[0] == results[1] == results[2]
    return results[0]


def check_crash(behaviour: int, interleaving: int) -> None:
    """A crash is the run in which the node is killed at the instant that the record keeps."""
    processes, faults, _ = plan(behaviour)
    draws = entropy.stream(behaviour, f"crash {interleaving}")
    crashes = tuple(
        Crash(window, draws.below(processes))
        for window in sorted(1 + draws.below(40) for _ in range(1 + draws.below(2)))
    )
    first = Run(
        processes=processes,
        behaviour=behaviour,
        interleaving=interleaving,
        faults=faults,
        crashes=crashes,
    ).result()
    planned = {(fault.at_ps, fault.process) for fault in faults if fault.kind == "kill"}
    kills = tuple(
        Fault(death.at_ps, "kill", death.process)
        for death in first.deaths
        if (death.at_ps, death.process) not in planned
    )
    again = Run(
        processes=processes, behaviour=behaviour, interleaving=interleaving, faults=faults + kills
    ).result()
    assert again.logs == first.logs


@pytest.mark.parametrize("behaviour", FEW)
def test_the_order_of_messages_and_frames_changes_nothing(behaviour: int) -> None:
    check_interleavings(behaviour)


@pytest.mark.slow
@pytest.mark.parametrize("behaviours", MANY, ids=len)
def test_nor_in_many_schedules(behaviours: range) -> None:
    """Three of each behaviour; and much happens in them."""
    results = [check_interleavings(behaviour) for behaviour in behaviours]
    events = sum(len(log) for result in results for log in result.logs.values())
    assert events > 30 * len(behaviours)
    assert 4 * sum(len(result.deaths) for result in results) > 3 * len(behaviours)


@pytest.mark.parametrize("behaviour", FEW)
def test_a_crash_is_a_kill_at_the_start_of_its_window(behaviour: int) -> None:
    check_crash(behaviour, 0)


@pytest.mark.slow
@pytest.mark.parametrize("behaviours", MANY, ids=len)
def test_so_it_is_in_many_schedules(behaviours: range) -> None:
    for behaviour in behaviours:
        for interleaving in range(2):
            check_crash(behaviour, interleaving)


# --- by hand --------------------------------------------------------------------------------------


def horizon(*next_ps: int) -> Horizon:
    made = Horizon(len(next_ps), LOOKAHEAD_PS)
    for process, at_ps in enumerate(next_ps):
        made.join(process, at_ps)
    return made


def test_only_who_has_an_event_before_the_horizon_gets_a_grant() -> None:
    made = horizon(0, 9, 10, NEVER_PS)
    assert made.decide() == [Grant(0, 1, 10, 0, False), Grant(1, 1, 10, 0, False)]


def test_an_idle_stretch_is_one_window() -> None:
    made = horizon(10**15, NEVER_PS)
    assert [grant.horizon_ps for grant in made.decide()] == [10**15 + LOOKAHEAD_PS]


def test_a_frame_on_its_way_is_an_event_of_its_receiver_which_must_have_read_it() -> None:
    made = horizon(0, NEVER_PS)
    made.decide()
    made.report(0, 1, NEVER_PS, NEVER_PS, [(1, 3, 25, 25)])
    assert made.decide() == [Grant(1, 2, 25 + LOOKAHEAD_PS, 3, False)]


def test_a_window_reaches_to_the_least_reaction_and_the_lookahead() -> None:
    """Whoever has an event before that runs, though nothing can come of it sooner."""
    made = horizon(0, 5, NEVER_PS)
    made.decide()
    made.report(0, 1, 20, 50, [(2, 1, 25, 55)])
    made.report(1, 1, 58, 58, [])
    assert made.decide() == [
        Grant(0, 2, 60, 0, False),
        Grant(1, 2, 60, 0, False),
        Grant(2, 2, 60, 1, False),
    ]
    assert made.died(1) == Death(1, 20, 2)


def test_a_stop_cuts_the_horizon_then_is_a_barrier_for_all() -> None:
    made = horizon(0, 5)
    made.stop_at(7)
    assert [grant.horizon_ps for grant in made.decide()] == [7, 7]
    made.report(0, 1, 7, 7, [])
    made.report(1, 1, 50, 50, [])
    assert made.decide() == [Grant(0, 2, 7, 0, True), Grant(1, 2, 7, 0, True)]
    made.report(0, 2, 7, 7, [])
    made.report(1, 2, 50, 50, [])
    assert made.take_stop() == 7
    assert made.decide() == [Grant(0, 3, 17, 0, False)]


def test_nothing_left_is_no_grant() -> None:
    assert horizon(NEVER_PS, NEVER_PS).decide() == []


def test_a_death_within_a_window_takes_its_report_back() -> None:
    made = horizon(0, 3)
    made.decide()
    made.report(0, 1, NEVER_PS, NEVER_PS, [(1, 1, 12, 12)])
    assert made.died(0) == Death(0, 0, 1)
    made.report(1, 1, NEVER_PS, NEVER_PS, [(0, 1, 14, 14)])
    assert made.decide() == []


def test_a_death_between_windows_is_at_the_last_horizon() -> None:
    made = horizon(0, 30)
    made.decide()
    made.report(0, 1, 40, 40, [])
    assert made.died(0) == Death(0, LOOKAHEAD_PS, 2)


def test_a_process_that_never_joined_may_die() -> None:
    made = horizon(0, 3)
    made.decide()
    made.report(0, 1, 40, 40, [])
    made.report(1, 1, 40, 40, [])
    made.died(0)
    assert made.died(0) == Death(0, LOOKAHEAD_PS, 2)
    assert made.alive() == [1]


def test_the_door_is_not_passed_by_a_report_that_does_not_know_it() -> None:
    """It came while the window was open; the report was made without it."""
    made = horizon(0, NEVER_PS)
    made.decide()
    assert made.enter(0) == LOOKAHEAD_PS
    made.report(0, 1, 500, 500, [])
    assert made.decide() == [Grant(0, 2, 2 * LOOKAHEAD_PS, 1, False)]


def test_a_second_report_to_one_grant_is_a_bug() -> None:
    made = horizon(0, 0)
    made.decide()
    made.report(0, 1, 5, 5, [])
    with pytest.raises(AssertionError):
        made.report(0, 1, 5, 5, [])


def test_a_stop_comes_though_nobody_lives() -> None:
    """A restart may be planned for it: no grant is left to wait for, but the stop is."""
    horizon = Horizon(1, LOOKAHEAD_PS)
    horizon.join(0, 0)
    horizon.stop_at(50)
    horizon.died(0)
    assert horizon.decide() == [] and horizon.stops_left and horizon.closed
    assert (horizon.horizon_ps, horizon.take_stop(), horizon.stops_left) == (50, 50, False)
    assert horizon.decide() == []
