"""The halves of a stream, each alone: cutting, the window, acknowledgements, deadlines that double."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cmnet.units import NEVER_PS
from planes.vpc_halves import (
    DATA,
    FLAG_FIN,
    FLAG_URGENT,
    HEAD,
    Incoming,
    Limits,
    Message,
    Outgoing,
    Retry,
)

LIMITS = Limits(chunk_bytes=100, window_bytes=1600, timeout_ps=1000, tries=3)


def outgoing(limit: int = 10**9) -> Outgoing:
    half = Outgoing(LIMITS)
    half.limit = limit
    return half


def chunk(sequence: int, data: bytes, flags: int = 0) -> Message:
    return Message(DATA, sequence, 0, 0, flags, data)


def test_the_head_of_a_message_is_33_bytes() -> None:
    """It is the body of every frame of the plane; the README prints it."""
    assert HEAD.size == 33


def test_waits_double_and_the_last_ends_in_giving_up() -> None:
    """Three tries: waits of 1000, 2000 and 4000, then no more."""
    retry = Retry(timeout_ps=1000, tries=3)
    retry.start(0)
    assert retry.at_ps == 1000
    assert retry.again(1000)
    assert retry.at_ps == 3000
    assert retry.again(3000)
    assert retry.at_ps == 7000
    assert not retry.again(7000)
    assert retry.at_ps == NEVER_PS


def test_an_answer_without_progress_keeps_the_wait_long() -> None:
    """A closed window is asked ever more rarely, for ever: tries count anew, up to the longest wait."""
    retry = Retry(timeout_ps=1000, tries=3)
    retry.start(0)
    for _ in range(5):
        assert retry.again(retry.at_ps)
        retry.heard(retry.at_ps)
    before_ps = retry.at_ps
    assert retry.again(before_ps)
    assert retry.at_ps - before_ps == 4000


@settings(deadline=None, max_examples=60)
@given(sizes=st.lists(st.integers(1, 350), max_size=20))
def test_chunks_joined_are_what_was_written(sizes: list[int]) -> None:
    """However writes fall on chunks: none above 100 bytes, none empty, all but the last full."""
    half = outgoing()
    written = b""
    for size in sizes:
        data = bytes((len(written) + at) % 251 for at in range(size))
        written += data
        half.write(data)
    cut = []
    while (piece := half.next_chunk(0)) is not None:
        cut.append(bytes(piece.data))
    assert b"".join(cut) == written
    assert [len(data) for data in cut[:-1]] == [100] * (len(cut) - 1)


def test_a_whole_write_leaves_uncopied() -> None:
    """What fits a chunk is the very object that was written."""
    half = outgoing()
    data = b"x" * 100
    half.write(data)
    piece = half.next_chunk(0)
    assert piece is not None
    assert piece.data is data


def test_no_byte_leaves_beyond_the_limit() -> None:
    """The window cuts a chunk short and then holds the rest back."""
    half = outgoing(limit=130)
    half.write(bytes(200))
    sizes = []
    while (piece := half.next_chunk(0)) is not None:
        sizes.append(len(piece.data))
    assert sizes == [100, 30]


def test_the_end_rides_on_the_last_chunk() -> None:
    """One frame, not two; alone if all bytes have left before."""
    half = outgoing()
    half.write(b"bye")
    half.finish()
    piece = half.next_chunk(0)
    assert piece is not None
    assert (bytes(piece.data), piece.fin, piece.end) == (b"bye", True, 4)
    assert half.next_chunk(0) is None
    later = outgoing()
    later.finish()
    piece = later.next_chunk(0)
    assert piece is not None
    assert (piece.data, piece.fin, piece.end) == (b"", True, 1)


def test_the_end_needs_no_room_in_the_window() -> None:
    """A window that is full of unread bytes must not hide that no more will come."""
    half = outgoing(limit=3)
    half.write(b"all")
    assert half.next_chunk(0) is not None
    half.finish()
    piece = half.next_chunk(0)
    assert piece is not None
    assert piece.fin


def test_the_deadline_runs_from_the_egress_of_the_oldest_chunk() -> None:
    """Later chunks do not move it; progress does; nothing in flight stops it."""
    half = outgoing()
    half.write(bytes(300))
    for at_ps in (10, 20, 30):
        half.next_chunk(at_ps)
        half.left(at_ps)
    assert half.retry.at_ps == 1010
    half.acknowledged(100, 10**9, 500)
    assert half.retry.at_ps == 1500
    half.acknowledged(300, 10**9, 600)
    assert half.retry.at_ps == NEVER_PS


def test_an_old_acknowledgement_takes_nothing_back() -> None:
    """Signals may come out of order: both numbers only grow."""
    half = outgoing(limit=1600)
    half.write(bytes(300))
    while half.next_chunk(0) is not None:
        half.left(0)
    half.acknowledged(200, 1800, 100)
    half.acknowledged(100, 1700, 200)
    assert (half.acked, half.limit, half.retry.at_ps) == (200, 1800, 1100)


def test_early_chunks_wait_for_the_gap_and_are_acknowledged_with_it() -> None:
    """Order is restored; the filled gap is told at once, as its sender may be resending."""
    half = Incoming(LIMITS)
    half.chunk(chunk(10, b"b" * 10), 0)
    half.chunk(chunk(20, b"c" * 10), 0)
    assert (list(half.pieces), half.ack_now) == ([], False)
    half.chunk(chunk(0, b"a" * 10), 0)
    assert b"".join(half.pieces) == b"a" * 10 + b"b" * 10 + b"c" * 10
    assert half.ack_now
    assert half.tell() == (30, 1600)


@pytest.mark.parametrize("again", [0, 20])
def test_a_chunk_that_comes_twice_is_told_at_once_and_kept_once(again: int) -> None:
    """Its first acknowledgement may be lost, whether it was in order or early."""
    half = Incoming(LIMITS)
    half.chunk(chunk(0, b"a" * 10), 0)
    half.chunk(chunk(20, b"c" * 10), 0)
    half.chunk(chunk(again, b"?" * 10), 5)
    assert half.ack_now
    assert half.duplicates == 1
    half.chunk(chunk(10, b"b" * 10), 0)
    assert b"".join(half.pieces) == b"a" * 10 + b"b" * 10 + b"c" * 10


def test_an_early_chunk_beyond_the_window_is_not_kept() -> None:
    """What a receiver holds is bounded by its window, whoever sends."""
    half = Incoming(LIMITS)
    half.chunk(chunk(1590, b"x" * 20), 0)
    half.chunk(chunk(1590, b"x" * 20), 0)
    assert half.duplicates == 0


def test_a_small_chunk_is_acknowledged_after_the_delay() -> None:
    """A fifth of the timeout: an answer within it carries the acknowledgement."""
    half = Incoming(LIMITS)
    half.chunk(chunk(0, b"x"), 50)
    assert (half.ack_now, half.ack_at_ps) == (False, 250)
    assert half.tell() == (1, 1600)
    assert half.ack_at_ps == NEVER_PS


def test_an_eighth_of_the_window_is_acknowledged_at_once() -> None:
    """200 of 1600 bytes."""
    half = Incoming(LIMITS)
    half.chunk(chunk(0, bytes(100)), 0)
    assert not half.ack_now
    half.chunk(chunk(100, bytes(100)), 0)
    assert half.ack_now


@pytest.mark.parametrize("flag", [FLAG_FIN, FLAG_URGENT])
def test_the_end_and_a_resent_chunk_are_acknowledged_at_once(flag: int) -> None:
    """Somebody waits for these."""
    half = Incoming(LIMITS)
    half.chunk(chunk(0, b"x", flag), 0)
    assert half.ack_now


def test_room_is_told_when_it_is_worth_it() -> None:
    """Reading an eighth of the window tells at once, less after the delay."""
    half = Incoming(LIMITS)
    for at in range(0, 1600, 100):
        half.chunk(chunk(at, bytes(100)), 0)
    half.tell()
    half.take(1000)
    assert (half.ack_now, half.ack_at_ps) == (False, 1200)
    half.take(1000)
    assert half.ack_now
    assert half.tell() == (1600, 1800)


def test_room_is_not_told_once_the_half_ended() -> None:
    """Nobody needs it, and who ended and forgot the stream must not be bothered."""
    half = Incoming(LIMITS)
    for at in range(0, 1600, 100):
        half.chunk(chunk(at, bytes(100)), 0)
    half.chunk(chunk(1600, b"", FLAG_FIN), 0)
    half.tell()
    while half.pieces:
        half.take(1000)
    assert (half.ack_now, half.ack_at_ps) == (False, NEVER_PS)


def test_bytes_that_meet_a_closed_window_start_the_probing() -> None:
    """Nothing is in flight, so no other deadline would find out; room ends it."""
    half = outgoing(limit=0)
    half.write(b"x")
    assert half.next_chunk(50) is None
    assert half.retry.at_ps == 1050
    half.acknowledged(0, 100, 60)
    assert half.retry.at_ps == NEVER_PS
    assert half.limited_ps(60) == half.limited_ps(99) == 10
