"""On the way from one placement to another every expert can be reached."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodes.moe import moving
from nodes.moe.eplb import rebalance
from nodes.moe.moving import Schedule, stages
from nodes.moe.placement import EMPTY, Placement, initial

EXAMPLES = 12


def placed(*slots: tuple[int, ...]) -> Placement:
    return Placement(slots, tuple(range(len(slots))))


@st.composite
def ways(draw: st.DrawFn) -> tuple[Placement, Placement, int]:
    """Two placements with the same slots, each with every expert, and the memory to spare."""
    rooms = draw(st.lists(st.integers(0, 4), min_size=1, max_size=6).filter(any))
    experts = draw(st.integers(1, sum(rooms)))

    def some(least: int) -> Placement:
        more = sum(rooms) - experts
        extra = draw(st.lists(st.integers(least, experts - 1), min_size=more, max_size=more))
        flat = iter(draw(st.permutations([*range(experts), *extra])))
        return placed(*(tuple(itertools.islice(flat, room)) for room in rooms))

    return some(EMPTY), some(EMPTY), draw(st.integers(1, 3))


def check(old: Placement, schedule: Schedule, room: int) -> None:
    """The rules, stage by stage, as one who carries them out would see them."""
    experts = {expert for expert in itertools.chain(*old.slots) if expert != EMPTY}
    in_force = old
    for first in range(0, len(schedule.stages), 4):
        prefetch, disable, load, enable = schedule.stages[first : first + 4]
        names = [stage.name for stage in (prefetch, disable, load, enable)]
        assert names == ["prefetch", "disable", "load", "enable"]
        assert prefetch.moves == disable.moves == load.moves == enable.moves != ()
        assert prefetch.placement == in_force
        assert disable.placement == load.placement
        touched = {(move.rank, move.slot): move for move in prefetch.moves}
        assert len(touched) == len(prefetch.moves)
        for rank, row in enumerate(old.slots):
            assert sum(move.rank == rank for move in prefetch.moves) <= room
            for slot in range(len(row)):
                move = touched.get((rank, slot))
                before = in_force.slots[rank][slot]
                assert disable.placement.slots[rank][slot] == (before if move is None else EMPTY)
                assert enable.placement.slots[rank][slot] == (
                    before if move is None else move.expert
                )
        for move in prefetch.moves:
            if move.expert != EMPTY:
                assert move.expert in in_force.held(move.source_rank)
        for stage in (prefetch, disable, load, enable):
            assert experts <= set(itertools.chain(*stage.placement.slots))
        in_force = enable.placement
    assert schedule.reached(old) == in_force


@settings(deadline=None, max_examples=EXAMPLES)
@given(ways())
def test_every_expert_has_an_enabled_replica_at_every_stage(
    way: tuple[Placement, Placement, int],
) -> None:
    """And it arrives, unless there is no slot to spare at all; then it does not begin."""
    old, new, room = way
    schedule = stages(old, new, room=room)
    check(old, schedule, room)
    full = sorted(itertools.chain(*old.slots)) == list(range(old.experts))
    if schedule.kept:
        assert full and schedule.stages == ()
        kept = {(move.rank, move.slot): move.expert for move in schedule.kept}
        assert kept == {
            (rank, slot): expert
            for rank, row in enumerate(new.slots)
            for slot, expert in enumerate(row)
            if old.slots[rank][slot] != expert
        }
    else:
        assert schedule.reached(old) == new


def test_two_experts_change_places_by_a_third_slot() -> None:
    """Expert 2 has two replicas and lends one slot, which it gets back."""
    old, new = placed((0,), (1,), (2,), (2,)), placed((1,), (0,), (2,), (2,))
    schedule = stages(old, new)
    check(old, schedule, 1)
    enabled = [stage.placement.slots for stage in schedule.stages[3::4]]
    assert enabled == [
        ((0,), (1,), (0,), (2,)),
        ((1,), (1,), (0,), (2,)),
        ((1,), (0,), (0,), (2,)),
        ((1,), (0,), (2,), (2,)),
    ]


def test_one_slot_serves_two_rings_and_goes_back_to_its_owner() -> None:
    """It is lent twice before it is given back, and no third slot is touched: three rounds a ring."""
    old = placed((0,), (1,), (2,), (3,), (4,), (4,))
    new = placed((1,), (0,), (3,), (2,), (4,), (4,))
    schedule = stages(old, new)
    check(old, schedule, 1)
    assert schedule.reached(old) == new
    assert len(schedule.stages) // 4 == 3 + 3 + 1


def test_an_empty_slot_is_a_slot_to_spare() -> None:
    """And is empty again at the end."""
    old, new = placed((0,), (1, EMPTY)), placed((1,), (0, EMPTY))
    schedule = stages(old, new)
    assert schedule.kept == () and schedule.reached(old) == new


def test_without_a_spare_slot_all_stays_and_is_named() -> None:
    """Each waits for the other's slot: no way without a gap."""
    old, new = placed((0,), (1,)), placed((1,), (0,))
    schedule = stages(old, new)
    assert schedule.stages == ()
    assert [(move.rank, move.slot, move.expert) for move in schedule.kept] == [(0, 0, 1), (1, 0, 0)]


def test_sources_take_turns_and_what_is_there_is_not_fetched() -> None:
    """Three copies of one expert that two ranks have; the last is in the same rank's other slot."""
    old = placed((0,), (0, 1), (1,), (1,), (1,))
    new = placed((0,), (0, 0), (0,), (0,), (1,))
    moves = stages(old, new).stages[0].moves
    assert [(move.rank, move.slot, move.source_rank) for move in moves] == [
        (1, 1, 1),
        (2, 0, 0),
        (3, 0, 1),
    ]


@pytest.mark.parametrize(
    ("ep_size", "redundant", "shared"), [(320, 32, 32), (8, 8, 0), (32, 32, 0)]
)
def test_the_way_to_a_plan_is_short(ep_size: int, redundant: int, shared: int) -> None:
    """One hot expert: at 320 ranks a single round; in smaller groups a few, one expert a rank at a time."""
    old = initial(experts=256, ep_size=ep_size, redundant=redundant, shared_ranks=shared)
    loads = np.full(256, 1000)
    loads[37] *= 30
    new = rebalance(old, loads).placement
    schedule = stages(old, new)
    check(old, schedule, 1)
    assert schedule.reached(old) == new
    assert len(schedule.stages) // 4 <= (1 if ep_size == 320 else 20)


def test_weights_in_memory() -> None:
    """42 MiB an expert and layer."""
    assert moving.EXPERT_BYTES == 44_040_192
