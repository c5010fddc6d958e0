"""The exact body: any split gives the same bits, and the model is the one of the fingerprint."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cmnet import errors
from nodes.model import exact_tables as t
from nodes.model.body import U64, Array, Body
from nodes.model.exact import ROW, ExactBody, no_rows, prepared
from nodes.settings import ModelSettings
from tests.nodes.model import stepwise

MODEL = ModelSettings()
BODY: Body = prepared(MODEL)
EXACT = prepared(MODEL)
FINGERPRINT = "f8ab02952ae3ffb3867768551e46843f"
DRAFT_FINGERPRINT = "d39d097851d2995ff7496c937d25ab6d"
COUNT = 40

cuts = st.lists(st.integers(0, COUNT), max_size=5).map(lambda ends: sorted({0, COUNT, *ends}))


def words(count: int, key: int = 11) -> U64:
    return np.random.Philox(key=key).random_raw(count)


def some(count: int = COUNT, key: int = 11) -> Array:
    """States that went through a layer."""
    return BODY.prefill(words(count, key), cached_rows=no_rows(MODEL)).states


@settings(deadline=None, max_examples=25)
@given(cuts)
def test_any_chunking_of_a_prompt_gives_the_same_bits(ends: list[int]) -> None:
    """A chunk is a run behind cached rows, so this is the prefix cache too."""
    seeds = words(COUNT)
    whole = BODY.prefill(seeds, cached_rows=no_rows(MODEL))
    held, states, shares = no_rows(MODEL), [], []
    for first, last in itertools.pairwise(ends):
        part = BODY.prefill(seeds[first:last], cached_rows=held)
        held = np.concatenate([held, part.rows], axis=1)
        states.append(part.states)
        shares.append(BODY.fold_prompt(part.states, first_place=first))
    assert held.tobytes() == whole.rows.tobytes()
    assert np.array_equal(np.concatenate(states), whole.states)
    one = BODY.fold_prompt(whole.states, first_place=0)
    assert BODY.receipt(5, shares) == BODY.receipt(5, [one])


@settings(deadline=None, max_examples=25)
@given(cuts.flatmap(lambda ends: st.permutations(list(itertools.pairwise(ends)))))
def test_pieces_of_a_sequence_add_up_in_any_order(pieces: list[tuple[int, int]]) -> None:
    """Sequence-parallel pieces, uneven, empty ones too, and in any order of arrival."""
    states = some(3)
    rows = BODY.kv_rows(some(), layer=1)
    total = np.zeros((3, t.SUM_WORDS), dtype=np.int64)
    for first, last in pieces:
        total = total + BODY.read(states, rows[first:last], layer=1, first_place=first)
    assert np.array_equal(total, BODY.read(states, rows, layer=1, first_place=0))


@settings(deadline=None, max_examples=15)
@given(st.permutations(range(COUNT)), st.integers(1, COUNT))
def test_any_batch_in_any_order_gives_the_same_bits(order: list[int], batch: int) -> None:
    """Attention and experts of tokens in permuted batches: rows do not know each other."""
    states, rows = some(), BODY.kv_rows(some(key=12), layer=1)
    whole = BODY.attend(states, BODY.read(states, rows, layer=1, first_place=0), layer=1)
    whole = BODY.moe_here(whole, layer=1)
    parts = []
    for first in range(0, COUNT, batch):
        piece = states[order[first : first + batch]]
        sums = BODY.read(piece, rows, layer=1, first_place=0)
        parts.append(BODY.moe_here(BODY.attend(piece, sums, layer=1), layer=1))
    assert np.array_equal(np.concatenate(parts), whole[order])
    assert np.array_equal(BODY.sample(whole[order]), BODY.sample(whole)[order])


@pytest.mark.slow
@settings(deadline=None, max_examples=15)
@given(st.data())
def test_experts_and_their_replicas_answer_in_any_order(data: st.DataObject) -> None:
    """Messages to redundant replicas at random, handled in random groups, put back by their slots."""
    states = some(12)
    gate, vectors = BODY.gate(states, layer=0), BODY.dispatch(states)
    experts = np.column_stack([gate.experts, np.full(12, MODEL.shared_expert)]).ravel()
    messages = np.repeat(vectors, 9, axis=0)
    replicas = data.draw(st.lists(st.integers(0, 2), min_size=108, max_size=108))
    order = np.array(data.draw(st.permutations(range(108))))
    results = np.zeros((108, BODY.result_words), dtype=np.uint64)
    for replica in data.draw(st.permutations(range(3))):
        mine = order[np.array(replicas)[order] == replica]
        results[mine] = BODY.expert(experts[mine], messages[mine], layer=0)
    by_token = results.reshape(12, 9, -1)
    slots = data.draw(st.permutations(range(8)))
    weights, routed = gate.weights[:, slots], by_token[:, slots]
    done = BODY.combine(states, weights, routed, by_token[:, 8], layer=0)
    assert np.array_equal(done, BODY.moe_here(states, layer=0))


@settings(deadline=None, max_examples=15)
@given(st.lists(st.integers(1, 31), max_size=6), st.data())
def test_heads_are_summed_in_any_split(ends: list[int], data: st.DataObject) -> None:
    """TP: each group of heads folds its own sums; the folds add modulo 2^64 in any order."""
    states, layer = some(4), EXACT.model.layers[1]
    sums = BODY.read(states, BODY.kv_rows(some(), layer=1), layer=1, first_place=0)
    pairs = list(itertools.pairwise([0, *sorted({*ends}), 32]))
    fold = np.zeros(4, dtype=np.uint64)
    numerators = sums[:, :640].view(np.uint64).reshape(4, 20, 32)
    odd = layer.fold_numerator.reshape(20, 32)
    for first, last in data.draw(st.permutations(pairs)):
        part = numerators[:, :, first:last] * odd[:, first:last]
        fold = fold + part.sum(axis=(1, 2), dtype=np.uint64)
    assert np.array_equal(fold, sums[:, :640].view(np.uint64) @ layer.fold_numerator)


def test_causal_sums_are_sums_up_to_the_own_row() -> None:
    states = some()
    rows = BODY.kv_rows(states, layer=0)
    causal = BODY.read_causal(states, rows, layer=0, first_place=7)
    for i in range(COUNT):
        alone = BODY.read(states[i : i + 1], rows[: i + 1], layer=0, first_place=7)
        assert np.array_equal(causal[i], alone[0])


def test_every_bit_of_a_row_counts() -> None:
    """Each of the 192 bits of a KV row changes what is read."""
    states = some(1)
    rows = BODY.kv_rows(some(5), layer=1)
    right = BODY.read(states, rows, layer=1, first_place=0)
    for bit in range(192):
        flipped = rows.copy()
        flipped[3:4].view(np.uint8)[bit // 8] ^= np.uint8(1 << bit % 8)
        assert not np.array_equal(BODY.read(states, flipped, layer=1, first_place=0), right)


def test_every_bit_of_a_vector_counts() -> None:
    """Each of the 640 bits changes the seal of the answer, the unused bits beside the scale too."""
    vectors = BODY.dispatch(some(1))
    right = BODY.expert(np.array([9]), vectors, layer=0)[0, 16]
    flipped = np.repeat(vectors, 640, axis=0)
    bits = np.arange(640)
    flipped[bits, bits // 64] ^= np.uint64(1) << (bits % 64).astype(np.uint64)
    assert not (BODY.expert(np.full(640, 9), flipped, layer=0)[:, 16] == right).any()


@pytest.mark.parametrize("part", ["routed", "shared"])
def test_every_bit_of_a_result_counts(part: str) -> None:
    """Each of the 1,088 bits changes the next seal: no weight is 0."""
    states = some(1)
    gate, vectors = BODY.gate(states, layer=0), BODY.dispatch(states)
    results = BODY.expert(gate.experts[0], np.repeat(vectors, 8, axis=0), layer=0)[None]
    shared = BODY.expert(np.array([256]), vectors, layer=0)
    right = BODY.seals(BODY.combine(states, gate.weights, results, shared, layer=0))[0]
    copies = [np.repeat(a, 1088, axis=0) for a in (states, gate.weights, results, shared)]
    bits = np.arange(1088)
    flipped = copies[2][:, 7] if part == "routed" else copies[3]
    flipped[bits, bits // 64] ^= np.uint64(1) << (bits % 64).astype(np.uint64)
    done = BODY.combine(copies[0], copies[1], copies[2], copies[3], layer=0)
    assert not (BODY.seals(done) == right).any()


def test_layers_and_experts_are_different() -> None:
    """A message handled for another layer, or by another expert, must not pass."""
    vectors = np.repeat(BODY.dispatch(some(1)), 257, axis=0)
    results = [BODY.expert(np.arange(257), vectors, layer=layer)[:, 16] for layer in (0, 1)]
    assert len(set(np.concatenate(results).tolist())) == 514
    states = some(1)
    rows = [BODY.kv_rows(states, layer=layer)["bound"][0] for layer in (0, 1)]
    assert rows[0] != rows[1]


def test_sampled_tokens_are_in_the_carried_vocabulary_and_alive() -> None:
    """5,000 seals: almost all of 512 tokens, none of them often (sum of p^2 about 0.0025)."""
    states = np.repeat(some(1), 5000, axis=0)
    states[:, t.SEAL] = words(5000).view(np.int64)
    counts = np.bincount(BODY.sample(states), minlength=t.VOCABULARY)
    assert len(counts) == t.VOCABULARY
    assert (counts > 0).sum() > 450
    assert counts.max() < 250


def test_rows_go_through_bytes_and_keep_one_axis() -> None:
    """Serving code holds rows as [layers, n] of one dtype."""
    rows = BODY.kv_rows(some(7), layer=0)
    assert rows.dtype == ROW and rows.dtype.itemsize == BODY.row_bytes == 24
    back = BODY.rows_from_bytes(rows.tobytes())
    assert back.tobytes() == rows.tobytes() and back.flags.writeable
    with pytest.raises(errors.CorruptError):
        BODY.rows_from_bytes(rows.tobytes()[:-1])


def test_a_stored_block_needs_its_last_layer_seals_only() -> None:
    """The receipt's share of cached rows: 8 bytes a row instead of a whole state."""
    states = some(6)
    share = BODY.fold_prompt(states, first_place=4)
    assert BODY.fold_prompt(BODY.seals(states), first_place=4) == share


