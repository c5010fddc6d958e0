"""The steps of the exact body, compiled: the bits of ``exact_plain``, many times faster.

Owns how weights lie in memory for the kernels: in few arrays, since each array argument costs 0.1 us a
call. Whoever makes the first body of a process compiles all kernels, or loads them from their cache
(``exact.prepared``, before the fork). Does not own the kernels.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from nodes.model import exact_kernels as attention
from nodes.model import exact_kernels_experts as moe
from nodes.model import exact_tables as t
from nodes.model.body import I64, U64
from nodes.model.exact_plain import RESULT_WORDS, ROW_BYTES, VECTOR_WORDS
from nodes.model.exact_tables import F32, F64, I8

MANY = 64
"""From so many rows on, a library's matrix product takes the place of the kernels' own: sums of integers
below 2^24 in float32 are exact in any order. Measured, on one thread: a gate takes 3/4 of the kernel's time
from 16 rows to 256."""
BLOCK = 1024
"""Rows at a time: what is between two steps stays in a core's cache (measured: 256 takes a tenth longer)."""
MANY_OF_ONE = 8
"""Rows of an expert together, on average (assumed, range 4 to 32)."""


class _Packed:
    """A layer's weights in few arrays."""

    __slots__ = ("bias", "dense", "first", "gate", "second", "words")

    def __init__(self, layer: t.Layer) -> None:
        parts = (layer.query, layer.latent, layer.key_up, layer.value_up, layer.out)
        self.dense: F32 = np.concatenate([part.ravel() for part in parts])
        self.gate: F32 = layer.gate.ravel()
        self.first: F32 = layer.first.reshape(len(layer.first), -1)
        self.second: F32 = layer.second.reshape(len(layer.second), -1)
        self.bias = layer.bias
        single = [layer.row, layer.place, layer.attention, layer.combine, layer.check_odd, 0, 0, 0]
        folds = (layer.fold_numerator, layer.fold_denominator, layer.fold_bound)
        more = (layer.fold_out, layer.fold_combine, layer.check.view(np.uint64), layer.expert)
        self.words: U64 = np.concatenate([np.array(single, dtype=np.uint64), *folds, *more])


