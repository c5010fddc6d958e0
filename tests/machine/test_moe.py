"""Dispatch and combine on real processes: a node that dies inside them costs what needed it, no more."""

from __future__ import annotations

import functools
import os
import signal
import tempfile
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from cmnet.launch.supervisor import NodeFault, RunResult, Supervisor
from nodes.model import bodies
from nodes.model.body import I64
from nodes.moe import placement, program, result
from nodes.moe.job import DISTINCT_ROWS, FIRST_SEED, MoeJob
from tests.machine.conftest import Runner, wait_for
from tests.nodes.moe.moe_run import Run, make_job, mini

pytestmark = [pytest.mark.machine, pytest.mark.slow]

DEAD = 3
"""The process of ranks 4 to 7; ranks 0 to 3 live."""
LIVING = range(4)
Moment = Literal["before", "dispatch", "results", "combine", "second layer"]
MOMENTS: tuple[Moment, ...] = ("before", "dispatch", "results", "combine", "second layer")
ALGOS = ("fused", "unfused")


def job_of(**options: Any) -> MoeJob:
    return make_job(**{"batch": 48, "layers": 3, **options})


@functools.cache
def healthy(algo: str) -> Run:
    """The run without a fault, in one process."""
    with tempfile.TemporaryDirectory() as folder:
        return Run(job_of(algo=algo), Path(folder))


def instant(moment: Moment, algo: str) -> int:
    """In the middle of an operator of the node's first rank, by the run without a fault."""
    line, later = (healthy(algo).lines[0, layer, 4] for layer in (0, 1))
    return {
        "before": 0,
        "dispatch": (line.began_ps + line.dispatched_ps) // 2,
        "results": (line.dispatched_ps + line.combine_began_ps) // 2,
        "combine": (line.combine_began_ps + line.combined_ps) // 2,
        "second layer": (later.began_ps + later.dispatched_ps) // 2,
    }[moment]


class Ended(Run):
    """What a run of real processes left."""

    def __init__(self, job: MoeJob, ended: RunResult) -> None:
        self.job, self.digest = job, ended.digest
        self.lines = {}
        for path in sorted(Path(ended.folder).glob(result.PATTERN)):
            for data in path.read_bytes().splitlines():
                line = result.decode(data)
                self.lines[line.step, line.layer, line.rank] = line

    def kept(self, layer: int) -> list[tuple[int, int]]:
        """(rank, number) of the living ranks' tokens that are whole after a layer."""
        return [
            (rank, number)
            for rank in LIVING
            for number in result.index(self.lines[0, layer, rank]).tolist()
        ]


def run_moe(
    run: Runner, job: MoeJob, *faults: NodeFault, interfere: Any = None
) -> tuple[RunResult, Ended]:
    """The run ends by itself; every living rank has a line of each layer, right or with an error."""
    made = program.make_program(mini(), job)
    ended = run(made, node_faults=list(faults), interfere=interfere)
    assert (ended.error, ended.interrupted) == ("", False)
    found = Ended(job, ended)
    assert found.wrong()[1] == 0
    failed: set[int] = set()
    for layer in range(job.model.carried_layers):
        for rank in LIVING:
            line = found.lines[0, layer, rank]
            if line.error:
                failed.add(rank)
            assert rank in failed or len(result.index(line)) == job.counts[rank]
    last_ps = max(line.combined_ps for line in found.lines.values())
    assert last_ps < 4 * job.timeout_ps, "it was waited for more than once"
    return ended, found


def kill(at_ps: int) -> NodeFault:
    return NodeFault(kind="kill", process=DEAD, at_ps=at_ps)


def experts_of(job: MoeJob) -> list[I64]:
    """[layer][ranks, batch, top_k]: what each token chooses, by the body, with nothing lost."""
    body = bodies.make(job.body, job.model, skew=job.skew)
    index = np.arange(job.ep_size * job.batch)
    states = body.start_prompt(
        np.uint64(FIRST_SEED) + (index % DISTINCT_ROWS).astype(np.uint64), first_place=0
    )
    found = []
    for layer in range(job.model.carried_layers):
        chosen = body.gate(states, layer=layer).experts
        found.append(chosen.reshape(job.ep_size, job.batch, -1))
        states = body.moe_here(states, layer=layer)
    return found


