"""Whole runs of layers: every token right at any shape, and nobody hangs when something is missing."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from cmnet.errors import CorruptError
from cmnet.link import effects
from cmnet.link.reach import Ends, Where
from cmnet.link.rules import Rule
from cmnet.topology.machine import Plane
from cmnet.units import NEVER_PS
from nodes.moe import result
from tests.nodes.moe.moe_run import Run, make_job, mini

US, MS = 10**6, 10**9
CUT = Where(plane=Plane.UB, one=Ends(processes=(3,)), both_ways=True)
"""All that node 3 (ranks 4 to 7 of 8) says or hears."""


def where(source: int | None = None, target: int | None = None) -> Where:
    """UB frames from one node to another; None: any."""
    ends = [None if node is None else Ends(processes=(node,)) for node in (source, target)]
    return Where(plane=Plane.UB, one=ends[0], other=ends[1])


def rule(effect: effects.Effect, place: Where, *, until_ps: int = NEVER_PS) -> Rule:
    return Rule(rule_id="it", owner="test", effect=effect, where=place, until_ps=until_ps)


SHAPES: dict[str, dict[str, Any]] = {
    "one node": {"ep": 4},
    "half a node": {"ep": 2},
    "one rank": {"ep": 1},
    "two nodes": {"ep": 8},
    "four nodes": {"ep": 16},
    "redundant": {"ep": 8, "redundant": 8},
    "one token": {"ep": 8, "batch": 1},
    "a rank without tokens": {"ep": 8, "counts": "0,6x7"},
    "one rank has all tokens": {"ep": 8, "counts": "6,0x7"},
    "nobody has tokens": {"ep": 8, "counts": "0x8"},
    "unfused": {"ep": 8, "algo": "unfused"},
    "unfused on four nodes": {"ep": 16, "algo": "unfused"},
    "by SDMA": {"ep": 8, "engine": "sdma"},
    "wider": {"ep": 8, "scale": "256"},
    "full scale": {"ep": 8, "scale": "full", "batch": 2},
    "exact": {"ep": 8, "model": "exact"},
    "exact at full scale": {"ep": 8, "model": "exact", "scale": "full", "batch": 2},
    "exact and skewed": {"ep": 8, "model": "exact", "skew": "hot:1:30"},
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_every_token_is_right(shape: str, tmp_path: Path) -> None:
    """Each rank of each layer has a line, no token is lost, all seals are the oracle's."""
    run = Run(make_job(**SHAPES[shape]), tmp_path)
    checked = run.job.model.carried_layers * sum(run.job.counts)
    assert len(run.lines) == run.job.model.carried_layers * run.job.ep_size
    assert (run.wrong(), run.errors()) == ((checked, 0, 0), "")


def test_algorithm_engine_scale_and_times_change_no_bit(tmp_path: Path) -> None:
    """The same tokens by other messages, at other times: the same seals."""
    ways: list[dict[str, Any]] = [{}, {"algo": "unfused"}, {"engine": "sdma"}, {"scale": "128"}]
    seals = []
    for number, way in enumerate(ways):
        seals.append(Run(make_job(**way), tmp_path / str(number)).seals())
    jitter = rule(effects.Jitter(jitter_ps=200 * US), where())
    seals.append(Run(make_job(), tmp_path / "jitter", rules=(jitter,)).seals())
    assert all(each == seals[0] for each in seals)


def test_times_of_scales_are_equal_and_those_of_engines_are_not(tmp_path: Path) -> None:
    """Charged bytes alone set times (design 2.2)."""
    ways: list[dict[str, Any]] = [{}, {"scale": "full"}, {"engine": "sdma"}]
    runs = [Run(make_job(**way), tmp_path / str(number)) for number, way in enumerate(ways)]
    assert runs[0].digest == runs[1].digest != runs[2].digest


def test_an_operator_of_sdma_begins_later_and_writes_slower(tmp_path: Path) -> None:
    plain, sdma = (
        Run(make_job(engine=engine), tmp_path / engine).lines[0, 0, 0] for engine in ("aiv", "sdma")
    )
    start_ps = mini().engines["sdma"].start_ps
    assert sdma.dispatched_ps - plain.dispatched_ps > start_ps


def test_the_unfused_flow_takes_longer(tmp_path: Path) -> None:
    """Three exchanges instead of two, BF16 instead of INT8."""
    fused, unfused = (
        Run(make_job(algo=algo), tmp_path / algo).lines[0, 0, 0] for algo in ("fused", "unfused")
    )
    assert unfused.dispatched_ps - unfused.began_ps > 2 * (fused.dispatched_ps - fused.began_ps)


# --- ranks of very different speeds --------------------------------------------------------------

