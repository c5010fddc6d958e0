"""Records: what was put comes back, or the error says what is wrong."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from cmnet.errors import CorruptError
from nodes.ems import record
from nodes.ems.record import PAYLOAD_BYTES_MAX, Header, Record

KEY = bytes(range(37))


def header_of(payload: bytes, *, write_id: int = 2**127 + 5) -> Header:
    return Header(
        namespace_id=7,
        epoch=3,
        write_id=write_id,
        raw_bytes=len(payload),
        charged_bytes=35_979_264,
    )


headers = st.builds(
    Header,
    namespace_id=st.integers(0, 2**32 - 1),
    epoch=st.integers(0, 2**64 - 1),
    write_id=st.integers(0, 2**128 - 1),
    raw_bytes=st.integers(0, 2**32 - 1),
    charged_bytes=st.integers(0, 2**56 - 1),
)


def test_the_header_lies_as_documented() -> None:
    """The disk is a format: offsets and sizes of the module's table."""
    value = record.encode(KEY, header_of(b"abc"), b"abc")
    assert len(value) == 56 + 3
    assert struct.unpack_from("<HBB", value) == (0xE35C, 1, 0)
    assert struct.unpack_from("<IQ", value, 4) == (7, 3)
    assert int.from_bytes(value[16:32], "little") == 2**127 + 5
    assert struct.unpack_from("<IIB", value, 32) == (3, 3, 0)
    assert int.from_bytes(value[41:48], "little") == 35_979_264
    digest = xxhash.xxh3_64_intdigest(value[:48] + KEY + b"abc")
    assert struct.unpack_from("<Q", value, 48) == (digest,)


@settings(deadline=None, max_examples=100)
@given(key=st.binary(min_size=1, max_size=40), header=headers, payload=st.binary(max_size=200))
def test_a_piece_comes_back_as_it_was(key: bytes, header: Header, payload: bytes) -> None:
    """All field ranges."""
    assert record.decode(key, record.encode(key, header, payload)) == Record(header, payload)


@settings(deadline=None, max_examples=150)
@given(bit=st.integers(0, (56 + 20) * 8 - 1))
def test_any_flipped_bit_is_found(bit: int) -> None:
    """Bit rot anywhere in header or payload."""
    payload = bytes(20)
    value = bytearray(record.encode(KEY, header_of(payload), payload))
    value[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptError):
        record.decode(KEY, bytes(value))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda value: value[:55], "55 bytes are shorter than a header"),
        (lambda value: b"??" + value[2:], "magic 0x3f3f"),
        (lambda value: value[:2] + b"\2" + value[3:], "version 2"),
        (lambda value: value[:-1], "9 bytes of payload, 10 stored"),
        (lambda value: value[:-1] + b"\1", "checksum"),
    ],
    ids=["short", "foreign", "newer", "cut", "changed"],
)
def test_the_error_names_what_is_wrong(change: Callable[[bytes], bytes], what: str) -> None:
    """A person with a broken disk reads this."""
    payload = bytes(10)
    with pytest.raises(CorruptError, match=what):
        record.decode(KEY, change(record.encode(KEY, header_of(payload), payload)))


def test_a_value_under_another_key_is_found() -> None:
    """Two values swapped on disk: each checks, but not there."""
    with pytest.raises(CorruptError, match="checksum"):
        record.decode(KEY[::-1], record.encode(KEY, header_of(b"abc"), b"abc"))


@pytest.mark.parametrize("size", [0, 1, 65_463, 65_464, 65_465, 2 * 65_464, 200_000])
def test_an_object_of_any_size_comes_back(size: int) -> None:
    """Around the limits of a piece; a full piece fills 16 pages but LMDB's 16 bytes exactly."""
    payload = (bytes(range(251)) * (size // 251 + 1))[:size]
    pieces = dict(record.split(KEY, header_of(payload), payload))
    assert len(pieces) == record.pieces_of(size) == max(1, -(-size // 65_464))
    assert max(map(len, pieces.values())) <= 16 * 4096 - 16
    assert record.join(KEY, pieces.get) == Record(header_of(payload), payload)


def test_pieces_follow_their_object_in_a_scan() -> None:
    """Big-endian indices sort as numbers, after piece 0 and before the next key."""
    keys = [record.piece_key(KEY, index) for index in (0, 1, 2, 255, 256, 65_535)]
    assert keys == sorted(keys)
    assert keys[-1] < KEY[:-1] + bytes([KEY[-1] + 1])


def test_an_absent_object_is_none_and_no_error() -> None:
    """A miss is not corruption."""
    assert record.join(KEY, lambda key: None) is None


def test_a_missing_piece_is_found() -> None:
    """A half deleted object never comes back short."""
    payload = bytes(100_000)
    pieces = dict(record.split(KEY, header_of(payload), payload))
    del pieces[record.piece_key(KEY, 1)]
    with pytest.raises(CorruptError, match="piece is missing"):
        record.join(KEY, pieces.get)


def test_pieces_of_two_puts_never_mix() -> None:
    """The same key and sizes, another write: the write_id tells them apart."""
    payload = bytes(100_000)
    pieces = dict(record.split(KEY, header_of(payload), payload))
    other = dict(record.split(KEY, header_of(payload, write_id=1), payload))
    second = record.piece_key(KEY, 1)
    with pytest.raises(CorruptError, match="piece of another put"):
        record.join(KEY, (pieces | {second: other[second]}).get)


def test_a_short_piece_in_the_middle_is_found() -> None:
    """Every piece checks, the whole does not: the writer was wrong."""
    header = header_of(bytes(100_000))
    pieces = {at: record.encode(at, header, b"short") for at in (KEY, record.piece_key(KEY, 1))}
    with pytest.raises(CorruptError, match="10 bytes in all, 100000 put"):
        record.join(KEY, pieces.get)


def test_a_full_piece_is_65464_bytes() -> None:
    """With header and LMDB's own 16 bytes it fills 16 pages."""
    assert PAYLOAD_BYTES_MAX == 65_464
