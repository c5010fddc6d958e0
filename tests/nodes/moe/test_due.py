"""Ranks due at instants of their own: woken with the first, all at once, in order."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from cmnet.vtime.loop import VirtualLoop
from nodes.moe.due import Due, silence_ps


def run(loop: VirtualLoop, main: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(main)


def test_what_is_known_is_taken_with_the_first() -> None:
    """Also what is due later: one call for all, each keeps its instant."""
    loop = VirtualLoop()
    due: Due[str] = Due(loop)

    async def main() -> None:
        for at_ps, name in ((300, "c"), (100, "a"), (200, "b"), (100, "d")):
            due.add(at_ps, name)
        assert await due.take() == [(100, "a"), (100, "d"), (200, "b"), (300, "c")]
        assert loop.now_ps == 100

    run(loop, main())


def test_a_taker_wakes_earlier_for_what_is_due_earlier() -> None:
    """Added while it waits: for nothing at all, then for something later."""
    loop = VirtualLoop()
    due: Due[str] = Due(loop)
    loop.call_at_ps(50, due.add, 500, "late")
    loop.call_at_ps(60, due.add, 80, "early")
    loop.call_at_ps(70, due.add, 600, "last")

    async def main() -> None:
        assert await due.take() == [(80, "early"), (500, "late"), (600, "last")]
        assert loop.now_ps == 80
        loop.call_at_ps(90, due.add, 95, "next")
        assert await due.take() == [(95, "next")]
        assert loop.now_ps == 95

    run(loop, main())


def test_what_comes_while_nobody_takes_is_kept() -> None:
    loop = VirtualLoop()
    due: Due[str] = Due(loop)

    async def main() -> None:
        due.add(10, "a")
        await due.take()
        due.add(20, "b")
        await loop.sleep_until_ps(40)
        assert await due.take() == [(20, "b")]
        assert loop.now_ps == 40

    run(loop, main())


def test_what_is_known_late_is_due_now_and_counted() -> None:
    """In one place for all that use it; none is lost, and none is silent."""
    loop = VirtualLoop()
    due: Due[str] = Due(loop)

    async def main() -> None:
        await loop.sleep_until_ps(10)
        due.add(10, "in time")
        assert due.statistics() == {"late": 0, "late_ps_max": 0}
        due.add(3, "by 7")
        due.add(9, "by 1")
        assert await due.take() == [(10, "in time"), (10, "by 7"), (10, "by 1")]
        assert due.statistics() == {"late": 2, "late_ps_max": 7}

    run(loop, main())


def test_a_taker_that_is_cancelled_leaves_all_there() -> None:
    loop = VirtualLoop()
    due: Due[str] = Due(loop)

    async def main() -> None:
        due.add(100, "a")
        async with asyncio.TaskGroup() as group:
            taker = group.create_task(due.take())
            await loop.sleep_until_ps(50)
            taker.cancel()
        assert taker.cancelled()
        assert await due.take() == [(100, "a")]

    run(loop, main())


def test_a_rank_is_taken_ahead_and_its_node_is_silent_until_its_instant() -> None:
    loop = VirtualLoop()
    due: Due[str] = Due(loop)

    async def main() -> None:
        loop.call_at_ps(10, due.add, 100, "a", 40)
        loop.call_at_ps(20, lambda: reactions.append(loop.reaction_ps()))
        assert await due.take() == [(100, "a")]
        assert loop.now_ps == 60

    reactions: list[int] = []
    run(loop, main())
    assert reactions == [100]


def test_what_writes_sooner_than_the_first_shortens_the_silence() -> None:
    """It is taken with the first, though its own turn was later."""
    loop = VirtualLoop()
    due: Due[str] = Due(loop)

    async def main() -> None:
        loop.call_at_ps(10, due.add, 100, "first", 80)
        loop.call_at_ps(11, due.add, 50, "sooner", 0)
        loop.call_at_ps(12, lambda: reactions.append(loop.reaction_ps()))
        assert await due.take() == [(50, "sooner"), (100, "first")]
        assert loop.now_ps == 20

    reactions: list[int] = []
    run(loop, main())
    assert reactions == [50]


def test_after_it_is_known_a_rank_is_silent_for_half_of_its_lead_in_any_case() -> None:
    loop = VirtualLoop()
    due: Due[str] = Due(loop)

    async def main() -> None:
        await loop.sleep_until_ps(100)
        due.add(125, "in time", 40)
        due.add(118, "by 2", 40)
        due.add(90, "by 30", 40)
        assert await due.take() == [(120, "by 2"), (120, "by 30"), (125, "in time")]
        assert due.statistics() == {"late": 2, "late_ps_max": 30}
        assert silence_ps(40) == 20

    run(loop, main())
