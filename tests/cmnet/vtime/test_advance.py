"""An event may go on at a later instant without a new event, if that changes no order."""

from __future__ import annotations

import pytest

from cmnet.vtime.loop import VirtualLoop


@pytest.mark.parametrize(
    ("other_ps", "to_ps", "horizon_ps", "moved"),
    [
        (500, 499, 1000, True),
        (500, 500, 1000, False),  # who is due then comes in its order
        (500, 501, 1000, False),
        (2000, 999, 1000, True),
        (2000, 1000, 1000, False),  # the next window's
        (2000, 100, 1000, False),  # the same instant: counted as spinning
    ],
)
def test_the_clock_moves_only_where_nothing_else_is_due(
    other_ps: int, to_ps: int, horizon_ps: int, moved: bool
) -> None:
    loop = VirtualLoop()
    seen: list[bool] = []
    try:
        loop.agenda.add_timer(other_ps, lambda _: None, None)
        loop.agenda.add_port(100, 0, lambda _: seen.append(loop.advance(to_ps)), None)
        loop.run_until(200 if horizon_ps < 200 else horizon_ps)
    finally:
        loop.close()
    assert seen == [moved]


def test_a_callback_that_waits_comes_first() -> None:
    """What an event wakes runs at the event's instant."""
    loop = VirtualLoop()
    seen: list[tuple[bool, int]] = []

    def event(_: object) -> None:
        loop.call_soon(lambda: None)
        seen.append((loop.advance(150), loop.now_ps))

    try:
        loop.agenda.add_port(100, 0, event, None)
        loop.run_until(1000)
    finally:
        loop.close()
    assert seen == [(False, 100)]


def test_events_of_one_instant_run_at_it() -> None:
    """The first of two may not leave the second behind."""
    loop = VirtualLoop()
    seen: list[tuple[bool, int]] = []
    try:
        for port in (0, 1):
            loop.agenda.add_port(
                100, port, lambda _: seen.append((loop.advance(150), loop.now_ps)), None
            )
        loop.run_until(1000)
    finally:
        loop.close()
    assert seen == [(False, 100), (True, 150)]
