"""A placement as arrays, and the check that a rank holds the experts for which it gets tokens."""

from __future__ import annotations

import numpy as np
import pytest

from cmnet.errors import CorruptError
from nodes.moe import placement
from nodes.moe.layout import TokenRows
from nodes.moe.placement import EMPTY, Placement
from nodes.moe.table import Table, check_held, table

EXPERTS = 256


def rows(target: int, expert: int, source: int = 3) -> TokenRows:
    """One good row before the one asked for."""
    targets, experts = np.array([0, target]), np.array([0, expert])
    one = np.zeros(2, dtype=np.int64)
    sources = np.array([0, source])
    return TokenRows(targets, sources, one, experts, one, one, np.zeros((2, 8), dtype=np.uint64))


def of(ep_size: int, *, redundant: int = 0, shared_ranks: int = 0) -> Table:
    first = placement.initial(
        experts=EXPERTS, ep_size=ep_size, redundant=redundant, shared_ranks=shared_ranks
    )
    return table(first, EXPERTS)


def test_without_shared_ranks_everybody_has_its_own() -> None:
    """It takes a slot, but nobody else writes to it."""
    held = of(8)
    assert (held.local_slot[:, EXPERTS] == 32).all()
    assert (held.slots, held.written.tolist(), held.shared.tolist()) == (
        33,
        [32] * 8,
        list(range(8)),
    )
    assert held.local_slot[2, 64:96].tolist() == list(range(32))
    assert (np.delete(held.local_slot[2, :EXPERTS], np.arange(64, 96)) == -1).all()


def test_the_deployment_has_one_expert_a_die() -> None:
    held = of(320, redundant=32, shared_ranks=32)
    assert (held.slots, set(held.written.tolist())) == (1, {1})
    assert ((held.local_slot >= 0).sum(axis=1) == 1).all()
    assert held.local_slot[256:288, EXPERTS].tolist() == [0] * 32
    assert held.shared[[0, 31, 32]].tolist() == [256, 287, 256]


def test_an_empty_slot_is_no_expert_and_a_double_one_counts_once() -> None:
    held = table(Placement(((0, EMPTY, 1), (1, 1)), (0, 1)), 2)
    assert held.local_slot.tolist() == [[0, 1, 2], [-1, 0, 1]]
    assert (held.slots, held.written.tolist()) == (3, [2, 1])


def test_rows_that_are_held_pass() -> None:
    held = of(8)
    check_held(held, rows(7, 255), shared_expert=EXPERTS)
    check_held(held, rows(7, EXPERTS), shared_expert=EXPERTS)
    nothing = rows(0, 0).chosen(np.empty(0, dtype=np.int64))
    check_held(held, nothing, shared_expert=EXPERTS)


@pytest.mark.parametrize(("target", "expert"), [(6, 255), (0, 32), (7, 223)])
def test_a_row_for_an_expert_that_is_elsewhere_is_named(target: int, expert: int) -> None:
    text = f"rank {target} does not hold expert {expert}, of a token of rank 3"
    with pytest.raises(CorruptError, match=text):
        check_held(of(8), rows(target, expert), shared_expert=EXPERTS)


@pytest.mark.parametrize("expert", [-1, EXPERTS + 1, 2**31 - 1])
def test_an_expert_that_does_not_exist_is_named(expert: int) -> None:
    with pytest.raises(CorruptError, match=f"a token for expert {expert}$"):
        check_held(of(8), rows(7, expert), shared_expert=EXPERTS)
