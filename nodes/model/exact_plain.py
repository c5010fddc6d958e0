"""The steps of the exact body in plain numpy: readable, and the measure of the compiled ones.

Steps take and return bare arrays: states int64 [n, 66] (64 values, place, seal), rows int8 [n, 24]
(16 latent, 4 rotated key, 4 bytes of bound seal), sums int64 [n, 673], vectors uint64 [n, 10],
results uint64 [n, 17]. Every sum over several terms is a sum of integers held exactly (float32 below
2^24, float64 below 2^53, or modulo 2^64); all else is elementwise, so any split gives the same bits.
Formulas: model.md section 2. ``exact_kernels.py`` has the same steps, compiled.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from nodes.model import exact_tables as t
from nodes.model.body import I64, U64
from nodes.model.exact_tables import F32, F64, I8
from nodes.model.seal import mix

ROW_BYTES = 24
VECTOR_WORDS = 10
"""64 int8, a word of float32 scale and 32 zero bits, the seal."""
RESULT_WORDS = 17
"""64 int16, the seal."""


class Steps(Protocol):
    """What a body needs of its arithmetic, compiled or not."""

    def start_tokens(self, tokens: I64, places: I64) -> I64:
        """States of generated tokens."""

    def merge(self, states: I64, tokens: I64) -> I64:
        """States at the beginning of the MTP layer."""

    def rows(self, states: I64, *, layer: int) -> I8:
        """KV rows of states."""

    def read(self, states: I64, rows: I8, limits: I64, *, layer: int, first_place: int) -> I64:
        """Sums of each state over the first ``limits`` of these rows."""

    def attend(self, states: I64, sums: I64, *, layer: int) -> I64:
        """States after attention."""

    def gate(self, states: I64, *, layer: int) -> tuple[I64, U64]:
        """Experts and weights [n, top_k], best first."""

    def dispatch(self, states: I64) -> U64:
        """Vectors of states."""

    def expert(self, experts: I64, vectors: U64, *, layer: int) -> U64:
        """Results of vectors at experts."""

    def combine(self, states: I64, weights: U64, results: U64, shared: U64, *, layer: int) -> I64:
        """States after the experts; results [n, slots, 17]."""

    def sample(self, states: I64) -> I64:
        """Tokens."""


class PlainSteps:
    """``Steps`` in numpy."""

    def __init__(self, model: t.Model) -> None:
        self._model = model

    def start_tokens(self, tokens: I64, places: I64) -> I64:
        model = self._model
        starts = mix(tokens.astype(np.uint64) + np.uint64(model.start_token))
        values = model.embedding[tokens.astype(np.uint64) % np.uint64(t.VOCABULARY)]
        return started(values, places, starts, model.start_place)

    def merge(self, states: I64, tokens: I64) -> I64:
        model = self._model
        embedded = model.embedding[tokens.astype(np.uint64) % np.uint64(t.VOCABULARY)]
        parts = (states[:, : t.HIDDEN], embedded * t.EMBEDDING_SCALE)
        both = np.concatenate([self._unit(part.astype(np.float64)) for part in parts], axis=1)
        most = np.maximum(np.abs(both).max(axis=1), 2.0**-30)
        x = np.rint(both * (127.0 / most)[:, None]).astype(np.float32)
        sums = (x @ model.merge).astype(np.float64)
        scale = (most / 127.0).astype(np.float32).astype(np.float64) * t.MERGE_SCALE
        after = states.copy()
        after[:, : t.HIDDEN] = _clip(np.rint((sums * model.channel) * scale[:, None]), t.LIMIT)
        seal = seals(states) + np.uint64(model.merge_word)
        seal += mix(tokens.astype(np.uint64) + np.uint64(model.start_token))
        seal += sums.astype(np.int64).view(np.uint64) @ model.fold_merge
        after[:, t.SEAL] = mix(seal).view(np.int64)
        return after

    def rows(self, states: I64, *, layer: int) -> I8:
        weights = self._model.layers[layer]
        x, scale = self._norm(states)
        sums = (x @ weights.latent).astype(np.float64)
        scaled = sums * self._model.channel[: t.ROW_VALUES]
        squares = (sums[:, : t.LATENT] ** 2).sum(axis=1)
        factor = t.LATENT_RMS / np.sqrt(squares / t.LATENT + 1.0)
        latent = _clip(np.rint(scaled[:, : t.LATENT] * factor[:, None]), 127.0)
        key = _clip(np.rint(scaled[:, t.LATENT :] * (scale * t.KEY_SCALE)[:, None]), 127.0)
        rows = np.empty((len(states), ROW_BYTES), dtype=np.int8)
        rows[:, : t.LATENT] = latent
        rows[:, t.LATENT : t.ROW_VALUES] = self._rotate(key, states[:, t.PLACE], limit=127.0)
        bound = mix(seals(states) + np.uint64(weights.row)) >> np.uint64(32)
        rows[:, t.ROW_VALUES :] = bound.astype("<u4")[:, None].view(np.int8)
        return rows

    def read(self, states: I64, rows: I8, limits: I64, *, layer: int, first_place: int) -> I64:
        weights = self._model.layers[layer]
        query = self._query(states, weights)
        sums = np.zeros((len(states), t.SUM_WORDS), dtype=np.int64)
        values = rows[:, : t.ROW_VALUES].astype(np.float32)
        bound = bound_seals(rows, place=weights.place, first_place=first_place)
        for start in range(0, len(rows), t.KEYS_A_BLOCK):
            block = slice(start, start + t.KEYS_A_BLOCK)
            inside = np.arange(start, start + len(values[block])) < limits[:, None]
            exps = _exps(query @ values[block].T) * inside[:, None, :]
            numerators = np.swapaxes(exps @ values[block], 1, 2)
            sums[:, : t.ROW_VALUES * t.HEADS] += numerators.reshape(
                len(states), t.ROW_VALUES * t.HEADS
            ).astype(np.int64)
            sums[:, t.ROW_VALUES * t.HEADS : -1] += exps.sum(axis=2).astype(np.int64)
            folds = (exps.astype(np.float64) @ bound[block]).astype(np.int64).view(np.uint64)
            sums[:, -1] += (folds @ weights.fold_bound).view(np.int64)
        return sums

    def attend(self, states: I64, sums: I64, *, layer: int) -> I64:
        weights = self._model.layers[layer]
        count, split = len(states), t.ROW_VALUES * t.HEADS
        words = sums.view(np.uint64)
        fold = words[:, :split] @ weights.fold_numerator + words[:, -1]
        fold += words[:, split:-1] @ weights.fold_denominator
        heads = sums[:, : t.LATENT * t.HEADS].reshape(count, t.LATENT, t.HEADS)
        numerators = heads.transpose(2, 0, 1).astype(np.float64)
        up = weights.value_up.transpose(2, 0, 1).astype(np.float64)
        mixed = (numerators @ up).transpose(1, 2, 0)
        denominators = np.maximum(sums[:, split:-1], 1).astype(np.float64)
        values = np.rint(2.0 * mixed / denominators[:, None, :]).reshape(count, t.VALUE * t.HEADS)
        most = np.maximum(np.abs(values).max(axis=1), 1.0)
        x = np.rint(values * (127.0 / most)[:, None]).astype(np.float32)
        out = (x @ weights.out).astype(np.float64)
        scale = (most / 127.0).astype(np.float32).astype(np.float64) * t.OUT_SCALE
        fold += out.astype(np.int64).view(np.uint64) @ weights.fold_out
        moved = np.rint((out * self._model.channel) * scale[:, None])
        seal = mix(seals(states) + np.uint64(weights.attention) + fold)
        return _moved(states, moved, seal)

    def gate(self, states: I64, *, layer: int) -> tuple[I64, U64]:
        settings, weights = self._model.settings, self._model.layers[layer]
        x, scale = self._norm(states)
        logits = (x @ weights.gate).astype(np.float64) * (scale * t.GATE_SCALE)[:, None]
        index = np.clip(np.rint(logits - t.GATE_SHIFT), -2048.0, 2047.0).astype(np.int64)
        scores = self._model.sigmoid[index + 2048]
        chosen = choose(scores + weights.bias, settings.groups, settings.top_groups, settings.top_k)
        return chosen, gate_weights(np.take_along_axis(scores, chosen, axis=1))

    def dispatch(self, states: I64) -> U64:
        x, scale = self._norm(states)
        vectors = np.zeros((len(states), VECTOR_WORDS), dtype=np.uint64)
        vectors[:, :8] = x.astype(np.int8).view("<u8")
        vectors[:, 8] = scale.astype(np.float32).view(np.uint32)
        vectors[:, 9] = seals(states)
        return vectors

    def expert(self, experts: I64, vectors: U64, *, layer: int) -> U64:
        weights, channel = self._model.layers[layer], self._model.channel
        order = np.argsort(experts, kind="stable")
        x = np.ascontiguousarray(vectors[:, :8], dtype="<u8").view(np.int8)
        check = (x.astype(np.int64) @ weights.check).view(np.uint64)
        spans = _spans(experts[order])
        first = grouped(x[order].astype(np.float32), weights.first, spans) * channel[: 2 * t.INNER]
        first = first * (scales(vectors[order, 8]) / 512)[:, None]
        gates, ups = first[:, : t.INNER], first[:, t.INNER :]
        inner = gates * np.clip(gates + 3.0, 0.0, 6.0) * ups
        most = np.maximum(np.abs(inner).max(axis=1, initial=0.0), 2.0**-30)
        z = np.rint(inner * (127.0 / most)[:, None]).astype(np.float32)
        second = grouped(z, weights.second, spans) * channel
        y = _clip(np.rint(second * (most * t.EXPERT_SCALE)[:, None]), 32767.0)
        results = np.empty((len(experts), RESULT_WORDS), dtype=np.uint64)
        results[order, :16] = y.astype("<i2").view("<u8")
        seal = vectors[:, 9] + weights.expert[experts] + vectors[:, 8]
        results[:, 16] = mix(seal + check * np.uint64(weights.check_odd))
        return results

    def combine(self, states: I64, weights: U64, results: U64, shared: U64, *, layer: int) -> I64:
        own = self._model.layers[layer]
        total = _halves(shared).astype(np.float64) * t.SHARED_WEIGHT
        seal = seals(states) + np.uint64(own.combine) + np.uint64(3) * shared[:, 16]
        for slot in range(weights.shape[1]):
            weight, result = weights[:, slot], results[:, slot]
            total += _halves(result) * weight.astype(np.float64)[:, None]
            seal += (weight + weight + np.uint64(1)) * result[:, 16]
        seal += total.astype(np.int64).view(np.uint64) @ own.fold_combine
        return _moved(states, np.rint(total / t.SHARED_WEIGHT), mix(seal))

    def sample(self, states: I64) -> I64:
        x, scale = self._norm(states)
        logits = (x @ self._model.head).astype(np.float64) * (scale * t.HEAD_SCALE)[:, None]
        index = np.clip(np.rint(logits), -512.0, 511.0).astype(np.int64)
        ends = np.cumsum(self._model.exp[index + 512], axis=1)
        bits = np.uint64(64 - t.DRAW_BITS)
        drawn = (mix(seals(states) + np.uint64(self._model.sample)) >> bits).astype(np.int64)
        threshold = (drawn * ends[:, -1]) >> t.DRAW_BITS
        tokens: I64 = (ends <= threshold[:, None]).sum(axis=1, dtype=np.int64)
        return tokens

    def _norm(self, states: I64) -> tuple[F32, F64]:
        """Values as int8 (in float32), and their scale with the RMS norm in it."""
        values = states[:, : t.HIDDEN].astype(np.float64)
        gained = values * self._model.gain
        most = np.maximum(np.abs(gained).max(axis=1), 1.0)
        x = np.rint(gained * (127.0 / most)[:, None]).astype(np.float32)
        squares = (values * values).sum(axis=1)
        scale = most / np.sqrt(squares / t.HIDDEN + 1.0) / 127.0
        return x, scale.astype(np.float32).astype(np.float64)

    def _unit(self, values: F64) -> F64:
        """RMS-normed values [n, 64], not rounded."""
        roots = np.sqrt((values * values).sum(axis=1) / t.HIDDEN + 1.0)
        units: F64 = values * self._model.gain / roots[:, None]
        return units

    def _query(self, states: I64, weights: t.Layer) -> F32:
        """[n, heads, 20]: absorbed queries for the latent, and 16 times those for the rotated key."""
        x, scale = self._norm(states)
        count, heads = len(states), t.HEADS
        scaled = (x @ weights.query).astype(np.float64).reshape(count, 4, t.HIDDEN)
        scaled = (scaled * self._model.channel).reshape(count, t.NOPE + t.ROPE, heads)
        query = np.rint(scaled * (scale * t.QUERY_SCALE)[:, None, None])
        query = _clip(query, t.QUERY_LIMIT)
        turned = query[:, t.NOPE :].transpose(0, 2, 1).reshape(count * heads, t.ROPE)
        places = np.repeat(states[:, t.PLACE], heads)
        turned = self._rotate(turned, places, limit=t.QUERY_LIMIT)
        absorbed = np.empty((count, heads, t.ROW_VALUES), dtype=np.float32)
        nope = query[:, : t.NOPE].transpose(2, 0, 1)
        up = weights.key_up.transpose(2, 0, 1).astype(np.float64)
        absorbed[:, :, : t.LATENT] = (nope @ up).transpose(1, 0, 2)
        absorbed[:, :, t.LATENT :] = 16.0 * turned.reshape(count, heads, t.ROPE)
        return absorbed

    def _rotate(self, pairs: F64, places: I64, *, limit: float) -> F64:
        """[n, 4] turned by their places: integers in, integers out."""
        turned = np.empty_like(pairs)
        for pair, step in enumerate(t.ROPE_STEPS):
            angle = places * step % t.ANGLES
            cos, sin = self._model.cos[angle], self._model.sin[angle]
            even, odd = pairs[:, 2 * pair], pairs[:, 2 * pair + 1]
            turned[:, 2 * pair] = np.rint((even * cos - odd * sin) / 2**14)
            turned[:, 2 * pair + 1] = np.rint((even * sin + odd * cos) / 2**14)
        return _clip(turned, limit)


def started(
    values: npt.NDArray[np.integer[Any]], places: I64, starts: U64, start_place: int
) -> I64:
    """States of embedded values [n, 64] at their places."""
    states = np.empty((len(starts), t.STATE_WORDS), dtype=np.int64)
    np.multiply(values, t.EMBEDDING_SCALE, out=states[:, : t.HIDDEN], dtype=np.int64)
    states[:, t.PLACE] = places
    bound = starts + places.astype(np.uint64) * np.uint64(start_place)
    states[:, t.SEAL] = mix(bound).view(np.int64)
    return states


def seals(states: I64) -> U64:
    """The seals of states [n]."""
    return states[:, t.SEAL].view(np.uint64)


def bound_seals(rows: I8, *, place: int, first_place: int) -> F64:
    """24 bits a row: its seal bound to the place where it is read."""
    words = np.ascontiguousarray(rows[:, t.ROW_VALUES :]).view("<u4")[:, 0].astype(np.uint64)
    places = np.arange(first_place, first_place + len(rows), dtype=np.uint64)
    return (mix(words + places * np.uint64(place)) >> np.uint64(40)).astype(np.float64)


def choose(biased: I64, groups: int, top_groups: int, top_k: int) -> I64:
    """Experts [n, top_k] of the best groups, best first; of equal scores the lower id wins."""
    count, experts = biased.shape
    bits = (experts - 1).bit_length()
    keys = (biased << bits) + (2**bits - 1 - np.arange(experts))
    grouped_scores = biased.reshape(count, groups, experts // groups)
    two = min(2, grouped_scores.shape[2])
    best = np.sort(grouped_scores, axis=2)[:, :, -two:].sum(axis=2)
    ranked = (best << groups.bit_length()) + (groups - 1 - np.arange(groups))
    least = np.sort(ranked, axis=1)[:, groups - top_groups]
    allowed = np.repeat(ranked >= least[:, None], experts // groups, axis=1)
    keys = np.where(allowed, keys, np.iinfo(np.int64).min)
    best_keys = np.sort(keys, axis=1)[:, : -top_k - 1 : -1]
    chosen: I64 = (2**bits - 1) - (best_keys & (2**bits - 1))
    return chosen


def gate_weights(scores: I64) -> U64:
    """Weights of chosen scores: in units of 1/4096, about 2.5 in all, never 0, distinct by slot.

    Distinct, so that two results in each other's slot are never the same sum.
    """
    top_k = scores.shape[1]
    parts = scores * (t.GATE_SUM // top_k) // scores.sum(axis=1, keepdims=True)
    weights: U64 = (parts * top_k + np.arange(1, top_k + 1)).astype(np.uint64)
    return weights


def grouped(x: F32, weights: F32, spans: list[tuple[int, int, int]]) -> F32:
    """Rows sorted by expert times their experts' weights."""
    out = np.empty((len(x), weights.shape[2]), dtype=np.float32)
    for expert, first, last in spans:
        np.matmul(x[first:last], weights[expert], out=out[first:last])
    return out


