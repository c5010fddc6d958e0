"""The exact body: DeepSeek-R1's structure in small, in integers, with a seal beside each token.

MLA with a latent KV in the absorbed form, the DeepSeek gate, INT8 per token and per channel, gated
experts, a sampler that the seal drives. Every sum is a sum of integers held exactly, so every split
gives the same bits; every exact sum is read twice, rounded for the next step and unrounded into the
seal, so an error that rounds away is still seen. Formulas: model.md section 2; weights and constants:
``exact_tables``; the arithmetic: ``exact_plain`` and, compiled to the same bits, ``exact_kernels``.

Owns the interface (``Body``) and the order of steps; the MTP layer takes the same steps as any other.
Does not own messages, placement, rows, or drafts (``drafts``).
States are int64 [n, 66], sums int64 [n, 673]; KV rows are records of 24 bytes in one axis.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cmnet import errors
from nodes.model import exact_skew
from nodes.model import exact_tables as t
from nodes.model.body import I64, U64, Gate, Prefilled
from nodes.model.exact_plain import (
    RESULT_WORDS,
    ROW_BYTES,
    VECTOR_WORDS,
    PlainSteps,
    Steps,
    seals,
    started,
)
from nodes.model.seal import MASK, mix
from nodes.settings import ModelSettings

ROW = np.dtype([("values", "i1", (t.ROW_VALUES,)), ("bound", "<u4")])
"""A KV row: 16 latent values, 4 of the rotated key, 32 bits of the seal. No byte goes unread."""
Rows = npt.NDArray[np.void]

_SHAPE = (
    "carried_layers",
    "tokens_per_carried",
    "block_tokens",
    "routed_experts",
    "shared_experts",
    "groups",
    "top_groups",
    "top_k",
)
"""Settings that change tokens; the vocabulary is the carried one (``ExactDimensions``)."""

_BLOCK = 256
"""Tokens that go through the experts at once: their results are 300 KB."""


class ExactBody:
    """``Body`` with real arithmetic."""

    name = "exact"
    vector_words = VECTOR_WORDS
    result_words = RESULT_WORDS
    row_bytes = ROW_BYTES

    def __init__(
        self, settings: ModelSettings, *, skew: str = "uniform", compiled: bool = True
    ) -> None:
        """``skew``: see ``exact_skew``. ``compiled`` False: plain numpy, 5 to 13 times slower."""
        self.settings = settings
        self.skew = skew
        self.model = t.model(settings, exact_skew.biases(settings, skew))
        self.steps = _steps(self.model, compiled=compiled)
        self.fingerprint = _fingerprint(self)
        self.draft_fingerprint = _draft_fingerprint(self)

    # -- attention ------------------------------------------------------------------------------

    def start_prompt(self, seeds: U64, *, first_place: int) -> I64:
        model = self.model
        values = mix(seeds[:, None] + model.embedding_words).astype("<u8", copy=False)
        places = np.arange(first_place, first_place + len(seeds), dtype=np.int64)
        starts = seeds + np.uint64(model.start_prompt)
        return started(values.view(np.int8), places, starts, model.start_place)

    def start_tokens(self, tokens: I64, *, places: I64) -> I64:
        return self.steps.start_tokens(tokens, places)

    def mtp_start(self, states: I64, tokens: I64) -> I64:
        return self.steps.merge(states, tokens)

    def kv_rows(self, states: I64, *, layer: int) -> Rows:
        return self.steps.rows(states, layer=layer).view(ROW)[:, 0]

    def rows_from_bytes(self, data: bytes | bytearray | memoryview) -> Rows:
        if len(data) % ROW_BYTES:
            message = f"{len(data)} bytes are no whole number of {ROW_BYTES} byte rows"
            raise errors.CorruptError(message, definite=True)
        return np.frombuffer(data, dtype=ROW).copy()

    def read(self, states: I64, rows: Rows, *, layer: int, first_place: int) -> I64:
        limits = np.full(len(states), len(rows), dtype=np.int64)
        return self._read(states, rows, limits, layer=layer, first_place=first_place)

    def read_causal(self, states: I64, rows: Rows, *, layer: int, first_place: int) -> I64:
        assert len(states) == len(rows), "read_causal: the states of these very rows"
        limits = np.arange(1, len(rows) + 1, dtype=np.int64)
        return self._read(states, rows, limits, layer=layer, first_place=first_place)

    def _read(self, states: I64, rows: Rows, limits: I64, *, layer: int, first_place: int) -> I64:
        whole = np.ascontiguousarray(rows).view(np.int8).reshape(len(rows), ROW_BYTES)
        return self.steps.read(states, whole, limits, layer=layer, first_place=first_place)

    def attend(self, states: I64, sums: I64, *, layer: int) -> I64:
        return self.steps.attend(states, sums, layer=layer)

    # -- experts --------------------------------------------------------------------------------

    def gate(self, states: I64, *, layer: int) -> Gate:
        experts, weights = self.steps.gate(states, layer=layer)
        return Gate(experts=experts, weights=weights)

    def dispatch(self, states: I64) -> U64:
        return self.steps.dispatch(states)

    def expert(self, experts: I64, vectors: U64, *, layer: int) -> U64:
        return self.steps.expert(experts, vectors, layer=layer)

    def combine(self, states: I64, weights: U64, results: U64, shared: U64, *, layer: int) -> I64:
        return self.steps.combine(states, weights, results, shared, layer=layer)

    def moe_here(self, states: I64, *, layer: int) -> I64:
        blocks = range(0, len(states), _BLOCK)
        parts = [self._moe_block(states[i : i + _BLOCK], layer) for i in blocks]
        return np.concatenate(parts) if parts else states

    def _moe_block(self, states: I64, layer: int) -> I64:
        """Sorted by expert, so that each expert's weights are read once."""
        count, slots = len(states), self.settings.top_k + 1
        experts = np.full((count, slots), self.settings.shared_expert, dtype=np.int64)
        experts[:, :-1], weights = self.steps.gate(states, layer=layer)
        order = np.argsort(experts, axis=None, kind="stable")
        vectors = self.steps.dispatch(states)[order // slots]
        results = np.empty((count * slots, RESULT_WORDS), dtype=np.uint64)
        results[order] = self.steps.expert(experts.ravel()[order], vectors, layer=layer)
        by_token = results.reshape(count, slots, RESULT_WORDS)
        routed, shared = by_token[:, :-1], by_token[:, -1]
        return self.steps.combine(states, weights, routed, shared, layer=layer)

    # -- requests -------------------------------------------------------------------------------

    def prefill(self, seeds: U64, *, cached_rows: Rows) -> Prefilled:
        first_place = cached_rows.shape[1]
        states = self.start_prompt(seeds, first_place=first_place)
        rows = np.empty((self.settings.carried_layers, len(seeds)), dtype=ROW)
        limits = np.arange(first_place + 1, first_place + len(seeds) + 1, dtype=np.int64)
        for layer in range(self.settings.carried_layers):
            rows[layer] = self.kv_rows(states, layer=layer)
            seen = np.concatenate([cached_rows[layer], rows[layer]])
            sums = self._read(states, seen, limits, layer=layer, first_place=0)
            states = self.attend(states, sums, layer=layer)
            states = self.moe_here(states, layer=layer)
        return Prefilled(rows=rows, states=states)

    def sample(self, states: I64) -> I64:
        return self.steps.sample(states)

    def seals(self, states: I64) -> U64:
        return seals(states).copy()

    def fold_prompt(self, states: I64 | U64, *, first_place: int) -> int:
        """States of the last layer, or their seals: a stored block keeps only those."""
        words = states.view(np.uint64) if states.ndim == 1 else seals(states.view(np.int64))
        places = np.arange(first_place, first_place + len(words), dtype=np.uint64)
        return int(np.add.reduce((places + places + np.uint64(1)) * words))

    def receipt(self, last: int, shares: Sequence[int]) -> int:
        return (last + sum(shares)) & MASK


@functools.cache
def prepared(settings: ModelSettings, skew: str = "uniform") -> ExactBody:
    """The body of a run, one a process: made before the fork, it is compiled and shared."""
    return ExactBody(settings, skew=skew)


def no_rows(settings: ModelSettings) -> Rows:
    """Cached rows [carried_layers, 0]: nothing is cached."""
    return np.empty((settings.carried_layers, 0), dtype=ROW)


def _steps(model: t.Model, *, compiled: bool) -> Steps:
    if not compiled:
        return PlainSteps(model)
    from nodes.model import exact_compiled  # imports numba, which plain does without

    return exact_compiled.CompiledSteps(model)


def _fingerprint(body: ExactBody) -> str:
    """Digest of the settings that change the model, its weights and tables, and one fixed run."""
    settings, model = body.settings, body.model
    seeds = np.random.Philox(key=1).random_raw(5)
    done = body.prefill(seeds, cached_rows=no_rows(settings))
    gate = body.gate(done.states, layer=0)
    tokens = body.sample(done.states)
    started = body.start_tokens(tokens, places=np.arange(5, dtype=np.int64))
    every = body.expert(
        np.arange(settings.routed_experts + 1, dtype=np.int64),
        np.repeat(body.dispatch(started[:1]), settings.routed_experts + 1, axis=0),
        layer=settings.carried_layers - 1,
    )
    shape = repr([getattr(settings, key) for key in _SHAPE]).encode()
    layers = model.layers[: settings.carried_layers]
    weights = [array for layer in layers for array in (layer.gate, layer.first, layer.bias)]
    weights += [model.head, model.embedding, model.cos, model.sin, model.sigmoid, model.exp]
    run = [done.rows.view(np.uint8), done.states, gate.experts, gate.weights, tokens, every]
    return t.digest(np.frombuffer(shape, dtype=np.uint8), *weights, *run)


def _draft_fingerprint(body: ExactBody) -> str:
    """Digest of the main model's fingerprint, the MTP layer's weights, and one fixed run of it."""
    model, layer = body.model, body.settings.carried_layers
    own = model.layers[layer]
    seeds = np.random.Philox(key=2).random_raw(5)
    before = body.start_prompt(seeds, first_place=7)
    begun = body.mtp_start(before, body.sample(before))
    rows = body.kv_rows(begun, layer=layer)
    sums = body.read_causal(begun, rows, layer=layer, first_place=7)
    done = body.moe_here(body.attend(begun, sums, layer=layer), layer=layer)
    main = np.frombuffer(body.fingerprint.encode(), dtype=np.uint8)
    weights = (model.merge, own.gate, own.first, own.bias)
    tokens = body.sample(done)
    return t.digest(main, *weights, begun, rows.view(np.uint8), sums, done, tokens)
