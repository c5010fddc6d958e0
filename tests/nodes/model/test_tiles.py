"""Tiles: any scale carries the same vectors, and no byte of it may differ unseen."""

from __future__ import annotations

import numpy as np
import pytest

from cmnet import errors
from nodes.model import tiles
from nodes.model.body import U64
from nodes.settings import ModelSettings

MODEL = ModelSettings()
SEAL = tiles.Tiling(words=8, copies=120)
EXACT = tiles.Tiling(words=8, copies=112, tail_words=2, tail_copies=32)
RESULT = tiles.Tiling(words=16, copies=112, tail_words=1, tail_copies=1)
SMALL = tiles.Tiling(words=8, copies=1, tail_words=2, tail_copies=1)


def vectors(tiling: tiles.Tiling, count: int = 5) -> U64:
    words = np.random.Philox(key=3).random_raw(count * tiling.item_words)
    return words.reshape(count, tiling.item_words)


@pytest.mark.parametrize("tiling", [SEAL, EXACT, RESULT, SMALL], ids=str)
@pytest.mark.parametrize("count", [0, 5])
def test_vectors_come_back_from_any_scale(tiling: tiles.Tiling, count: int) -> None:
    given = vectors(tiling, count)
    data = bytes(tiles.tile(given, tiling))
    assert len(data) == count * tiling.item_bytes
    back = tiles.untile(data, tiling)
    assert back.dtype == np.uint64
    assert np.array_equal(back, given)


def test_full_scale_is_the_size_of_the_real_vectors() -> None:
    """7,168 + 512 B out and 14,336 B back (design 2.2); the exact body's results have a seal more."""
    seal, exact = tiles.parse_scale("full", MODEL), tiles.parse_scale("full", MODEL, exact=True)
    assert (seal.vector.item_bytes, seal.result.item_bytes) == (7680, 14336)
    assert (exact.vector, exact.result) == (EXACT, RESULT)
    assert (exact.vector.item_bytes, exact.result.item_bytes) == (7680, 14344)
    assert exact.vector.copies * 64 == MODEL.hidden


@pytest.mark.parametrize(("text", "sizes"), [("64", (80, 136)), ("640", (656, 1288))])
def test_smaller_scales_carry_one_tail(text: str, sizes: tuple[int, int]) -> None:
    """``--scale`` counts the bytes of the values."""
    scale = tiles.parse_scale(text, MODEL, exact=True)
    assert (scale.vector.item_bytes, scale.result.item_bytes) == sizes
    plain = tiles.parse_scale(text, MODEL)
    assert (plain.vector.item_bytes, plain.result.item_bytes) == (int(text), 2 * int(text))


@pytest.mark.parametrize("text", ["", "0", "32", "100", "-64", "Full", "64 B", "1048640"])
def test_other_scales_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="'full' or a multiple of 64"):
        tiles.parse_scale(text, MODEL)


@pytest.mark.parametrize("tiling", [SEAL, EXACT], ids=["seal", "exact"])
@pytest.mark.parametrize(("item", "byte"), [(0, 64), (0, 7679), (3, 100), (4, 7616), (4, 7160)])
def test_the_byte_that_differs_is_named(tiling: tiles.Tiling, item: int, byte: int) -> None:
    data = bytearray(tiles.tile(vectors(tiling), tiling))
    data[item * 7680 + byte] ^= 1
    with pytest.raises(errors.CorruptError, match=f"^byte {item * 7680 + byte} differs"):
        tiles.untile(data, tiling)


@pytest.mark.parametrize(("offset", "named"), [(9, 64 + 9), (7168 + 3, 7168 + 16 + 3)])
def test_a_first_tile_that_differs_is_seen_too(offset: int, named: int) -> None:
    """The first tile is compared as well: its byte is then named in the second."""
    data = bytearray(tiles.tile(vectors(EXACT), EXACT))
    data[2 * 7680 + offset] ^= 128
    with pytest.raises(errors.CorruptError, match=f"^byte {2 * 7680 + named} differs"):
        tiles.untile(data, EXACT)


def test_a_byte_in_a_later_block_of_comparison_is_named_right() -> None:
    """Items are compared in blocks; the offset counts from the beginning of the data."""
    data = bytearray(tiles.tile(np.tile(vectors(EXACT), (40, 1)), EXACT))
    data[150 * 7680 + 70] ^= 4
    with pytest.raises(errors.CorruptError, match=f"^byte {150 * 7680 + 70} differs"):
        tiles.untile(data, EXACT)


def test_a_torn_item_is_refused() -> None:
    with pytest.raises(errors.CorruptError, match="no whole number of items"):
        tiles.untile(bytes(100), SEAL)
