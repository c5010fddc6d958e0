"""Carried sizes of vectors and results: ``--scale`` tiles them, and every byte is checked.

Owns how a vector of 64 bytes fills the carried bytes of its message. The model never sees the
scale: tokens and seals are the same at any of them (design 2.2).
"""

from __future__ import annotations

import msgspec
import numpy as np

from cmnet import errors
from nodes.model.body import U64
from nodes.model.seal import RESULT_WORDS, VECTOR_WORDS
from nodes.settings import ModelSettings

_CHECK_BYTES = 1 << 19
"""Bytes compared at a time: in a usual L2 cache with their comparison; measured in 2^16..2^22."""


class Scale(msgspec.Struct, frozen=True):
    """Carried bytes of one token's vector and of one result."""

    vector_bytes: int
    result_bytes: int


def parse_scale(text: str, settings: ModelSettings) -> Scale:
    """``"64"``, a multiple of it, or ``"full"``. ValueError says what would be right."""
    if text == "full":
        return Scale(vector_bytes=settings.dispatch_bytes, result_bytes=settings.combine_bytes)
    size = 8 * VECTOR_WORDS
    if not text.isdecimal() or int(text) < size or int(text) % size or int(text) > 2**20:
        raise ValueError(f"'full' or a multiple of {size} up to 1048576 (bytes of a vector)")
    ratio = RESULT_WORDS // VECTOR_WORDS
    return Scale(vector_bytes=int(text), result_bytes=int(text) * ratio)


def tile(vectors: U64, *, item_bytes: int) -> bytes | memoryview:
    """The bytes of vectors [n, words], each repeated to fill ``item_bytes``, little-endian."""
    count, words = vectors.shape
    copies = _copies(words, item_bytes)
    if copies == 1:
        return vectors.astype("<u8", copy=False).tobytes()
    tiled = np.empty((count, copies, words), dtype="<u8")
    tiled[:] = vectors[:, None, :]
    return tiled.reshape(-1).view(np.uint8).data


def untile(data: bytes | bytearray | memoryview, *, words: int, item_bytes: int) -> U64:
    """Vectors [n, words] of tiled bytes. CorruptError names the first byte that is not its tile's.

    With one tile an item the result shares the memory of ``data``: there is nothing to compare,
    and the model itself sees every bit.
    """
    copies = _copies(words, item_bytes)
    if len(data) % item_bytes:
        message = f"{len(data)} bytes are no whole number of items of {item_bytes} bytes"
        raise errors.CorruptError(message, definite=True)
    items = np.frombuffer(data, dtype="<u8").reshape(-1, copies, words)
    if copies > 1:
        _check(items, item_bytes=item_bytes)
    return np.ascontiguousarray(items[:, 0], dtype=np.uint64)


def _check(items: U64, *, item_bytes: int) -> None:
    step = max(1, _CHECK_BYTES // item_bytes)
    for start in range(0, len(items), step):
        block = items[start : start + step]
        same = block[:, 1:] == block[:, :-1]
        if not same.all():
            offset = start * item_bytes + _first_difference(block)
            raise errors.CorruptError(f"byte {offset} differs from its first tile", definite=True)


def _first_difference(block: U64) -> int:
    """Offset in the block of the first byte that differs from the first tile of its item."""
    first = np.broadcast_to(block[:, :1], block.shape)
    left = np.ascontiguousarray(block).view(np.uint8)
    right = np.ascontiguousarray(first).view(np.uint8)
    return int(np.flatnonzero((left != right).ravel())[0])


def _copies(words: int, item_bytes: int) -> int:
    copies, rest = divmod(item_bytes, 8 * words)
    assert copies > 0 == rest, f"item_bytes {item_bytes}: a multiple of {8 * words}"
    return copies