def test_no_argument_is_written_into() -> None:
    """Nodes keep what they give: a second read of it must be the same."""
    states = some(9)
    kept = states.copy()
    stepwise.exchange(BODY, states, layer=0, touch=stepwise.untouched)
    rows = BODY.kv_rows(states, layer=0)
    BODY.read_causal(states, rows, layer=0, first_place=0)
    BODY.sample(states)
    assert np.array_equal(states, kept)


@pytest.mark.parametrize("layer", [0, MODEL.carried_layers], ids=["first", "mtp"])
def test_attention_and_experts_move_a_state_by_a_quarter_and_a_half(layer: int) -> None:
    """Larger attention steps would draw all tokens in one direction (model.md 2.6).

    The MTP layer begins with values as large as a start's, of states much larger than that.
    """
    states = BODY.start_prompt(words(200), first_place=0)
    if layer:
        states = BODY.mtp_start(some(200), BODY.sample(states))
    sums = BODY.read_causal(states, BODY.kv_rows(states, layer=layer), layer=layer, first_place=0)
    attended = BODY.attend(states, sums, layer=layer)
    done = BODY.moe_here(attended, layer=layer)
    size = [np.sqrt((a[50:, :64].astype(float) ** 2).mean()) for a in (states, attended)]
    step = [
        np.sqrt(((a - b)[50:, :64].astype(float) ** 2).mean())
        for a, b in ((attended, states), (done, attended))
    ]
    assert 0.1 < step[0] / size[0] < 0.3
    assert 0.4 < step[1] / size[1] < 0.65