def scales(words: U64) -> F64:
    """Scales of vectors' ninth words."""
    bits = (words & np.uint64(2**32 - 1)).astype(np.uint32)
    return (
        np.where(bits <= t.ONE_BITS, bits, 0).astype(np.uint32).view(np.float32).astype(np.float64)
    )


def _spans(experts: I64) -> list[tuple[int, int, int]]:
    """(expert, first, last) of a sorted list."""
    if not len(experts):
        return []
    starts = np.flatnonzero(np.diff(experts, prepend=-1))
    ends = [*starts[1:].tolist(), len(experts)]
    return list(zip(experts[starts].tolist(), starts.tolist(), ends, strict=True))


def _exps(scores: F32) -> F32:
    """1..255, in float32 throughout."""
    y = scores * np.float32(t.SCORE_SCALE) + np.float32(t.SCORE_SHIFT)
    y = np.clip(y, np.float32(t.SCORE_LEAST), np.float32(1))
    for _ in range(4):
        y = y * y
    exps: F32 = np.rint(y * np.float32(255))
    return exps


def _halves(results: U64) -> npt.NDArray[np.int16]:
    """The 64 int16 of results [n, 17]."""
    return np.ascontiguousarray(results[:, :16], dtype="<u8").view("<i2")


def _clip(values: F64, limit: float) -> F64:
    return np.minimum(np.maximum(values, -limit), limit)


def _moved(states: I64, moved: F64, seal: U64) -> I64:
    after = states.copy()
    after[:, : t.HIDDEN] = _clip(states[:, : t.HIDDEN] + moved, t.LIMIT)
    after[:, t.SEAL] = seal.view(np.int64)
    return after
