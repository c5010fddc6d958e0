"""Which rank holds which expert, whoever lives."""

from __future__ import annotations

import collections

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodes.moe.placement import ExpertPlacement, place

SIZES = st.sampled_from([(256, 320), (256, 8), (256, 256), (256, 257), (16, 16), (8, 3), (1, 1)])


@st.composite
def groups(draw: st.DrawFn) -> tuple[int, int, frozenset[int], frozenset[int]]:
    """Experts, EP size, who lives, and who of those lives a little later."""
    experts, ep_size = draw(SIZES)
    everyone = list(range(ep_size))
    alive = draw(st.sets(st.sampled_from(everyone), min_size=1))
    fewer = draw(st.sets(st.sampled_from(sorted(alive)), min_size=1))
    return experts, ep_size, frozenset(alive), frozenset(fewer)


def everywhere(placement: ExpertPlacement) -> tuple[int, ...]:
    return placement.ranks + placement.shared


@settings(deadline=None, max_examples=60)
@given(groups())
def test_every_expert_is_on_a_rank_that_lives(
    group: tuple[int, int, frozenset[int], frozenset[int]],
) -> None:
    """The shared expert has a rank for each source rank, also for those that are gone."""
    experts, ep_size, alive, _ = group
    placement = place(experts=experts, ep_size=ep_size, alive=alive)
    assert (len(placement.ranks), len(placement.shared)) == (experts, ep_size)
    assert alive.issuperset(everywhere(placement))


@settings(deadline=None, max_examples=60)
@given(groups())
def test_nothing_moves_that_need_not(
    group: tuple[int, int, frozenset[int], frozenset[int]],
) -> None:
    """Weights that move cost seconds on the real machine: a rank that lives keeps what it has."""
    experts, ep_size, alive, _ = group
    at_home = place(experts=experts, ep_size=ep_size, alive=frozenset(range(ep_size)))
    now = place(experts=experts, ep_size=ep_size, alive=alive)
    for home, rank in zip(everywhere(at_home), everywhere(now), strict=True):
        assert rank == home or home not in alive


@settings(deadline=None, max_examples=60)
@given(groups())
def test_what_moves_goes_to_those_that_have_least(
    group: tuple[int, int, frozenset[int], frozenset[int]],
) -> None:
    """No rank that took a piece has more than one above the least."""
    experts, ep_size, alive, _ = group
    at_home = place(experts=experts, ep_size=ep_size, alive=frozenset(range(ep_size)))
    now = place(experts=experts, ep_size=ep_size, alive=alive)
    held = collections.Counter(everywhere(now))
    moved = {
        rank
        for home, rank in zip(everywhere(at_home), everywhere(now), strict=True)
        if rank != home
    }
    least = min(held[rank] for rank in alive)
    assert all(held[rank] <= least + 1 for rank in moved)


def test_the_published_group_of_320_dies() -> None:
    """One expert a die; 32 replicas of the shared one serve ten ranks each; 32 dies hold nothing."""
    placement = place(experts=256, ep_size=320, alive=frozenset(range(320)))
    assert placement.ranks == tuple(range(256))
    assert collections.Counter(placement.shared) == dict.fromkeys(range(256, 288), 10)


def test_redundant_ranks_take_over_first() -> None:
    """A node of 16 dies is gone: 16 of the 32 dies that held nothing have its experts."""
    alive = frozenset(range(320)) - frozenset(range(16))
    placement = place(experts=256, ep_size=320, alive=alive)
    assert placement.ranks == (*range(288, 304), *range(16, 256))


@pytest.mark.parametrize(("alive", "ranks"), [({0, 1, 2, 3}, (0, 1, 2, 3)), ({1, 3}, (1, 1, 3, 3))])
def test_a_group_smaller_than_its_experts(alive: set[int], ranks: tuple[int, ...]) -> None:
    """Contiguous experts; each rank computes the shared expert of its own tokens."""
    placement = place(experts=4, ep_size=4, alive=frozenset(alive))
    assert placement.ranks == ranks
    assert all(placement.shared[rank] == rank for rank in alive)
