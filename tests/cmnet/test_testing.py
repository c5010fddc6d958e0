"""The test kit: faults for the length of a block, real runs, and what a failing one says."""

from __future__ import annotations

from pathlib import Path

import pytest

from cmnet.chaos import plan as plans
from cmnet.errors import DeadlockError, StallError
from cmnet.launch.agent import Context
from cmnet.link.effects import Delay, Partition
from cmnet.messages import Arrival
from cmnet.testing import LocalMachine, spawn
from cmnet.topology.load import load
from cmnet.topology.machine import Machine, Operation, Plane

US = 1_000_000
TOPOLOGIES = Path(__file__).parents[2] / "topologies"


@pytest.fixture
def pair() -> Machine:
    return load(str(TOPOLOGIES / "pair.yaml"))


async def _receive(context: Context, got: list[int]) -> None:
    context.fabric.bind(1, lambda _: got.append(context.loop.now_ps))


def _send(context: Context) -> None:
    machine = context.machine
    ends = machine.dies(0)[0], machine.dies(1)[0]
    route = context.fabric.route(Plane.UB, Operation.WRITE, *ends)
    context.fabric.send(route, 1, charged_bytes=0)


def test_a_fault_acts_for_as_long_as_its_block(pair: Machine, tmp_path: Path) -> None:
    """Before and after it nothing is changed; two of them add up."""
    local = LocalMachine(pair, folder=tmp_path)
    got: list[int] = []
    sent: list[int] = []

    async def program(context: Context) -> None:
        if context.process == 1:
            await _receive(context, got)
            return

        async def send() -> None:
            sent.append(context.loop.now_ps)
            _send(context)
            await context.loop.sleep_ps(20 * US)

        await send()
        with local.inject(Delay(delay_ps=5 * US)):
            await send()
            with local.inject(Delay(delay_ps=3 * US)):
                await send()
        await send()
        context.finish()

    local.run(program)
    one_way = got[0] - sent[0]
    delays = [at - began - one_way for at, began in zip(got, sent, strict=True)]
    assert delays == [0, 5 * US, 8 * US, 0]


def test_a_fault_ends_with_a_block_that_raises(pair: Machine, tmp_path: Path) -> None:
    """What a test does wrong inside leaves no rule behind."""
    local = LocalMachine(pair, folder=tmp_path)
    with pytest.raises(ZeroDivisionError), local.inject(Partition()):
        raise ZeroDivisionError
    assert all(context.fabric.rules.idle(0) for context in local.contexts)


def test_a_run_without_end_says_its_seed(
    pair: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that only ticks is stopped after 600 virtual seconds; whoever reads knows the seed."""

    async def program(context: Context) -> None:
        context.outstanding(+1)
        while True:
            await context.loop.sleep_ps(10**12)

    with pytest.raises(ExceptionGroup) as caught:
        LocalMachine(pair, folder=tmp_path, seed=77).run(program)
    assert caught.group_contains(StallError)
    assert "seed 77" in capsys.readouterr().out


def test_time_without_work_is_no_stall(pair: Machine, tmp_path: Path) -> None:
    """As in real processes: the next work counts from its own beginning."""

    async def program(context: Context) -> None:
        for _ in range(2 if context.process else 0):
            context.outstanding(+1)
            await context.loop.sleep_ps(500 * 10**12)
            context.mark("done")
            context.outstanding(-1)
            await context.loop.sleep_ps(700 * 10**12)
        if context.process:
            context.finish()

    local = LocalMachine(pair, folder=tmp_path)
    local.run(program)
    assert local.loop.now_ps == 2400 * 10**12


def test_work_that_nobody_will_ever_do_is_a_deadlock(pair: Machine, tmp_path: Path) -> None:
    """And without work, the end."""

    async def waits(context: Context) -> None:
        context.outstanding(+1)
        await context.loop.create_future()

    async def nothing(context: Context) -> None:
        await context.loop.create_future()

    with pytest.raises(ExceptionGroup) as caught:
        LocalMachine(pair, folder=tmp_path).run(waits)
    assert caught.group_contains(DeadlockError)
    assert LocalMachine(pair, folder=tmp_path).run(nothing)


@pytest.mark.machine
@pytest.mark.slow
def test_spawned_processes_follow_the_plan(pair: Machine, tmp_path: Path) -> None:
    """Real processes, a planned death, and the same digest as the local machine without it."""

    async def program(context: Context) -> None:
        got: list[Arrival] = []
        context.fabric.bind(1, got.append)
        if context.process == 0:
            _send(context)
            await context.loop.sleep_ps(50 * US)
            context.finish()

    local = LocalMachine(pair, folder=tmp_path, seed=3).run(program)
    with spawn(pair, program, folder=tmp_path, seed=3) as result:
        assert (result.error, result.digest) == ("", local)
    killed = plans.Plan().with_kills([("node01", 20 * US)])
    with spawn(pair, program, folder=tmp_path, seed=3, plan=killed) as result:
        assert [(death.name, death.at_ps) for death in result.deaths] == [("node01", 20 * US)]
        assert result.digest != local, "a death is part of what happened"


@pytest.mark.machine
@pytest.mark.slow
def test_a_failing_assertion_about_a_real_run_says_how_to_see_it_again(
    pair: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seed, folder and the command of the test."""

    async def program(context: Context) -> None:
        context.finish()

    with pytest.raises(ZeroDivisionError), spawn(pair, program, folder=tmp_path, seed=5):
        raise ZeroDivisionError
    said = capsys.readouterr().out
    assert "seed 5" in said
    assert "test_a_failing_assertion" in said
