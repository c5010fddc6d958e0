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

import functools
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cmnet.messages import Repeat
from nodes.model.body import I64, U64
from nodes.model.tiles import Tiling
from nodes.moe import kernels

U8 = npt.NDArray[np.uint8]

TOKEN_WORDS = 2
"""expert | slot << 32, token | k << 32"""
RESULT_WORDS = 1
"""token | k << 32"""
BEGAN_BYTES = 8
_LOW = np.uint64(0xFFFF_FFFF)
_HIGH = np.uint64(32)


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

    def chosen(self, index: I64) -> Tokens:
        """Some of the tokens."""
        return Tokens(
            ranks=self.ranks.take(index),
            numbers=self.numbers.take(index),
            experts=self.experts.take(index, axis=0),
            vectors=self.vectors.take(index, axis=0),
        )


def all_tokens(parts: list[Tokens]) -> Tokens:
    """The tokens of some ranks."""
    return Tokens(
        ranks=np.concatenate([part.ranks for part in parts]),
        numbers=np.concatenate([part.numbers for part in parts]),
        experts=np.concatenate([part.experts for part in parts]),
        vectors=np.concatenate([part.vectors for part in parts]),
    )


class Outgoing(NamedTuple):
    """Tokens that leave, a row for each (token, expert)."""

    targets: I64
    """[n], rank that has the expert"""
    sources: I64
    """[n], rank that the token is of"""
    slots: I64
    experts: I64
    tokens: I64
    """[n], the token's number in its rank's batch"""
    k: I64
    of: I64
    """[n], index among the tokens"""

    def chosen(self, index: I64) -> Outgoing:
        """Some of the rows."""
        return Outgoing(*(part.take(index) for part in self))


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

    def chosen(self, index: I64) -> TokenRows:
        """Some of the rows."""
        return TokenRows(
            targets=self.targets.take(index),
            sources=self.sources.take(index),
            slots=self.slots.take(index),
            experts=self.experts.take(index),
            tokens=self.tokens.take(index),
            k=self.k.take(index),
            vectors=self.vectors.take(index, axis=0),
        )


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

    def chosen(self, index: I64) -> ResultRows:
        """Some of the rows."""
        return ResultRows(
            targets=self.targets.take(index),
            sources=self.sources.take(index),
            tokens=self.tokens.take(index),
            k=self.k.take(index),
            results=self.results.take(index, axis=0),
        )


def pack_tokens(rows: Outgoing, vectors: U64) -> U8:
    """Token messages [n, bytes] of rows whose tokens have these vectors."""
    data = np.empty((len(rows.of), TOKEN_WORDS + vectors.shape[1]), dtype="<u8")
    leads = np.stack([rows.experts | rows.slots << 32, rows.tokens | rows.k << 32], axis=1)
    kernels.pack(leads, np.ascontiguousarray(vectors), rows.of, data)
    return data.view(np.uint8)


def unpack_tokens(targets: I64, sources: I64, data: U8) -> TokenRows:
    """Rows of token messages [n, bytes]."""
    words = data.view("<u8")
    return TokenRows(
        targets=targets,
        sources=sources,
        slots=(words[:, 0] >> _HIGH).view(np.int64),
        experts=(words[:, 0] & _LOW).astype(np.uint32).view(np.int32).astype(np.int64),
        tokens=(words[:, 1] & _LOW).view(np.int64),
        k=(words[:, 1] >> _HIGH).view(np.int64),
        vectors=words[:, TOKEN_WORDS:],
    )


def pack_results(tokens: I64, k: I64, results: U64, of: I64) -> U8:
    """Result messages [n, bytes]; ``of`` [n]: which of the results."""
    data = np.empty((len(tokens), RESULT_WORDS + results.shape[1]), dtype="<u8")
    leads = (tokens | k << 32).reshape(-1, RESULT_WORDS)
    kernels.pack(leads, np.ascontiguousarray(results), of, data)
    return data.view(np.uint8)


