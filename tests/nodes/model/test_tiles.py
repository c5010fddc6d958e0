"""Tiles: any scale carries the same vectors, and no byte of it may differ unseen."""

from __future__ import annotations

import numpy as np
import pytest

from cmnet import errors
from nodes.model import tiles
from nodes.settings import ModelSettings

MODEL = ModelSettings()
VECTORS = np.random.Philox(key=3).random_raw(5 * 8).reshape(5, 8).astype(np.uint64)


@pytest.mark.parametrize("item_bytes", [64, 128, 4096, 7680])
def test_vectors_come_back_from_any_scale(item_bytes: int) -> None:
    data = tiles.tile(VECTORS, item_bytes=item_bytes)
    assert len(data) == 5 * item_bytes
    back = tiles.untile(bytes(data), words=8, item_bytes=item_bytes)
    assert back.dtype == np.uint64
    assert np.array_equal(back, VECTORS)


def test_no_vectors_are_no_bytes() -> None:
    empty = VECTORS[:0]
    for item_bytes in (64, 7680):
        data = tiles.tile(empty, item_bytes=item_bytes)
        assert len(data) == 0
        assert tiles.untile(data, words=8, item_bytes=item_bytes).shape == (0, 8)


def test_full_scale_is_the_size_of_the_real_vectors() -> None:
    """7,168 + 512 B out and 14,336 B back: whole tiles of 64 and 128 B (design 2.2)."""
    assert tiles.parse_scale("full", MODEL) == tiles.Scale(vector_bytes=7680, result_bytes=14336)
    assert tiles.parse_scale("64", MODEL) == tiles.Scale(vector_bytes=64, result_bytes=128)
    assert 7680 % 64 == 14336 % 128 == 0


@pytest.mark.parametrize("text", ["", "0", "32", "100", "-64", "Full", "64 B", "1048640"])
def test_other_scales_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="'full' or a multiple of 64"):
        tiles.parse_scale(text, MODEL)


@pytest.mark.parametrize(("item", "byte"), [(0, 64), (0, 7679), (3, 100), (4, 7616), (4, 7679)])
def test_the_byte_that_differs_is_named(item: int, byte: int) -> None:
    data = bytearray(tiles.tile(VECTORS, item_bytes=7680))
    data[item * 7680 + byte] ^= 1
    with pytest.raises(errors.CorruptError, match=f"^byte {item * 7680 + byte} differs"):
        tiles.untile(data, words=8, item_bytes=7680)


def test_a_first_tile_that_differs_is_seen_too() -> None:
    """The first tile is compared as well: its byte is then named in the second."""
    data = bytearray(tiles.tile(VECTORS, item_bytes=7680))
    data[2 * 7680 + 9] ^= 128
    with pytest.raises(errors.CorruptError, match=f"^byte {2 * 7680 + 64 + 9} differs"):
        tiles.untile(data, words=8, item_bytes=7680)


def test_a_byte_in_a_later_block_of_comparison_is_named_right() -> None:
    """Items are compared in blocks; the offset counts from the beginning of the data."""
    many = np.tile(VECTORS, (40, 1))
    data = bytearray(tiles.tile(many, item_bytes=7680))
    data[150 * 7680 + 70] ^= 4
    with pytest.raises(errors.CorruptError, match=f"^byte {150 * 7680 + 70} differs"):
        tiles.untile(data, words=8, item_bytes=7680)


def test_a_torn_item_is_refused() -> None:
    with pytest.raises(errors.CorruptError, match="no whole number of items"):
        tiles.untile(bytes(100), words=8, item_bytes=64)
