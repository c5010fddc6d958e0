"""The one total order of a node's events (design 1.4)."""

from __future__ import annotations

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from cmnet.units import NEVER_PS
from cmnet.vtime.agenda import Agenda, Event


def taken(agenda: Agenda) -> list[object]:
    """The items of the least instant."""
    instant: deque[Event] = deque()
    agenda.take_instant(instant)
    return [event[5] for event in instant]


def nothing(_: object) -> None: ...


def test_deliveries_then_ports_then_timers_at_one_instant() -> None:
    agenda = Agenda()
    agenda.add_timer(5, nothing, "timer")
    agenda.add_port(5, 3, nothing, "port 3")
    agenda.add_port(5, 2, nothing, "port 2")
    agenda.add_delivery(5, 9, 1, nothing, "of 9")
    agenda.add_delivery(5, 2, 8, nothing, "second of 2")
    agenda.add_delivery(5, 2, 7, nothing, "first of 2")
    agenda.add_timer(4, nothing, "earlier")
    assert taken(agenda) == ["earlier"]
    assert taken(agenda) == ["first of 2", "second of 2", "of 9", "port 2", "port 3", "timer"]
    assert agenda.next_at_ps() == NEVER_PS


def test_ties_of_timers_and_of_one_port_go_by_creation() -> None:
    agenda = Agenda()
    for number in range(20):
        agenda.add_timer(5, nothing, ("timer", number))
        agenda.add_port(5, 1, nothing, ("port", number))
    assert taken(agenda) == [(kind, n) for kind in ("port", "timer") for n in range(20)]


Deliveries = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(0, 50)), unique=True, max_size=30
)


@settings(deadline=None, max_examples=60)
@given(deliveries=Deliveries, data=st.data())
def test_the_order_of_adding_deliveries_changes_nothing(
    deliveries: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    """When the kernel handed a frame over can change nothing."""
    orders = []
    for listed in (deliveries, data.draw(st.permutations(deliveries))):
        agenda, order = Agenda(), []
        for delivery in listed:
            agenda.add_delivery(*delivery, nothing, delivery)
        while agenda.next_at_ps() < NEVER_PS:
            order += taken(agenda)
        orders.append(order)
    assert orders[0] == orders[1] == sorted(deliveries)


def test_discard_takes_out_what_matches_and_keeps_the_order() -> None:
    agenda = Agenda()
    for number in (3, 1, 2, 5, 4):
        agenda.add_timer(number, nothing, number)
    assert agenda.discard(lambda event: event[5] % 2 == 1) == 3
    assert agenda.discard(lambda event: event[5] > 9) == 0
    assert [taken(agenda), taken(agenda)] == [[2], [4]]


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 15), st.booleans()), max_size=30))
def test_the_earliest_reaction_is_that_of_all_events_that_are_not_cancelled(
    events: list[tuple[int, int, bool]],
) -> None:
    agenda = Agenda()
    for at_ps, silence_ps, cancelled in events:
        agenda.add_timer(at_ps, nothing, cancelled, silence_ps)
    least_ps = min([sum(event[:2]) for event in events if not event[2]], default=NEVER_PS)
    assert agenda.reaction_ps(lambda event: bool(event[5])) == least_ps
