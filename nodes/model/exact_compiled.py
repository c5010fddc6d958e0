"""The steps of the exact body, compiled: the bits of ``exact_plain``, many times faster.

Owns how weights lie in memory for the kernels: in few arrays, since each array argument costs 0.1 us a
call. Whoever makes the first body of a process compiles all kernels, or loads them from their cache
(``exact.prepared``, before the fork). Does not own the kernels.
"""

from __future__ import annotations

import sys
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from nodes.model import exact_kernels as attention
from nodes.model import exact_kernels_experts as moe
from nodes.model import exact_kernels_gate as gates
from nodes.model import exact_tables as t
from nodes.model.body import I64, U64
from nodes.model.exact_plain import RESULT_WORDS, ROW_BYTES, VECTOR_WORDS
from nodes.model.exact_tables import F32, F64, I8


class _Packed:
    """A layer's weights in few arrays."""

    __slots__ = ("bias", "dense", "first", "gate", "keyed", "lanes", "second", "words")

    def __init__(self, layer: t.Layer, *, groups: int, sigmoid: I64) -> None:
        parts = (layer.query, layer.latent, layer.key_up, layer.value_up, layer.out)
        self.dense: F32 = np.concatenate([part.ravel() for part in parts])
        self.gate, self.keyed, self.lanes = gates.packed(layer.gate, layer.bias, sigmoid, groups)
        experts = len(layer.bias)
        self.first: I8 = layer.first.reshape(experts + 1, -1).astype(np.int8)
        self.second: I8 = layer.second.reshape(experts + 1, -1).astype(np.int8)
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
        self._layers = [
            _Packed(layer, groups=settings.groups, sigmoid=model.sigmoid) for layer in model.layers
        ]
        self._reals: F64 = np.concatenate([model.gain, model.channel])
        self._tables: I64 = np.concatenate([model.cos, model.sin, model.sigmoid, model.exp])
        self._head: F32 = model.head.ravel()
        self._sample: U64 = np.array([model.sample], dtype=np.uint64)
        self._embedding = model.embedding
        self._start: U64 = np.array([model.start_token, model.start_place], dtype=np.uint64)
        self._merge: F32 = model.merge.ravel()
        own = np.array([model.merge_word, model.start_token], dtype=np.uint64)
        self._merge_words: U64 = np.concatenate([own, model.fold_merge])

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
        shape_of = self._groups, own.lanes, self._top_groups
        weights_of = own.gate, own.keyed, own.bias, self._reals
        gates.gate(_own(states), *weights_of, *shape_of, experts, weights)
        return experts, weights

    def dispatch(self, states: I64) -> U64:
        vectors = np.empty((len(states), VECTOR_WORDS), dtype=np.uint64)
        moe.dispatch(_own(states), self._reals, vectors, vectors.view(np.int8))
        return vectors

    def expert(self, experts: I64, vectors: U64, *, layer: int) -> U64:
        own = self._layers[layer]
        results = np.empty((len(experts), RESULT_WORDS), dtype=np.uint64)
        first, second, words, reals = own.first, own.second, own.words, self._reals
        vectors = _own(vectors)
        views, halves = (vectors.view(np.int8), vectors.view(np.float32)), results.view(np.int16)
        args = _own(experts), vectors, *views, first, second, words, reals, results, halves
        assert moe.expert(*args), "no such expert"
        return results

    def combine(self, states: I64, weights: U64, results: U64, shared: U64, *, layer: int) -> I64:
        words = self._layers[layer].words
        after = np.empty((len(states), t.STATE_WORDS), dtype=np.int64)
        results, shared = _own(results), _own(shared)
        halves = results.view(np.int16), shared.view(np.int16)
        moe.combine(
            _own(states), _own(weights), results, halves[0], shared, halves[1], words, after
        )
        return after

    def sample(self, states: I64) -> I64:
        tokens = np.empty(len(states), dtype=np.int64)
        moe.sample(_own(states), self._head, self._sample, self._reals, self._tables, tokens)
        return tokens


Array = TypeVar("Array", bound=npt.NDArray[Any])


def _own(array: Array) -> Array:
    """The array as the kernels were compiled for: writeable, rows together."""
    flags = array.flags
    if flags.c_contiguous and flags.writeable:
        return array
    return array.copy()
