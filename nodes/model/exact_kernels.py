"""Kernels of the exact body: what they share, and attention; compiled to ``exact_plain``'s bits.

Compiled by numba without fastmath: LLVM then neither contracts a * b + c nor reorders float sums; only
where every sum is exact it may (``integer_kernel``). Layout serves vectorisation: inner loops run over
heads or columns, and what one head's loop reads and writes lies in one array at constant offsets. The
cache of compiled code lies under a digest of all sources that it depends on: numba itself looks at one
file only, and constants of other modules are compiled in. Does not own any formula: see ``exact_plain``.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba
import numpy as np

from nodes.model import exact_tables as t
from nodes.model.body import I64, U64
from nodes.model.exact_tables import F32, F64, I8, U32
from nodes.model.seal import MULTIPLIER_1, MULTIPLIER_2

Function = TypeVar("Function", bound=Callable[..., Any])

SOURCES = (
    "exact_tables.py",
    "exact_kernels.py",
    "exact_kernels_experts.py",
    "exact_kernels_gate.py",
    "seal.py",
)
"""What is compiled in, directly or as constants."""


def _cache_dir() -> str:
    here, digest = Path(__file__).parent, hashlib.blake2b(digest_size=8)
    for source in SOURCES:
        digest.update((here / source).read_bytes())
    return str(here / "__pycache__" / f"kernels-{digest.hexdigest()}")


numba.config.CACHE_DIR = _cache_dir()  # type: ignore[attr-defined]  # numba's config has no types
_COMPILE: Any = numba.njit(cache=True, fastmath=False, error_model="numpy", boundscheck=False)
_COMPILE_SUMS: Any = numba.njit(
    cache=True, fastmath={"contract", "reassoc", "nsz"}, error_model="numpy", boundscheck=False
)


def kernel(function: Function) -> Function:
    """Compiled at its first call, or loaded from the cache."""
    compiled: Function = _COMPILE(function)
    return compiled


def integer_kernel(function: Function) -> Function:
    """A kernel whose sums are all of integers below 2^24 in float32: exact in any order, so that they may
    be reordered, and multiplied and added at once."""
    compiled: Function = _COMPILE_SUMS(function)
    return compiled


D, H, V, E2 = t.HIDDEN, t.HEADS, t.VOCABULARY, 2 * t.INNER
DL, DR, RV = t.LATENT, t.ROPE, t.ROW_VALUES
QN, QC = t.NOPE, (t.NOPE + t.ROPE) * t.HEADS
VH = t.VALUE * t.HEADS
NUM = RV * H
PLACE, SEAL = t.PLACE, t.SEAL

# offsets in a layer's dense weights (float32)
LATENT_AT = D * QC
KEY_UP_AT = LATENT_AT + D * RV
VALUE_UP_AT = KEY_UP_AT + QN * DL * H
OUT_AT = VALUE_UP_AT + DL * VH
# offsets in a layer's seal words (uint64)
ROW_AT, PLACE_AT, ATTENTION_AT, COMBINE_AT, CHECK_ODD_AT = 0, 1, 2, 3, 4
NUMERATOR_AT = 8
DENOMINATOR_AT = NUMERATOR_AT + NUM
BOUND_AT = DENOMINATOR_AT + H
FOLD_OUT_AT = BOUND_AT + H
FOLD_COMBINE_AT = FOLD_OUT_AT + D
CHECK_AT = FOLD_COMBINE_AT + D
EXPERT_AT = CHECK_AT + D
# offsets in the tables (int64)
SIN_AT, EXP_AT = t.ANGLES, 3 * t.ANGLES

M1, M2 = np.uint64(MULTIPLIER_1), np.uint64(MULTIPLIER_2)
S24, S27, S30, S31, S32 = (np.uint64(n) for n in (24, 27, 30, 31, 32))
S40, BYTE = np.uint64(40), np.uint64(255)
U1, U3, U8 = np.uint64(1), np.uint64(3), np.uint64(8)
LOW, ONE = np.uint64(2**32 - 1), np.uint64(t.ONE_BITS)
DRAW_SHIFT = np.uint64(64 - t.DRAW_BITS)
F = np.float32
F0, F1, F255 = np.float32(0), np.float32(1), np.float32(255)
SCALE, SHIFT, LEAST = (np.float32(x) for x in (t.SCORE_SCALE, t.SCORE_SHIFT, t.SCORE_LEAST))
QUERY_SCALE, KEY_SCALE, LATENT_RMS = t.QUERY_SCALE, t.KEY_SCALE, t.LATENT_RMS
OUT_SCALE, EXPERT_SCALE, HEAD_SCALE = t.OUT_SCALE, t.EXPERT_SCALE, t.HEAD_SCALE
GATE_SCALE, GATE_SHIFT = t.GATE_SCALE, t.GATE_SHIFT
QUERY_LIMIT, LIMIT = t.QUERY_LIMIT, t.LIMIT
STEP0, STEP1, ANGLES = t.ROPE_STEPS[0], t.ROPE_STEPS[1], t.ANGLES
GATE_SUM, SHARED_WEIGHT, DRAW_BITS = t.GATE_SUM, t.SHARED_WEIGHT, t.DRAW_BITS
EMBEDDING_SCALE, MERGE_SCALE = t.EMBEDDING_SCALE, t.MERGE_SCALE
KEYS = 8
"""Weighed, then added together."""
TILE = 4
"""Rows that are multiplied together."""
GAIN_STEPS = 512
"""A gain times it is an integer: ``exact_tables``."""
BLOCK, INNER, VALUE = t.KEYS_A_BLOCK, t.INNER, t.VALUE


@kernel
def mix(z: Any) -> Any:
    z = (z ^ (z >> S30)) * M1
    z = (z ^ (z >> S27)) * M2
    return z ^ (z >> S31)


@kernel
def bounded(value: float, limit: float) -> float:
    return min(max(value, -limit), limit)


@kernel
def norm(state: I64, gain: F64, x: F32) -> float:
    """INT8 values into ``x``; returns their scale."""
    largest, squares = GAIN_STEPS, 0
    for d in range(len(gain)):  # of a length that is not known: else it is unrolled, one by one
        value = state[d]
        squares += value * value
        gained = abs(value) * (GAIN_STEPS + d)
        largest = gained if gained > largest else largest
    most = float(largest) / float(GAIN_STEPS)
    factor = 127.0 / most
    for d in range(D):
        x[d] = np.float32(np.rint((float(state[d]) * gain[d]) * factor))
    return float(np.float32(most / math.sqrt(float(squares) / float(D) + 1.0) / 127.0))


@kernel
def start_tokens(tokens: I64, places: I64, embedding: I64, words: U64, states: I64) -> None:
    for i in range(len(tokens)):
        token = np.int64(np.uint64(tokens[i]) % np.uint64(V))
        for d in range(D):
            states[i, d] = embedding[token, d] * EMBEDDING_SCALE
        states[i, PLACE] = places[i]
        start = mix(np.uint64(tokens[i]) + words[0])
        states[i, SEAL] = np.int64(mix(start + np.uint64(places[i]) * words[1]))


@integer_kernel
def project(x: F32, weights: Any, sums: F32) -> None:
    """Sums of x times weights [len(x) * len(sums)], columns together; weights are float32 or int8."""
    n = len(sums)
    sums[:] = F0
    for k in range(0, len(x), 8):
        a, b, c, d = x[k], x[k + 1], x[k + 2], x[k + 3]
        e, f, g, h = x[k + 4], x[k + 5], x[k + 6], x[k + 7]
        w = weights[k * n : (k + 8) * n]
        for i in range(n):
            w0, w1, w2, w3 = F(w[i]), F(w[n + i]), F(w[2 * n + i]), F(w[3 * n + i])
            w4, w5, w6, w7 = F(w[4 * n + i]), F(w[5 * n + i]), F(w[6 * n + i]), F(w[7 * n + i])
            one = a * w0 + b * w1 + c * w2 + d * w3
            two = e * w4 + f * w5 + g * w6 + h * w7
            sums[i] += one + two


def tile_product(terms: int, columns: int) -> Callable[[F32, F32, F32], None]:
    """``project`` of ``TILE`` rows, x [TILE * terms] to sums [TILE * columns]: weights are read once.
    Their number is compiled in: all that is written lies in one array at constant offsets."""
    n, a, b, c = columns, terms, 2 * terms, 3 * terms

    @integer_kernel
    def product(x: F32, weights: F32, sums: F32) -> None:
        sums[:] = F0
        for k in range(0, terms, 4):
            x0, x1, x2, x3 = x[k], x[k + 1], x[k + 2], x[k + 3]
            a0, a1, a2, a3 = x[a + k], x[a + k + 1], x[a + k + 2], x[a + k + 3]
            b0, b1, b2, b3 = x[b + k], x[b + k + 1], x[b + k + 2], x[b + k + 3]
            c0, c1, c2, c3 = x[c + k], x[c + k + 1], x[c + k + 2], x[c + k + 3]
            w = weights[k * n : (k + 4) * n]
            for i in range(columns):
                w0, w1, w2, w3 = w[i], w[n + i], w[2 * n + i], w[3 * n + i]
                sums[i] += x0 * w0 + x1 * w1 + x2 * w2 + x3 * w3
                sums[n + i] += a0 * w0 + a1 * w1 + a2 * w2 + a3 * w3
                sums[2 * n + i] += b0 * w0 + b1 * w1 + b2 * w2 + b3 * w3
                sums[3 * n + i] += c0 * w0 + c1 * w1 + c2 * w2 + c3 * w3

    return product


@kernel
def widened(weights: I8, wide: F32) -> None:
    """For some rows together. Weights lie in bytes, since most calls find them in no cache."""
    for w in range(len(weights)):
        wide[w] = np.float32(weights[w])


@kernel
def rows(states: I64, dense: F32, words: U64, reals: F64, tables: I64, rows: I8) -> None:
    gain, channel = reals[:D], reals[D:]
    x, sums, scaled = np.empty(D, np.float32), np.empty(RV, np.float32), np.empty(RV)
    for i in range(len(states)):
        scale = norm(states[i], gain, x) * KEY_SCALE
        project(x, dense[LATENT_AT:KEY_UP_AT], sums)
        squares = 0.0
        for d in range(RV):
            scaled[d] = float(sums[d]) * channel[d]
            if d < DL:
                squares += float(sums[d]) * float(sums[d])
        factor = LATENT_RMS / math.sqrt(squares / float(DL) + 1.0)
        for d in range(DL):
            rows[i, d] = np.int8(bounded(np.rint(scaled[d] * factor), 127.0))
        for pair in range(2):
            even = bounded(np.rint(scaled[DL + 2 * pair] * scale), 127.0)
            odd = bounded(np.rint(scaled[DL + 2 * pair + 1] * scale), 127.0)
            angle = (states[i, PLACE] * (STEP1 if pair else STEP0)) % ANGLES
            cos, sin = float(tables[angle]), float(tables[SIN_AT + angle])
            turned = np.rint((even * cos - odd * sin) / 16384.0)
            rows[i, DL + 2 * pair] = np.int8(bounded(turned, 127.0))
            turned = np.rint((even * sin + odd * cos) / 16384.0)
            rows[i, DL + 2 * pair + 1] = np.int8(bounded(turned, 127.0))
        bound = mix(np.uint64(states[i, SEAL]) + words[ROW_AT]) >> S32
        for byte in range(4):
            value = np.int64((bound >> np.uint64(8 * byte)) & BYTE)
            rows[i, RV + byte] = np.int8(value - 256 if value > 127 else value)


@kernel
def query(state: I64, dense: F32, reals: F64, tables: I64, x: F32, sums: F32, query: F32) -> None:
    """Absorbed queries into ``query[d * H + h]``, d of 20."""
    scale = norm(state, reals[:D], x) * QUERY_SCALE
    project(x, dense[:LATENT_AT], sums)
    for c in range(QC):
        scaled = float(sums[c]) * reals[D + c % D]
        sums[c] = np.float32(bounded(np.rint(scaled * scale), QUERY_LIMIT))
    up = dense[KEY_UP_AT:VALUE_UP_AT]
    for d in range(DL):
        for h in range(H):
            query[d * H + h] = (
                sums[h] * up[d * H + h]
                + sums[H + h] * up[(DL + d) * H + h]
                + sums[2 * H + h] * up[(2 * DL + d) * H + h]
                + sums[3 * H + h] * up[(3 * DL + d) * H + h]
            )
    for pair in range(2):
        angle = (state[PLACE] * (STEP1 if pair else STEP0)) % ANGLES
        cos, sin = float(tables[angle]), float(tables[SIN_AT + angle])
        at, to = (QN + 2 * pair) * H, (DL + 2 * pair) * H
        for h in range(H):
            even, odd = float(sums[at + h]), float(sums[at + H + h])
            turned = np.rint((even * cos - odd * sin) / 16384.0)
            query[to + h] = np.float32(16.0 * bounded(turned, QUERY_LIMIT))
            turned = np.rint((even * sin + odd * cos) / 16384.0)
            query[to + H + h] = np.float32(16.0 * bounded(turned, QUERY_LIMIT))


@kernel
def weigh(b: F32, v: F32, exps: F32) -> None:
    """One key's exps of all heads; ``b`` begins with the queries [20, H]."""
    v0, v1, v2, v3, v4, v5, v6, v7 = v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7]
    v8, v9, va, vb, vc, vd, ve, vf = v[8], v[9], v[10], v[11], v[12], v[13], v[14], v[15]
    r0, r1, r2, r3 = v[16], v[17], v[18], v[19]
    for h in range(H):
        score = b[h] * v0 + b[H + h] * v1 + b[2 * H + h] * v2 + b[3 * H + h] * v3
        score += b[4 * H + h] * v4 + b[5 * H + h] * v5 + b[6 * H + h] * v6 + b[7 * H + h] * v7
        score += b[8 * H + h] * v8 + b[9 * H + h] * v9 + b[10 * H + h] * va + b[11 * H + h] * vb
        score += b[12 * H + h] * vc + b[13 * H + h] * vd + b[14 * H + h] * ve + b[15 * H + h] * vf
        score += b[16 * H + h] * r0 + b[17 * H + h] * r1 + b[18 * H + h] * r2 + b[19 * H + h] * r3
        y = min(max(score * SCALE + SHIFT, LEAST), F1)
        y = y * y
        y = y * y
        y = y * y
        y = y * y
        exps[h] = np.rint(y * F255)


