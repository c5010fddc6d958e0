"""The serving system on real processes: deaths of every role, crashes from outside, replay."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from cmnet.entropy import stream
from cmnet.launch.supervisor import NodeFault, RunResult, Supervisor
from cmnet.link.rules import Rule
from nodes.node import make_program
from nodes.serving.decoding import Decoding
from nodes.serving.job import Job
from tests.machine.conftest import Runner, wait_for
from tests.nodes.serving import broken, local
from tests.nodes.serving.local import Served

pytestmark = [pytest.mark.machine, pytest.mark.slow]

MACHINE = local.mini()
JOB = local.job_of(MACHINE, local.busy_requests())
S = 10**12
PREFILL, OTHER_PREFILL, LEADER, DECODE = 0, 1, 2, 3


def fault(kind: str, process: int, at_s: float) -> NodeFault:
    return NodeFault(kind=kind, process=process, at_ps=int(at_s * S))  # type: ignore[arg-type]  # str is wide


def serve(
    run: Runner,
    *faults: NodeFault,
    rules: tuple[Rule, ...] = (),
    interfere: Callable[[Supervisor], None] | None = None,
    job: Job = JOB,
) -> tuple[RunResult, Served]:
    """Every run must end by itself, with each request right or with an error."""
    ended = run(
        make_program(MACHINE, job),
        node_faults=list(faults),
        rules=list(rules),
        interfere=interfere,
    )
    assert (ended.error, ended.interrupted) == ("", False)
    served = local.judge(job, Path(ended.folder), ended.digest)
    assert sorted(r["index"] for r in served.requests) == list(range(len(job.workload.requests)))
    assert served.wrong == 0, served.first
    assert all(bool(r["error"]) == (r["status"] == "error") for r in served.requests)
    return ended, served


def ok(served: Served) -> int:
    return sum(record["status"] == "ok" for record in served.requests)


def test_real_processes_do_what_one_loop_does(run: Runner, tmp_path: Path) -> None:
    """The conductor, the sockets and the kernel leave no trace in the digest."""
    folder = tmp_path / "local"
    folder.mkdir()
    ended, served = serve(run)
    assert ended.digest == local.serve(MACHINE, JOB, folder).digest
    assert ok(served) == 10


BOTH = local.job_of(
    MACHINE, local.busy_requests(), body="exact", decoding=Decoding(microbatch="on", drafts=1)
)


def test_micro_batches_and_drafts_are_the_same_on_real_processes(
    run: Runner, tmp_path: Path
) -> None:
    """Two streams and coins: still nothing of the kernel's in the digest."""
    folder = tmp_path / "local"
    folder.mkdir()
    ended, served = serve(run, job=BOTH)
    assert ended.digest == local.serve(MACHINE, BOTH, folder).digest
    assert ok(served) == 10


@pytest.mark.parametrize("process", [LEADER, DECODE])
def test_a_death_within_a_pipelined_step_leaves_no_half_of_it(run: Runner, process: int) -> None:
    """What both micro-batches had is done again by those that live; its requests begin anew."""
    _, served = serve(run, fault("kill", process, 2.9), job=BOTH)
    assert ok(served) == 10


PLANS: dict[str, tuple[list[NodeFault], int]] = {
    "a prefill node": ([fault("kill", PREFILL, 2.5)], 10),
    "a prefill node, back before anyone noticed": (
        [fault("kill", PREFILL, 2.1005), fault("restart", PREFILL, 2.11)],
        10,
    ),
    "both prefill nodes, one back later": (
        [
            fault("kill", PREFILL, 1),
            fault("kill", OTHER_PREFILL, 1),
            fault("restart", OTHER_PREFILL, 9),
        ],
        10,
    ),
    "the decode leader": ([fault("kill", LEADER, 2.9)], 10),
    "a decode node, back before anyone noticed": (
        [fault("kill", DECODE, 2.9), fault("restart", DECODE, 2.95)],
        10,
    ),
    "the decode leader, back at once": (
        [fault("kill", LEADER, 2.9), fault("restart", LEADER, 2.9)],
        10,
    ),
    "all of decode, one back": (
        [fault("kill", LEADER, 2), fault("kill", DECODE, 2), fault("restart", DECODE, 12)],
        10,
    ),
    "all of decode, for ever": ([fault("kill", LEADER, 2), fault("kill", DECODE, 2.2)], 2),
    "decode nodes in turn": (
        [
            *(fault("kill", LEADER, 1), fault("restart", LEADER, 2)),
            *(fault("kill", DECODE, 3), fault("restart", DECODE, 4)),
            *(fault("kill", LEADER, 5), fault("restart", LEADER, 12)),
        ],
        8,
    ),
}
"""What dies and comes back when, and how many requests must end well all the same."""


