"""Any split gives the same bits, all at once: batch, chunks, sequence, experts, replicas, order; heads.

Each one alone is in ``test_exact.py`` and ``test_seal.py``; together they are what a serving system does.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cmnet import entropy
from nodes.model import bodies
from nodes.model import exact_plain as plain
from nodes.model import exact_tables as t
from nodes.model.body import I64, U64, Array, Body
from nodes.model.exact import ExactBody
from nodes.settings import ModelSettings
from tests.nodes.model import drafting

MODEL = ModelSettings()
NAMES: tuple[bodies.Name, ...] = ("exact", "seal")
BODIES = {name: bodies.make(name, MODEL) for name in NAMES}
PLAIN = ExactBody(MODEL, compiled=False)
REPLICAS = 3


def order(count: int, draw: entropy.Stream) -> I64:
    """A permutation."""
    return np.argsort(np.array([draw.u64() for _ in range(count)], dtype=np.uint64), kind="stable")


def pieces(count: int, draw: entropy.Stream) -> list[tuple[int, int]]:
    """Up to four pieces that make up so many items, empty ones too, in any order."""
    cuts = sorted([0, count, *(draw.below(count + 1) for _ in range(draw.below(4)))])
    ends = list(itertools.pairwise(cuts))
    return [ends[i] for i in order(len(ends), draw)]


def batches(count: int, draw: entropy.Stream) -> Iterator[I64]:
    """All items in batches of any size, in any order."""
    every = order(count, draw)
    yield from (every[first:last] for first, last in pieces(count, draw) if last > first)


def attended(
    body: Body, states: Array, rows: Array, *, first: int, layer: int, draw: entropy.Stream
) -> Array:
    """Each state reads all rows up to its own, in pieces, the sums added in any order."""
    after = states.copy()
    for batch in batches(len(states), draw):
        sums = []
        for index in batch:
            one = states[index : index + 1]
            parts = [
                body.read(one, rows[a:b], layer=layer, first_place=a)
                for a, b in pieces(first + int(index) + 1, draw)
            ]
            sums.append(sum(parts[1:], start=parts[0]))
        after[batch] = body.attend(states[batch], np.concatenate(sums), layer=layer)
    return after


def exchanged(body: Body, states: Array, *, layer: int, draw: entropy.Stream) -> Array:
    """Every message to one of three replicas, which answer in any batches; slots in any order."""
    count, slots = len(states), MODEL.top_k + 1
    experts = np.full((count, slots), MODEL.shared_expert)
    weights = np.zeros((count, slots - 1), dtype=np.uint64)
    vectors = np.zeros((count, body.vector_words), dtype=np.uint64)
    for batch in batches(count, draw):
        gate = body.gate(states[batch], layer=layer)
        experts[batch, :-1], weights[batch] = gate.experts, gate.weights
        vectors[batch] = body.dispatch(states[batch])
    sent, asked = np.repeat(vectors, slots, axis=0), experts.ravel()
    results = np.zeros((count * slots, body.result_words), dtype=np.uint64)
    replica = np.array([draw.below(REPLICAS) for _ in asked])
    for number in order(REPLICAS, draw):
        mine = np.flatnonzero(replica == number)
        for batch in batches(len(mine), draw):
            which = mine[batch]
            results[which] = body.expert(asked[which], sent[which], layer=layer)
    by_token, after = results.reshape(count, slots, -1), states.copy()
    for batch in batches(count, draw):
        own = order(slots - 1, draw)
        parts = weights[batch][:, own], by_token[batch][:, own], by_token[batch, -1]
        after[batch] = body.combine(states[batch], *parts, layer=layer)
    return after


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=15)
@given(st.integers(0, 2**32), st.integers(1, 24))
def test_all_splits_at_once_give_the_bits_of_none(name: bodies.Name, seed: int, count: int) -> None:
    """A prompt in chunks, each chunk's attention and experts split in every way, against one pass."""
    body, draw = BODIES[name], entropy.stream(seed, "splits")
    seeds = np.random.Philox(key=seed).random_raw(count)
    none = body.rows_from_bytes(b"").reshape(MODEL.carried_layers, 0)
    whole = body.prefill(seeds, cached_rows=none)
    held, states, shares = none, [], []
    for first, last in sorted(pieces(count, draw)):
        if first == last:
            continue
        now, layers = body.start_prompt(seeds[first:last], first_place=first), []
        for layer in range(MODEL.carried_layers):
            rows = np.concatenate([held[layer], body.kv_rows(now, layer=layer)])
            now = attended(body, now, rows, first=first, layer=layer, draw=draw)
            now = exchanged(body, now, layer=layer, draw=draw)
            layers.append(rows)
        held = np.stack(layers)
        states.append(now)
        shares.append(body.fold_prompt(now, first_place=first))
    assert held.tobytes() == whole.rows.tobytes()
    assert np.concatenate(states).tobytes() == whole.states.tobytes()
    assert np.array_equal(body.sample(np.concatenate(states)), body.sample(whole.states))
    share = body.fold_prompt(whole.states, first_place=0)
    assert body.receipt(0, shares) == body.receipt(0, [share])


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=15)
@given(st.integers(0, 2**32), st.integers(1, 16))
def test_the_mtp_layer_may_be_split_as_any(name: bodies.Name, seed: int, count: int) -> None:
    """Rows that came one by one or two by two, as drafts are accepted, against one pass."""
    body, draw = BODIES[name], entropy.stream(seed, "mtp splits")
    layer = MODEL.carried_layers
    main = body.start_prompt(np.random.Philox(key=seed).random_raw(count), first_place=9)
    tokens = body.sample(main)
    none = body.rows_from_bytes(b"")
    rows, whole = drafting.mtp(body, none, main, tokens.tolist(), first_place=9)
    held, done = none, []
    for first, last in sorted(pieces(count, draw)):
        begun = body.mtp_start(main[first:last], tokens[first:last])
        held = np.concatenate([held, body.kv_rows(begun, layer=layer)])
        for index in range(last - first):
            one = begun[index : index + 1]
            parts = [
                body.read(one, held[a:b], layer=layer, first_place=9 + a)
                for a, b in pieces(first + index + 1, draw)
            ]
            after = body.attend(one, sum(parts[1:], start=parts[0]), layer=layer)
            done.append(exchanged(body, after, layer=layer, draw=draw))
    assert held.tobytes() == rows.tobytes()
    assert np.concatenate(done).tobytes() == whole.tobytes()