def unpack_results(targets: I64, sources: I64, data: U8) -> ResultRows:
    """Rows of result messages [n, bytes]."""
    words = data.view("<u8")
    return ResultRows(
        targets=targets,
        sources=sources,
        tokens=(words[:, 0] & _LOW).view(np.int64),
        k=(words[:, 0] >> _HIGH).view(np.int64),
        results=words[:, RESULT_WORDS:],
    )


@functools.cache
def _flag_type(counts: int) -> np.dtype[np.void]:
    return np.dtype([("began", "<i8"), ("counts", "<u4", (counts,))])


def pack_flags(began_ps: I64, counts: I64) -> U8:
    """Flag messages [n, bytes] with counts [n, m]."""
    kind = _flag_type(counts.shape[1])
    fields = np.empty(len(began_ps), dtype=kind)
    fields["began"] = began_ps
    fields["counts"] = counts
    return fields.view(np.uint8).reshape(len(fields), kind.itemsize)


def unpack_flags(data: U8) -> tuple[I64, I64]:
    """(when the operators began [n], counts [n, m]) of flag messages."""
    kind = _flag_type((data.shape[1] - BEGAN_BYTES) // 4)
    fields = np.ascontiguousarray(data).view(kind)[:, 0]
    return fields["began"].astype(np.int64), fields["counts"].astype(np.int64)


def joined(parts: list[TokenRows], vector_words: int) -> TokenRows:
    """All rows of some lots."""
    if parts:
        return TokenRows(*(np.concatenate(part) for part in zip(*parts, strict=True)))
    return no_rows(vector_words)


def sorted_rows(parts: list[TokenRows], vector_words: int, *, first: int) -> TokenRows:
    """All rows of some lots by target, expert, source and slot. ``first``: the least target."""
    if not parts:
        return no_rows(vector_words)
    targets, sources, slots, experts, tokens, k = [
        np.concatenate(column) for column in list(zip(*parts, strict=True))[:6]
    ]
    order = order_by(targets - first, experts, sources, slots)
    places = np.empty(len(order), dtype=np.int64)
    places[order] = np.arange(len(order))
    vectors, begin = np.empty((len(order), vector_words), dtype=np.uint64), 0
    for part in parts:
        end = begin + len(part.vectors)
        kernels.put(part.vectors, places[begin:end], vectors)
        begin = end
    return TokenRows(
        targets=targets.take(order),
        sources=sources.take(order),
        slots=slots.take(order),
        experts=experts.take(order),
        tokens=tokens.take(order),
        k=k.take(order),
        vectors=vectors,
    )


@functools.cache
def no_rows(vector_words: int) -> TokenRows:
    """Nothing came."""
    none = np.empty(0, dtype=np.int64)
    empty = np.empty((0, vector_words), dtype=np.uint64)
    return TokenRows(none, none, none, none, none, none, empty)


def order_by(*keys: I64) -> I64:
    """The stable order of rows [n] by the first key, equal ones by the second, and so on. No key is
    negative."""
    joined = np.empty(len(keys[0]), dtype=np.int64)
    bits = kernels.join_keys(np.array(keys), joined)
    assert bits >= 0, "a negative key"
    if bits > kernels.KEY_BITS_MAX:
        return np.lexsort(keys[::-1])
    order: I64 = kernels.order(joined, bits)
    return order


def running_index(groups: I64) -> I64:
    """How many earlier entries [n] are of the same group, entry by entry. No group is negative."""
    assert groups.min(initial=0) >= 0, "a negative group"
    groups = np.ascontiguousarray(groups, dtype=np.int64)
    index: I64 = kernels.running_index(groups, int(groups.max(initial=-1)) + 1)
    return index


def repeat(tiling: Tiling, *, lead_words: int) -> Repeat:
    """How the words of a vector or result behind so many others fill the bytes that are carried."""
    return Repeat(
        lead_bytes=8 * lead_words,
        body_bytes=8 * tiling.words,
        copies=tiling.copies,
        tail_bytes=8 * tiling.tail_words,
        tail_copies=tiling.tail_copies,
    )