@pytest.mark.parametrize("name", PLANS)
def test_a_death_costs_no_more_than_it_must(run: Runner, name: str) -> None:
    """Whatever dies: requests are tried again or fail with an error that says why."""
    faults, least_ok = PLANS[name]
    _, served = serve(run, *faults)
    assert ok(served) >= least_ok, [record["error"] for record in served.requests]


def test_requests_that_nobody_could_serve_say_so(run: Runner) -> None:
    _, served = serve(run, *PLANS["all of decode, for ever"][0])
    errors = {record["error"] for record in served.requests if record["status"] == "error"}
    assert errors == {"no decode node lived for 30 s", "node03 died before 5 s"}


def crash(process: int, window: int) -> Callable[[Supervisor], None]:
    """SIGKILL from outside, once a window has begun."""

    def interfere(supervisor: Supervisor) -> None:
        wait_for(lambda: hasattr(supervisor, "horizon") and supervisor.horizon.window >= window)
        os.kill(supervisor.pids[process], signal.SIGKILL)

    return interfere


def crash_and_replay(run: Runner, process: int, window: int, plan: list[NodeFault]) -> None:
    """Design 1.8: the recorded run replays to the same digest, its death planned."""
    first, served = serve(run, *plan, interfere=crash(process, window))
    died = [death for death in first.deaths if not death.planned]
    assert [death.process for death in died] == [process]
    kills = [
        NodeFault(kind="kill", process=death.process, at_ps=death.at_ps, sudden=True)
        for death in died
    ]
    second, again = serve(run, *plan, *kills)
    assert (second.digest, again.requests) == (first.digest, served.requests)


RESTARTS = [[fault("restart", process, 6.5)] for process in range(4)]


@pytest.mark.parametrize(("process", "window", "plan"), [(DECODE, 900, []), (LEADER, 1500, None)])
def test_a_crash_from_outside_replays(
    run: Runner, process: int, window: int, plan: list[NodeFault] | None
) -> None:
    crash_and_replay(run, process, window, RESTARTS[process] if plan is None else plan)


@pytest.mark.soak
@pytest.mark.parametrize("number", range(100))
def test_random_plans_of_deaths_end_and_repeat(run: Runner, number: int) -> None:
    """Kills and restarts of any node at any instant, one upon the other, every second time on links
    that break too."""
    draws = stream(6, f"plan {number}")
    plan = []
    for _ in range(1 + draws.below(5)):
        process, at_ps = draws.below(4), draws.below(10 * S)
        plan.append(NodeFault(kind="kill", process=process, at_ps=at_ps))
        if draws.below(3):
            back_ps = at_ps + draws.below(5 * S)
            plan.append(NodeFault(kind="restart", process=process, at_ps=back_ps))
    rules = broken.rules(broken.random_plan(number)) if number % 2 else ()
    first, second = serve(run, *plan, rules=rules), serve(run, *plan, rules=rules)
    assert first[0].digest == second[0].digest


@pytest.mark.soak
@pytest.mark.parametrize("number", range(10))
def test_ten_crashes_at_random_moments_replay(run: Runner, number: int) -> None:
    """Acceptance 5: any node, any moment; three of ten come back."""
    draws = stream(5, f"crash {number}")
    process, window = draws.below(4), 1 + draws.below(2800)
    crash_and_replay(run, process, window, RESTARTS[process] if number < 3 else [])
