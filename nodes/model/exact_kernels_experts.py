"""Kernels of the exact body: messages, experts, combine, the sampler and the MTP layer's beginning.

Does not own what they share with attention (``exact_kernels``) nor any formula (``exact_plain``).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nodes.model.body import I64, U64
from nodes.model.exact_kernels import (
    CHECK_AT,
    CHECK_ODD_AT,
    COMBINE_AT,
    DRAW_BITS,
    DRAW_SHIFT,
    E2,
    EMBEDDING_SCALE,
    EXP_AT,
    EXPERT_AT,
    EXPERT_SCALE,
    F0,
    FOLD_COMBINE_AT,
    HEAD_SCALE,
    INNER,
    LIMIT,
    LOW,
    MERGE_SCALE,
    ONE,
    PLACE,
    SEAL,
    SHARED_WEIGHT,
    TILE,
    U1,
    U3,
    D,
    V,
    bounded,
    integer_kernel,
    kernel,
    mix,
    norm,
    project,
    tile_product,
    widened,
)
from nodes.model.exact_tables import F32, F64, I8, I16

_project_first, _project_second = tile_product(D, E2), tile_product(INNER, D)
TWO_AT = D * E2
CHECK_SUM_AT = TWO_AT + INNER * D
UP_AT = CHECK_SUM_AT + D
DOWN_AT = UP_AT + TILE * E2
X_AT = DOWN_AT + TILE * D
Z_AT = X_AT + TILE * D
"""Offsets in the scratch of ``expert``: one array, since each allocation takes 50 ns."""


@kernel
def dispatch(states: I64, reals: F64, vectors: U64, octets: I8) -> None:
    """Octets are the bytes of vectors: little-endian hosts only."""
    x, scale = np.empty(D, np.float32), np.empty(1, np.float32)
    bits = scale.view(np.uint32)
    for i in range(len(states)):
        scale[0] = np.float32(norm(states[i], reals[:D], x))
        for d in range(D):
            octets[i, d] = np.int8(x[d])
        vectors[i, 8] = np.uint64(bits[0])
        vectors[i, 9] = np.uint64(states[i, SEAL])


@integer_kernel
def opened(octets: I8, check: F32, x: F32) -> Any:
    """A vector's values into ``x``; returns their check sum."""
    total = F0
    for d in range(D):
        x[d] = np.float32(octets[d])
        total += x[d] * check[d]
    return np.int64(total)


@kernel
def larger(a: float, b: float, c: float, d: float) -> float:
    """The largest of four, which do not wait for each other."""
    a = a if a > b else b
    c = c if c > d else d
    return a if a > c else c


@kernel
def gated(up: F32, scale: float, reals: F64, inner: F64, z: F32) -> float:
    """INT8 values of the inner layer into ``z``; returns the largest. ``inner`` is [INNER] scratch."""
    for f in range(INNER):
        opened_up = (float(up[f]) * reals[D + f]) * scale
        other = (float(up[INNER + f]) * reals[D + INNER + f]) * scale
        gate = opened_up + 3.0
        gate = gate if gate > 0.0 else 0.0
        gate = gate if gate < 6.0 else 6.0
        inner[f] = (opened_up * gate) * other
    most = 2.0**-30
    for f in range(0, INNER, 4):
        four = larger(abs(inner[f]), abs(inner[f + 1]), abs(inner[f + 2]), abs(inner[f + 3]))
        most = four if four > most else most
    factor = 127.0 / most
    for f in range(INNER):
        z[f] = np.float32(np.rint(inner[f] * factor))
    return most


@kernel
def answered(down: F32, most: float, reals: F64, halves: I16) -> None:
    scale = most * EXPERT_SCALE
    for d in range(D):
        y = np.rint((float(down[d]) * reals[D + d]) * scale)
        halves[d] = np.int16(np.int32(min(max(y, -32767.0), 32767.0)))


@kernel
def sealed(vector: U64, expert_word: int, check: int, words: U64) -> Any:
    seal = vector[9] + expert_word + vector[8]
    return mix(seal + np.uint64(check) * words[CHECK_ODD_AT])


