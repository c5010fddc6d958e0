"""Static buffers: the published sizes, and a detector that sees every slot overwritten unread."""

from __future__ import annotations

import numpy as np
import pytest

from cmnet.errors import CorruptError
from nodes.model.body import I64
from nodes.moe import buffers, detector
from nodes.moe.detector import Buffer
from nodes.settings import ModelSettings

MODEL = ModelSettings()
MIB = 2**20


def array(*values: int) -> I64:
    return np.array(values, dtype=np.int64)


def test_buffers_have_the_published_sizes() -> None:
    """645 MiB a die at EP 320, batch 96, one expert a die (arXiv 2506.12708, section 4.2.1)."""
    dispatch = buffers.dispatch_buffer_bytes(ep_size=320, batch=96, experts_per_die=1, model=MODEL)
    combine = buffers.combine_buffer_bytes(ep_size=320, batch=96, experts_per_die=1, model=MODEL)
    assert (dispatch, combine) == (225 * MIB, 420 * MIB)


def test_little_of_the_combine_buffer_can_be_touched() -> None:
    """The slot is (token, k), whoever writes: 12.4 MB with the shared expert's, 11.0 without."""
    touched = [
        buffers.combine_touched_bytes(batch=96, slots_per_token=slots, model=MODEL)
        for slots in (9, 8)
    ]
    assert touched == [12_386_304, 11_010_048]


@pytest.mark.parametrize(("held", "slots"), [(1, 96), (3, 288), (8, 768), (32, 768)])
def test_a_source_has_at_most_top_k_slots_a_token(held: int, slots: int) -> None:
    assert buffers.max_tokens(96, held, MODEL) == slots


# --- the detector ---------------------------------------------------------------------------------

RANKS, SLOTS = 3, 5


def test_a_slot_written_twice_without_a_read_is_named() -> None:
    buffer = Buffer(name="dispatch", ranks=RANKS, slots=SLOTS)
    buffer.write(array(0, 1, 2), array(4, 4, 0), array(10, 10, 10))
    buffer.write(array(0, 1, 2), array(3, 3, 1), array(20, 20, 20))
    with pytest.raises(CorruptError, match=r"dispatch buffer of local rank 1, slot 3: overwritten"):
        buffer.write(array(2, 1), array(4, 3), array(30, 30))


def test_a_slot_read_before_is_free() -> None:
    """Up to the instant: read at 50, so a write at 50 is right and one at 49 was too early."""
    buffer = Buffer(name="combine", ranks=RANKS, slots=SLOTS)
    for at_ps in (10, 50, 90):
        buffer.write(array(2), array(3), array(at_ps))
        buffer.take(array(2), array(3), array(at_ps + 40))
    with pytest.raises(CorruptError, match=r"overwritten unread at 129 ps"):
        buffer.write(array(2), array(3), array(129))


@pytest.mark.parametrize("sources", [1, SLOTS])
def test_other_slots_are_not_meant(sources: int) -> None:
    """Neither the same slot of another rank nor another slot: rows are told apart by both."""
    buffer = Buffer(name="dispatch", ranks=RANKS, slots=SLOTS, sources=sources)
    ranks, slots = np.repeat(np.arange(RANKS), SLOTS), np.tile(np.arange(SLOTS), RANKS)
    buffer.write(ranks, slots, np.zeros(len(ranks), dtype=np.int64))
    buffer.take(array(1), array(0), array(7))
    buffer.write(array(1), array(0), array(8))
    for rank, slot in ((0, 0), (1, 1), (2, 0), (0, SLOTS - 1)):
        with pytest.raises(CorruptError, match=f"local rank {rank}, slot {slot}:"):
            buffer.write(array(rank), array(slot), array(8))


@pytest.mark.parametrize("slot", [-1, SLOTS])
def test_a_slot_outside_is_refused(slot: int) -> None:
    buffer = Buffer(name="dispatch", ranks=RANKS, slots=SLOTS)
    with pytest.raises(CorruptError, match=f"dispatch slot {slot} is outside"):
        buffer.write(array(0, 0), array(SLOTS - 1, slot), array(1, 1))


def test_nothing_is_written_or_read() -> None:
    buffer = Buffer(name="dispatch", ranks=RANKS, slots=SLOTS)
    buffer.write(array(), array(), array())
    buffer.take(array(), array(), array())


def test_two_buffers_do_not_see_each_other() -> None:
    pair = detector.make(
        ranks=2, sources=2, dispatch_slots=2, combine_slots=4, shared=False, model=MODEL
    )
    pair["dispatch"].write(array(0), array(0), array(1))
    pair["combine"].write(array(0), array(0), array(2))
    with pytest.raises(CorruptError, match=r"^combine buffer"):
        pair["combine"].write(array(0), array(0), array(3))


@pytest.mark.parametrize(("combine", "meets"), [(0, True), (1, True), (2, False)])
def test_in_one_memory_slots_meet_by_bytes(combine: int, meets: bool) -> None:
    """A result has 28 units of 512 B, a token 15: token slot 3 is units 45 to 59, result slots 0 and 1
    units 0 to 55."""
    pair = detector.make(
        ranks=2, sources=4, dispatch_slots=2, combine_slots=4, shared=True, model=MODEL
    )
    tokens = array(3) if combine == 1 else array(1)
    pair["dispatch"].write(array(1), tokens, array(1))
    if meets:
        with pytest.raises(CorruptError, match="shared buffer of local rank 1"):
            pair["combine"].write(array(1), array(combine), array(2))
        pair["dispatch"].take(array(1), tokens, array(2))
    pair["combine"].write(array(1), array(combine), array(2))
    pair["combine"].write(array(0), array(combine), array(2))