@kernel
def add_keys(b: F32, e: F32, v: F32, bound: F64, folds: F64) -> None:
    """Eight keys with their exps [8, H] to the numerators, denominators and folds of all heads."""
    for d in range(RV):
        v0, v1, v2, v3 = v[0, d], v[1, d], v[2, d], v[3, d]
        v4, v5, v6, v7 = v[4, d], v[5, d], v[6, d], v[7, d]
        to = b[NUM + d * H : NUM + (d + 1) * H]
        for h in range(H):
            one = e[h] * v0 + e[H + h] * v1 + e[2 * H + h] * v2 + e[3 * H + h] * v3
            two = e[4 * H + h] * v4 + e[5 * H + h] * v5 + e[6 * H + h] * v6 + e[7 * H + h] * v7
            to[h] += one + two
    for k in range(KEYS):
        seal = bound[k]
        for h in range(H):
            b[2 * NUM + h] += e[k * H + h]
            folds[h] += float(e[k * H + h]) * seal


@kernel
def unpack(rows: I8, seals: U32, words: U64, first_place: int, values: F32, bound: F64) -> None:
    """Rows as floats, and their seals bound to the places where they are read."""
    for i in range(len(rows)):
        for d in range(RV):
            values[i, d] = np.float32(rows[i, d])
    odd, last = words[PLACE_AT], seals.shape[1] - 1
    for i in range(len(rows)):
        place = np.uint64(first_place + i) * odd
        bound[i] = float(np.int64(mix(np.uint64(seals[i, last]) + place) >> S40))


