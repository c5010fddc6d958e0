"""Which rank holds which expert, whoever lives, and where each token goes."""

from __future__ import annotations

import collections
import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodes.moe.placement import EMPTY, Placement, contiguous, initial, targets, without

EXAMPLES = 12


class Shape(msgspec.Struct, frozen=True):
    """What ``initial`` is asked for."""

    experts: int
    ep_size: int
    redundant: int = 0
    shared_ranks: int = 0

    def placement(self, alive: frozenset[int] | None = None) -> Placement:
        return initial(**msgspec.structs.asdict(self), alive=alive)


PUBLISHED = Shape(256, 320, 32, 32)
SHAPES = st.sampled_from(
    [
        PUBLISHED,
        Shape(256, 288, 0, 32),
        Shape(256, 288, 256, 32),
        Shape(256, 8),
        Shape(256, 32, 32),
        Shape(12, 4, 2 * 4),
        Shape(8, 3, 1),
        Shape(4, 4, 12),
        Shape(2, 3, 7),
        Shape(1, 1),
        Shape(1, 2, 0, 1),
    ]
)


@st.composite
def groups(draw: st.DrawFn) -> tuple[Shape, frozenset[int]]:
    """A shape and who lives."""
    shape = draw(SHAPES)
    everyone = list(range(shape.ep_size))
    return shape, frozenset(draw(st.sets(st.sampled_from(everyone), min_size=1)))


def in_slots(placement: Placement) -> list[int]:
    return list(itertools.chain(*placement.slots))


@settings(deadline=None, max_examples=EXAMPLES)
@given(SHAPES)
def test_every_slot_has_an_expert_and_every_expert_a_slot(shape: Shape) -> None:
    """Replicas of one expert are on different ranks, unless a rank has more slots than there are."""
    placement = shape.placement()
    assert len(in_slots(placement)) == shape.experts + shape.redundant
    assert set(in_slots(placement)) == set(range(shape.experts))
    assert len({room for room in placement.rooms if room}) == 1
    for row in placement.slots:
        assert len(set(row)) == min(len(row), shape.experts)


@settings(deadline=None, max_examples=EXAMPLES)
@given(SHAPES)
def test_without_loads_replicas_are_spread_evenly(shape: Shape) -> None:
    """No expert has two replicas more than another, as far as a rank need not have one twice."""
    placement = shape.placement()
    counts = [len(placement.replicas(expert)) for expert in range(shape.experts)]
    assert max(counts) - min(counts) <= 1


def test_the_published_group_of_320_dies() -> None:
    """One expert a die; 32 replicas of the shared one serve ten ranks each; 32 dies are redundant."""
    placement = PUBLISHED.placement()
    assert placement.slots[:256] == tuple((expert,) for expert in range(256))
    assert placement.slots[256:288] == ((),) * 32
    assert placement.slots[288:] == tuple((expert,) for expert in range(0, 256, 8))
    assert placement.shared == tuple(256 + rank % 32 for rank in range(320))
    assert placement.replicas(16) == (16, 290)


def test_groups_of_other_sizes_hold_experts_in_their_order() -> None:
    """Contiguous, the shared expert at home; redundant slots are dealt out to all ranks."""
    placement = Shape(256, 8).placement()
    assert in_slots(placement) == list(range(256))
    assert placement.shared == tuple(range(8))
    prefill = Shape(256, 32, 32).placement()
    assert [row[:8] for row in prefill.slots] == [tuple(range(8 * r, 8 * r + 8)) for r in range(32)]


@pytest.mark.parametrize(
    ("shape", "right"),
    [
        (Shape(256, 320), "64, 384"),
        (Shape(256, 3), "2, 5"),
        (Shape(4, 4, 0, 4), "not a shared one"),
    ],
)
def test_a_group_that_does_not_come_out_even_is_refused(shape: Shape, right: str) -> None:
    """With what would be right: the command passes it on to whoever typed it."""
    with pytest.raises(ValueError, match=right):
        shape.placement()


@settings(deadline=None, max_examples=EXAMPLES)
@given(groups(), st.integers(0, 2**40), st.integers(1, 8))
def test_each_token_goes_to_one_rank_that_has_the_expert(
    group: tuple[Shape, frozenset[int]], first: int, top_k: int
) -> None:
    """Counted exactly once, whoever lives; replicas take turns by the token's index."""
    shape, alive = group
    placement = shape.placement(alive)
    index = first + np.arange(60)
    chosen = (index[:, None] * 7 + np.arange(top_k)) % shape.experts
    ranks = targets(placement, chosen, index)
    assert ranks.shape == chosen.shape
    for token, expert, rank in zip(
        np.repeat(index, top_k).tolist(), chosen.ravel().tolist(), ranks.ravel().tolist()
    ):
        replicas = placement.replicas(expert)
        assert rank == replicas[token % len(replicas)]
        assert expert in placement.held(rank)


