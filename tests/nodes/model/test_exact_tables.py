"""Weights and tables of the exact body: their definition, their ranges, and that no libm matters."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest

from cmnet import errors
from nodes.model import exact_tables as t
from nodes.settings import ModelSettings

MODEL = ModelSettings()
BIASES = [np.zeros(256, dtype=np.int64)] * (MODEL.carried_layers + 1)
MADE = t.model(MODEL, BIASES)


def test_bytes_are_those_of_the_raw_stream() -> None:
    """The definition in other words: generators of numpy may change, raw words may not."""
    digest = hashlib.blake2b(b"cmnet exact gate 1", digest_size=16).digest()
    words = np.random.Philox(key=int.from_bytes(digest, "little")).random_raw(64 * 32)
    octets = b"".join(int(word).to_bytes(8, "little") for word in words)
    expected = [byte % 255 - 127 for byte in octets]
    assert MADE.layers[1].gate.ravel().astype(int).tolist() == expected


def test_weights_are_small_integers() -> None:
    """127 for what int8 meets; 15 where an absorbed query must stay small (model.md R1, 2.4)."""
    for layer in MADE.layers:
        for weights in (
            layer.query,
            layer.latent,
            layer.out,
            layer.gate,
            layer.first,
            layer.second,
            MADE.merge,
        ):
            assert np.abs(weights).max() == 127
            assert np.array_equal(weights, np.rint(weights))
        assert np.abs(layer.key_up).max() == np.abs(layer.value_up).max() == 15
        assert np.abs(layer.check).min() >= 1
        assert np.abs(layer.check).max() <= 127


def test_every_fold_is_odd() -> None:
    """An odd factor lets no single changed bit vanish modulo 2^64."""
    for layer in MADE.layers:
        folds = (layer.fold_numerator, layer.fold_denominator, layer.fold_bound, layer.fold_out)
        for fold in (*folds, layer.fold_combine, layer.expert, MADE.fold_merge):
            assert (fold & np.uint64(1)).all()
        assert layer.place & layer.check_odd & MADE.start_place & 1


def test_the_mtp_layer_has_weights_of_its_own() -> None:
    """It is not the next carried layer: with one layer more it stays what it is."""
    more = ModelSettings(carried_layers=MODEL.carried_layers + 1)
    longer = t.model(more, [*BIASES, BIASES[0]])
    assert np.array_equal(longer.layers[-1].first, MADE.layers[-1].first)
    assert not np.array_equal(longer.layers[-2].first, MADE.layers[-1].first)
    assert len(longer.layers) == len(MADE.layers) + 1


def test_no_table_entry_is_near_a_tie() -> None:
    """Any libm that errs by less than 1e-9 makes the same integers (model.md R4).

    But one: the sigmoid of 0 is a tie, and exact, since exp(0) is 1 everywhere.
    """
    exact = [65535 / (1 + math.exp(-i / 256)) for i in range(-2048, 2048) if i]
    exact += [1024 * math.exp(i / 128) for i in range(-512, 512)]
    exact += [2**14 * math.cos(2 * math.pi * i / 4096) for i in range(4096)]
    exact += [2**14 * math.sin(2 * math.pi * i / 4096) for i in range(4096)]
    assert min(abs(value - math.floor(value) - 0.5) for value in exact) > 3e-5


def test_other_tables_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose libm differs must not compute silently with another model."""
    monkeypatch.setattr(t, "exp_table", lambda: MADE.exp + 1)
    with pytest.raises(errors.RunError, match="libm"):
        t.model(MODEL, BIASES)


def test_the_dimensions_are_the_published_ones_in_small() -> None:
    """``--scale full`` carries whole tiles; rotated pairs and absorbed queries fit their kernels."""
    d = t.DIMENSIONS
    assert MODEL.hidden == 112 * d.hidden
    assert (d.latent + d.rope, d.nope, 2 * len(t.ROPE_STEPS)) == (20, 4, d.rope)
    assert d.hidden % 8 == d.inner % 8 == d.heads * d.value % 8 == 0, "unrolled by eight"