@kernel
def read(
    states: I64,
    rows: I8,
    seals: U32,
    limits: I64,
    dense: F32,
    words: U64,
    reals: F64,
    tables: I64,
    first_place: int,
    out: I64,
) -> None:
    room = (len(rows) + KEYS - 1) // KEYS * KEYS
    values, bound = np.zeros((room, RV), np.float32), np.zeros(room)
    unpack(rows, seals, words, first_place, values, bound)
    x, sums = np.empty(D, np.float32), np.empty(QC, np.float32)
    held, exps = np.empty(2 * NUM + H, np.float32), np.empty(KEYS * H, np.float32)
    folds = np.empty(H)
    for s in range(len(states)):
        query(states[s], dense, reals, tables, x, sums, held)
        out[s, :] = 0
        folds[:] = 0.0
        for start in range(0, limits[s], BLOCK):
            held[NUM : 2 * NUM + H] = F0
            end = min(start + BLOCK, limits[s])
            for i in range(start, end, KEYS):
                for k in range(KEYS):
                    if i + k < end:
                        weigh(held, values[i + k], exps[k * H : (k + 1) * H])
                    else:
                        exps[k * H : (k + 1) * H] = F0
                add_keys(held, exps, values[i : i + KEYS], bound[i : i + KEYS], folds)
            for n in range(NUM + H):
                out[s, n] += np.int64(held[NUM + n])
        fold = np.uint64(0)
        for h in range(H):
            fold += np.uint64(np.int64(folds[h])) * words[BOUND_AT + h]
        out[s, NUM + H] = np.int64(fold)