class CompiledSteps:
    """``exact_plain.Steps``, compiled."""

    def __init__(self, model: t.Model) -> None:
        assert sys.byteorder == "little", "kernels look at bytes of words: use plain steps"
        settings = model.settings
        self._groups, self._top_groups = settings.groups, settings.top_groups
        self._top_k = settings.top_k
        self._layers = [_Packed(layer) for layer in model.layers]
        self._reals: F64 = np.concatenate([model.gain, model.channel])
        self._tables: I64 = np.concatenate([model.cos, model.sin, model.sigmoid, model.exp])
        self._head: F32 = model.head.ravel()
        self._sample: U64 = np.array([model.sample], dtype=np.uint64)
        self._embedding = model.embedding
        self._start: U64 = np.array([model.start_token, model.start_place], dtype=np.uint64)
        self._merge: F32 = model.merge.ravel()
        own = np.array([model.merge_word, model.start_token], dtype=np.uint64)
        self._merge_words: U64 = np.concatenate([own, model.fold_merge])

        sizes = ((t.HIDDEN,), (), (2 * t.INNER,), (t.INNER,), (), (t.HIDDEN,))
        types = (np.float32, np.int64, np.float32, np.float32, np.float64, np.float32)
        self._scratch: tuple[Any, ...] = tuple(
            np.empty((BLOCK, *size), dtype) for size, dtype in zip(sizes, types, strict=True)
        )
        self._compile_for_many()

    def _compile_for_many(self) -> None:
        """What is compiled for few rows, the first run of a body compiles."""
        states = self.start_tokens(np.zeros(MANY, np.int64), np.zeros(MANY, np.int64))
        self.gate(states, layer=0)
        self.expert(np.zeros(MANY, np.int64), self.dispatch(states), layer=0)

    def start_tokens(self, tokens: I64, places: I64) -> I64:
        states = np.empty((len(tokens), t.STATE_WORDS), dtype=np.int64)
        attention.start_tokens(_own(tokens), _own(places), self._embedding, self._start, states)
        return states

    def merge(self, states: I64, tokens: I64) -> I64:
        after = np.empty((len(states), t.STATE_WORDS), dtype=np.int64)
        weights, words, reals = self._merge, self._merge_words, self._reals
        moe.merge(_own(states), _own(tokens), self._embedding, weights, words, reals, after)
        return after

    def rows(self, states: I64, *, layer: int) -> I8:
        own = self._layers[layer]
        rows = np.empty((len(states), ROW_BYTES), dtype=np.int8)
        attention.rows(_own(states), own.dense, own.words, self._reals, self._tables, rows)
        return rows

    def read(self, states: I64, rows: I8, limits: I64, *, layer: int, first_place: int) -> I64:
        own = self._layers[layer]
        out = np.empty((len(states), t.SUM_WORDS), dtype=np.int64)
        tables, dense, words = self._tables, own.dense, own.words
        states, rows = _own(states), _own(rows)
        seals = rows.view(np.uint32)
        attention.read(
            states, rows, seals, limits, dense, words, self._reals, tables, first_place, out
        )
        return out

    def attend(self, states: I64, sums: I64, *, layer: int) -> I64:
        own = self._layers[layer]
        after = np.empty((len(states), t.STATE_WORDS), dtype=np.int64)
        attention.attend(_own(states), _own(sums), own.dense, own.words, self._reals, after)
        return after

    def gate(self, states: I64, *, layer: int) -> tuple[I64, U64]:
        own, shape = self._layers[layer], (len(states), self._top_k)
        experts, weights = np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.uint64)
        groups, top_groups, tables = self._groups, self._top_groups, self._tables
        gates, bias, reals = own.gate, own.bias, self._reals
        if len(states) < MANY:
            moe.gate(_own(states), gates, bias, reals, tables, groups, top_groups, experts, weights)
            return experts, weights
        x, scales = np.empty((len(states), t.HIDDEN), np.float32), np.empty(len(states))
        moe.norms(_own(states), reals, x, scales)
        logits = x @ gates.reshape(t.HIDDEN, -1)
        moe.pick_all(logits, scales, bias, tables, groups, top_groups, experts, weights)
        return experts, weights

    def dispatch(self, states: I64) -> U64:
        vectors = np.empty((len(states), VECTOR_WORDS), dtype=np.uint64)
        moe.dispatch(_own(states), self._reals, vectors)
        return vectors

    def expert(self, experts: I64, vectors: U64, *, layer: int) -> U64:
        own = self._layers[layer]
        results = np.empty((len(experts), RESULT_WORDS), dtype=np.uint64)
        first, second, words, reals = own.first, own.second, own.words, self._reals
        vectors = _own(vectors)
        octets, halves = vectors.view(np.int8), results.view(np.int16)
        experts = _own(experts)
        edges = np.flatnonzero(experts[1:] != experts[:-1]) + 1
        if len(experts) < MANY or len(experts) < MANY_OF_ONE * len(edges):
            args = experts, vectors, octets, first, second, words, reals, results, halves
            assert moe.expert(*args), "no such expert"
            return results
        assert 0 <= experts.min() <= experts.max() < len(first), "no such expert"
        for begin in range(0, len(experts), BLOCK):
            block = slice(begin, begin + BLOCK)
            self._expert_block(own, experts[block], vectors[block], results[block])
        return results

    def _expert_block(self, own: _Packed, experts: I64, vectors: U64, results: U64) -> None:
        """Rows of one expert are neighbours."""
        x, checks, up, z, largest, down = (part[: len(experts)] for part in self._scratch)
        edges = np.flatnonzero(experts[1:] != experts[:-1]) + 1
        spans = list(itertools.pairwise([0, *edges.tolist(), len(experts)]))
        moe.open_all(vectors.view(np.int8), own.words, x, checks)
        _by_expert(x, own.first, experts, spans, up)
        moe.gate_all(up, vectors, self._reals, z, largest)
        _by_expert(z, own.second, experts, spans, down)
        halves = results.view(np.int16)
        moe.answer_all(
            experts, vectors, down, largest, checks, own.words, self._reals, results, halves
        )

    def combine(self, states: I64, weights: U64, results: U64, shared: U64, *, layer: int) -> I64:
        words = self._layers[layer].words
        after = np.empty((len(states), t.STATE_WORDS), dtype=np.int64)
        moe.combine(_own(states), _own(weights), _own(results), _own(shared), words, after)
        return after

    def sample(self, states: I64) -> I64:
        tokens = np.empty(len(states), dtype=np.int64)
        moe.sample(_own(states), self._head, self._sample, self._reals, self._tables, tokens)
        return tokens


def _by_expert(
    x: F32, weights: F32, experts: I64, spans: list[tuple[int, int]], product: F32
) -> None:
    """Rows times the weights of their experts; rows of one expert together."""
    shape = (x.shape[1], product.shape[1])
    for begin, end in spans:
        np.matmul(x[begin:end], weights[experts[begin]].reshape(shape), out=product[begin:end])


Array = TypeVar("Array", bound=npt.NDArray[Any])


def _own(array: Array) -> Array:
    """The array as the kernels were compiled for: writeable, rows together."""
    flags = array.flags
    if flags.c_contiguous and flags.writeable:
        return array
    return array.copy()
