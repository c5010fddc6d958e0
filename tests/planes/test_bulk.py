"""Bulk: pieces in proportion, every chunk once, and nothing taken for what it is not."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cmnet.errors import CorruptError
from cmnet.messages import Arrival
from planes.bulk import CHUNK, Assemblies, chunks_count, digest_of, pieces


@given(
    payload=st.binary(max_size=300),
    charged_bytes=st.integers(0, 10_000),
    chunk_bytes=st.integers(1, 3_000),
)
@settings(deadline=None, max_examples=200)
def test_pieces_make_the_payload_and_follow_the_charge(
    payload: bytes, charged_bytes: int, chunk_bytes: int
) -> None:
    """Cut and joined it is the same, and no piece is off its share by a whole byte."""
    count = chunks_count(charged_bytes, chunk_bytes)
    piece = pieces(payload, charged_bytes=charged_bytes, chunk_bytes=chunk_bytes)
    cut = [bytes(piece(index)) for index in range(count)]
    assert b"".join(cut) == payload
    if count > 1:
        share = len(payload) * chunk_bytes / charged_bytes
        assert all(abs(len(part) - share) < 1 for part in cut[:-1])


def chunk(index: int, count: int, piece: bytes, *, said: int | None = None) -> Arrival:
    """A chunk of flow 5 from device 1; ``said``: the index that its digest was made for."""
    digest = digest_of(piece, index if said is None else said)
    body = CHUNK.pack(5, index, count, digest) + b"head"
    header = (len(body), len(piece), 0, 21, 0, 0, 0, 1, 2, index, 0, 0, 100, 1)
    return Arrival(header, body, piece)


@given(order=st.permutations(range(5)))
@settings(deadline=None, max_examples=60)
def test_chunks_in_any_order_make_one_message(order: list[int]) -> None:
    """Whole when the last missing one is in, not before; nothing stays open."""
    assemblies = Assemblies()
    parts = [bytes((65 + index,)) * index for index in range(5)]
    for index in order[:-1]:
        assert assemblies.add(chunk(index, 5, parts[index])) is None
    whole = assemblies.add(chunk(order[-1], 5, parts[order[-1]]))
    assert whole is not None
    assert (whole.payload(), whole.head, whole.charged_bytes) == (b"BCCDDDEEEE", b"head", 500)
    assert len(assemblies) == 0


@pytest.mark.parametrize("wrong", [chunk(1, 3, b"piece", said=2), chunk(1, 3, b"piece")])
def test_a_piece_that_is_not_the_one_sent_is_seen(wrong: Arrival) -> None:
    """Another place's piece, or a flipped bit."""
    if digest_of(wrong.payload, 1) == CHUNK.unpack_from(wrong.body)[3]:
        wrong.payload = b"pifce"
    with pytest.raises(CorruptError):
        Assemblies().add(wrong)


def test_a_message_that_is_given_up_is_forgotten() -> None:
    """What is dropped may be unknown: the notice may come before any chunk, or after all."""
    assemblies = Assemblies()
    assemblies.add(chunk(0, 2, b"x"))
    assemblies.drop(1, 99)
    assert len(assemblies) == 1
    assemblies.drop(1, 5)
    assert len(assemblies) == 0