# --- no fault -------------------------------------------------------------------------------------


@pytest.mark.parametrize("algo", ALGOS)
def test_real_processes_do_what_one_loop_does(algo: str, run: Runner) -> None:
    _, found = run_moe(run, job_of(algo=algo))
    assert found.digest == healthy(algo).digest
    assert found.seals() == healthy(algo).seals()


# --- a node dies ----------------------------------------------------------------------------------


@pytest.mark.parametrize("algo", ALGOS)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_death_ends_with_errors_that_name_its_ranks(
    moment: Moment, algo: str, run: Runner
) -> None:
    """Whatever was under way: a bounded wait, then all living ranks go on without the node."""
    ended, found = run_moe(run, job_of(algo=algo), kill(instant(moment, algo)))
    assert [death.process for death in ended.deaths] == [DEAD]
    errors = "".join(found.lines[0, layer, rank].error for layer in range(3) for rank in LIVING)
    assert "ranks 4, 5, 6, 7" in errors


def test_nothing_is_lost_that_did_not_need_the_node(run: Runner) -> None:
    """It dies before it does anything: a token is whole as long as none of its experts was there."""
    job = job_of(batch=96)
    _, found = run_moe(run, job, kill(0))
    needs = [np.logical_or.reduce(chosen >= 32 * 4, axis=2) for chosen in experts_of(job)]
    right = {(rank, number) for rank in LIVING for number in range(96)}
    for layer in range(3):
        right = {place for place in right if not needs[layer][place]}
        assert found.kept(layer) == sorted(right)
        assert right or layer, "no token to look at"


def test_later_layers_use_the_replicas_of_the_other_node(
    run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every expert is on both nodes, and tokens take turns: of the first layer the half that went to the
    dead node is lost, and from then on nothing."""
    rows = [tuple(range(32 * rank, 32 * rank + 32)) for rank in range(8)]
    slots = tuple(row + rows[(rank + 4) % 8] for rank, row in enumerate(rows))
    across = placement.Placement(slots, tuple(range(8)))
    monkeypatch.setattr(placement, "initial", lambda **_: across)
    _, found = run_moe(run, job_of(redundant=256, batch=96), kill(0))
    kept = [found.kept(layer) for layer in range(3)]
    assert kept[0] == kept[1] == kept[2]
    assert kept[0] == [(rank, number) for rank in LIVING for number in range(0, 96, 2)]
    assert all(found.lines[0, layer, rank].error == "" for layer in (1, 2) for rank in LIVING)


@pytest.mark.parametrize("moment", ["dispatch", "combine"])
def test_a_node_that_comes_back_takes_no_part(moment: Moment, run: Runner) -> None:
    """Its tokens are gone; the others neither wait for it again nor take anything from it."""
    at_ps = instant(moment, "fused")
    back = NodeFault(kind="restart", process=DEAD, at_ps=at_ps + 100 * 10**6)
    _, found = run_moe(run, job_of(), kill(at_ps), back)
    alone, _ = run_moe(run, job_of(), kill(at_ps))
    assert found.errors() == Ended(job_of(), alone).errors()


@pytest.mark.parametrize("moment", ["dispatch", "combine"])
def test_planned_deaths_repeat(moment: Moment, run: Runner) -> None:
    runs = [run_moe(run, job_of(), kill(instant(moment, "fused"))) for _ in range(2)]
    assert runs[0][0].digest == runs[1][0].digest
    assert runs[0][1].errors() == runs[1][1].errors()


@pytest.mark.parametrize("window", [2, 5])
def test_a_crash_from_outside_replays_as_a_planned_kill(window: int, run: Runner) -> None:
    """Design 1.8: at the start of the window that was under way."""

    def interfere(supervisor: Supervisor) -> None:
        wait_for(lambda: hasattr(supervisor, "horizon") and supervisor.horizon.window >= window)
        os.kill(supervisor.pids[DEAD], signal.SIGKILL)

    first, found = run_moe(run, job_of(), interfere=interfere)
    assert [(death.process, death.planned) for death in first.deaths] == [(DEAD, False)]
    second, again = run_moe(run, job_of(), kill(first.deaths[0].at_ps))
    assert (second.digest, again.seals()) == (first.digest, found.seals())
