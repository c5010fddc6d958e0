"""Every kind of link fault, during a dispatch and during a combine: nobody hangs, no token is wrong, and
whoever lost one says whom it missed."""

from __future__ import annotations

import functools
import re
import tempfile
from pathlib import Path
from typing import Literal

import pytest

from cmnet.chaos import plan as plans
from cmnet.link.rules import Rule
from nodes.moe import result
from nodes.moe.job import Algo, MoeJob
from tests.nodes.moe.moe_run import Run, make_job, mini

pytestmark = pytest.mark.slow

Operator = Literal["dispatch", "combine"]
OPERATORS: tuple[Operator, ...] = ("dispatch", "combine")
ALGOS: tuple[Algo, ...] = ("fused", "unfused")
PLACES = {
    "between the nodes": "node02 <-> node03",
    "to one node": "node02 -> node03",
    "of one node": "node03",
    "of one die": "node03/npu0/die1",
}
LOSING = {
    "loss": "kind: loss, p: 0.2",
    "all lost": "kind: loss, p: 1",
    "burst_loss": "kind: burst_loss, p_bad: 0.1, p_good: 0.2, loss_bad: 0.9, loss_good: 0",
    "partition": "kind: partition",
    "flap": "kind: flap, period: 2 ms, down: 1900 us",
    "corrupt": "kind: corrupt, p: 0.2",
}
"""These may cost tokens."""
HARMLESS = {
    "delay": "kind: delay, delay: 400 us",
    "jitter": "kind: jitter, jitter: 400 us",
    "rate": "kind: rate, factor: 0.02",
    "duplicate": "kind: duplicate, p: 0.5",
}
"""These cost time only."""
SWITCHES = {
    "subplane_down": "target: subplane 3, kind: subplane_down",
    "l2_down": "target: subplane 3, kind: l2_down, chip: 2",
}


def job_of(algo: Algo) -> MoeJob:
    return make_job(algo=algo, batch=8, layers=2)


@functools.cache
def healthy(algo: Algo) -> Run:
    """The run without a fault; its lines say when what is under way."""
    with tempfile.TemporaryDirectory() as folder:
        return Run(job_of(algo), Path(folder))


def during(operator: Operator, algo: Algo) -> str:
    """When ranks are in the first layer's operator, as keys of a plan."""
    lines = [line for line in healthy(algo).lines.values() if line.layer == 0]
    if operator == "dispatch":
        begin_ps = min(line.began_ps for line in lines)
        end_ps = max(line.dispatched_ps for line in lines)
    else:
        begin_ps = min(line.combine_began_ps for line in lines)
        end_ps = max(line.combined_ps for line in lines)
    return f"at: {begin_ps} ps, for: {end_ps - begin_ps} ps"


def rules_of(entry: str) -> tuple[Rule, ...]:
    return plans.parse(f"- {{{entry}}}", file="test", machine=mini()).rules


def check(run: Run) -> int:
    """What holds after any fault; returns the tokens that are lost."""
    job, layers = run.job, run.job.model.carried_layers
    assert len(run.lines) == layers * job.ep_size, "a rank did not end"
    last_ps = max(line.combined_ps for line in run.lines.values())
    assert last_ps < (3 * layers + 1) * job.timeout_ps, "somebody waited longer than the limit"
    checked, wrong, lost = run.wrong()
    assert wrong == 0
    failed: set[int] = set()
    for (_, layer, rank), line in sorted(run.lines.items()):
        if line.error:
            assert re.search(r"ranks \d", line.error) or "missing ranks" in line.error
            failed.add(rank)
        if len(result.index(line)) < job.counts[rank]:
            assert rank in failed, f"rank {rank} lost tokens of layer {layer} in silence"
    assert checked + lost == layers * sum(job.counts)
    return lost


@pytest.mark.parametrize("algo", ALGOS)
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", [*LOSING, *HARMLESS])
def test_a_link_fault_costs_an_error_or_time(
    kind: str, place: str, operator: Operator, algo: Algo, tmp_path: Path
) -> None:
    """No hang, no wrong token, nothing lost in silence; and what loses no message loses no token."""
    effect = (LOSING | HARMLESS)[kind]
    entry = f'{during(operator, algo)}, target: "{PLACES[place]}", plane: ub, {effect}'
    run = Run(job_of(algo), tmp_path, rules=rules_of(entry))
    assert run.digest != healthy(algo).digest, "it hit nothing"
    lost = check(run)
    if kind in HARMLESS:
        assert (lost, run.errors()) == (0, "")
        assert run.seals() == healthy(algo).seals()


@pytest.mark.parametrize("algo", ALGOS)
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("kind", SWITCHES)
def test_switches_that_are_down_take_bandwidth_only(
    kind: str, operator: Operator, algo: Algo, tmp_path: Path
) -> None:
    entry = f"{during(operator, algo)}, {SWITCHES[kind]}"
    run = Run(job_of(algo), tmp_path, rules=rules_of(entry))
    assert run.digest != healthy(algo).digest, "it hit nothing"
    assert (check(run), run.errors(), run.seals()) == (0, "", healthy(algo).seals())


@pytest.mark.parametrize("algo", ALGOS)
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("target", ["node02", "node03"])
@pytest.mark.parametrize("one_way", ["true", "false"])
def test_a_partition_names_who_was_missing(
    one_way: str, target: str, operator: Operator, algo: Algo, tmp_path: Path
) -> None:
    """One way or both: every error names ranks of the other node, and all tokens that needed none of
    them are there."""
    when = during(operator, algo)
    entry = f"{when}, target: {target}, plane: ub, kind: partition, one_way: {one_way}"
    run = Run(job_of(algo), tmp_path, rules=rules_of(entry))
    assert check(run) > 0
    sides = {"node02": range(4), "node03": range(4, 8)}
    for (_, layer, rank), line in run.lines.items():
        if layer == 0 and line.error:
            other = next(side for side in sides.values() if rank not in side)
            lists = re.findall(r"of ranks ([\d, ]+)", line.error)
            named = {int(number) for each in lists for number in each.split(",")}
            assert named <= set(other), line.error


def test_the_same_fault_again_is_the_same_run(tmp_path: Path) -> None:
    entry = f"{during('dispatch', 'fused')}, target: node03, plane: ub, {LOSING['loss']}"
    runs = [Run(job_of("fused"), tmp_path / str(n), rules=rules_of(entry)) for n in range(2)]
    assert runs[0].digest == runs[1].digest
    assert runs[0].errors() == runs[1].errors() != ""
