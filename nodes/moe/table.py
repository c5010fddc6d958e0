"""A placement as arrays: who holds what, and in which of its slots. Pure.

Does not own the placement (``placement``) nor which of several replicas a token goes to (the same).
"""

from __future__ import annotations

import functools

import msgspec
import numpy as np

from cmnet.errors import CorruptError
from nodes.model.body import I64
from nodes.moe.layout import TokenRows
from nodes.moe.placement import EMPTY, Placement


class Table(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """What ranks hold. The shared expert has the number after the routed ones."""

    local_slot: I64
    """[ep_size, experts + 1] slot of an expert at a rank; -1 where it is not."""
    slots: int
    """The most slots of a rank."""
    written: I64
    """[ep_size] experts of a rank to which others write: without the shared one of its own tokens."""
    shared: I64
    """[ep_size] rank that computes the shared expert of a rank's tokens."""


@functools.lru_cache(maxsize=128)
def table(placement: Placement, experts: int) -> Table:
    """The arrays of a placement of so many routed experts. Made once for each placement."""
    ep_size = len(placement.slots)
    local_slot = np.full((ep_size, experts + 1), -1, dtype=np.int64)
    held: I64 = np.zeros(ep_size, dtype=np.int64)
    shared = np.array(placement.shared, dtype=np.int64)
    for rank, slots in enumerate(placement.slots):
        for expert in slots:
            if expert != EMPTY and local_slot[rank, expert] < 0:
                local_slot[rank, expert] = held[rank]
                held[rank] += 1
    written = held.copy()
    written[np.unique(shared[shared != np.arange(ep_size)])] += 1
    serving = np.unique(shared)
    local_slot[serving, experts] = held[serving]
    held[serving] += 1
    return Table(local_slot=local_slot, slots=int(held.max()), written=written, shared=shared)


def check_held(held: Table, rows: TokenRows, *, shared_expert: int) -> None:
    """Every row is for an expert that its target holds. CorruptError names the first that is not."""
    inside = (rows.experts >= 0) & (rows.experts <= shared_expert)
    if not inside.all():
        raise CorruptError(f"a token for expert {rows.experts[~inside][0]}", definite=True)
    flat = rows.targets * held.local_slot.shape[1] + rows.experts
    slot = held.local_slot.ravel().take(flat)
    if slot.min(initial=0) < 0:
        wrong = int(np.argmin(slot))
        where = f"rank {rows.targets[wrong]} does not hold expert {rows.experts[wrong]}"
        raise CorruptError(f"{where}, of a token of rank {rows.sources[wrong]}", definite=True)
