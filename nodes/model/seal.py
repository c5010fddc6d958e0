"""The seal-only body: the algebraic half of the model, 64-bit integers modulo 2^64.

A token's state is one integer w, its seal. Every step reads everything it was given with odd
factors and mixes once, so one flipped bit, and any lost, doubled, exchanged or misplaced part,
gives another seal: with certainty for one wrong word in one sum, else but for 2^-64. All sums are
modulo 2^64, so no split and no order can change a bit. Formulas: model.md, sections 2 and 7.

    row      c = mix(w + ROW_l)                     8 bytes, moves and is stored
    read     s = sum of mix(c + PLACE_l * place)    the reader binds content to its place
    attend   w = mix(w + (mix(w + QUERY_l) | 1) * s)
    gate     score_e = mix(w + GATE_l + G_e); its lowest bits are e, so no two are equal;
             the top_groups groups of the least minimum, in them the top_k least
    dispatch v = w, mix(w + V_1), ...
    fold     sum of F_i * (v_i ^ v_i >> 32), F_i odd
    expert   r = mix(fold(v) + EXPERT_l + E_e), then words as in dispatch
    combine  w = mix(w + COMBINE_l + sum (2 g_k + 1) fold(r_k) + 3 fold(r_shared))
    mtp      w = mix(w + MERGE + mix(token + START)), then the steps of the MTP layer

Owns this arithmetic. Does not own messages, placement of experts, or who keeps rows. Rows of a
sequence are really read at each step: the sum is made anew from all of them (6 us for 300 rows,
8 us for 1,000), so a row that goes bad in a decode node's memory is seen too.

``nodes/model/oracle.py`` repeats the arithmetic in its own code and must not import this module.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
import numpy as np

from cmnet import errors
from nodes.model.body import I64, U64, Gate, Prefilled
from nodes.settings import ModelSettings

MASK = 2**64 - 1
MULTIPLIER_1 = 0xBF58476D1CE4E5B9
MULTIPLIER_2 = 0x94D049BB133111EB
"""SplitMix64's finaliser: Steele, Lea, Flood, "Fast splittable pseudorandom number generators",
OOPSLA 2014, with Stafford's constants (variant 13). A bijection of 64-bit integers."""

VECTOR_WORDS = 8
"""A token's vector is 64 bytes carried (design 2.2); larger scales tile it."""
RESULT_WORDS = 16
"""A result is twice as wide: BF16 for INT8."""

_SHAPE = (
    "carried_layers",
    "tokens_per_carried",
    "block_tokens",
    "vocabulary",
    "routed_experts",
    "shared_experts",
    "groups",
    "top_groups",
    "top_k",
)
"""Settings that change tokens; the others change charged bytes and times only."""

_BLOCK = 128
"""Rows per block where a step needs 256 words a row: 256 KiB, half of a usual L2 cache."""

_M1, _M2 = np.uint64(MULTIPLIER_1), np.uint64(MULTIPLIER_2)
_S27, _S30, _S31, _S32 = (np.uint64(bits) for bits in (27, 30, 31, 32))


def mix_integer(value: int) -> int:
    """``mix`` of one Python integer; the value is first taken modulo 2^64."""
    value &= MASK
    value = ((value ^ (value >> 30)) * MULTIPLIER_1) & MASK
    value = ((value ^ (value >> 27)) * MULTIPLIER_2) & MASK
    return value ^ (value >> 31)


def mix_into(words: U64, spare: U64) -> U64:
    """``mix`` of every word, in place; ``spare`` is an array of the same shape, overwritten."""
    np.right_shift(words, _S30, out=spare)
    np.bitwise_xor(words, spare, out=words)
    np.multiply(words, _M1, out=words)
    np.right_shift(words, _S27, out=spare)
    np.bitwise_xor(words, spare, out=words)
    np.multiply(words, _M2, out=words)
    np.right_shift(words, _S31, out=spare)
    np.bitwise_xor(words, spare, out=words)
    return words


def mix(words: U64) -> U64:
    """``mix`` of every word, in a new array."""
    spare = words >> _S30
    mixed = words ^ spare
    np.multiply(mixed, _M1, out=mixed)
    np.right_shift(mixed, _S27, out=spare)
    np.bitwise_xor(mixed, spare, out=mixed)
    np.multiply(mixed, _M2, out=mixed)
    np.right_shift(mixed, _S31, out=spare)
    np.bitwise_xor(mixed, spare, out=mixed)
    return mixed