LATE = rule(effects.Delay(delay_ps=800 * US), where(2, 3), until_ps=60 * US)
"""Flags and tokens of one node's first dispatch come late to the other's ranks: those still wait when
results come, which nothing delays."""


def test_no_slot_is_overwritten_unread(tmp_path: Path) -> None:
    """A fast rank's results do not touch the tokens that a slow one has not read: two buffers."""
    run = Run(make_job(layers=4, ep=8), tmp_path, rules=(LATE,))
    assert run.wrong()[1:] == (0, 0)
    waited = run.lines[0, 0, 4].dispatched_ps
    assert waited > 800 * US > run.lines[0, 0, 0].dispatched_ps, "ranks are not at different speeds"


def test_in_one_shared_buffer_a_slot_is_overwritten(tmp_path: Path) -> None:
    """The detector sees what two buffers are there to avoid."""
    with pytest.raises(BaseExceptionGroup) as found:
        Run(make_job(layers=4, ep=8), tmp_path, rules=(LATE,), shared_buffer=True)
    text = r"shared buffer of local rank \d+, slot \d+: overwritten unread"
    assert found.group_contains(CorruptError, match=text)


def test_a_rank_has_written_before_it_is_done(tmp_path: Path) -> None:
    """Its own flag comes behind its own results: with one hot expert its rank is the last of all."""
    run = Run(make_job(model="exact", skew="hot:1:30", batch=48), tmp_path)
    for (_, layer, rank), line in run.lines.items():
        own_ps = int(result.instants(line.combine_flags_ps)[rank])
        away = sum(
            int(result.sent_rows(run.lines[0, layer, source])[rank])
            for source in range(8)
            if source != rank
        )
        writing_ps = away * run.job.model.combine_bytes * 8 * 10**12 // (210 * 8 * 10**9)
        assert own_ps > line.combine_began_ps + writing_ps
        assert line.combined_ps >= own_ps


def test_without_rules_nobody_learns_late_that_it_is_done(tmp_path: Path) -> None:
    """Ranks with an expert that all want go on long after their neighbours, in time all the same."""
    assert Run(make_job(model="exact", skew="hot:1:30", batch=24), tmp_path).late() == 0


@pytest.mark.slow
def test_where_a_rule_makes_flags_crawl_it_is_said_who_learned_late(tmp_path: Path) -> None:
    """Those at the begin of a frame of flags are known with the last; without the rule nobody is late."""
    crawl = rule(effects.Rate(factor=Fraction(1, 10_000)), where(3))
    late = [
        Run(make_job(batch=24), tmp_path / str(len(rules)), rules=rules).late()
        for rules in ((), (crawl,))
    ]
    assert late[0] == 0 < late[1]


# --- something is missing -------------------------------------------------------------------------


def test_a_rank_that_is_cut_off_is_named_and_others_go_on(tmp_path: Path) -> None:
    """Node 3 (ranks 4 to 7) hears and says nothing: tokens for its experts are lost, the others right."""
    cut = rule(effects.Partition(), CUT)
    run = Run(make_job(), tmp_path, rules=(cut,))
    checked, wrong, lost = run.wrong()
    assert (wrong, checked + lost) == (0, 2 * 8 * 6)
    assert lost
    assert "ranks 4, 5, 6, 7" in run.lines[0, 0, 0].error
    returned_ps = max(line.combined_ps for line in run.lines.values() if line.rank < 4)
    assert returned_ps < 3 * run.job.timeout_ps, "the second layer waited again"


def test_tokens_with_living_replicas_survive(tmp_path: Path) -> None:
    """One die is cut off, and each of its experts has a replica on another: once that is known, nobody
    else loses a token."""
    alone = Where(plane=Plane.UB, one=Ends(devices=(mini().dies(3)[3],)), both_ways=True)
    job = make_job(redundant=256, layers=3, batch=24)
    run = Run(job, tmp_path, rules=(rule(effects.Partition(), alone),))
    kept = [sum(len(run.lines[0, layer, rank].index) for rank in range(7)) for layer in range(3)]
    assert run.wrong()[1] == 0
    assert 7 * 24 * 4 > kept[0] == kept[1] == kept[2] > 0


def test_lost_messages_lose_tokens_and_nothing_else(tmp_path: Path) -> None:
    loss = rule(effects.Loss(probability=Fraction(1, 3)), where(2, 3), until_ps=1 * MS)
    run = Run(make_job(), tmp_path, rules=(loss,))
    checked, wrong, lost = run.wrong()
    assert wrong == 0 and lost and checked
    assert run.errors()


def test_two_runs_are_the_same(tmp_path: Path) -> None:
    jitter = rule(effects.Jitter(jitter_ps=50 * US), where())
    digests = {Run(make_job(), tmp_path / str(n), rules=(jitter,)).digest for n in range(2)}
    assert len(digests) == 1
