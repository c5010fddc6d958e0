"""Replicas and packing, for any loads."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodes.moe import eplb
from nodes.moe.eplb import rebalance, replicate
from nodes.moe.placement import I64, Placement, contiguous, initial, targets, without

EXAMPLES = 12


class Case(msgspec.Struct, frozen=True):
    """A placement, loads, and where ranks and experts belong."""

    placement: Placement
    loads: tuple[int, ...]
    groups: int
    nodes: tuple[int, ...]

    def plan(self) -> eplb.Plan:
        loads = np.array(self.loads)
        return rebalance(self.placement, loads, groups=self.groups, nodes=self.nodes)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any group of up to 16 ranks, some of them gone, some loads, often after an earlier plan."""
    nodes = draw(st.integers(1, 4))
    ep_size = nodes * draw(st.integers(1, 4))
    shared = draw(st.sampled_from([0, 0, ep_size // 4]))
    each = draw(st.integers(1, 5))
    experts = draw(st.integers(1, (ep_size - shared) * each))
    placement = initial(
        experts=experts,
        ep_size=ep_size,
        redundant=(ep_size - shared) * each - experts,
        shared_ranks=shared,
    )
    if draw(st.integers(0, 3)) == 0:
        gone = draw(st.sets(st.integers(0, ep_size - 1), max_size=ep_size - 1))
        placement = without(placement, dead=frozenset(gone))
    of_node = tuple(rank * nodes // ep_size for rank in range(ep_size))
    groups = draw(st.sampled_from([g for g in (1, 2, 4, 8, 16) if experts % g == 0]))
    numbers = draw(st.sampled_from([1, 3, 100, 10**9]))
    some = st.lists(st.integers(0, numbers), min_size=experts, max_size=experts)
    for _ in range(draw(st.integers(0, 1))):
        loads = np.array(draw(some))
        placement = rebalance(placement, loads, groups=groups, nodes=of_node).placement
    return Case(placement, tuple(draw(some)), groups, of_node)


def even(placement: Placement) -> bool:
    return len({room for room in placement.rooms if room}) == 1


@settings(deadline=None, max_examples=EXAMPLES)
@given(cases())
def test_every_slot_is_used_and_every_expert_there(case: Case) -> None:
    """The slots are the old ones, so at most so many a rank as it has memory for; shared ranks stay."""
    plan = case.plan()
    assert plan.placement.rooms == case.placement.rooms
    assert plan.placement.shared == case.placement.shared
    assert set(itertools.chain(*plan.placement.slots)) == set(range(len(case.loads)))


@settings(deadline=None, max_examples=EXAMPLES)
@given(cases())
def test_no_rank_has_an_expert_twice_that_need_not(case: Case) -> None:
    """With equal slots it need only if a rank has more slots than there are experts."""
    if even(case.placement):
        for row in case.plan().placement.slots:
            assert len(set(row)) == min(len(row), len(case.loads))


@settings(deadline=None, max_examples=EXAMPLES)
@given(cases())
def test_the_fullest_rank_is_never_worse_off(case: Case) -> None:
    """Neither than before nor than with experts in their order."""
    plan, loads = case.plan(), np.array(case.loads)
    most = eplb.rank_loads(plan.placement, loads).max()
    in_order = Placement(contiguous(case.placement.rooms, len(loads)), case.placement.shared)
    assert most <= eplb.rank_loads(case.placement, loads).max()
    assert most <= eplb.rank_loads(in_order, loads).max()
    assert (plan.kind == "unchanged") == (plan.placement == case.placement)


@settings(deadline=None, max_examples=EXAMPLES)
@given(cases())
def test_in_nodes_the_experts_of_a_group_stay_together(case: Case) -> None:
    """That is what the hierarchy is for: what a token needs of a group is in one node."""
    plan = case.plan()
    if plan.kind == "hierarchical":
        size = len(case.loads) // case.groups
        of_group: dict[int, set[int]] = {}
        for rank in range(plan.placement.ep_size):
            for expert in plan.placement.held(rank):
                of_group.setdefault(expert // size, set()).add(case.nodes[rank])
        assert all(len(nodes) == 1 for nodes in of_group.values())


def hot(experts: int, times: int) -> I64:
    """Expert 37 with so many times the load of each other."""
    loads = np.full(experts, 1000)
    loads[37] *= times
    return loads


PUBLISHED = initial(experts=256, ep_size=320, redundant=32, shared_ranks=32)
NODES = tuple(rank // 16 for rank in range(320))


def test_one_hot_expert_of_the_published_group() -> None:
    """30 times the others: it gets 29 replicas more, nothing else moves; nodes do not divide groups."""
    plan = rebalance(PUBLISHED, hot(256, 30), groups=8, nodes=NODES)
    assert plan.kind == "global"
    assert len(plan.placement.replicas(37)) == 30
    assert plan.placement.slots[:288] == PUBLISHED.slots[:288]
    assert plan.imbalance_before == pytest.approx(30.3, abs=0.05)
    assert plan.imbalance_after == pytest.approx(1.01, abs=0.005)


def test_groups_stay_in_nodes_where_that_costs_little() -> None:
    """Two nodes, four groups each; a group with twice the load is no reason to spread."""
    placement = initial(experts=256, ep_size=32, redundant=32)
    loads = np.repeat([2000, 2000, 2000, 2000, 1000, 1000, 1000, 1000], 32)
    plan = rebalance(placement, loads, groups=8, nodes=NODES[:32])
    assert plan.kind == "hierarchical"
    assert plan.imbalance_after < 1.1


def test_groups_are_spread_where_a_node_is_too_small_for_one() -> None:
    """Eight nodes, a group each: the hot expert's node has 16 of 128 redundant slots, so 1.7 x the mean."""
    placement = initial(experts=256, ep_size=128, redundant=128)
    plan = rebalance(placement, hot(256, 30), groups=8, nodes=NODES[:128])
    assert plan.kind == "global"
    assert plan.imbalance_after < 1.15


def test_groups_are_spread_where_a_node_would_have_too_few_experts() -> None:
    """Two experts for three slots of a rank: one would be there twice."""
    placement = initial(experts=4, ep_size=2, redundant=2)
    plan = rebalance(placement, np.array([1, 0, 0, 1]), groups=2, nodes=(0, 1))
    assert plan.kind != "hierarchical"


def test_experts_in_their_order_are_taken_where_packing_is_worse() -> None:
    """Heaviest first is a rule of thumb: here 8 is the most a rank need have, and it ends above that."""
    old = Placement(((0, 1, 2), (2, 3, 1)), (0, 1))
    plan = rebalance(old, np.array([0, 4, 6, 5]))
    assert (plan.kind, plan.placement.slots) == ("contiguous", ((0, 1, 2), (2, 3, 0)))


def test_small_differences_move_nothing() -> None:
    """Loads of the next step differ as much."""
    placement = initial(experts=256, ep_size=8, redundant=8)
    loads = 1000 + np.arange(256) % 7
    assert rebalance(placement, loads).kind == "unchanged"


@pytest.mark.parametrize(
    ("loads", "slots", "ranks", "counts"),
    [
        ([5, 5, 5, 5], 6, 6, [2, 2, 1, 1]),
        ([0, 0, 0], 5, 5, [2, 2, 1]),
        ([9, 0, 0], 6, 6, [4, 1, 1]),
        ([9, 0, 0], 6, 3, [3, 2, 1]),
        ([9, 1], 7, 2, [4, 3]),
        ([6, 3, 2], 6, 9, [3, 2, 1]),
        ([7], 3, 1, [3]),
    ],
    ids=["uniform", "zero", "one has all", "few ranks", "more than ranks", "mixed", "one rank"],
)
def test_replicas_go_where_most_is_left(
    loads: list[int], slots: int, ranks: int, counts: list[int]
) -> None:
    """Ties: fewest replicas, then the lower expert; none gets two on a rank before all have one there."""
    found = replicate(np.array(loads), slots=slots, ranks=ranks)
    assert found.tolist() == counts


@settings(deadline=None, max_examples=EXAMPLES)
@given(cases())
def test_the_same_loads_again_make_nothing_worse(case: Case) -> None:
    """Loads are looked at again and again; a plan is a function of what it is given."""
    plan = case.plan()
    again = msgspec.structs.replace(case, placement=plan.placement).plan()
    assert again.imbalance_before == plan.imbalance_after >= again.imbalance_after
    assert case.plan() == plan


def test_equal_loads_are_told_apart_by_number_only() -> None:
    """The heaviest first, the lower expert of two that are as heavy: not by any order of a heap."""
    counts = np.ones(6, dtype=np.int64)
    rows = eplb.pack(np.full(6, 4), counts, rooms=[2, 2, 2], stay=[frozenset()] * 3)
    assert rows == [[0, 3], [1, 4], [2, 5]]


def test_a_place_is_made_by_moving_others_on() -> None:
    """The last free slot is on a rank that has the expert: another goes there instead."""
    rows = eplb.pack(
        np.array([10, 9, 1]), np.array([1, 1, 2]), rooms=[2, 2], stay=[frozenset()] * 2
    )
    assert sorted(map(sorted, rows)) == [[0, 2], [1, 2]]
    table = eplb._Ranks(np.array([4, 3, 2, 1]), [2, 3])
    for rank, expert in [(0, 0), (0, 2), (1, 1), (1, 3)]:
        table.add(rank, expert)
    assert table.make_room(1)
    assert [sorted(row) for row in table.rows] == [[2], [0, 1, 3]]


@settings(deadline=None, max_examples=EXAMPLES)
@given(cases())
def test_the_load_of_a_rank_is_what_tokens_bring(case: Case) -> None:
    """As many tokens as an expert's load, with indices in a row: no rank is off by more than its experts."""
    loads = np.minimum(np.array(case.loads), 50)
    placement = case.plan().placement
    experts = np.repeat(np.arange(len(loads)), loads)
    index = np.concatenate([np.arange(load) for load in loads.tolist()])
    ranks = targets(placement, experts[:, None].astype(np.int64), index.astype(np.int64))
    came = np.bincount(ranks.ravel(), minlength=placement.ep_size)
    expected = eplb.rank_loads(placement, loads) / eplb.PARTS
    held = np.array([len(placement.held(rank)) for rank in range(placement.ep_size)])
    assert (np.abs(came - expected) <= held).all()


def test_no_loads_are_no_imbalance() -> None:
    """Nothing to divide by."""
    assert eplb.imbalance(PUBLISHED, np.zeros(256, dtype=np.int64)) == 1.0
