"""The oracle: says of every token and seal of a request whether it is right.

Teacher forcing: the claimed tokens are taken as input, so all rows of a request (prompt rows, then
one for each token that was fed back) go through a layer in one pass, and each step's token and
seal are compared with the claimed ones. By induction that is the same as generating them.

This file repeats the model in its own plain code: it imports neither the body nor the identities
that the serving code uses, because an error in shared code is invisible to any comparison. Read
it beside model.md sections 2 and 7. Prefix blocks that were seen before are not computed again;
the memory is keyed by the block's whole chain, made here from the trace, never from the run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from nodes.settings import ModelSettings

U64 = npt.NDArray[np.uint64]

WORD = 2**64
PACK_ROWS = 192
"""Tokens whose 256 gate scores are held at once: 400 KB."""


class ClaimedRequest(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """What was asked, and what the run says the answer was."""

    name: str
    hash_ids: Sequence[int]
    input_tokens: int
    output_tokens: int
    """Tokens asked for: one more or fewer claimed is wrong."""
    tokens: Sequence[int]
    seals: Sequence[int]
    """Per token the seal of the state that it was sampled from."""
    receipt: int
    log: Sequence[Sequence[tuple[int, int]]] | None = None
    """Optional, per token and layer: the seals after attention and after the experts. A token's
    list may be empty (the first token's, which the prefill makes)."""
    draft_fold: int | None = None
    """Optional: the sum of (2 i + 1) w_i mod 2^64, w_i the seal after the MTP layer of token i with the
    token after it, for every token that was fed back. Rows of rejected drafts are not in it."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """``wrong`` of ``checked_tokens`` are wrong; a wrong receipt or draft fold counts against the last
    token."""

    checked_tokens: int
    wrong: int
    first: str | None
    """The first difference in words, or None."""


class _Prefix(msgspec.Struct, frozen=True):
    """Sums over all rows of a chain of full blocks."""

    sums: tuple[int, ...]
    share: int


class Oracle:
    """Checks requests of one model; remembers prefixes."""

    def __init__(self, settings: ModelSettings) -> None:
        self._settings = settings
        self._model = Model(settings)
        self._prefixes: dict[bytes, _Prefix] = {}

    def check(self, request: ClaimedRequest) -> Verdict:
        """Compares every token, seal and the receipt of one request with what they should be."""
        asked = request.output_tokens
        if not len(request.tokens) == len(request.seals) == asked:
            counts = f"{len(request.tokens)} tokens and {len(request.seals)} seals"
            first = f"{request.name}: {counts} for {asked} asked"
            return Verdict(checked_tokens=asked, wrong=asked, first=first)
        truth = self._run(request)
        return compare(request, truth)

    def _run(self, request: ClaimedRequest) -> Truth:
        seeds, keys = read_prompt(request, self._settings)
        known, prefix = self._known(keys, len(seeds))
        fed = np.array([int(token) % WORD for token in request.tokens[:-1]], dtype=np.uint64)
        start = known * self._settings.block_tokens // self._settings.tokens_per_carried
        places = np.arange(start, len(seeds) + len(fed), dtype=np.uint64)
        prompt_count = len(seeds) - start
        w = self._model.start(seeds[start:], fed, places)
        answers = slice(prompt_count - 1, None)
        log, running = [], []
        for layer, before in enumerate(prefix.sums):
            sums = self._model.sums(layer, w, places, before)
            attended = self._model.attend(layer, w, sums)
            w = self._model.experts(layer, attended)
            running.append(sums)
            log.append((attended[answers], w[answers]))
        odd = places[:prompt_count] * u64(2) + u64(1)
        shares = np.cumsum(odd * w[:prompt_count]) + u64(prefix.share)
        self._remember(keys, known, start, running, shares)
        seals = w[answers]
        receipt = (int(seals[-1]) + int(shares[-1])) % WORD
        fold = None if request.draft_fold is None else self._fold(request, seals[1:], places)
        return Truth(self._model.tokens(seals), seals, receipt, log, draft_fold=fold)

    def _fold(self, request: ClaimedRequest, w: U64, places: U64) -> int:
        """The fold of the MTP layer over all rows of generated tokens."""
        if not len(w):
            return 0
        layer, places = self._settings.carried_layers, places[-len(w) :]
        after = np.array([int(token) % WORD for token in request.tokens[1:]], dtype=np.uint64)
        w = self._model.merge(w, after)
        w = self._model.attend(layer, w, self._model.sums(layer, w, places, 0))
        odd = np.arange(len(w), dtype=np.uint64) * u64(2) + u64(1)
        return int((odd * self._model.experts(layer, w)).sum(dtype=np.uint64))

    def _known(self, keys: list[bytes], rows: int) -> tuple[int, _Prefix]:
        """Leading full blocks already seen (never all rows: the last one is always computed)."""
        per_block = self._settings.block_tokens // self._settings.tokens_per_carried
        for count in range(min(len(keys), (rows - 1) // per_block), 0, -1):
            prefix = self._prefixes.get(keys[count - 1])
            if prefix is not None:
                return count, prefix
        return 0, _Prefix(sums=(0,) * self._settings.carried_layers, share=0)

    def _remember(
        self, keys: list[bytes], known: int, start: int, running: list[U64], shares: U64
    ) -> None:
        per_block = self._settings.block_tokens // self._settings.tokens_per_carried
        for block in range(known, len(keys)):
            end = (block + 1) * per_block - 1 - start
            sums = tuple(int(layer[end]) for layer in running)
            self._prefixes[keys[block]] = _Prefix(sums=sums, share=int(shares[end]))


class Truth(msgspec.Struct, frozen=True, eq=False):
    """What should have been claimed."""

    tokens: U64
    seals: U64
    receipt: int
    log: list[tuple[U64, U64]]
    """Per layer: seals after attention and after the experts, one for each token."""
    draft_fold: int | None
    """If it was claimed."""


def compare(request: ClaimedRequest, truth: Truth) -> Verdict:
    bad, first = 0, None
    last = request.output_tokens - 1
    for index in range(request.output_tokens):
        seal, right_seal = int(request.seals[index]), int(truth.seals[index])
        token, right_token = int(request.tokens[index]), int(truth.tokens[index])
        what = None
        if seal != right_seal:
            what = f"seal {seal:016x}, not {right_seal:016x}{_part(request, truth, index)}"
        elif token != right_token:
            what = f"token {token}, not {right_token}"
        elif index == last and request.receipt != truth.receipt:
            what = f"receipt {request.receipt:016x}, not {truth.receipt:016x}: a prompt row differs"
        elif index == last and request.draft_fold != truth.draft_fold:
            what = f"draft fold {request.draft_fold}, not {truth.draft_fold}: the MTP layer"
        if what is not None:
            bad += 1
            first = first or f"{request.name}: token {index}: {what}"
    return Verdict(checked_tokens=request.output_tokens, wrong=bad, first=first)


def _part(request: ClaimedRequest, truth: Truth, index: int) -> str:
    """Which layer and part of this token differs first, if the request has a log."""
    if request.log is None or not request.log[index]:
        return ""
    for layer, claimed in enumerate(request.log[index]):
        attended, combined = truth.log[layer]
        if int(claimed[0]) != int(attended[index]):
            return f": layer {layer}, attention or its KV rows"
        if int(claimed[1]) != int(combined[index]):
            return f": layer {layer}, experts"
    return ": after the last layer"


# -- the prompt -----------------------------------------------------------------------------------


def read_prompt(request: ClaimedRequest, settings: ModelSettings) -> tuple[U64, list[bytes]]:
    """Seeds of all prompt rows, and the identities of full blocks: digests chained row by row."""
    row_tokens, block_tokens = settings.tokens_per_carried, settings.block_tokens
    parent = _digest((5, settings.carried_layers), (6, row_tokens), (7, block_tokens))
    seeds, keys = [], []
    for first in range(0, request.input_tokens, row_tokens):
        last = min(first + row_tokens, request.input_tokens)
        hash_id = request.hash_ids[first // block_tokens]
        index = first % block_tokens // row_tokens
        parent = _digest((1, parent), (2, hash_id), (3, index), (4, last - first))
        seeds.append(int.from_bytes(parent[:8], "little"))
        if last % block_tokens == 0:
            keys.append(parent)
    return np.array(seeds, dtype=np.uint64), keys


def _digest(*fields: tuple[int, int | bytes]) -> bytes:
    data = bytearray()
    for tag, value in fields:
        if isinstance(value, int):
            value = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        data += bytes([tag]) + len(value).to_bytes(4, "little") + value
    return hashlib.blake2b(data, digest_size=32, person=b"cmnet-prefix-1").digest()


# -- the arithmetic -------------------------------------------------------------------------------


def u64(value: int) -> np.uint64:
    return np.uint64(value % WORD)


def _name(name: str, index: int | str = 0) -> int:
    text = f"cmnet seal {name} {index}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _names(name: str, count: int, *, odd: bool = False) -> U64:
    return np.array([_name(name, i) | odd for i in range(count)], dtype=np.uint64)


def _of_layers(name: str, count: int, *, odd: bool = False) -> U64:
    """One for each carried layer, and behind them the MTP layer's."""
    names = [*range(count), "mtp"]
    return np.array([_name(name, layer) | odd for layer in names], dtype=np.uint64)


def mix(z: U64) -> U64:
    """SplitMix64's finaliser, as published."""
    z = (z ^ (z >> u64(30))) * u64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> u64(27))) * u64(0x94D049BB133111EB)
    return z ^ (z >> u64(31))


