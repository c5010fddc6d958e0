"""Messages of dispatch and combine as bytes: tokens, results, counts and flags, in rows of arrays. Pure.

Owns the layout of each message and the order in which a rank writes them: tokens in (token, k) order,
results in (token, k, source) order, then one flag to every rank. (In the order of experts every rank would
begin with expert 0: a convoy worth 40 to 50 us at EP 256.) Does not own when (``operators``) nor where to
(``placement``).

    token   expert, slot, token, k, then the vector       slot = source * max_tokens + running index there
    result  token, k, then the result                     slot = token * slots_per_token + k
    flag    when the operator began, then counts          one count per expert of the target, or one
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nodes.model.body import I64, U64
from nodes.model.tiles import Tiling, tile, untile

U8 = npt.NDArray[np.uint8]

TOKEN = np.dtype([("expert", "<i4"), ("slot", "<u4"), ("token", "<u4"), ("k", "<u4")])
RESULT = np.dtype([("token", "<u4"), ("k", "<u4")])
BEGAN_BYTES = 8


class Tokens(NamedTuple):
    """Tokens of some ranks of this node on their way to experts; those of one rank are neighbours."""

    ranks: I64
    """[n]"""
    numbers: I64
    """[n], of the token in its rank's batch, from 0"""
    experts: I64
    """[n, top_k]"""
    vectors: U64
    """[n, vector_words]"""

    def chosen(self, index: Any) -> Tokens:
        """Some of the tokens."""
        return Tokens(
            self.ranks[index], self.numbers[index], self.experts[index], self.vectors[index]
        )


def all_tokens(parts: list[Tokens]) -> Tokens:
    """The tokens of some ranks."""
    return Tokens(
        ranks=np.concatenate([part.ranks for part in parts]),
        numbers=np.concatenate([part.numbers for part in parts]),
        experts=np.concatenate([part.experts for part in parts]),
        vectors=np.concatenate([part.vectors for part in parts]),
    )


class TokenRows(NamedTuple):
    """Tokens that arrived, a row for each (token, expert)."""

    targets: I64
    """[n], rank that has the expert"""
    sources: I64
    """[n], rank that the token is of"""
    slots: I64
    experts: I64
    tokens: I64
    k: I64
    vectors: U64
    """[n, vector_words]"""

    def chosen(self, index: Any) -> TokenRows:
        """Some of the rows."""
        return TokenRows(*(part[index] for part in self))


class ResultRows(NamedTuple):
    """Results that arrived."""

    targets: I64
    """[n], rank that the token is of"""
    sources: I64
    """[n], rank that has the expert"""
    tokens: I64
    k: I64
    results: U64
    """[n, result_words]"""


def pack_tokens(rows: TokenRows, tiling: Tiling) -> U8:
    """Token messages [n, bytes]."""
    data = np.empty((len(rows.tokens), TOKEN.itemsize + tiling.item_bytes), dtype=np.uint8)
    meta = np.empty(len(rows.tokens), dtype=TOKEN)
    meta["expert"], meta["slot"] = rows.experts, rows.slots
    meta["token"], meta["k"] = rows.tokens, rows.k
    data[:, : TOKEN.itemsize] = meta.view(np.uint8).reshape(-1, TOKEN.itemsize)
    data[:, TOKEN.itemsize :] = _octets(tile(rows.vectors, tiling), tiling)
    return data


def unpack_tokens(targets: I64, sources: I64, data: U8, tiling: Tiling) -> TokenRows:
    """Rows of token messages [n, bytes]. CorruptError where a carried byte is not as its tile."""
    meta = _meta(data, TOKEN)
    return TokenRows(
        targets=targets,
        sources=sources,
        slots=meta["slot"].astype(np.int64),
        experts=meta["expert"].astype(np.int64),
        tokens=meta["token"].astype(np.int64),
        k=meta["k"].astype(np.int64),
        vectors=_words(data, TOKEN.itemsize, tiling),
    )


def pack_results(tokens: I64, k: I64, results: U64, tiling: Tiling) -> U8:
    """Result messages [n, bytes]."""
    data = np.empty((len(tokens), RESULT.itemsize + tiling.item_bytes), dtype=np.uint8)
    meta = np.empty(len(tokens), dtype=RESULT)
    meta["token"], meta["k"] = tokens, k
    data[:, : RESULT.itemsize] = meta.view(np.uint8).reshape(-1, RESULT.itemsize)
    data[:, RESULT.itemsize :] = _octets(tile(results, tiling), tiling)
    return data


def unpack_results(targets: I64, sources: I64, data: U8, tiling: Tiling) -> ResultRows:
    """Rows of result messages [n, bytes]. CorruptError as ``unpack_tokens``."""
    meta = _meta(data, RESULT)
    return ResultRows(
        targets=targets,
        sources=sources,
        tokens=meta["token"].astype(np.int64),
        k=meta["k"].astype(np.int64),
        results=_words(data, RESULT.itemsize, tiling),
    )


def pack_flags(began_ps: I64, counts: I64) -> U8:
    """Flag messages [n, bytes] with counts [n, m]."""
    data = np.empty((len(began_ps), BEGAN_BYTES + 4 * counts.shape[1]), dtype=np.uint8)
    data[:, :BEGAN_BYTES] = began_ps.astype("<i8").view(np.uint8).reshape(-1, BEGAN_BYTES)
    small = np.ascontiguousarray(counts, dtype="<u4")
    data[:, BEGAN_BYTES:] = small.view(np.uint8).reshape(len(counts), 4 * counts.shape[1])
    return data


def unpack_flags(data: U8) -> tuple[I64, I64]:
    """(when the operators began [n], counts [n, m]) of flag messages."""
    began = np.ascontiguousarray(data[:, :BEGAN_BYTES]).view("<i8")[:, 0].astype(np.int64)
    counts = np.ascontiguousarray(data[:, BEGAN_BYTES:]).view("<u4").astype(np.int64)
    return began, counts


def joined(parts: list[TokenRows], vector_words: int) -> TokenRows:
    """All rows of some lots."""
    if parts:
        return TokenRows(*(np.concatenate(part) for part in zip(*parts, strict=True)))
    none = np.empty(0, dtype=np.int64)
    empty = np.empty((0, vector_words), dtype=np.uint64)
    return TokenRows(none, none, none, none, none, none, empty)


def running_index(groups: I64) -> I64:
    """How many earlier entries [n] are of the same group, entry by entry."""
    if not len(groups):
        return np.empty(0, dtype=np.int64)
    order = np.argsort(groups, kind="stable")
    ordered = groups[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    lengths = np.diff(np.r_[starts, len(groups)])
    index = np.empty(len(groups), dtype=np.int64)
    index[order] = np.arange(len(groups)) - np.repeat(starts, lengths)
    return index


def _octets(data: bytes | memoryview, tiling: Tiling) -> U8:
    return np.frombuffer(data, dtype=np.uint8).reshape(-1, tiling.item_bytes)


def _meta(data: U8, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    return np.ascontiguousarray(data[:, : dtype.itemsize]).view(dtype)[:, 0]


def _words(data: U8, offset: int, tiling: Tiling) -> U64:
    return untile(np.ascontiguousarray(data[:, offset:]).reshape(-1).data, tiling)
