"""Slots of the buffers of dispatch and combine: who writes where, and what must not be overwritten. Pure.

Owns the *detector*: every slot is busy from its write until its reader has taken it, and a write to a busy
slot is an error that names it. Does not hold bytes, nor own how large buffers are (``buffers``).

Dispatch and combine have a buffer each ("double buffer"): a fast rank may write results while a slow one
has not read its tokens. Flags of all ranks, also of those without tokens, keep layers apart: whoever
begins a layer has a flag of every rank's combine before it, so every rank has read its dispatch.
"""

from __future__ import annotations

import mmap

import numpy as np

from cmnet.errors import CorruptError
from cmnet.units import NEVER_PS, format_ps
from nodes.model.body import I64
from nodes.moe import kernels
from nodes.settings import ModelSettings

UNIT_BYTES = 512
"""Both message sizes are multiples of it (7,680 and 14,336 B): the grain of a shared buffer."""


class Buffer:
    """The slots of one kind at some ranks of this node: when each was taken, or that it was not."""

    def __init__(self, *, name: str, ranks: int, slots: int, sources: int = 1) -> None:
        """``slots`` of each rank, each source's together."""
        assert slots % sources == 0, (slots, sources)
        self._name, self._sources = name, sources
        memory = mmap.mmap(-1, max(ranks * slots, 1) * 8)  # zero where nobody touches it
        self._taken_ps: I64 = np.frombuffer(memory, np.int64, ranks * slots).reshape(ranks, slots)

    def write(self, ranks: I64, slots: I64, at_ps: I64) -> None:
        """Messages reach these slots at these instants. CorruptError where one is not taken yet."""
        wrong = kernels.write_slots(ranks, slots, at_ps, self._sources, NEVER_PS, self._taken_ps)
        if wrong >= 0:
            slot = int(slots[wrong])
            if not 0 <= slot < self._taken_ps.shape[1]:
                raise CorruptError(f"{self._name} slot {slot} is outside", definite=True)
            raise overwritten(self._name, int(ranks[wrong]), slot, int(at_ps[wrong]))

    def take(self, ranks: I64, slots: I64, at_ps: I64) -> None:
        """Their reader is done with them at these instants."""
        slots = np.ascontiguousarray(slots)
        kernels.take_slots(ranks, slots, at_ps, self._sources, self._taken_ps)


class SharedBuffer:
    """For tests: dispatch and combine in one memory, as no deployment should have it."""

    def __init__(self, memory: Buffer, *, slot_units: int) -> None:
        self._memory, self._slot_units = memory, slot_units

    def write(self, ranks: I64, slots: I64, at_ps: I64) -> None:
        """As ``Buffer.write``, unit by unit."""
        self._memory.write(*self._units(ranks, slots, at_ps))

    def take(self, ranks: I64, slots: I64, at_ps: I64) -> None:
        """As ``Buffer.take``."""
        self._memory.take(*self._units(ranks, slots, at_ps))

    def _units(self, ranks: I64, slots: I64, at_ps: I64) -> tuple[I64, I64, I64]:
        units = slots[:, None] * self._slot_units + np.arange(self._slot_units)
        size = self._slot_units
        return np.repeat(ranks, size), units.ravel(), np.repeat(at_ps, size)


def make(
    *,
    ranks: int,
    sources: int,
    dispatch_slots: int,
    combine_slots: int,
    shared: bool,
    model: ModelSettings,
) -> dict[str, Buffer | SharedBuffer]:
    """Both buffers of the local ranks, that of a dispatch with so many slots of each source."""
    dispatch_slots *= sources
    if not shared:
        return {
            "dispatch": Buffer(name="dispatch", ranks=ranks, slots=dispatch_slots, sources=sources),
            "combine": Buffer(name="combine", ranks=ranks, slots=combine_slots),
        }
    dispatch, combine = (size // UNIT_BYTES for size in (model.dispatch_bytes, model.combine_bytes))
    most = max(dispatch_slots * dispatch, combine_slots * combine)
    memory = Buffer(name="shared", ranks=ranks, slots=most)
    return {
        "dispatch": SharedBuffer(memory, slot_units=dispatch),
        "combine": SharedBuffer(memory, slot_units=combine),
    }


def overwritten(name: str, rank: int, slot: int, at_ps: int) -> CorruptError:
    """A slot was written again before its reader took it."""
    where = f"{name} buffer of local rank {rank}, slot {slot}"
    return CorruptError(f"{where}: overwritten unread at {format_ps(at_ps)}", definite=True)
