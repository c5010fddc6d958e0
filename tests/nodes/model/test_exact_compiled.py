"""The compiled steps give the bits of the plain ones, piece by piece, for any input."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nodes.model import (
    exact_kernels,
    exact_kernels_experts,
    exact_kernels_gate,
    exact_plain,
)
from nodes.model import exact_tables as t
from nodes.model.body import I64, U64
from nodes.model.exact import ExactBody, prepared
from nodes.settings import ModelSettings

MODEL = ModelSettings()
COMPILED, PLAIN = prepared(MODEL), ExactBody(MODEL, compiled=False)
FAST, SLOW = COMPILED.steps, PLAIN.steps


def words(*shape: int, key: int = 0) -> U64:
    count = int(np.prod(shape))
    return np.random.Philox(key=1000 + key).random_raw(count).reshape(shape)


def states(count: int, kind: str) -> I64:
    """Typical, largest, smallest, all zero."""
    made = COMPILED.start_prompt(words(count), first_place=3)
    if kind == "large":
        made[:, :64] = (words(count, 64) % np.uint64(2**21 + 1)).astype(np.int64) - 2**20
    if kind == "limit":
        made[:, :64] = np.where(words(count, 64) & np.uint64(1), 2**20, -(2**20))
    if kind == "small":
        made[:, :64] = (words(count, 64) % np.uint64(3)).astype(np.int64) - 1
    if kind == "zero":
        made[:, :64] = 0
    made[:, t.PLACE] = (words(count, key=1) % np.uint64(200_000)).astype(np.int64)
    return made


KINDS = ("typical", "large", "limit", "small", "zero")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_states_go_through_every_step_alike(kind: str, layer: int) -> None:
    own = states(70, kind)
    rows = FAST.rows(own, layer=layer)
    assert np.array_equal(rows, SLOW.rows(own, layer=layer))
    limits = np.arange(1, 71)
    sums = FAST.read(own, rows, limits, layer=layer, first_place=11)
    assert np.array_equal(sums, SLOW.read(own, rows, limits, layer=layer, first_place=11))
    after = FAST.attend(own, sums, layer=layer)
    assert np.array_equal(after, SLOW.attend(own, sums, layer=layer))
    for mine, other in zip(FAST.gate(after, layer=layer), SLOW.gate(after, layer=layer)):
        assert np.array_equal(mine, other)
    assert np.array_equal(FAST.dispatch(after), SLOW.dispatch(after))
    assert np.array_equal(FAST.sample(after), SLOW.sample(after))


@pytest.mark.parametrize("count", [1, 511, 512, 513, 1100])
def test_any_bytes_as_rows_are_read_alike(count: int) -> None:
    """Corrupted rows included: -128 is one; blocks of 512 keys end where they may."""
    rows = words(count, 3).view(np.int8).reshape(count, 24)
    own = states(3, "typical")
    limits = np.array([count, count // 2, 0])
    sums = FAST.read(own, rows, limits, layer=1, first_place=5)
    assert np.array_equal(sums, SLOW.read(own, rows, limits, layer=1, first_place=5))
    assert not sums[2].any()
    kept = own[:2], sums[:2]
    assert np.array_equal(FAST.attend(*kept, layer=1), SLOW.attend(*kept, layer=1))


def test_extreme_rows_are_summed_alike() -> None:
    """All of one sign: the largest numerators that 600 rows can make."""
    rows = np.full((600, 24), -128, dtype=np.int8)
    own, limits = states(2, "limit"), np.array([600, 600])
    sums = FAST.read(own, rows, limits, layer=0, first_place=0)
    assert np.array_equal(sums, SLOW.read(own, rows, limits, layer=0, first_place=0))


@pytest.mark.parametrize("kind", ["valid", "any bits"])
def test_vectors_are_answered_alike(kind: str) -> None:
    """Any bits: scales that are infinite, negative or NaN."""
    vectors = words(600, 10)
    if kind == "valid":
        vectors = np.repeat(FAST.dispatch(states(100, "large")), 6, axis=0)
    experts = (words(600, key=2) % np.uint64(257)).astype(np.int64)
    results = FAST.expert(experts, vectors, layer=1)
    assert np.array_equal(results, SLOW.expert(experts, vectors, layer=1))


@pytest.mark.parametrize("count", [1, 2, 4, 5, 31, 33, 36, 65])
def test_any_number_of_tokens_is_gated_alike(count: int) -> None:
    """Tokens go together by tiles and chunks, a token alone goes by itself."""
    own = states(70, "large")[-count:].copy()
    for mine, other in zip(FAST.gate(own, layer=0), SLOW.gate(own, layer=0), strict=True):
        assert np.array_equal(mine, other)


def test_rows_of_one_expert_are_answered_alike() -> None:
    """Runs of 1 to 12 rows, which go together by tiles, and an expert that comes again."""
    lengths = np.arange(1, 13)
    experts = np.concatenate([np.repeat(lengths * 21 % 257, lengths), [252, 7, 7, 252, 252]])
    vectors = FAST.dispatch(states(len(experts), "large"))
    results = FAST.expert(experts, vectors, layer=0)
    assert np.array_equal(results, SLOW.expert(experts, vectors, layer=0))


@pytest.mark.parametrize("slots", [0, 1, 7, 8, 9])
def test_results_are_combined_alike(slots: int) -> None:
    own, results, shared = states(40, "limit"), words(40, slots, 17), words(40, 17, key=3)
    weights = words(40, slots, key=4) % np.uint64(10_300)
    done = FAST.combine(own, weights, results, shared, layer=1)
    assert np.array_equal(done, SLOW.combine(own, weights, results, shared, layer=1))


@pytest.mark.slow
def test_any_bias_chooses_alike() -> None:
    """Large biases saturate scores and make many of them equal."""
    body = ExactBody(MODEL, skew="hot:4:10")
    slow = ExactBody(MODEL, skew="hot:4:10", compiled=False)
    own = states(300, "typical")
    assert np.array_equal(body.gate(own, layer=1).experts, slow.gate(own, layer=1).experts)
    equal = states(5, "zero")
    assert np.array_equal(body.gate(equal, layer=1).experts, slow.gate(equal, layer=1).experts)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ModelSettings(carried_layers=1, routed_experts=60, groups=5, top_groups=2, top_k=5),
        ModelSettings(carried_layers=1, routed_experts=8, groups=8, top_groups=8, top_k=8),
        ModelSettings(carried_layers=1, routed_experts=36, groups=12, top_groups=3, top_k=4),
        ModelSettings(carried_layers=1, routed_experts=130, groups=65, top_groups=9, top_k=3),
    ],
    ids=["odd", "groups of one", "twelve groups", "many groups"],
)
def test_other_gates_are_the_same_model_too(settings: ModelSettings) -> None:
    """The fingerprint holds a whole run."""
    plain = ExactBody(settings, compiled=False)
    compiled = ExactBody(settings)
    own = states(90, "typical")
    for mine, other in zip(
        compiled.steps.gate(own, layer=0), plain.steps.gate(own, layer=0), strict=True
    ):
        assert np.array_equal(mine, other)
    assert compiled.fingerprint == plain.fingerprint
    assert compiled.draft_fingerprint == plain.draft_fingerprint


def test_tokens_start_alike() -> None:
    """Also those that no sampler gives."""
    tokens = np.array([0, 511, 512, -1, 2**62], dtype=np.int64)
    places = np.array([0, 5, 131072, 9, 1], dtype=np.int64)
    assert np.array_equal(FAST.start_tokens(tokens, places), SLOW.start_tokens(tokens, places))


@pytest.mark.parametrize("kind", KINDS)
def test_the_mtp_layer_begins_alike(kind: str) -> None:
    """With tokens that no sampler gives among them."""
    own = states(70, kind)
    tokens = (words(70, key=5) >> np.uint64(50)).view(np.int64) - 3
    begun = FAST.merge(own, tokens)
    assert np.array_equal(begun, SLOW.merge(own, tokens))
    assert np.array_equal(begun[:, t.PLACE], own[:, t.PLACE])


@pytest.mark.parametrize("steps", [FAST, SLOW], ids=["compiled", "plain"])
def test_no_rows_go_through_every_step(steps: exact_plain.Steps) -> None:
    """A rank without a token still takes part."""
    none, ids = states(2, "typical")[:0], np.empty(0, dtype=np.int64)
    assert steps.rows(none, layer=0).shape == (0, 24)
    assert steps.read(none, words(3, 3).view(np.int8), ids, layer=0, first_place=0).shape[0] == 0
    vectors = steps.dispatch(none)
    assert steps.expert(ids, vectors, layer=0).shape == (0, 17)
    experts, weights = steps.gate(none, layer=0)
    assert experts.shape == weights.shape == (0, 8)
    done = steps.combine(none, weights, words(0, 8, 17), words(0, 17), layer=0)
    assert done.shape == (0, 66)
    assert steps.sample(none).shape == (0,)
    assert steps.merge(none, ids).shape == (0, 66)


def test_an_expert_that_does_not_exist_is_refused() -> None:
    """Kernels check no bounds: a wrong id must not read other memory."""
    vectors = FAST.dispatch(states(2, "typical"))
    for wrong in (-1, 257, 2**40):
        with pytest.raises(AssertionError, match="no such expert"):
            FAST.expert(np.array([5, wrong]), vectors, layer=0)


def test_arrays_of_other_layouts_are_taken() -> None:
    """Read-only bytes of a socket and slices of larger arrays, without compiling anew."""
    own = states(20, "typical")
    vectors = FAST.dispatch(own)
    frozen = np.frombuffer(vectors.tobytes(), dtype="<u8").reshape(-1, 10)
    experts = np.arange(20)
    right = FAST.expert(experts, vectors, layer=0)
    assert np.array_equal(FAST.expert(experts, frozen, layer=0), right)
    assert np.array_equal(FAST.expert(experts[::2], vectors[::2], layer=0), right[::2])
    thawed = np.frombuffer(own.tobytes(), dtype=np.int64).reshape(-1, t.STATE_WORDS)
    begun = FAST.merge(own, experts)
    assert np.array_equal(FAST.merge(thawed[::2], experts[::2]), begun[::2])
    kernels: list[Any] = [exact_kernels.read, exact_kernels.attend, exact_kernels_experts.expert]
    kernels += [exact_kernels_experts.merge, exact_kernels_experts.combine]
    kernels.append(exact_kernels_gate.gate)
    assert [len(kernel.signatures) for kernel in kernels] == [1, 1, 1, 1, 1, 1]


def test_the_kernels_cache_depends_on_all_their_sources() -> None:
    """numba looks at one file; a constant that changes in another must not run old code."""
    sources = set(exact_kernels.SOURCES)
    needed = {"exact_kernels.py", "exact_kernels_experts.py", "exact_kernels_gate.py"}
    for source in needed.copy():
        tree = ast.parse((Path(exact_kernels.__file__).parent / source).read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "nodes.model":
                needed |= {f"{alias.name}.py" for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("nodes.model."):
                needed.add(f"{str(node.module).split('.')[-1]}.py")
    assert sources == needed - {"body.py"}, "body.py has names of types only"
