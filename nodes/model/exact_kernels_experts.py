"""Kernels of the exact body: gate, messages, experts, combine, the sampler and the MTP layer's beginning.

Does not own what they share with attention (``exact_kernels``) nor any formula (``exact_plain``).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nodes.model.body import I64, U64
from nodes.model.exact_kernels import (
    BYTE,
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
    FOLD_COMBINE_AT,
    GATE_SCALE,
    GATE_SHIFT,
    GATE_SUM,
    HALF,
    HEAD_SCALE,
    INNER,
    LIMIT,
    LOW,
    MERGE_SCALE,
    ONE,
    PLACE,
    SEAL,
    SHARED_WEIGHT,
    SIGMOID_AT,
    U1,
    U3,
    D,
    V,
    bounded,
    kernel,
    mix,
    norm,
    project,
)
from nodes.model.exact_tables import F32, F64, I8, I16


@kernel
def choose(biased: I64, groups: int, top_groups: int, best: I64, chosen: I64) -> None:
    """The experts of the best groups, best first, into ``chosen``; ``best`` is [groups] scratch."""
    size, top_k = len(biased) // groups, len(chosen)
    for g in range(groups):
        first, second = biased[g * size], np.int64(-(2**40))
        for e in range(g * size + 1, (g + 1) * size):
            value = biased[e]
            second = max(second, min(first, value))
            first = max(first, value)
        best[g] = first + second if size > 1 else first
    chosen[:] = -1
    for _ in range(top_groups):
        top = 0
        for g in range(1, groups):
            if best[g] > best[top]:
                top = g
        best[top] = -(2**41)
        for e in range(top * size, (top + 1) * size):
            k, expert, value = top_k - 1, e, biased[e]
            last = chosen[k]
            if last >= 0 and (value < biased[last] or (value == biased[last] and e > last)):
                continue
            while k > 0:
                above = chosen[k - 1]
                if above >= 0 and (
                    value < biased[above] or (value == biased[above] and expert > above)
                ):
                    break
                chosen[k] = above
                k -= 1
            chosen[k] = expert


@kernel
def gate(
    states: I64,
    weights: F32,
    bias: I64,
    reals: F64,
    tables: I64,
    groups: int,
    top_groups: int,
    experts: I64,
    parts: U64,
) -> None:
    count, top_k = len(bias), experts.shape[1]
    x, logits = np.empty(D, np.float32), np.empty(count, np.float32)
    scores, biased, best = (
        np.empty(count, np.int64),
        np.empty(count, np.int64),
        np.empty(groups, np.int64),
    )
    for i in range(len(states)):
        scale = norm(states[i], reals[:D], x) * GATE_SCALE
        project(x, weights, logits)
        for e in range(count):
            index = np.rint(float(logits[e]) * scale - GATE_SHIFT)
            index = min(max(index, -2048.0), 2047.0)
            scores[e] = tables[SIGMOID_AT + 2048 + np.int64(index)]
            biased[e] = scores[e] + bias[e]
        choose(biased, groups, top_groups, best, experts[i])
        total = 0
        for k in range(top_k):
            total += scores[experts[i, k]]
        for k in range(top_k):
            part = scores[experts[i, k]] * (GATE_SUM // top_k) // total
            parts[i, k] = np.uint64(part * top_k + k + 1)


@kernel
def dispatch(states: I64, reals: F64, vectors: U64) -> None:
    x, scale = np.empty(D, np.float32), np.empty(1, np.float32)
    bits = scale.view(np.uint32)
    for i in range(len(states)):
        scale[0] = np.float32(norm(states[i], reals[:D], x))
        for w in range(8):
            word = np.uint64(0)
            for d in range(8):
                word |= (np.uint64(np.int64(x[8 * w + d])) & BYTE) << np.uint64(8 * d)
            vectors[i, w] = word
        vectors[i, 8] = np.uint64(bits[0])
        vectors[i, 9] = np.uint64(states[i, SEAL])


@kernel
def expert(
    experts: I64,
    vectors: U64,
    octets: I8,
    first: F32,
    second: F32,
    words: U64,
    reals: F64,
    results: U64,
    halves: I16,
) -> bool:
    """False if there is no such expert. Octets and halves are views: little-endian hosts only."""
    for i in range(len(experts)):
        if experts[i] < 0 or experts[i] >= len(first):
            return False
    x, up, inner = np.empty(D, np.float32), np.empty(E2, np.float32), np.empty(INNER)
    z, down = np.empty(INNER, np.float32), np.empty(D, np.float32)
    number = np.empty(1, np.uint32)
    as_float = number.view(np.float32)
    for i in range(len(experts)):
        check = np.int64(0)
        for d in range(D):
            x[d] = np.float32(octets[i, d])
            check += np.int64(octets[i, d]) * np.int64(words[CHECK_AT + d])
        chosen = experts[i]
        project(x, first[chosen], up)
        low = vectors[i, 8] & LOW
        number[0] = np.uint32(low if low <= ONE else np.uint64(0))
        scale = float(as_float[0]) / 512.0
        most = 2.0**-30
        for f in range(INNER):
            opened = (float(up[f]) * reals[D + f]) * scale
            other = (float(up[INNER + f]) * reals[D + INNER + f]) * scale
            inner[f] = (opened * min(max(opened + 3.0, 0.0), 6.0)) * other
        for f in range(INNER):
            most = max(most, abs(inner[f]))
        factor = 127.0 / most
        for f in range(INNER):
            z[f] = np.float32(np.rint(inner[f] * factor))
        project(z, second[chosen], down)
        scale = most * EXPERT_SCALE
        for d in range(D):
            y = np.rint((float(down[d]) * reals[D + d]) * scale)
            halves[i, d] = np.int16(np.int32(min(max(y, -32767.0), 32767.0)))
        seal = vectors[i, 9] + words[EXPERT_AT + chosen] + vectors[i, 8]
        results[i, 16] = mix(seal + np.uint64(check) * words[CHECK_ODD_AT])
    return True


@kernel
def add(total: I64, weight: Any, result: U64) -> None:
    for w in range(16):
        for d in range(4):
            half = np.int64((result[w] >> np.uint64(16 * d)) & HALF)
            total[4 * w + d] += weight * (half - 65536 if half > 32767 else half)


@kernel
def combine(states: I64, weights: U64, results: U64, shared: U64, words: U64, after: I64) -> None:
    total = np.empty(D, np.int64)
    for i in range(len(states)):
        total[:] = 0
        add(total, SHARED_WEIGHT, shared[i])
        seal = np.uint64(states[i, SEAL]) + words[COMBINE_AT] + U3 * shared[i, 16]
        for k in range(weights.shape[1]):
            weight = weights[i, k]
            add(total, np.int64(weight), results[i, k])
            seal += (weight + weight + U1) * results[i, k, 16]
        for d in range(D):
            seal += np.uint64(total[d]) * words[FOLD_COMBINE_AT + d]
            moved = np.rint(float(total[d]) / float(SHARED_WEIGHT))
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
