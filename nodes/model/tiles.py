"""Carried sizes of vectors and results: ``--scale`` tiles them, and every byte is checked.

Owns how the words of a vector or result fill the carried bytes of its message: its values again and
again, and behind all of them what comes once a message (scale and seal), again and again too where
there is room for it. The model never sees the scale: tokens and seals are the same at any of them
(design 2.2).
"""

from __future__ import annotations

import msgspec
import numpy as np

from cmnet import errors
from nodes.model.body import U64
from nodes.settings import ModelSettings

_CHECK_BYTES = 1 << 19
"""Bytes compared at a time: in a usual L2 cache with their comparison; measured in 2^16..2^22."""
_VALUE_WORDS = 8
"""A token's values carried: 64 bytes; a result's are twice as wide, BF16 for INT8."""


class Tiling(msgspec.Struct, frozen=True, kw_only=True):
    """One message's layout: so many copies of its first words, then of its last."""

    words: int
    copies: int
    tail_words: int = 0
    tail_copies: int = 0

    @property
    def item_words(self) -> int:
        """Words of an item before it is tiled."""
        return self.words + self.tail_words

    @property
    def item_bytes(self) -> int:
        """Carried bytes of an item."""
        return 8 * (self.words * self.copies + self.tail_words * self.tail_copies)


class Scale(msgspec.Struct, frozen=True):
    """How one token's vector and one result are carried."""

    vector: Tiling
    result: Tiling


def parse_scale(text: str, settings: ModelSettings, *, exact: bool = False) -> Scale:
    """``"64"``, a multiple of it, or ``"full"``. ValueError says what would be right.

    The exact body's messages have a tail: scale and seal (16 B) of a vector, at full scale 32 times in
    its 512 B slot; the seal (8 B) of a result.
    """
    size, full = 8 * _VALUE_WORDS, text == "full"
    if not full and (not text.isdecimal() or int(text) % size or not size <= int(text) <= 2**20):
        raise ValueError(f"'full' or a multiple of {size} up to 1048576 (bytes of a vector)")
    results = settings.combine_bytes // (2 * size) if full else int(text) // size
    if not exact:
        copies = settings.dispatch_bytes // size if full else results
        return Scale(_tiling(8, copies), _tiling(16, results))
    copies = settings.hidden // size if full else results
    slots = (settings.dispatch_bytes - settings.hidden) // 16 if full else 1
    return Scale(_tiling(8, copies, 2, slots), _tiling(16, results, 1, 1))


def _tiling(words: int, copies: int, tail_words: int = 0, tail_copies: int = 0) -> Tiling:
    return Tiling(words=words, copies=copies, tail_words=tail_words, tail_copies=tail_copies)


def tile(vectors: U64, tiling: Tiling) -> bytes | memoryview:
    """The bytes of vectors [n, item_words], tiled, little-endian."""
    if tiling.copies == 1 and tiling.tail_copies <= 1:
        return vectors.astype("<u8", copy=False).tobytes()
    tiled = np.empty((len(vectors), tiling.item_bytes // 8), dtype="<u8")
    head, tail = _parts(tiled, tiling)
    head[:] = vectors[:, None, : tiling.words]
    tail[:] = vectors[:, None, tiling.words :]
    return tiled.reshape(-1).view(np.uint8).data


def untile(data: bytes | bytearray | memoryview, tiling: Tiling) -> U64:
    """Vectors [n, item_words] of tiled bytes. CorruptError names the first byte that differs from
    its first tile.

    With one tile an item the result shares the memory of ``data``: there is nothing to compare,
    and the model itself sees every bit.
    """
    if len(data) % tiling.item_bytes:
        message = f"{len(data)} bytes are no whole number of items of {tiling.item_bytes} bytes"
        raise errors.CorruptError(message, definite=True)
    items = np.frombuffer(data, dtype="<u8").reshape(-1, tiling.item_bytes // 8)
    if tiling.copies == 1 and tiling.tail_copies <= 1:
        return np.ascontiguousarray(items, dtype=np.uint64)
    head, tail = _parts(items, tiling)
    for part, offset in ((head, 0), (tail, 8 * tiling.words * tiling.copies)):
        if part.shape[1] > 1:
            _check(part, item_bytes=tiling.item_bytes, offset=offset)
    firsts = [part[:, 0] for part in (head, tail) if part.shape[1]]
    return np.ascontiguousarray(np.concatenate(firsts, axis=1), dtype=np.uint64)


def _parts(items: U64, tiling: Tiling) -> tuple[U64, U64]:
    """Views [n, copies, words] of both parts."""
    count, split = len(items), tiling.words * tiling.copies
    head = items[:, :split].reshape(count, tiling.copies, tiling.words, copy=False)
    tail = items[:, split:].reshape(count, tiling.tail_copies, tiling.tail_words, copy=False)
    return head, tail


def _check(items: U64, *, item_bytes: int, offset: int) -> None:
    step = max(1, _CHECK_BYTES // item_bytes)
    for start in range(0, len(items), step):
        block = items[start : start + step]
        same = block[:, 1:] == block[:, :-1]
        if not same.all():
            index, inside = _first_difference(block)
            at = (start + index) * item_bytes + offset + inside
            raise errors.CorruptError(f"byte {at} differs from its first tile", definite=True)


def _first_difference(block: U64) -> tuple[int, int]:
    """Item, and offset in it, of the first byte that differs from the first tile of its item."""
    first = np.broadcast_to(block[:, :1], block.shape)
    left = np.ascontiguousarray(block).view(np.uint8).reshape(len(block), -1)
    right = np.ascontiguousarray(first).view(np.uint8).reshape(len(block), -1)
    index, inside = np.argwhere(left != right)[0]
    return int(index), int(inside)