def constant(name: str, index: int | str = 0) -> int:
    """A constant of the model: the first 8 bytes of a digest of its name and index."""
    data = f"cmnet seal {name} {index}".encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _constants(name: str, count: int, *, first: int = 0) -> U64:
    return np.array([constant(name, first + i) for i in range(count)], dtype=np.uint64)


class Layer(msgspec.Struct, frozen=True, eq=False):
    """The constants of one carried layer, or of the MTP layer."""

    row: int
    place: int
    query: int
    combine: int
    gate: U64
    """Per routed expert: GATE_l + G_e."""
    expert: U64
    """Per expert, the shared one last: EXPERT_l + E_e."""
    expert_integers: list[int]


def _layer(index: int | str, settings: ModelSettings) -> Layer:
    gate = _constants("gate expert", settings.routed_experts)
    expert = _constants("expert", settings.routed_experts + settings.shared_experts)
    expert += np.uint64(constant("expert layer", index))
    return Layer(
        row=constant("row", index),
        place=constant("place", index) | 1,
        query=constant("query", index),
        combine=constant("combine", index),
        gate=gate + np.uint64(constant("gate layer", index)),
        expert=expert,
        expert_integers=[int(value) for value in expert],
    )


class SealBody:
    """``Body`` with seals only: states, rows and sums are uint64 arrays of one axis."""

    name = "seal"
    vector_words = VECTOR_WORDS
    result_words = RESULT_WORDS
    row_bytes = 8

    def __init__(self, settings: ModelSettings) -> None:
        self.settings = settings
        names = [*range(settings.carried_layers), "mtp"]
        self._layers = [_layer(name, settings) for name in names]
        self._merge = constant("merge", "mtp")
        self._start_prompt = constant("start prompt")
        self._start_token = constant("start token")
        self._start_place = constant("start place") | 1
        self._sample = constant("sample")
        self._vector = np.concatenate(([np.uint64(0)], _constants("vector", VECTOR_WORDS)[1:]))
        self._result = np.concatenate(([np.uint64(0)], _constants("result", RESULT_WORDS)[1:]))
        self._fold_vector = _constants("fold vector", VECTOR_WORDS) | np.uint64(1)
        self._fold_result = _constants("fold result", RESULT_WORDS) | np.uint64(1)
        self._id_mask = (1 << (settings.routed_experts - 1).bit_length()) - 1
        self._ids = np.arange(settings.routed_experts, dtype=np.uint64)
        self._ids1 = self._ids + np.uint64(1)
        self._scores = np.empty((2, settings.routed_experts), dtype=np.uint64)
        self._places: list[U64] = [np.empty(0, dtype=np.uint64) for _ in self._layers]
        self.fingerprint = _fingerprint(self)
        self.draft_fingerprint = _draft_fingerprint(self)

    # -- attention ------------------------------------------------------------------------------

    def start_prompt(self, seeds: U64, *, first_place: int) -> U64:
        places = np.arange(first_place, first_place + len(seeds), dtype=np.uint64)
        start = seeds + np.uint64(self._start_prompt)
        return mix(start + places * np.uint64(self._start_place))

    def start_tokens(self, tokens: I64, *, places: I64) -> U64:
        if len(tokens) == 1:
            inner = mix_integer(int(tokens[0]) + self._start_token)
            return _one(mix_integer(inner + self._start_place * int(places[0])))
        inner_words = mix(tokens.astype(np.uint64) + np.uint64(self._start_token))
        return mix(inner_words + places.astype(np.uint64) * np.uint64(self._start_place))

    def mtp_start(self, states: U64, tokens: I64) -> U64:
        sampled = mix(tokens.astype(np.uint64) + np.uint64(self._start_token))
        return mix(states + np.uint64(self._merge) + sampled)

    def kv_rows(self, states: U64, *, layer: int) -> U64:
        if len(states) == 1:
            return _one(mix_integer(int(states[0]) + self._layers[layer].row))
        return mix(states + np.uint64(self._layers[layer].row))

    def rows_from_bytes(self, data: bytes | bytearray | memoryview) -> U64:
        if len(data) % 8:
            message = f"{len(data)} bytes are no whole number of 8 byte rows"
            raise errors.CorruptError(message, definite=True)
        return np.frombuffer(data, dtype="<u8").astype(np.uint64, copy=False)

    def bound(self, rows: U64, *, layer: int, first_place: int) -> U64:
        """Rows [n] bound to their places: what a sum adds up."""
        end = first_place + len(rows)
        if end > len(self._places[layer]):
            self._grow_places(end)
        return mix(rows + self._places[layer][first_place:end])

    def bound_sum(self, rows: U64, *, layer: int, first_place: int) -> int:
        """The sum over these rows; sums of pieces add modulo 2^64 in any order."""
        return int(np.add.reduce(self.bound(rows, layer=layer, first_place=first_place)))

    def _grow_places(self, count: int) -> None:
        places = np.arange(max(1024, 2 * count), dtype=np.uint64)
        self._places = [places * np.uint64(layer.place) for layer in self._layers]

    def read(self, states: U64, rows: U64, *, layer: int, first_place: int) -> U64:
        total = np.add.reduce(self.bound(rows, layer=layer, first_place=first_place), keepdims=True)
        return total if len(states) == 1 else np.repeat(total, len(states))

    def read_causal(self, states: U64, rows: U64, *, layer: int, first_place: int) -> U64:
        assert len(states) == len(rows), "read_causal: the states of these very rows"
        return np.cumsum(self.bound(rows, layer=layer, first_place=first_place), dtype=np.uint64)

    def attend(self, states: U64, sums: U64, *, layer: int) -> U64:
        query = self._layers[layer].query
        if len(states) == 1:
            w = int(states[0])
            return _one(mix_integer(w + (mix_integer(w + query) | 1) * int(sums[0])))
        return mix(states + (mix(states + np.uint64(query)) | np.uint64(1)) * sums)

    # -- experts --------------------------------------------------------------------------------

    def gate(self, states: U64, *, layer: int) -> Gate:
        if len(states) <= 2:
            slots = [self._gate_row(int(w), self._layers[layer].gate) for w in states]
            keys = np.array(slots, dtype=np.uint64).reshape(len(states), self.settings.top_k)
        else:
            blocks = range(0, len(states), _BLOCK)
            gates = self._layers[layer].gate
            parts = [self._gate_block(states[i : i + _BLOCK], gates) for i in blocks]
            keys = np.concatenate(parts)
        return self._gate_of_keys(keys)

    def _gate_row(self, w: int, gates: U64) -> list[int]:
        """The ``top_k`` least keys of one token, ascending, in the best groups."""
        keys, spare = self._scores
        np.add(gates, np.uint64(w), out=keys)
        self._keys_into(keys, spare)
        groups, top_groups = self.settings.groups, self.settings.top_groups
        by_group = keys.reshape(groups, -1)
        minima: list[int] = np.minimum.reduce(by_group, axis=1).tolist()
        chosen = sorted(range(groups), key=minima.__getitem__)[:top_groups]
        inside = by_group[chosen].ravel()
        inside.sort()
        least: list[int] = inside[: self.settings.top_k].tolist()
        return least

    def _gate_block(self, states: U64, gates: U64) -> U64:
        """As ``_gate_row``, for all tokens of a block: [n, top_k]."""
        keys = states[:, None] + gates
        self._keys_into(keys, np.empty_like(keys))
        groups, top_groups = self.settings.groups, self.settings.top_groups
        by_group = keys.reshape(len(states), groups, -1)
        minima = by_group.min(axis=2)
        limits = np.sort(minima, axis=1)[:, top_groups - 1]
        chosen = np.nonzero(minima <= limits[:, None])[1].reshape(len(states), top_groups)
        inside = np.take_along_axis(by_group, chosen[:, :, None], axis=1).reshape(len(states), -1)
        inside.sort(axis=1)
        return inside[:, : self.settings.top_k]

    def _keys_into(self, keys: U64, spare: U64) -> None:
        mix_into(keys, spare)
        np.bitwise_and(keys, np.uint64(MASK ^ self._id_mask), out=keys)
        np.bitwise_or(keys, self._ids, out=keys)

    def _gate_of_keys(self, keys: U64) -> Gate:
        """Experts are the keys' lowest bits; weights in 1..4096 from others, distinct by slot."""
        top_k = self.settings.top_k
        levels = np.uint64(4096 // top_k)
        weights = (keys >> np.uint64(24)) % levels * np.uint64(top_k) + self._ids1[:top_k]
        experts = (keys & np.uint64(self._id_mask)).astype(np.int64)
        return Gate(experts=experts, weights=weights)

    def dispatch(self, states: U64) -> U64:
        return _words(states, self._vector)

    def expert(self, experts: I64, vectors: U64, *, layer: int) -> U64:
        folds = _folds(vectors, self._fold_vector)
        return _words(mix(folds + self._layers[layer].expert[experts]), self._result)

    def combine(self, states: U64, weights: U64, results: U64, shared: U64, *, layer: int) -> U64:
        parts = _folds(results, self._fold_result)
        total = ((weights + weights + np.uint64(1)) * parts).sum(axis=1, dtype=np.uint64)
        total += np.uint64(3) * _folds(shared, self._fold_result)
        return mix(states + total + np.uint64(self._layers[layer].combine))

    def moe_here(self, states: U64, *, layer: int) -> U64:
        blocks = range(0, len(states), _BLOCK)
        parts = [self._moe_block(states[i : i + _BLOCK], layer) for i in blocks]
        return np.concatenate(parts) if parts else states

    def _moe_block(self, states: U64, layer: int) -> U64:
        count, top_k = len(states), self.settings.top_k
        gate = self.gate(states, layer=layer)
        vectors = self.dispatch(states)
        copies = np.repeat(vectors, top_k, axis=0)
        results = self.expert(gate.experts.ravel(), copies, layer=layer)
        results = results.reshape(count, top_k, RESULT_WORDS)
        shared_ids = np.full(count, self.settings.shared_expert, dtype=np.int64)
        shared = self.expert(shared_ids, vectors, layer=layer)
        return self.combine(states, gate.weights, results, shared, layer=layer)

    # -- requests -------------------------------------------------------------------------------

    def prefill(self, seeds: U64, *, cached_rows: U64) -> Prefilled:
        first_place = cached_rows.shape[1]
        states = self.start_prompt(seeds, first_place=first_place)
        rows = np.empty((self.settings.carried_layers, len(seeds)), dtype=np.uint64)
        for layer in range(self.settings.carried_layers):
            rows[layer] = self.kv_rows(states, layer=layer)
            before = self.read(states, cached_rows[layer], layer=layer, first_place=0)
            sums = self.read_causal(states, rows[layer], layer=layer, first_place=first_place)
            states = self.attend(states, before + sums, layer=layer)
            states = self.moe_here(states, layer=layer)
        return Prefilled(rows=rows, states=states)

    def sample(self, states: U64) -> I64:
        high = mix(states + np.uint64(self._sample)) >> np.uint64(32)
        return ((high * np.uint64(self.settings.vocabulary)) >> np.uint64(32)).astype(np.int64)

    def seals(self, states: U64) -> U64:
        return states

    def fold_prompt(self, states: U64, *, first_place: int) -> int:
        places = np.arange(first_place, first_place + len(states), dtype=np.uint64)
        return int(np.add.reduce((places + places + np.uint64(1)) * states))

    def receipt(self, last: int, shares: Sequence[int]) -> int:
        return (last + sum(shares)) & MASK


def _one(value: int) -> U64:
    return np.array((value,), dtype=np.uint64)


def _folds(words: U64, odd: U64) -> U64:
    """The fold along the last axis: any one flipped bit changes it with certainty.

    The shift keeps flips of the highest bits of two words from cancelling each other.
    """
    folds: U64 = (words ^ (words >> _S32)) @ odd
    return folds


def _words(seeds: U64, constants: U64) -> U64:
    """[n, words]: each seed itself, then mixes of it with the constants."""
    words = seeds[:, None] + constants
    mix_into(words, np.empty_like(words))
    words[:, 0] = seeds
    return words


def _fingerprint(body: SealBody) -> str:
    """Digest of the settings that change the model, its constants' use, and one fixed run."""
    settings = body.settings
    seeds = _constants("fingerprint", 5)
    empty = np.empty((settings.carried_layers, 0), dtype=np.uint64)
    done = body.prefill(seeds, cached_rows=empty)
    gate = body.gate(done.states, layer=0)
    tokens = body.sample(done.states)
    started = body.start_tokens(tokens, places=np.arange(5, dtype=np.int64))
    every = body.expert(
        np.arange(settings.routed_experts + 1, dtype=np.int64),
        np.repeat(body.dispatch(started[:1]), settings.routed_experts + 1, axis=0),
        layer=settings.carried_layers - 1,
    )
    shape = [getattr(settings, key) for key in _SHAPE]
    digest = hashlib.blake2b(f"seal 1 {shape}".encode(), digest_size=16)
    for array in (done.rows, done.states, gate.experts, gate.weights, tokens, started, every):
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _draft_fingerprint(body: SealBody) -> str:
    """Digest of the main model's fingerprint and one fixed run of the MTP layer."""
    layer, before = body.settings.carried_layers, _constants("draft fingerprint", 5)
    begun = body.mtp_start(before, body.sample(before))
    rows = body.kv_rows(begun, layer=layer)
    sums = body.read_causal(begun, rows, layer=layer, first_place=7)
    done = body.moe_here(body.attend(begun, sums, layer=layer), layer=layer)
    digest = hashlib.blake2b(body.fingerprint.encode(), digest_size=16)
    for array in (begun, rows, sums, done, body.sample(done)):
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
