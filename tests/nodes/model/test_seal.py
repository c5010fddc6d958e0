"""The seal-only body: any split gives the same bits; one token at a time gives the same as many."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cmnet import entropy, errors
from nodes.model.body import U64, Body
from nodes.model.seal import MASK, SealBody, mix, mix_integer
from nodes.settings import ModelSettings
from tests.nodes.model import stepwise

MODEL = ModelSettings()
BODY: Body = SealBody(MODEL)
SEALS = SealBody(MODEL)
FINGERPRINT = "d0d4fa08b0710fb8da301cee1e14af80"


def words(count: int, name: str = "words") -> U64:
    draw = entropy.stream(11, name)
    return np.array([draw.u64() for _ in range(count)], dtype=np.uint64)


def no_rows(body: Body = BODY) -> U64:
    return np.empty((body.settings.carried_layers, 0), dtype=np.uint64)


cuts = st.lists(st.integers(0, 40), max_size=5).map(lambda ends: sorted({0, 40, *ends}))


def test_mix_is_the_published_finaliser() -> None:
    """SplitMix64 from state 1234567: the first outputs that other implementations print."""
    states = [(1234567 + i * 0x9E3779B97F4A7C15) & MASK for i in (1, 2, 3)]
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [mix_integer(state) for state in states] == expected
    assert mix(np.array(states, dtype=np.uint64)).tolist() == expected


def test_one_row_at_a_time_equals_all_at_once() -> None:
    """Single rows take a short way in Python integers; it must not be another model."""
    states, sums, layer = words(300), words(300, "sums"), 1
    tokens = (words(300, "tokens") % np.uint64(MODEL.vocabulary)).astype(np.int64)
    places = np.arange(300, dtype=np.int64)
    many = BODY.gate(states, layer=layer)
    started = BODY.start_tokens(tokens, places=places)
    rows = BODY.kv_rows(states, layer=layer)
    attended = BODY.attend(states, sums, layer=layer)
    for i in range(300):
        one = slice(i, i + 1)
        single = BODY.gate(states[one], layer=layer)
        assert single.experts.tolist() == many.experts[one].tolist()
        assert single.weights.tolist() == many.weights[one].tolist()
        assert BODY.start_tokens(tokens[one], places=places[one])[0] == started[i]
        assert BODY.kv_rows(states[one], layer=layer)[0] == rows[i]
        assert BODY.attend(states[one], sums[one], layer=layer)[0] == attended[i]


def test_the_gate_takes_eight_experts_of_four_groups() -> None:
    """Every token: 8 distinct experts in at most 4 groups, weights 1..4096, distinct by slot."""
    gate = BODY.gate(words(2000), layer=0)
    assert gate.experts.shape == gate.weights.shape == (2000, 8)
    for experts, weights in zip(gate.experts.tolist(), gate.weights.tolist()):
        assert len(set(experts)) == len(set(weights)) == 8
        assert len({expert // 32 for expert in experts}) <= 4
        assert min(weights) >= 1
        assert max(weights) <= 4096


def test_experts_are_loaded_evenly() -> None:
    """2,000 tokens x 8 over 256 experts: 62.5 each; 7 standard deviations are 55."""
    counts = np.bincount(BODY.gate(words(2000), layer=1).experts.ravel(), minlength=256)
    assert counts.min() > 8
    assert counts.max() < 118


def test_an_odd_gate_works_too() -> None:
    """Other numbers of experts, groups and slots than powers of two."""
    model = ModelSettings(routed_experts=60, groups=5, top_groups=2, top_k=5)
    body, states = SealBody(model), words(200)
    gate = body.gate(states, layer=0)
    assert gate.experts.max() < 60
    assert all(len(set(row // 12)) <= 2 for row in gate.experts)
    singles = [body.gate(states[i : i + 1], layer=0).experts[0].tolist() for i in range(200)]
    assert singles == gate.experts.tolist()


@settings(deadline=None, max_examples=30)
@given(cuts)
def test_any_chunking_of_a_prompt_gives_the_same_bits(ends: list[int]) -> None:
    """A chunk is a run behind cached rows, so this is the prefix cache too."""
    seeds = words(40, "seeds")
    whole = BODY.prefill(seeds, cached_rows=no_rows())
    held, states, shares = no_rows(), [], []
    for first, last in itertools.pairwise(ends):
        part = BODY.prefill(seeds[first:last], cached_rows=held)
        held = np.concatenate([held, part.rows], axis=1)
        states.append(part.states)
        shares.append(BODY.fold_prompt(part.states, first_place=first))
    assert np.array_equal(held, whole.rows)
    assert np.array_equal(np.concatenate(states), whole.states)
    assert BODY.receipt(5, shares) == BODY.receipt(
        5, [BODY.fold_prompt(whole.states, first_place=0)]
    )


@settings(deadline=None, max_examples=30)
@given(cuts.flatmap(lambda ends: st.permutations(list(itertools.pairwise(ends)))))
def test_pieces_of_a_sequence_add_up_in_any_order(pieces: list[tuple[int, int]]) -> None:
    """Sequence-parallel pieces, uneven and in any order of arrival."""
    rows, states = words(40, "rows"), words(3)
    total = np.zeros(3, dtype=np.uint64)
    for first, last in pieces:
        total = total + BODY.read(states, rows[first:last], layer=1, first_place=first)
    assert np.array_equal(total, BODY.read(states, rows, layer=1, first_place=0))
    sums = [SEALS.bound_sum(rows[a:b], layer=1, first_place=a) for a, b in pieces]
    assert sum(sums) & MASK == int(total[0])


def test_causal_sums_are_sums_up_to_the_own_row() -> None:
    rows = words(40, "rows")
    causal = BODY.read_causal(rows, rows, layer=0, first_place=7)
    alone = [
        SEALS.bound_sum(rows[: i + 1], layer=0, first_place=7) & MASK for i in range(len(rows))
    ]
    assert causal.tolist() == alone


@settings(deadline=None, max_examples=20)
@given(st.permutations(range(12)), st.permutations(range(8)), st.integers(1, 12))
def test_experts_and_batch_in_any_order_and_split(
    tokens: list[int], slots: list[int], batch: int
) -> None:
    """Messages grouped by expert or not, tokens in any batch: the combined state is the same."""
    states = words(12)
    whole = BODY.moe_here(states, layer=0)
    order = np.array(tokens)
    parts = []
    for first in range(0, 12, batch):
        piece = states[order[first : first + batch]]
        gate, vectors = BODY.gate(piece, layer=0), BODY.dispatch(piece)
        results = np.empty((len(piece), 8, 16), dtype=np.uint64)
        for slot in slots:
            results[:, slot] = BODY.expert(gate.experts[:, slot], vectors, layer=0)
        ids = np.full(len(piece), MODEL.shared_expert)
        shared = BODY.expert(ids, vectors, layer=0)
        weights, results = gate.weights[:, slots], results[:, slots]
        parts.append(BODY.combine(piece, weights, results, shared, layer=0))
    assert np.array_equal(np.concatenate(parts), whole[order])


def test_every_bit_of_a_vector_and_of_a_result_counts() -> None:
    """Single bit flips change the fold with certainty (odd factors), so all are tried."""
    states = words(1)
    vectors, ids = BODY.dispatch(states), np.array([9])
    flipped = np.repeat(vectors, 512, axis=0)
    flipped.reshape(512, 8)[np.arange(512), np.arange(512) // 64] ^= np.uint64(1) << (
        np.arange(512, dtype=np.uint64) % np.uint64(64)
    )
    right = BODY.expert(ids, vectors, layer=0)[0, 0]
    assert not (BODY.expert(np.repeat(ids, 512), flipped, layer=0)[:, 0] == right).any()
    results = np.zeros((1, 8, 16), dtype=np.uint64)
    weights, shared = BODY.gate(states, layer=0).weights, np.zeros((1, 16), dtype=np.uint64)
    right = BODY.combine(states, weights, results, shared, layer=0)[0]
    many = np.zeros((1024, 8, 16), dtype=np.uint64)
    many[np.arange(1024), 3, np.arange(1024) // 64] = np.uint64(1) << (
        np.arange(1024, dtype=np.uint64) % np.uint64(64)
    )
    copies = [np.repeat(part, 1024, axis=0) for part in (states, weights, shared)]
    outcomes = BODY.combine(copies[0], copies[1], many, copies[2], layer=0)
    assert not (outcomes == right).any()


def test_flips_of_the_same_bit_in_two_words_do_not_cancel() -> None:
    """A stuck data line flips one bit of many words; without the shift bit 63 would cancel."""
    vectors, ids = BODY.dispatch(words(1)), np.array([9])
    right = BODY.expert(ids, vectors, layer=0)[0, 0]
    for bit in range(64):
        for other in range(1, 8):
            flipped = vectors.copy()
            flipped[0, [0, other]] ^= np.uint64(1 << bit)
            assert BODY.expert(ids, flipped, layer=0)[0, 0] != right


def test_layers_and_experts_are_different() -> None:
    """A message handled for another layer, or by another expert, must not pass."""
    vectors = np.repeat(BODY.dispatch(words(1)), 257, axis=0)
    results = [BODY.expert(np.arange(257), vectors, layer=layer)[:, 0] for layer in (0, 1)]
    assert len(set(np.concatenate(results).tolist())) == 514
    states = words(1)
    assert BODY.kv_rows(states, layer=0)[0] != BODY.kv_rows(states, layer=1)[0]
    sums = words(1, "sums")
    assert BODY.attend(states, sums, layer=0)[0] != BODY.attend(states, sums, layer=1)[0]


def test_sampled_tokens_are_in_the_vocabulary_and_spread() -> None:
    tokens = BODY.sample(words(5000))
    assert tokens.min() >= 0
    assert tokens.max() < MODEL.vocabulary
    assert len(set(tokens.tolist())) > 4800


def test_rows_go_through_bytes() -> None:
    rows = words(7)
    assert np.array_equal(BODY.rows_from_bytes(rows.tobytes()), rows)
    with pytest.raises(errors.CorruptError):
        BODY.rows_from_bytes(rows.tobytes()[:-1])


def test_no_argument_is_written_into() -> None:
    """Nodes keep what they give: a second read of it must be the same."""
    states = words(9)
    kept = states.copy()
    stepwise.exchange(BODY, states, layer=0, touch=stepwise.untouched)
    BODY.prefill(states, cached_rows=no_rows())
    BODY.sample(states)
    assert np.array_equal(states, kept)


def test_the_fingerprint_is_known() -> None:
    """Another constant, formula or fixed run is another model: change this with the reason."""
    assert BODY.fingerprint == FINGERPRINT
    assert BODY.draft_fingerprint == "d0f59dc959faeb58aa302a12c9b57fca"


def test_the_fingerprint_follows_what_changes_tokens_only() -> None:
    """Charged sizes change times, not tokens."""
    assert SealBody(ModelSettings(combine_bytes=7168)).fingerprint == FINGERPRINT
    assert SealBody(ModelSettings(tokens_per_carried=64)).fingerprint != FINGERPRINT
    assert SealBody(ModelSettings(carried_layers=3)).fingerprint != FINGERPRINT


@pytest.mark.slow
def test_the_fingerprint_is_the_same_in_another_process() -> None:
    """No string hash, no state of this process."""
    code = "from nodes.model.seal import SealBody; from nodes.settings import ModelSettings; "
    code += "print(SealBody(ModelSettings()).fingerprint)"
    for seed in ("0", "1"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.getcwd()}
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == FINGERPRINT