@kernel
def attend(states: I64, sums: I64, dense: F32, words: U64, reals: F64, after: I64) -> None:
    values, x, out = np.empty(VH), np.empty(VH, np.float32), np.empty(D, np.float32)
    up = dense[VALUE_UP_AT:OUT_AT]
    for i in range(len(states)):
        fold = np.uint64(sums[i, NUM + H])
        for n in range(NUM + H):
            fold += np.uint64(sums[i, n]) * words[NUMERATOR_AT + n]
        values[:] = 0.0
        for d in range(DL):
            for j in range(VALUE):
                for h in range(H):
                    values[j * H + h] += float(sums[i, d * H + h]) * float(
                        up[(d * VALUE + j) * H + h]
                    )
        most = 1.0
        for j in range(VALUE):
            for h in range(H):
                value = 2.0 * values[j * H + h] / float(max(sums[i, NUM + h], 1))
                values[j * H + h] = np.rint(value)
                most = max(most, abs(values[j * H + h]))
        factor = 127.0 / most
        for c in range(VH):
            x[c] = np.float32(np.rint(values[c] * factor))
        project(x, dense[OUT_AT:], out)
        scale = float(np.float32(most / 127.0)) * OUT_SCALE
        for d in range(D):
            fold += np.uint64(np.int64(out[d])) * words[FOLD_OUT_AT + d]
            moved = np.rint((float(out[d]) * reals[D + d]) * scale)
            after[i, d] = np.int64(bounded(float(states[i, d]) + moved, LIMIT))
        after[i, PLACE] = states[i, PLACE]
        seal = mix(np.uint64(states[i, SEAL]) + words[ATTENTION_AT] + fold)
        after[i, SEAL] = np.int64(seal)