def test_replicas_share_the_tokens_evenly() -> None:
    """96 tokens of one rank, all to one expert with two replicas."""
    placement = PUBLISHED.placement()
    ranks = targets(placement, np.full((96, 1), 8), np.arange(96, 192))
    assert collections.Counter(ranks.ravel().tolist()) == {8: 48, 289: 48}


# --- ranks that are gone --------------------------------------------------------------------------


@settings(deadline=None, max_examples=EXAMPLES)
@given(groups())
def test_every_expert_is_on_a_rank_that_lives(group: tuple[Shape, frozenset[int]]) -> None:
    """The shared expert has a rank for each source rank, also for those that are gone."""
    shape, alive = group
    placement = shape.placement(alive)
    assert set(in_slots(placement)) == set(range(shape.experts))
    assert alive.issuperset(rank for rank, row in enumerate(placement.slots) if row)
    assert alive.issuperset(placement.shared)
    assert len(placement.shared) == placement.ep_size == shape.ep_size


@settings(deadline=None, max_examples=EXAMPLES)
@given(groups())
def test_nothing_moves_that_need_not(group: tuple[Shape, frozenset[int]]) -> None:
    """Weights that move cost seconds on the real machine: a rank that lives keeps what it has.

    An expert moves only if no rank has it any more; the shared one is new to a rank only if no
    living rank has it.
    """
    shape, alive = group
    at_home = shape.placement()
    now = without(at_home, dead=frozenset(range(shape.ep_size)) - alive)
    moved: list[int] = []
    for rank in alive:
        had = at_home.slots[rank]
        assert now.slots[rank][: len(had)] == had
        moved += now.slots[rank][len(had) :]
    assert sorted(moved) == [
        e for e in range(shape.experts) if not alive.intersection(at_home.replicas(e))
    ]
    for rank, (before, after) in enumerate(zip(at_home.shared, now.shared)):
        assert after == before or before not in alive
        assert after in at_home.shared or after == rank or not alive.intersection(at_home.shared)


@settings(deadline=None, max_examples=EXAMPLES)
@given(groups())
def test_what_moves_goes_to_those_that_have_least(group: tuple[Shape, frozenset[int]]) -> None:
    """No rank that took a piece has more than one above the least, shared experts counted."""
    shape, alive = group
    at_home = shape.placement()
    now = shape.placement(alive)
    served = collections.Counter(at_home.shared[rank] for rank in alive)
    pieces = {rank: len(now.slots[rank]) + served[rank] for rank in alive}
    took = [rank for rank in alive if len(now.slots[rank]) > len(at_home.slots[rank])]
    assert all(pieces[rank] <= min(pieces.values()) + 1 for rank in took)


def test_ranks_whose_expert_has_another_replica_take_over_first() -> None:
    """A node of 16 dies is gone. Experts 0 and 8 have a replica; the others go where one die gains
    no second expert of its own: to one half of a pair of replicas each."""
    alive = frozenset(range(320)) - frozenset(range(16))
    placement = PUBLISHED.placement(alive)
    assert placement.replicas(0) == (288,) and placement.replicas(8) == (289,)
    assert placement.slots[16] == (16, 1) and placement.slots[24] == (24, 2)
    assert placement.slots[17] == (17,)
    assert placement.slots[:16] == ((),) * 16


def test_a_shared_rank_that_is_gone_is_stood_in_for_by_the_others() -> None:
    """They have the weights; its ten ranks are dealt out to ten of them."""
    placement = PUBLISHED.placement(frozenset(range(320)) - {256})
    assert placement.shared[:2] == (257, 257)
    assert sorted(collections.Counter(placement.shared).values()) == [10] * 21 + [11] * 10


def test_without_any_shared_rank_each_rank_computes_its_own() -> None:
    """Two nodes of 16 dies hold all replicas of the shared expert."""
    alive = frozenset(range(320)) - frozenset(range(256, 288))
    placement = PUBLISHED.placement(alive)
    assert all(placement.shared[rank] == rank for rank in alive)


def test_an_expert_that_comes_takes_an_empty_slot() -> None:
    """Its memory is there already."""
    before = Placement(((0,), (1, EMPTY)), (0, 1))
    assert without(before, dead=frozenset({0})).slots == ((), (1, 0))


@settings(deadline=None, max_examples=EXAMPLES)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any), st.data())
def test_slots_of_any_number_are_filled(rooms: list[int], data: st.DataObject) -> None:
    """Ranks that took over experts of others have more slots than the rest."""
    experts = data.draw(st.integers(1, sum(rooms)))
    rows = contiguous(rooms, experts)
    assert [len(row) for row in rows] == rooms
    assert set(itertools.chain(*rows)) == set(range(experts))