def _fold(words: U64, odd: U64) -> U64:
    """All words of each message [n, words] in one, modulo 2^64."""
    total: U64 = ((words ^ (words >> u64(32))) * odd).sum(axis=1, dtype=np.uint64)
    return total


class Model:
    """The model's constants by name, and its steps."""

    def __init__(self, settings: ModelSettings) -> None:
        self._settings = settings
        layers = settings.carried_layers
        self._row, self._query = _of_layers("row", layers), _of_layers("query", layers)
        self._place = _of_layers("place", layers, odd=True)
        self._combine = _of_layers("combine", layers)
        self._gate, self._gate_layer = (
            _names("gate expert", settings.routed_experts),
            _of_layers("gate layer", layers),
        )
        self._expert, self._expert_layer = (
            _names("expert", settings.routed_experts + 1),
            _of_layers("expert layer", layers),
        )
        self._vector, self._result = _names("vector", 8), _names("result", 16)
        self._fold_vector = _names("fold vector", 8, odd=True)
        self._fold_result = _names("fold result", 16, odd=True)

    def start(self, seeds: U64, tokens: U64, places: U64) -> U64:
        prompt = seeds + u64(_name("start prompt"))
        generated = mix(tokens + u64(_name("start token")))
        odd = u64(_name("start place") | 1)
        return mix(np.concatenate([prompt, generated]) + places * odd)

    def merge(self, w: U64, tokens: U64) -> U64:
        """What goes into the MTP layer."""
        return mix(w + u64(_name("merge", "mtp")) + mix(tokens + u64(_name("start token"))))

    def sums(self, layer: int, w: U64, places: U64, before: int) -> U64:
        """For each row the sum over all rows up to itself, bound to their places."""
        rows = mix(w + self._row[layer])
        return np.cumsum(mix(rows + places * self._place[layer])) + u64(before)

    def attend(self, layer: int, w: U64, sums: U64) -> U64:
        return mix(w + (mix(w + self._query[layer]) | u64(1)) * sums)

    def experts(self, layer: int, w: U64) -> U64:
        pieces = np.split(w, range(PACK_ROWS, len(w), PACK_ROWS))
        return np.concatenate([self._moe(layer, piece) for piece in pieces])

    def _moe(self, layer: int, w: U64) -> U64:
        chosen, weights = self._choose(layer, w)
        vector = mix(w[:, None] + self._vector)
        vector[:, 0] = w
        fold = _fold(vector, self._fold_vector)
        shared = self._settings.routed_experts
        total = self._answer(layer, fold, np.full(len(w), shared)) * u64(3)
        for slot in range(self._settings.top_k):
            answer = self._answer(layer, fold, chosen[:, slot])
            total += (weights[:, slot] * u64(2) + u64(1)) * answer
        return mix(w + self._combine[layer] + total)

    def _answer(self, layer: int, fold: U64, expert: npt.NDArray[np.int64]) -> U64:
        """The fold of what one expert each sends back."""
        inner = mix(fold + self._expert[expert] + self._expert_layer[layer])
        words = mix(inner[:, None] + self._result)
        words[:, 0] = inner
        return _fold(words, self._fold_result)

    def _choose(self, layer: int, w: U64) -> tuple[npt.NDArray[np.int64], U64]:
        """Experts [n, top_k] by rising score, and weights 1..4096 that differ by slot."""
        model = self._settings
        bits = u64((model.routed_experts - 1).bit_length())
        ids = np.arange(model.routed_experts, dtype=np.uint64)
        score = mix(w[:, None] + self._gate + self._gate_layer[layer])
        key = ((score >> bits) << bits) | ids
        grouped = key.reshape(len(w), model.groups, -1)
        minimum = grouped.min(axis=2)
        worst = np.sort(minimum, axis=1)[:, model.top_groups - 1]
        allowed = minimum <= worst[:, None]
        key = np.where(allowed[:, :, None], grouped, u64(-1)).reshape(len(w), -1)
        least = np.partition(key, model.top_k - 1, axis=1)[:, : model.top_k]
        least.sort(axis=1)
        levels, count = u64(4096 // model.top_k), u64(model.top_k)
        slots = np.arange(model.top_k, dtype=np.uint64)
        weights = (least >> u64(24)) % levels * count + slots + u64(1)
        return (least % (u64(1) << bits)).astype(np.int64), weights

    def tokens(self, seals: U64) -> U64:
        half = u64(32)
        drawn = mix(seals + u64(_name("sample"))) >> half
        return (drawn * u64(self._settings.vocabulary)) >> half