def read_heads(states: I64, rows: Array, heads: slice, *, layer: int) -> tuple[I64, I64, U64]:
    """What a rank with these heads only reads: numerators, denominators, its part of the fold."""
    own, steps = PLAIN.model.layers[layer], PLAIN.steps
    assert isinstance(steps, plain.PlainSteps)
    octets = np.ascontiguousarray(rows).view(np.int8).reshape(len(rows), plain.ROW_BYTES)
    values = octets[:, : t.ROW_VALUES].astype(np.float32)
    exps: t.F32 = plain._exps(steps._query(states, own)[:, heads] @ values.T)
    bound = plain.bound_seals(octets, place=own.place, first_place=0)
    folds = (exps.astype(np.float64) @ bound).astype(np.int64).view(np.uint64)
    fold: U64 = folds @ own.fold_bound[heads]
    denominators: I64 = exps.sum(axis=2).astype(np.int64)
    return np.swapaxes(exps @ values, 1, 2).astype(np.int64), denominators, fold


def attend_heads(
    sums: list[tuple[slice, I64, I64]], count: int, *, layer: int
) -> tuple[Array, Array]:
    """Scale and output sums of all heads: the largest value is the ranks' largest, and each rank has its
    rows of the output's weights; the ranks' sums are added."""
    own = PLAIN.model.layers[layer]
    parts = []
    for heads, numerators, denominators in sums:
        up = own.value_up[:, :, heads].astype(np.float64)
        mixed = np.einsum("ndh,djh->njh", numerators[:, : t.LATENT].astype(np.float64), up)
        parts.append((heads, np.rint(2.0 * mixed / denominators[:, None, :])))
    most = np.ones(count)
    for _, values in parts:
        most = np.maximum(most, np.abs(values).max(axis=(1, 2)))
    out = np.zeros((count, t.HIDDEN), dtype=np.float32)
    for heads, values in parts:
        x = np.rint(values * (127.0 / most)[:, None, None]).astype(np.float32)
        weights = own.out.reshape(t.VALUE, t.HEADS, t.HIDDEN)[:, heads].reshape(-1, t.HIDDEN)
        out = out + x.reshape(count, -1) @ weights
    return most, out


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**32), st.integers(1, 8))
def test_ranks_with_some_heads_each_make_the_sums_of_all(seed: int, ranks: int) -> None:
    """TP: reads by head are columns of the whole read; folds add mod 2^64; the output's sums add."""
    body, draw, layer = BODIES["exact"], entropy.stream(seed, "heads"), 1
    states = body.start_prompt(np.random.Philox(key=seed).random_raw(30), first_place=0)
    rows, states = body.kv_rows(states, layer=layer), states[-4:]
    cuts = sorted({0, t.HEADS, *(1 + draw.below(t.HEADS - 1) for _ in range(ranks - 1))})
    groups = [slice(a, b) for a, b in itertools.pairwise(cuts)]
    sums = np.zeros((4, t.SUM_WORDS), dtype=np.int64)
    split = t.ROW_VALUES * t.HEADS
    parts = []
    for group in (groups[i] for i in order(len(groups), draw)):
        numerators, denominators, folds = read_heads(states, rows, group, layer=layer)
        sums[:, :split].reshape(4, t.ROW_VALUES, t.HEADS)[:, :, group] = numerators
        sums[:, split:-1][:, group] = denominators
        sums[:, -1] += folds.view(np.int64)
        parts.append((group, numerators, denominators))
    assert np.array_equal(sums, body.read(states, rows, layer=layer, first_place=0))
    most, out = attend_heads(parts, 4, layer=layer)
    after = body.attend(states, sums, layer=layer)
    scale = (most / 127.0).astype(np.float32).astype(np.float64) * t.OUT_SCALE
    moved = np.rint((out * PLAIN.model.channel) * scale[:, None])
    expected = np.clip(states[:, : t.HIDDEN] + moved, -t.LIMIT, t.LIMIT)
    assert np.array_equal(after[:, : t.HIDDEN], expected)
