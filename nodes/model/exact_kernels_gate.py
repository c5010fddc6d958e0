"""Kernels of the exact body's gate: which experts a token visits, and their weights.

A key is a biased score and, below it, what puts equal ones in order of their ids: keys differ, so that the
largest ones are the choice. The columns of the gate lie so that a loop over neighbours is one over groups:
column c is of group c % lanes (``packed``). Does not own what is shared (``exact_kernels``) nor any
formula (``exact_plain``).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from nodes.model.body import I64, U64
from nodes.model.exact_kernels import (
    F0,
    GATE_SCALE,
    GATE_SHIFT,
    GATE_SUM,
    TILE,
    D,
    kernel,
    norm,
    project,
    tile_product,
    widened,
)
from nodes.model.exact_tables import F32, F64, I8

I32 = npt.NDArray[np.int32]
COLUMNS = 32
"""Multiplied together, with weights that stay in a core's cache."""
LANES_MIN = 8
"""``key_all`` folds no further."""
CHUNK = 32
"""Tokens for which these weights are read once (measured: 16 to 64 take the same time)."""
SCORES = 4096
"""Of the sigmoid's table."""
LEAST = np.int32(-(2**31))
GROUPS_MAX = 1 << 12
"""Scores of groups are below 2^18 and at least -2^18."""
EXPERTS_MAX = 1 << 14
"""Biased scores too."""

_project_tile = tile_product(D, COLUMNS)


