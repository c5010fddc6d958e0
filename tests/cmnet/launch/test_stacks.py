"""Words for where tasks wait."""

from __future__ import annotations

from cmnet.launch import stacks
from cmnet.units import NEVER_PS
from cmnet.vtime.loop import VirtualLoop


async def inner(loop: VirtualLoop) -> None:
    await loop.sleep_ps(100)


async def outer(loop: VirtualLoop) -> None:
    await inner(loop)


async def for_ever(loop: VirtualLoop) -> None:
    await loop.create_future()


def test_a_wait_is_named_from_the_inside_out() -> None:
    loop = VirtualLoop()
    tasks = [loop.create_task(outer(loop), name="a")]
    tasks += [loop.create_task(for_ever(loop), name=name) for name in "bc"]
    loop.run_until(50)
    lines = stacks.waits(loop)
    for task in tasks:
        task.cancel()
    loop.run_until(NEVER_PS)
    loop.close()
    assert lines[0].startswith("a in sleep_until_ps at loop.py:")
    assert ", called by inner at test_stacks.py:" in lines[0]
    assert ", called by outer at test_stacks.py:" in lines[0]
    assert [line.split(":")[0] for line in lines[1:]] == [
        "b in for_ever at test_stacks.py",
        "c in for_ever at test_stacks.py",
    ]


def test_who_spins_is_a_task_with_its_place_or_a_callback() -> None:
    loop = VirtualLoop()
    loop.call_soon(for_ever, loop)
    task = loop.create_task(outer(loop), name="busy")
    lines = stacks.spinning(loop.due())
    loop._ready.popleft()
    loop.run_until(50)
    task.cancel()
    loop.run_until(NEVER_PS)
    loop.close()
    assert lines[0].startswith("spins: for_ever at test_stacks.py:")
    assert lines[1].startswith("spins: busy in outer at test_stacks.py:")