def test_the_fingerprint_is_known() -> None:
    """Another constant, formula or fixed run is another model: change this with the reason."""
    for body in (EXACT, ExactBody(MODEL, compiled=False)):
        assert (body.fingerprint, body.draft_fingerprint) == (FINGERPRINT, DRAFT_FINGERPRINT)


@pytest.mark.slow
def test_the_fingerprint_follows_what_changes_tokens_only() -> None:
    """Charged sizes and the charged vocabulary change times, not tokens."""
    charged = ExactBody(ModelSettings(combine_bytes=7168, vocabulary=9))
    assert (charged.fingerprint, charged.draft_fingerprint) == (FINGERPRINT, DRAFT_FINGERPRINT)
    assert ExactBody(ModelSettings(tokens_per_carried=64)).fingerprint != FINGERPRINT
    assert ExactBody(ModelSettings(carried_layers=3)).fingerprint != FINGERPRINT
    skewed = ExactBody(MODEL, skew="hot:1:30")
    assert skewed.fingerprint != FINGERPRINT
    assert skewed.draft_fingerprint != DRAFT_FINGERPRINT


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "compiled"),
    [
        ({"OPENBLAS_CORETYPE": "Haswell", "PYTHONHASHSEED": "0"}, False),
        ({"OPENBLAS_CORETYPE": "Nehalem", "PYTHONHASHSEED": "1"}, False),
        ({"OPENBLAS_CORETYPE": "SkylakeX"}, False),
        ({"NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4 AVX512_ICL AVX512_SPR"}, False),
        ({"PYTHONHASHSEED": "7"}, True),
    ],
    ids=["haswell", "nehalem", "skylakex", "no simd", "compiled"],
)
def test_the_fingerprint_is_the_same_on_other_kernels(
    variables: dict[str, str], compiled: bool
) -> None:
    """Sums of integers do not see how a BLAS blocks them, nor a string hash, nor this process."""
    code = "from nodes.model.exact import ExactBody; from nodes.settings import ModelSettings; "
    code += f"body = ExactBody(ModelSettings(), compiled={compiled}); "
    code += "print(body.fingerprint, body.draft_fingerprint)"
    env = {**os.environ, **variables, "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [FINGERPRINT, DRAFT_FINGERPRINT]