def packed(gate: F32, bias: I64, sigmoid: I64, groups: int) -> tuple[I8, I32, int]:
    """A gate's weights [blocks, 64 * COLUMNS], the table of shifted scores with what is added to each
    column's, and the lanes: groups up to a power of two. Columns without an expert are never chosen."""
    experts, bits = len(bias), (len(bias) - 1).bit_length()
    assert experts <= EXPERTS_MAX and groups <= GROUPS_MAX, "keys of 32 bits"
    assert np.abs(bias).max(initial=0) <= 65535, "keys of 32 bits"
    size, lanes = experts // groups, max(1 << (groups - 1).bit_length(), LANES_MIN)
    blocks = -(-size * lanes // COLUMNS)
    columns = np.arange(blocks * COLUMNS)
    group, number = columns % lanes, columns // lanes
    of = np.where((group < groups) & (number < size), group * size + number, -1)
    added = np.where(of < 0, int(LEAST), (bias[of] << bits) + (2**bits - 1 - of))
    weights = np.where(of < 0, 0, gate[:, of]).astype(np.int8)
    by_block = weights.reshape(D, blocks, COLUMNS).transpose(1, 0, 2).reshape(blocks, -1)
    keyed = np.concatenate([sigmoid << bits, added]).astype(np.int32)
    return np.ascontiguousarray(by_block), keyed, lanes


@kernel
def fold(two: I32, half: int) -> None:
    """The two largest of lane c and lane c + half, into lane c."""
    for c in range(half):
        high, other = two[c], two[half + c]
        low, under = two[COLUMNS + c], two[COLUMNS + half + c]
        two[c] = high if high > other else other
        middle = other if high > other else high
        low = low if low > under else under
        two[COLUMNS + c] = low if low > middle else middle


@kernel
def largest(keys: I32) -> Any:
    found = LEAST
    for i in range(len(keys)):
        key = keys[i]
        found = key if key > found else found
    return found


@kernel
def take_largest(keys: I32, best: I32) -> None:
    """The largest keys in order; keys are lost."""
    for k in range(len(best)):
        found = largest(keys)
        best[k] = found
        for i in range(len(keys)):
            keys[i] = LEAST if keys[i] == found else keys[i]


@kernel
def key_all(logits: F32, scale: float, keyed: I32, keys: I32, two: I32, lanes: int) -> None:
    """Keys [columns] of a token, and the two largest of each lane. Logits are those of a tile, the token's
    first; whole loops one after the other, since a wide load waits for narrow stores."""
    blocks = len(keys) // COLUMNS
    for block in range(blocks):
        own = logits[block * TILE * COLUMNS : block * TILE * COLUMNS + COLUMNS]
        at = keys[block * COLUMNS : (block + 1) * COLUMNS]
        for c in range(COLUMNS):
            index = np.int32(np.rint(float(own[c]) * scale - GATE_SHIFT))
            index = index if index > -2048 else np.int32(-2048)
            index = index if index < 2047 else np.int32(2047)
            at[c] = index + 2048
    table, added = keyed[:SCORES], keyed[SCORES:]
    for c in range(len(keys)):
        keys[c] = table[np.uintp(keys[c])] + added[c]
    two[:] = LEAST
    folds = len(two) // (2 * COLUMNS)
    for block in range(blocks):
        at, to = keys[block * COLUMNS :], two[block % folds * 2 * COLUMNS :]
        for c in range(COLUMNS):
            key, first, second = at[c], to[c], to[COLUMNS + c]
            low = key if key < first else first
            to[COLUMNS + c] = low if low > second else second
            to[c] = key if key > first else first
    if lanes <= COLUMNS // 2:
        fold(two, 16)
    if lanes <= COLUMNS // 4:
        fold(two, 8)


@kernel
def choose(
    keys: I32,
    two: I32,
    lanes: int,
    bits: int,
    groups: int,
    top_groups: int,
    size: int,
    best: I32,
    top_k: int,
) -> None:
    """The largest keys of the best groups, in order, into the first ``top_k`` of ``best``; behind them is
    scratch: [groups], [top_groups] and [top_groups * size]."""
    ranks, kept = best[top_k : top_k + groups], best[top_k + groups + top_groups :]
    chosen = best[top_k + groups : top_k + groups + top_groups]
    for g in range(groups):
        at = g // COLUMNS * 2 * COLUMNS + g % COLUMNS
        score = (two[at] >> bits) + (two[at + COLUMNS] >> bits if size > 1 else 0)
        ranks[g] = np.int32(score * GROUPS_MAX + (GROUPS_MAX - 1 - g))
    take_largest(ranks, chosen)
    for j in range(top_groups):
        group = GROUPS_MAX - 1 - (chosen[j] & (GROUPS_MAX - 1))
        for e in range(size):
            kept[j * size + e] = keys[e * lanes + group]
    take_largest(kept, best[:top_k])


@kernel
def weigh_experts(best: I32, bits: int, bias: I64, experts: I64, parts: U64) -> None:
    """Ids and weights of chosen keys."""
    top_k, total, last = len(experts), 0, (1 << bits) - 1
    for k in range(top_k):
        expert = last - (best[k] & last)
        score = (best[k] >> bits) - bias[expert]
        experts[k], parts[k] = expert, np.uint64(score)
        total += score
    for k in range(top_k):
        part = parts[k] * np.uint64(GATE_SUM // top_k) // np.uint64(total)
        parts[k] = part * np.uint64(top_k) + np.uint64(k + 1)


@kernel
def project_block(x: F32, weights: I8, wide: F32, logits: F32, stride: int) -> None:
    """Logits of a block of columns, of tokens x [tiles * TILE * 64]: ``stride`` from a tile to the next."""
    widened(weights, wide)
    for tile in range(len(x) // (TILE * D)):
        own = x[tile * TILE * D : (tile + 1) * TILE * D]
        _project_tile(own, wide, logits[tile * stride : tile * stride + TILE * COLUMNS])


@kernel
def gate(
    states: I64,
    weights: I8,
    keyed: I32,
    bias: I64,
    reals: F64,
    groups: int,
    lanes: int,
    top_groups: int,
    experts: I64,
    parts: U64,
) -> None:
    blocks, count, top_k = len(weights), len(states), experts.shape[1]
    size, bits, stride = len(bias) // groups, 0, blocks * TILE * COLUMNS
    while (1 << bits) < len(bias):
        bits += 1
    room = (min(count, CHUNK) + TILE - 1) // TILE * TILE
    scratch = np.empty(room * (D + blocks * COLUMNS) + D * COLUMNS, np.float32)
    x, logits, wide = (
        scratch[: room * D],
        scratch[room * D : room * (D + blocks * COLUMNS)],
        scratch[room * (D + blocks * COLUMNS) :],
    )
    x[:] = F0
    scales = np.empty(room)
    keys, two = np.empty(blocks * COLUMNS, np.int32), np.empty(2 * max(lanes, COLUMNS), np.int32)
    best = np.empty(top_k + groups + top_groups * (size + 1), np.int32)
    for begin in range(0, count, CHUNK):
        tokens = min(CHUNK, count - begin)
        for i in range(tokens):
            row = x[i * D : (i + 1) * D]
            scales[i] = norm(states[begin + i], reals[:D], row) * GATE_SCALE
        for block in range(blocks):
            sums = logits[block * TILE * COLUMNS :]
            if tokens == 1:
                project(x[:D], weights[block], sums[:COLUMNS])
            else:
                tiles = (tokens + TILE - 1) // TILE
                project_block(x[: tiles * TILE * D], weights[block], wide, sums, stride)
        for i in range(tokens):
            own = logits[i // TILE * stride + i % TILE * COLUMNS :]
            key_all(own, scales[i], keyed, keys, two, lanes)
            choose(keys, two, lanes, bits, groups, top_groups, size, best, top_k)
            weigh_experts(best[:top_k], bits, bias, experts[begin + i], parts[begin + i])
