"""The plain steps: bounds that make sums exact, the two forms of MLA, the gate by its definition."""

from __future__ import annotations

import numpy as np
import pytest

from cmnet import entropy
from nodes.model import exact_plain as plain
from nodes.model import exact_tables as t
from nodes.model.body import I64
from nodes.settings import ModelSettings

MODEL = ModelSettings()
MADE = t.model(MODEL, [np.zeros(256, dtype=np.int64)] * (MODEL.carried_layers + 1))
LAYERS = [str(name) for name in t.layer_names(MODEL)]
STEPS = plain.PlainSteps(MADE)
F32_MAX, F64_MAX = 2**24, 2**53
ROWS_MAX = MODEL.max_tokens + MODEL.max_tokens // MODEL.tokens_per_carried
"""No sequence has more rows: one a generated token, one for 128 prompt tokens."""


def random_states(count: int, name: str = "states") -> I64:
    bits = entropy.stream(3, name)
    states = np.array([[bits.u64() % 20001 - 10000 for _ in range(66)] for _ in range(count)])
    states[:, t.PLACE] = np.arange(count) * 37
    states[:, t.SEAL] = np.array([bits.u64() for _ in range(count)], dtype=np.uint64).view(np.int64)
    return states


def columns_max(weights: t.F32, most: int) -> int:
    """The largest sum that any input within ``most`` can make in any column."""
    return int(most * np.abs(weights.astype(np.int64)).sum(axis=-2).max())


@pytest.mark.parametrize("layer", MADE.layers, ids=LAYERS)
def test_float32_sums_stay_below_2_to_24_at_their_worst(layer: t.Layer) -> None:
    """128, not 127: a flipped bit may make -128 of any byte, and results must not depend on how."""
    matrices = (layer.query, layer.latent, layer.out, layer.gate, layer.first, layer.second)
    every = (*matrices, MADE.head, MADE.merge)
    assert max(columns_max(weights, 128) for weights in every) < F32_MAX
    absorbed = (t.QUERY_LIMIT * np.abs(layer.key_up).sum(axis=0)).sum(axis=0).max()
    score = 128 * absorbed + 128 * t.ROPE * 16 * t.QUERY_LIMIT
    assert score < F32_MAX
    assert 255 * 128 * t.KEYS_A_BLOCK < F32_MAX


@pytest.mark.parametrize("layer", MADE.layers, ids=LAYERS)
def test_float64_sums_stay_below_2_to_53_at_their_worst(layer: t.Layer) -> None:
    assert t.HIDDEN * int(t.LIMIT) ** 2 < F64_MAX, "squares of a norm"
    assert t.LATENT * columns_max(layer.latent, 128) ** 2 < F64_MAX, "squares of a latent"
    up = int(np.abs(layer.value_up).sum(axis=0).max())
    assert 255 * 128 * ROWS_MAX * up < F64_MAX, "numerators times value up"
    assert 255 * 2**24 * ROWS_MAX < F64_MAX, "folds of bound seals"
    assert (t.GATE_SUM + 36 + t.SHARED_WEIGHT) * 2**15 < F64_MAX, "combine"
    assert int(MADE.exp.max()) * t.VOCABULARY < 2 ** (63 - t.DRAW_BITS), "the sampler's product"


def test_worst_inputs_really_give_exact_sums() -> None:
    """All bytes at -128 against weights of one sign: float32 against integers."""
    x = np.full((2, 64), -128, dtype=np.float32)
    x[1] = -128 * np.sign(MADE.layers[0].gate[:, 17])
    found = x @ MADE.layers[0].gate
    assert np.array_equal(found, x.astype(np.int64) @ MADE.layers[0].gate.astype(np.int64))
    exps = np.full((1, t.KEYS_A_BLOCK), 255, dtype=np.float32)
    values = np.full((t.KEYS_A_BLOCK, 1), -128, dtype=np.float32)
    assert int((exps @ values)[0, 0]) == -255 * 128 * t.KEYS_A_BLOCK


