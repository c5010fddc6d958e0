"""The oracle of layers of experts: what it remembers changes nothing, and it agrees with the bodies."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from nodes.model import bodies, exact_oracle_model, layer_oracle
from nodes.model.body import I64, U64
from nodes.settings import ModelSettings

NAMES: tuple[bodies.Name, ...] = ("exact", "seal")
MODEL = msgspec.structs.replace(ModelSettings(), carried_layers=3)
BODIES = {name: bodies.make(name, MODEL) for name in NAMES}
COUNT = 60


def seeds(distinct: int, count: int = COUNT) -> U64:
    """Contents in turn, not in the order of their seeds."""
    shuffled = np.arange(distinct, dtype=np.uint64) * np.uint64(7919) % np.uint64(10007)
    return np.resize(shuffled, count)


def places(count: int = COUNT) -> I64:
    return np.arange(count, dtype=np.int64) + 5


def exact(distinct: int, skew: str = "uniform") -> layer_oracle.ExactLayers:
    return layer_oracle.ExactLayers(MODEL, seeds=seeds(distinct), places=places(), skew=skew)


@pytest.mark.parametrize("distinct", [1, 7, COUNT])
def test_what_is_remembered_is_bit_equal_to_computing_all(distinct: int) -> None:
    """Few contents, many, and as many as tokens; layer after layer."""
    model = exact_oracle_model.Model(MODEL, "uniform")
    h, w = model.start(seeds(distinct), np.empty(0, dtype=np.uint64), places())
    found = exact(distinct)
    for layer in range(MODEL.carried_layers):
        h, w = model.experts(layer, h, w)
        assert np.array_equal(found.seals(layer), w)
    assert len(np.unique(w)) == COUNT, "equal contents have seals of their own"


def test_packs_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of contents and of tokens."""
    whole = exact(20).seals(2)
    monkeypatch.setattr(layer_oracle, "PACK_CONTENTS", 7)
    monkeypatch.setattr(layer_oracle, "PACK_TOKENS", 11)
    assert np.array_equal(exact(20).seals(2), whole)


@pytest.mark.parametrize("name", NAMES)
def test_the_body_agrees(name: bodies.Name) -> None:
    """Two codes, the same bits; asked for out of order."""
    body = BODIES[name]
    states = body.start_prompt(seeds(20), first_place=5)
    found = layer_oracle.make(name, MODEL, seeds=seeds(20), places=places())
    last = found.seals(2)
    for layer in range(MODEL.carried_layers):
        states = body.moe_here(states, layer=layer)
        assert np.array_equal(found.seals(layer), body.seals(states))
    assert np.array_equal(found.seals(2), last)


@pytest.mark.slow
def test_the_body_agrees_with_a_skew() -> None:
    """The biases are the oracle's own."""
    body = bodies.make("exact", MODEL, skew="hot:1:30")
    states = body.moe_here(body.start_prompt(seeds(20), first_place=5), layer=0)
    found = layer_oracle.make("exact", MODEL, seeds=seeds(20), places=places(), skew="hot:1:30")
    assert np.array_equal(found.seals(0), body.seals(states))
    assert not np.array_equal(found.seals(0), exact(20).seals(0))


def test_no_tokens_are_no_seals() -> None:
    none = np.empty(0, dtype=np.uint64)
    for name in NAMES:
        found = layer_oracle.make(name, MODEL, seeds=none, places=none.astype(np.int64))
        assert len(found.seals(2)) == 0