@kernel
def expert(
    experts: I64,
    vectors: U64,
    octets: I8,
    singles: F32,
    first: I8,
    second: I8,
    words: U64,
    reals: F64,
    results: U64,
    halves: I16,
) -> bool:
    """False if there is no such expert. Octets, singles and halves are views: little-endian hosts only.
    Rows of an expert that are neighbours go ``TILE`` at a time."""
    for i in range(len(experts)):
        if experts[i] < 0 or experts[i] >= len(first):
            return False
    scratch = np.empty(Z_AT + TILE * INNER, np.float32)
    one, two, check = scratch[:TWO_AT], scratch[TWO_AT:CHECK_SUM_AT], scratch[CHECK_SUM_AT:UP_AT]
    up, down, x, z = (
        scratch[UP_AT:DOWN_AT],
        scratch[DOWN_AT:X_AT],
        scratch[X_AT:Z_AT],
        scratch[Z_AT:],
    )
    checks, inner = np.empty(TILE, np.int64), np.empty(INNER + TILE)
    most = inner[INNER:]
    scratch[X_AT:] = F0
    for d in range(D):
        check[d] = np.float32(np.int64(words[CHECK_AT + d]))
    loaded, begin = -1, 0
    while begin < len(experts):
        chosen, count = experts[begin], 1
        while count < TILE and begin + count < len(experts) and experts[begin + count] == chosen:
            count += 1
        if count > 1 and chosen != loaded:
            widened(first[chosen], one)
            widened(second[chosen], two)
            loaded = chosen
        for r in range(count):
            checks[r] = opened(octets[begin + r], check, x[r * D : (r + 1) * D])
        if count == 1:
            project(x[:D], first[chosen], up[:E2])
        else:
            _project_first(x, one, up)
        for r in range(count):
            i = begin + r
            scale = float(singles[i, 16]) / 512.0 if vectors[i, 8] & LOW <= ONE else 0.0
            row = z[r * INNER : (r + 1) * INNER]
            most[r] = gated(up[r * E2 : (r + 1) * E2], scale, reals, inner, row)
        if count == 1:
            project(z[:INNER], second[chosen], down[:D])
        else:
            _project_second(z, two, down)
        for r in range(count):
            i = begin + r
            answered(down[r * D : (r + 1) * D], most[r], reals, halves[i])
            results[i, 16] = sealed(vectors[i], words[EXPERT_AT + chosen], checks[r], words)
        begin += count
    return True


@kernel
def combine(
    states: I64,
    weights: U64,
    results: U64,
    halves: I16,
    shared: U64,
    shared_halves: I16,
    words: U64,
    after: I64,
) -> None:
    """Halves are views: little-endian hosts only."""
    total = np.empty(D)
    for i in range(len(states)):
        for d in range(D):
            total[d] = float(shared_halves[i, d]) * float(SHARED_WEIGHT)
        seal = np.uint64(states[i, SEAL]) + words[COMBINE_AT] + U3 * shared[i, 16]
        for k in range(weights.shape[1]):
            weight = weights[i, k]
            factor = float(weight)
            for d in range(D):
                total[d] += float(halves[i, k, d]) * factor
            seal += (weight + weight + U1) * results[i, k, 16]
        for d in range(D):
            seal += np.uint64(np.int64(total[d])) * words[FOLD_COMBINE_AT + d]
            moved = np.rint(total[d] / float(SHARED_WEIGHT))
            after[i, d] = np.int64(bounded(float(states[i, d]) + moved, LIMIT))
        after[i, PLACE] = states[i, PLACE]
        after[i, SEAL] = np.int64(mix(seal))


@kernel
def sample(states: I64, head: F32, constant: U64, reals: F64, tables: I64, tokens: I64) -> None:
    x, logits, ends = np.empty(D, np.float32), np.empty(V, np.float32), np.empty(V, np.int64)
    for i in range(len(states)):
        scale = norm(states[i], reals[:D], x) * HEAD_SCALE
        project(x, head, logits)
        end = 0
        for v in range(V):
            index = min(max(np.rint(float(logits[v]) * scale), -512.0), 511.0)
            end += tables[EXP_AT + 512 + np.int64(index)]
            ends[v] = end
        drawn = np.int64(mix(np.uint64(states[i, SEAL]) + constant[0]) >> DRAW_SHIFT)
        threshold = (drawn * end) >> DRAW_BITS
        token = 0
        while ends[token] <= threshold:
            token += 1
        tokens[i] = token


@kernel
def merge(
    states: I64, tokens: I64, embedding: I64, weights: F32, words: U64, reals: F64, after: I64
) -> None:
    """Words: of the MTP layer, of a token's start, then the fold."""
    u, x, sums = np.empty(2 * D), np.empty(2 * D, np.float32), np.empty(D, np.float32)
    for i in range(len(states)):
        token = np.int64(np.uint64(tokens[i]) % np.uint64(V))
        squares, others = 0.0, 0.0
        for d in range(D):
            u[d] = float(states[i, d])
            u[D + d] = float(embedding[token, d] * EMBEDDING_SCALE)
            squares += u[d] * u[d]
            others += u[D + d] * u[D + d]
        root = math.sqrt(squares / float(D) + 1.0)
        other = math.sqrt(others / float(D) + 1.0)
        most = 2.0**-30
        for d in range(D):
            u[d] = u[d] * reals[d] / root
            u[D + d] = u[D + d] * reals[d] / other
            most = max(most, max(abs(u[d]), abs(u[D + d])))
        factor = 127.0 / most
        for d in range(2 * D):
            x[d] = np.float32(np.rint(u[d] * factor))
        project(x, weights, sums)
        scale = float(np.float32(most / 127.0)) * MERGE_SCALE
        seal = np.uint64(states[i, SEAL]) + words[0] + mix(np.uint64(tokens[i]) + words[1])
        for d in range(D):
            seal += np.uint64(np.int64(sums[d])) * words[2 + d]
            begun = np.rint((float(sums[d]) * reals[D + d]) * scale)
            after[i, d] = np.int64(bounded(begun, LIMIT))
        after[i, PLACE] = states[i, PLACE]
        after[i, SEAL] = np.int64(mix(seal))