def test_the_bound_can_be_broken() -> None:
    """The counter-check: beyond 2^24 float32 loses integers (model.md R1: K = 1,041 at 127)."""
    x = np.full(1041, 127, dtype=np.float32)
    assert float(x[:1040] @ x[:1040]) == 127 * 127 * 1040
    assert float(x @ x) != 127 * 127 * 1041


def test_the_plain_form_of_mla_gives_the_bits_of_the_absorbed() -> None:
    """(q W) c = q (W c), and no rounding in between: keys made large, then scored head by head."""
    states, layer = random_states(30), MADE.layers[1]
    values = STEPS.rows(states, layer=1)[:, :20].astype(np.int64)
    absorbed = STEPS._query(states, layer).astype(np.float64)
    scores = absorbed @ values.T.astype(np.float64)
    x, scale = STEPS._norm(states)
    ramp = np.tile(1 + np.arange(64) / 512, 4)
    query = np.rint((x @ layer.query) * ramp * (scale * t.QUERY_SCALE)[:, None])
    nope = np.clip(query, -31, 31).reshape(30, 8, 32)[:, :4]
    keys = np.einsum("jdh,td->tjh", layer.key_up.astype(np.int64), values[:, :16])
    plain_form = np.einsum("njh,tjh->nht", nope.astype(np.int64), keys)
    rope = absorbed[:, :, 16:].astype(np.int64) @ values[:, 16:].T
    assert np.array_equal(scores, plain_form + rope)


@pytest.mark.parametrize(("groups", "top_groups", "top_k"), [(8, 4, 8), (4, 1, 3), (16, 16, 5)])
def test_the_gate_chooses_by_its_definition(groups: int, top_groups: int, top_k: int) -> None:
    """Written out in Python with many equal scores: lower groups and lower ids win."""
    bits = entropy.stream(9, f"gate {groups}")
    biased = np.array([[bits.below(7) for _ in range(64)] for _ in range(60)])
    chosen = plain.choose(biased, groups, top_groups, top_k)
    size = 64 // groups
    for scores, found in zip(biased.tolist(), chosen.tolist()):
        parts = [scores[g * size : (g + 1) * size] for g in range(groups)]
        best = sorted(range(groups), key=lambda g: (-sum(sorted(parts[g])[-2:]), g))[:top_groups]
        ids = [g * size + i for g in best for i in range(size)]
        assert found == sorted(ids, key=lambda e: (-scores[e], e))[:top_k]


def test_weights_are_distinct_positive_and_sum_to_two_and_a_half() -> None:
    scores = np.array([[65535, 22, 22, 22, 22, 22, 22, 22], [5, 5, 5, 5, 5, 5, 5, 5]])
    for row in plain.gate_weights(scores).tolist():
        assert min(row) > 0
        assert len(set(row)) == 8
        assert abs(sum(row) - 10240) <= 64


def test_a_scale_that_is_none_is_taken_as_zero() -> None:
    """Flipped bits make infinities and NaN of a float: no warning, no crash, and the seal sees it."""
    floats = np.array([0.01, 1.0, -0.01, np.inf, -np.inf, np.nan, 2.0, 0.0], dtype=np.float32)
    found = plain.scales(floats.view(np.uint32).astype(np.uint64))
    assert found.tolist() == [float(floats[0]), 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_swapped_rows_are_seen_by_the_fold_alone() -> None:
    """Attention itself does not see the order of rows: their keys are rotated already."""
    states = random_states(1)
    rows = STEPS.rows(random_states(9, "rows"), layer=0)
    limits = np.array([9])
    swapped = rows[[0, 5, 2, 3, 4, 1, 6, 7, 8]]
    right = STEPS.read(states, rows, limits, layer=0, first_place=0)[0]
    wrong = STEPS.read(states, swapped, limits, layer=0, first_place=0)[0]
    assert np.array_equal(right[:-1], wrong[:-1])
    assert right[-1] != wrong[-1]
