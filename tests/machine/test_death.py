"""Nodes that die: by the plan, by themselves, with and without coming back; and what dies with whom."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from cmnet.launch import agent
from cmnet.launch.supervisor import NodeFault, RunResult, Supervisor
from tests.machine import programs
from tests.machine.conftest import Runner, lives, wait_for

pytestmark = [pytest.mark.machine, pytest.mark.slow]

END_US = 400
US = 1_000_000
PROGRAM = {"end_us": END_US}


def fault(kind: str, process: int, at_us: float) -> NodeFault:
    return NodeFault(kind=kind, process=process, at_ps=int(at_us * US))  # type: ignore[arg-type]  # str is wide


def crash(process: int, window: int) -> Callable[[Supervisor], None]:
    """SIGKILL from outside, once a window has begun."""

    def interfere(supervisor: Supervisor) -> None:
        wait_for(lambda: hasattr(supervisor, "horizon") and supervisor.horizon.window >= window)
        os.kill(supervisor.pids[process], signal.SIGKILL)

    return interfere


def replayed(run: Runner, first: RunResult, plan: list[NodeFault]) -> RunResult:
    """The run again, its deaths planned."""
    deaths = [death for death in first.deaths if not death.planned]
    kills = [NodeFault(kind="kill", process=d.process, at_ps=d.at_ps, sudden=True) for d in deaths]
    return run(programs.chatter, program=PROGRAM, node_faults=plan + kills)


def same(first: RunResult, second: RunResult) -> bool:
    assert first.error == second.error == ""
    assert [(d.process, d.at_ps) for d in first.deaths] == [
        (d.process, d.at_ps) for d in second.deaths
    ]
    return first.digest == second.digest


PLANS: list[list[NodeFault]] = [
    [],
    [fault("restart", 1, 300)],
    [fault("kill", 2, 150), fault("restart", 2, 151), fault("restart", 1, 300)],
]
CRASHES = [(1, 1, 0), (1, 2, 0), (0, 10, 0), (1, 37, 1), (1, 60, 2), (2, 90, 2), (3, 120, 0)]
CRASHES += [(1, 150, 1), (0, 200, 1), (2, 260, 0)]


@pytest.mark.parametrize(("process", "window", "plan"), CRASHES)
def test_a_crash_at_any_moment_replays_as_a_planned_kill(
    run: Runner, process: int, window: int, plan: int
) -> None:
    """Design 1.8: it died at the start of the window in progress, so a kill at that instant is the
    same run, frame by frame."""
    faults = PLANS[plan]
    first = run(
        programs.chatter,
        program=PROGRAM,
        node_faults=faults,
        interfere=crash(process, window),
    )
    died = [death for death in first.deaths if not death.planned]
    assert [death.name for death in died] == [f"node{process:02}"]
    assert same(first, replayed(run, first, faults))


def test_two_crashes_replay(run: Runner) -> None:
    def interfere(supervisor: Supervisor) -> None:
        crash(0, 50)(supervisor)
        crash(3, 51)(supervisor)

    first = run(programs.chatter, program=PROGRAM, interfere=interfere)
    assert len(first.deaths) == 2
    assert same(first, replayed(run, first, []))


def test_planned_kill_and_restart_are_repeatable(run: Runner) -> None:
    """Two faults of one instant, a restart of one that lives, a fault after the end."""
    plan = [
        fault("kill", 1, 100),
        fault("kill", 2, 100),
        fault("restart", 1, 100),
        fault("restart", 3, 120),
        fault("restart", 2, 200),
        fault("kill", 2, 200),
        fault("kill", 0, 10 * END_US),
    ]
    runs = [run(programs.chatter, program=PROGRAM, node_faults=plan) for _ in range(2)]
    assert runs[0].error == ""
    assert same(*runs)
    assert [death.name for death in runs[0].deaths] == ["node01", "node02", "node02"]
    assert [f.process for f in runs[0].not_reached] == [0]


def test_a_node_may_come_back_many_times(run: Runner) -> None:
    """Twenty incarnations: sockets, sequences and digests of each; no descriptor is left."""
    plan = [
        fault(kind, 2, 10 * n + 3 * (kind == "restart"))
        for n in range(1, 21)
        for kind in ("kill", "restart")
    ]
    runs = [run(programs.chatter, program=PROGRAM, node_faults=plan) for _ in range(2)]
    assert same(*runs) and len(runs[0].deaths) == 20


@pytest.mark.parametrize(("sudden", "came"), [(False, 50), (True, 100)])
def test_what_a_node_has_begun_to_send(run: Runner, sudden: bool, came: int) -> None:
    """All of it is one slice. A death that the plan tells ends it; one that nobody knew does not."""
    kill = NodeFault(kind="kill", process=0, at_ps=50 * US, sudden=sudden)
    ended = run(programs.sends_slowly, node_faults=[kill], journal=True)
    assert ended.error == ""
    journal = (Path(ended.folder) / "journal" / "node01.0.txt").read_text()
    assert f"mark {came} came" in journal


def test_a_kill_at_the_very_beginning_lets_nothing_of_that_instant_happen(run: Runner) -> None:
    """A barrier at 0: no event at 0 has run, the victim's own start included."""
    runs = [
        run(programs.chatter, program=PROGRAM, node_faults=[fault("kill", 1, 0)] * times)
        for times in (1, 2)
    ]
    assert same(*runs)


@pytest.fixture
def never_ready(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes a process die right after its fork; its name is that of node and incarnation."""

    def set_name(doomed: str) -> None:
        def prepare(run_folder: str, name: str) -> None:
            if name == doomed:
                os._exit(3)

        monkeypatch.setattr(agent, "prepare_process", prepare)

    return set_name


def test_a_node_that_dies_before_it_is_ready_ends_the_launch(
    run: Runner, never_ready: Callable[[str], None]
) -> None:
    never_ready("node02.0")
    result = run(programs.lively)
    assert result.error_code == "LAUNCH"
    assert "node02 ended before it was ready" in result.error


def test_a_node_whose_program_ends_the_process_is_a_death(run: Runner) -> None:
    result = run(programs.dies_at_once)
    assert [death.name for death in result.deaths] == ["node01"]
    assert result.deaths[0].at_ps == 0 and not result.deaths[0].planned


def test_a_restarted_node_that_dies_before_it_is_ready_is_dead_again(
    run: Runner, never_ready: Callable[[str], None]
) -> None:
    """It ran nothing, so it replays as a kill right after the restart."""
    plan = [fault("kill", 1, 100), fault("restart", 1, 150)]
    never_ready("node01.1")
    result = run(programs.chatter, program=PROGRAM, node_faults=plan)
    assert [(death.planned, death.at_ps // US) for death in result.deaths] == [
        (True, 100),
        (False, 150),
    ]
    never_ready("nobody")
    assert same(result, replayed(run, result, plan))


def test_the_death_of_the_zygote_ends_the_run_with_all_processes(run: Runner) -> None:
    def interfere(supervisor: Supervisor) -> None:
        wait_for(lambda: hasattr(supervisor, "horizon") and supervisor.horizon.window > 20)
        os.kill(supervisor._zygote.pid, signal.SIGKILL)

    result = run(programs.lively, interfere=interfere)
    assert result.error_code == "LAUNCH" and "forks" in result.error
    assert not lives(run.last._zygote.pid if run.last else 0)
