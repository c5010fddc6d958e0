"""Re-placement while tokens go on: loads fall, no token is wrong in any stage, nobody waits for ever."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cmnet.errors import CorruptError, InputError
from cmnet.link import effects
from cmnet.link.reach import Ends, Where
from cmnet.link.rules import Rule
from cmnet.topology.machine import Plane
from cmnet.units import NEVER_PS
from nodes.constants import EXPERT_WEIGHTS
from nodes.moe import eplb, layer, moving, placement, rebalancing, refill, result, table, verify
from nodes.moe.layout import TokenRows
from nodes.moe.placement import Placement
from nodes.moe.rebalancing import PassDone, Rebalancing, StageName
from tests.nodes.moe.moe_run import Run, make_job, mini

MS = 10**9
RANKS = 8
ROUND = ["prefetch", "disable", "load", "enable"]


def loads(*, hot: int, tokens: int = 4096) -> placement.I64:
    """One expert of 256 has 30 of 100 tokens, the others as much as each other."""
    found = np.full(256, tokens * 7 // 10 // 255, dtype=np.int64)
    found[hot] = tokens * 3 // 10
    return found


def first(ranks: int = RANKS, redundant: int = RANKS) -> Placement:
    return placement.initial(experts=256, ep_size=ranks, redundant=redundant)


def done(number: int, **changes: Any) -> list[PassDone]:
    """Two nodes have ended a pass; ``changes`` are the second one's."""
    counted = rebalancing.packed(loads(hot=100)) if number == 0 else b""
    one = PassDone(number=number, node=0, loads=counted)
    return [one, msgspec.structs.replace(one, node=1, **changes)]


# --- refill ---------------------------------------------------------------------------------------


@pytest.mark.slow
@given(st.lists(st.integers(0, 1000), min_size=16, max_size=16), st.sampled_from((4, 8, 12)))
def test_refilled_slots_leave_every_expert_at_home(counted: list[int], redundant: int) -> None:
    """So one round a slot is enough, without a gap; no rank gets an expert twice."""
    old = placement.initial(experts=16, ep_size=4, redundant=redundant)
    new = refill.refilled(old, np.array(counted))
    schedule = moving.stages(old, new)
    assert [row[:4] for row in new.slots] == [row[:4] for row in old.slots]
    assert schedule.kept == ()
    assert len(schedule.stages) <= 4 * redundant // 4
    assert all(len(set(row)) == len(row) for row in new.slots)


def test_a_hot_expert_gets_replicas_in_one_round() -> None:
    way = rebalancing.find_way(first(), loads(hot=100), groups=8, nodes=(0,) * 4 + (1,) * 4)
    assert (way.kind, len(way.schedule.stages)) == ("refilled", 4)
    assert way.imbalance_before > 2 > 1.05 > way.imbalance_predicted


def test_everything_is_placed_anew_where_that_is_better_by_far() -> None:
    """At EP 128 with 128 replicas a rank has two experts at home, by number; parting heavy ones helps."""
    old, counted = first(ranks=128, redundant=128), 10 + np.arange(256) * 37 % 256
    way = rebalancing.find_way(old, counted)
    refilled = refill.refilled(old, counted)
    assert way.kind == "global"
    assert 1 < len(way.schedule.stages) // 4 <= rebalancing.ROUNDS_MAX
    assert way.imbalance_predicted < 0.875 * eplb.imbalance(refilled, counted)


def test_even_loads_move_nothing() -> None:
    even = np.full(256, 100, dtype=np.int64)
    old = refill.refilled(first(), even)
    assert rebalancing.find_way(old, even).kind == "unchanged"


# --- which stage follows --------------------------------------------------------------------------


def test_stages_come_in_order_and_wait_for_every_node() -> None:
    """A prefetch goes on while one node's weights are not there; so does a load."""
    walk = Rebalancing((first(),), groups=8, nodes=(0,) * 4 + (1,) * 4)
    seen = []
    ready = [True, False, True, True, False, False, True, True, True]
    for number, each in enumerate(ready):
        seen.append(walk.now.stage)
        if not walk.go_on(done(number, ready=each)):
            break
    assert seen == ["before", "prefetch", "prefetch", "disable", "load", "load", "load", *seen[7:]]
    assert seen[7:] == ["enable", "after"]
    before = ["", *seen]
    assert all(b in rebalancing.FOLLOWERS.get(a, ("before",)) for a, b in zip(before, seen))


def test_a_failed_fetch_ends_the_re_placement_where_it_is() -> None:
    walk = Rebalancing((first(),), groups=8, nodes=(0,) * 4 + (1,) * 4)
    walk.go_on(done(0))
    assert walk.go_on(done(1, ready=False, failed="rank 5 did not get it"))
    assert (walk.now.stage, walk.gave_up) == ("after", "rank 5 did not get it")
    assert walk.now.placements == (first(),)
    assert not walk.go_on(done(2))


