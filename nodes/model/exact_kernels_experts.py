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
def pick(
    logits: F32,
    scale: float,
    bias: I64,
    tables: I64,
    scratch: I64,
    groups: int,
    top_groups: int,
    experts: I64,
    parts: U64,
) -> None:
    """One token's experts and their weights; ``scratch`` is [2 * experts + groups]."""
    count, top_k = len(bias), len(experts)
    scores, biased, best = scratch[:count], scratch[count : 2 * count], scratch[2 * count :]
    for e in range(count):
        index = np.rint(float(logits[e]) * scale - GATE_SHIFT)
        index = min(max(index, -2048.0), 2047.0)
        scores[e] = tables[SIGMOID_AT + 2048 + np.int64(index)]
        biased[e] = scores[e] + bias[e]
    choose(biased, groups, top_groups, best, experts)
    total = 0
    for k in range(top_k):
        total += scores[experts[k]]
    for k in range(top_k):
        part = scores[experts[k]] * (GATE_SUM // top_k) // total
        parts[k] = np.uint64(part * top_k + k + 1)


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
    count = len(bias)
    x, logits = np.empty(D, np.float32), np.empty(count, np.float32)
    scratch = np.empty(2 * count + groups, np.int64)
    for i in range(len(states)):
        scale = norm(states[i], reals[:D], x) * GATE_SCALE
        project(x, weights, logits)
        pick(logits, scale, bias, tables, scratch, groups, top_groups, experts[i], parts[i])


@kernel
def norms(states: I64, reals: F64, x: F32, scales: F64) -> None:
    """For ``pick_all``: rows that a library multiplies with the gate's weights in between."""
    for i in range(len(states)):
        scales[i] = norm(states[i], reals[:D], x[i]) * GATE_SCALE


@kernel
def pick_all(
    logits: F32,
    scales: F64,
    bias: I64,
    tables: I64,
    groups: int,
    top_groups: int,
    experts: I64,
    parts: U64,
) -> None:
    scratch = np.empty(2 * len(bias) + groups, np.int64)
    for i in range(len(logits)):
        pick(logits[i], scales[i], bias, tables, scratch, groups, top_groups, experts[i], parts[i])


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
def opened(octets: I8, words: U64, x: F32) -> Any:
    """A vector's values into ``x``; returns their check sum."""
    check = np.int64(0)
    for d in range(D):
        x[d] = np.float32(octets[d])
        check += np.int64(octets[d]) * np.int64(words[CHECK_AT + d])
    return check


@kernel
def gated(up: F32, scale_word: int, number: Any, reals: F64, inner: F64, z: F32) -> float:
    """INT8 values of the inner layer into ``z``; returns the largest. ``inner`` is [INNER] scratch,
    ``number`` one word."""
    low = scale_word & LOW
    number[0] = np.uint32(low if low <= ONE else np.uint64(0))
    scale = float(number.view(np.float32)[0]) / 512.0
    most = 2.0**-30
    for f in range(INNER):
        opened_up = (float(up[f]) * reals[D + f]) * scale
        other = (float(up[INNER + f]) * reals[D + INNER + f]) * scale
        inner[f] = (opened_up * min(max(opened_up + 3.0, 0.0), 6.0)) * other
    for f in range(INNER):
        most = max(most, abs(inner[f]))
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
    for i in range(len(experts)):
        chosen = experts[i]
        check = opened(octets[i], words, x)
        project(x, first[chosen], up)
        most = gated(up, vectors[i, 8], number, reals, inner, z)
        project(z, second[chosen], down)
        answered(down, most, reals, halves[i])
        results[i, 16] = sealed(vectors[i], words[EXPERT_AT + chosen], check, words)
    return True


@kernel
def open_all(octets: I8, words: U64, x: F32, checks: I64) -> None:
    """For ``gate_all`` and ``answer_all``: rows that a library multiplies with the weights of their
    experts in between."""
    for i in range(len(octets)):
        checks[i] = opened(octets[i], words, x[i])


@kernel
def gate_all(up: F32, vectors: U64, reals: F64, z: F32, largest: F64) -> None:
    inner, number = np.empty(INNER), np.empty(1, np.uint32)
    for i in range(len(up)):
        largest[i] = gated(up[i], vectors[i, 8], number, reals, inner, z[i])


@kernel
def answer_all(
    experts: I64,
    vectors: U64,
    down: F32,
    largest: F64,
    checks: I64,
    words: U64,
    reals: F64,
    results: U64,
    halves: I16,
) -> None:
    for i in range(len(experts)):
        answered(down[i], largest[i], reals, halves[i])
        results[i, 16] = sealed(vectors[i], words[EXPERT_AT + experts[i]], checks[i], words)


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