def test_a_prefetch_that_never_ends_is_given_up() -> None:
    """As often as every node counts alike."""
    walk = Rebalancing((first(),), groups=8, nodes=(0,) * 4 + (1,) * 4)
    walk.go_on(done(0))
    passes = 0
    while walk.now.stage == "prefetch":
        walk.go_on(done(1, ready=False))
        passes += 1
    assert (passes, walk.now.stage) == (rebalancing.PREFETCHES_MAX, "after")
    assert "not all there" in walk.gave_up


def test_layers_with_fewer_rounds_wait_for_the_others() -> None:
    """Each layer has its own placement; all have the same stage."""
    old = first(redundant=16)
    walk = Rebalancing((old, old), groups=8, nodes=(0,) * 4 + (1,) * 4)
    counted = np.stack([loads(hot=3), refill_free(old)])
    walk.go_on([PassDone(number=0, node=0, loads=rebalancing.packed(counted))])
    assert walk.course is not None
    rounds = [len(way.schedule.stages) // 4 for way in walk.course.ways]
    assert rounds[1] == 0 < rounds[0]
    while walk.now.stage != "after":
        assert walk.now.placements[1] == old
        walk.go_on([PassDone(number=1, node=0)])
    assert walk.now.placements[0] != old


def refill_free(old: Placement) -> placement.I64:
    """Loads for which the placement is right: equal for each replica of an expert."""
    return np.array([10 * len(old.replicas(expert)) for expert in range(256)])


# --- whole runs -----------------------------------------------------------------------------------

SHAPES: dict[str, dict[str, Any]] = {
    "seal": {"batch": 24},
    "exact and skewed": {"batch": 24, "model": "exact", "skew": "hot:1:30", "layers": 1},
}


def stages_of(run: Run) -> list[str]:
    """Of each pass, the same at all ranks and layers."""
    found: dict[int, set[str]] = collections.defaultdict(set)
    for (step, _, _), line in run.lines.items():
        found[step].add(line.stage)
    assert all(len(each) == 1 for each in found.values()), found
    return [found[step].pop() for step in sorted(found)]


def most_over_mean(run: Run, step: int, layer: int) -> float:
    rows = [run.lines[step, layer, rank].rows for rank in range(run.job.ep_size)]
    return max(rows) / (sum(rows) / len(rows))


def without_repeats(stages: list[str]) -> list[str]:
    return [each for i, each in enumerate(stages) if i == 0 or stages[i - 1] != each]


def verified(run: Run) -> verify.Verified:
    verifier = verify.Verifier(run.job)
    for line in run.lines.values():
        verifier.take(result.encode(line))
    return verifier.finish()


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_loads_fall_and_every_token_is_right_in_every_pass(shape: str, tmp_path: Path) -> None:
    """Stages in order, all ranks in each; the verifier of whole runs says the same."""
    run = Run(make_job(eplb=True, redundant=RANKS, **SHAPES[shape]), tmp_path)
    stages, layers = stages_of(run), run.job.model.carried_layers
    assert without_repeats(stages) == ["before", *ROUND, "after"]
    tokens = len(stages) * layers * sum(run.job.counts)
    assert (run.wrong(), run.errors()) == ((tokens, 0, 0), "")
    found = verified(run)
    assert (found.checked, found.wrong, found.missing) == (tokens, 0, [])
    for number in range(layers):
        before, after = (most_over_mean(run, step, number) for step in (0, len(stages) - 1))
        assert after < before


@pytest.mark.slow
def test_two_runs_are_the_same(tmp_path: Path) -> None:
    digests = {
        Run(make_job(eplb=True, redundant=RANKS), tmp_path / str(number)).digest
        for number in range(2)
    }
    assert len(digests) == 1


def test_off_is_one_pass_without_a_message_more(tmp_path: Path) -> None:
    run = Run(make_job(redundant=RANKS, layers=1), tmp_path)
    assert stages_of(run) == [""]


@pytest.mark.slow
def test_weights_that_are_not_the_experts_end_the_run(tmp_path: Path) -> None:
    """What came is looked at, with the name of expert and layer."""

    def touch(what: str, items: Any) -> Any:
        return items.replace(b"expert", b"export") if what == "prefetched" else items

    with pytest.raises(CorruptError, match="not the weights of layer 0, expert"):
        Run(make_job(eplb=True, redundant=RANKS, layers=1), tmp_path, touch=touch)


def test_a_row_for_a_slot_that_is_disabled_is_an_error() -> None:
    """Whoever sends by the placement of another stage is found out at the receiver."""
    walk = Rebalancing((first(),), groups=8, nodes=(0,) * 4 + (1,) * 4)
    for number in range(2):
        walk.go_on(done(number))
    assert walk.now.stage == "disable"
    move = walk.now.moves[0][0]
    gone, one = first().slots[move.rank][move.slot], np.array([0])
    group = layer.Group(sources=one, experts=one, placements=walk.now.placements, batch=1)
    for expert in (gone, move.expert):
        row = TokenRows(
            one + move.rank, one, one, one + expert, one, one, np.zeros((1, 4), np.uint64)
        )
        with pytest.raises(CorruptError, match=f"rank {move.rank} does not hold expert {expert}"):
            table.check_held(table.table(group.placement(0), 256), row, shared_expert=256)


@pytest.mark.slow
def test_fetched_weights_cross_links_and_cost_their_time(tmp_path: Path) -> None:
    """A pass in which they come is longer than the one before; 42 MiB at most 137 GB/s a die."""
    run = Run(make_job(eplb=True, redundant=RANKS, layers=1, batch=24), tmp_path)
    began, ended = (
        [max(line.combined_ps for (s, _, _), line in run.lines.items() if s == step) for step in at]
        for at in ((0, 1), (1, 2))
    )
    passes = [end - begin for begin, end in zip(began, ended, strict=True)]
    assert passes[0] > passes[1]
    assert int(EXPERT_WEIGHTS.value) / 137e9 * 1e12 < sum(passes)


# --- something is missing -------------------------------------------------------------------------


def cut(place: Where, *, after_ps: int, until_ps: int = NEVER_PS) -> Rule:
    return Rule(
        rule_id="it",
        owner="test",
        effect=effects.Partition(),
        where=place,
        start_ps=after_ps,
        until_ps=until_ps,
    )


NODE_3 = Where(plane=Plane.UB, one=Ends(processes=(3,)), both_ways=True)
QUICK = {"timeout_ps": 20 * MS}


@pytest.mark.slow
@pytest.mark.parametrize("after_us", [0, 700, 1300, 2600, 3800, 5100, 6400])
def test_a_node_that_is_cut_off_at_any_stage_is_named(after_us: int, tmp_path: Path) -> None:
    """Every token that is there is right; all end, and say why."""
    job = make_job(QUICK, eplb=True, redundant=RANKS, layers=1, batch=24)
    run = Run(job, tmp_path, rules=(cut(NODE_3, after_ps=after_us * 10**6),))
    found = verified(run)
    assert (run.wrong()[1], found.wrong) == (0, 0)
    assert "ranks 4, 5, 6, 7" in run.errors() or "node03 did not end pass" in run.errors()
    assert max(line.combined_ps for line in run.lines.values()) < 10 * job.timeout_ps


@pytest.mark.slow
def test_weights_that_cannot_be_fetched_leave_the_old_placement(tmp_path: Path) -> None:
    """One die is cut off while others read from it: all give up, and go on with what they have, at once
    as that rank is missed."""
    die = Where(plane=Plane.UB, one=Ends(devices=(mini().dies(3)[1],)), both_ways=True)
    job = make_job(QUICK, eplb=True, redundant=RANKS, layers=1, batch=24)
    run = Run(job, tmp_path, rules=(cut(die, after_ps=1300 * 10**6),))
    assert run.wrong()[1] == 0
    assert without_repeats(stages_of(run)) == ["before", "prefetch", "after"]
    gave_up = {each["eplb"]["gave_up"] for each in run.statistics if "eplb" in each}
    assert gave_up == {"node02 misses ranks 5"}
    assert max(line.combined_ps for line in run.lines.values()) < 10 * job.timeout_ps


# --- what is refused ------------------------------------------------------------------------------


def test_without_a_slot_to_move_to_it_is_refused() -> None:
    with pytest.raises(InputError) as found:
        make_job(eplb=True, ep=8)
    assert "--redundant" in str(found.value) and "8 or a multiple" in str(found.value)


def test_the_verifier_misses_the_pass_after_and_sees_a_wrong_order() -> None:
    """A run that ends in the middle has not done what it was to do."""
    job = make_job(eplb=True, redundant=RANKS, layers=1, batch=1)
    verifier = verify.Verifier(job)
    stages: tuple[StageName, ...] = ("before", "disable")
    for step, stage in enumerate(stages):
        for rank in range(RANKS):
            line = result.RankLayer(
                step=step, layer=0, rank=rank, tokens=1, stage=stage, error="it"
            )
            verifier.take(result.encode(line))
    found = verifier.finish()
    assert found.first is not None and "stage 'disable' after 'before'" in found.first
    assert [(each.rank, each.step) for each in found.missing] == [(r, 2) for r in range(RANKS)]


def test_the_verifier_sees_ranks_in_different_stages() -> None:
    job = make_job(eplb=True, redundant=RANKS, layers=1, batch=1)
    verifier = verify.Verifier(job)
    stages: tuple[StageName, ...] = ("load", "stopped", "load", "enable")
    for rank, stage in enumerate(stages):
        line = result.RankLayer(step=4, layer=0, rank=rank, tokens=1, stage=stage, error="it")
        verifier.take(result.encode(line))
    first_wrong = "step 4, layer 0, rank 3: in stage 'enable', others in 'load'"
    assert (verifier.verified.wrong, verifier.verified.first) == (1, first_wrong)


def test_predicted_loads_are_those_of_the_placement() -> None:
    way = rebalancing.find_way(first(), loads(hot=7))
    reached = way.schedule.reached(first())
    assert way.imbalance_predicted == eplb.imbalance(reached, loads(hot=7))
