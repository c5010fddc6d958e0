"""The oracle of the exact body: says of every token and seal of a request whether it is right.

As ``nodes/model/oracle.py``: teacher forcing, own plain code, no import of what it checks, and blocks
that were seen before are not computed again. Rows of many requests go through a layer together,
grouped by expert; attention is done request by request in tiles that stay in a core's cache. Does not
own the model's steps (``exact_oracle_model``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from nodes.model.exact_oracle_model import F32, F64, I64, U64, Model
from nodes.model.oracle import ClaimedRequest, Truth, Verdict, compare, read_prompt, u64
from nodes.settings import ModelSettings

PACK_ROWS = 4096
"""Rows of a pack of requests: enough for some 140 rows an expert."""


class ExactOracle:
    """Checks requests of one model; remembers prefixes."""

    def __init__(self, settings: ModelSettings, *, skew: str = "uniform") -> None:
        self._settings = settings
        self._model = Model(settings, skew)
        self._blocks: dict[bytes, _Block] = {}

    def check(self, request: ClaimedRequest) -> Verdict:
        """Compares every token, seal and the receipt of one request with what they should be."""
        return self.check_many([request])[0]

    def check_many(self, requests: Sequence[ClaimedRequest]) -> list[Verdict]:
        """As ``check``, for many requests in few passes."""
        verdicts: dict[int, Verdict] = {}
        for pack in self._packs(requests, verdicts):
            for (index, _), truth in zip(pack, self._run([own for _, own in pack]), strict=True):
                verdicts[index] = compare(requests[index], truth)
        return [verdicts[index] for index in range(len(requests))]

    def _packs(
        self, requests: Sequence[ClaimedRequest], verdicts: dict[int, Verdict]
    ) -> Iterator[list[tuple[int, _Part]]]:
        """Requests together until they have enough rows, or one needs a block of another."""
        pack: list[tuple[int, _Part]] = []
        rows, new = 0, set[bytes]()
        for index, request in enumerate(requests):
            asked = request.output_tokens
            if not len(request.tokens) == len(request.seals) == asked:
                counts = f"{len(request.tokens)} tokens and {len(request.seals)} seals"
                first = f"{request.name}: {counts} for {asked} asked"
                verdicts[index] = Verdict(checked_tokens=asked, wrong=asked, first=first)
                continue
            part = self._part(request)
            if pack and (rows > PACK_ROWS or not new.isdisjoint(part.keys[part.known :])):
                yield pack
                pack, rows, new = [], 0, set()
                part = self._part(request)
            pack.append((index, part))
            rows += len(part.places)
            new.update(part.keys[part.known :])
        if pack:
            yield pack

    def _part(self, request: ClaimedRequest) -> _Part:
        seeds, keys = read_prompt(request, self._settings)
        per_block = self._settings.block_tokens // self._settings.tokens_per_carried
        known = 0
        while known < min(len(keys), (len(seeds) - 1) // per_block) and keys[known] in self._blocks:
            known += 1
        fed = np.array([int(token) % 2**64 for token in request.tokens[:-1]], dtype=np.uint64)
        places = np.arange(known * per_block, len(seeds) + len(fed))
        prompt = len(seeds) - known * per_block
        drafts = request.draft_fold is not None
        last = int(request.tokens[-1]) % 2**64 if drafts else None
        return _Part(seeds[known * per_block :], fed, keys, known, places, prompt, last)

    def _run(self, parts: list[_Part]) -> list[Truth]:
        model = self._model
        started = [model.start(part.seeds, part.fed, part.places) for part in parts]
        h = np.concatenate([values for values, _ in started])
        w = np.concatenate([seals for _, seals in started])
        places = np.concatenate([part.places for part in parts])
        ends = np.cumsum([len(part.places) for part in parts])
        spans = [slice(end - len(part.places), end) for part, end in zip(parts, ends, strict=True)]
        logs, kept = [], []
        for layer in range(self._settings.carried_layers):
            values, bound = model.rows(layer, h, w, places)
            query = model.query(layer, h, places)
            sums, folds = np.empty((len(h), 32, 21)), np.empty(len(h), dtype=np.uint64)
            for part, span in zip(parts, spans, strict=True):
                seen, seals = self._seen(part, layer, values[span], bound[span])
                sums[span], folds[span] = model.read(layer, query[span], seen, seals)
            h, attended = model.attend(layer, h, w, sums, folds)
            h, w = model.experts(layer, h, attended)
            logs.append((attended, w))
            kept.append((values, bound))
        tokens, drafts = model.tokens(h, w), self._drafts(parts, spans, h, w)
        return [
            self._truth(part, span, w[span], tokens[span], logs, kept, fold)
            for part, span, fold in zip(parts, spans, drafts, strict=True)
        ]

    def _drafts(self, parts: list[_Part], spans: list[slice], h: F64, w: U64) -> list[int | None]:
        """The fold of the MTP layer for each request that asks for it.

        All rows of generated tokens go through it, each with the token that came after it.
        """
        folds: list[int | None] = [None if part.last is None else 0 for part in parts]
        asked = [i for i, part in enumerate(parts) if part.last is not None and len(part.fed)]
        if not asked:
            return folds
        model, layer = self._model, self._settings.carried_layers
        rows = np.concatenate([np.arange(spans[i].stop)[-len(parts[i].fed) :] for i in asked])
        places = np.concatenate([parts[i].places[-len(parts[i].fed) :] for i in asked])
        after = [np.append(parts[i].fed[1:], u64(parts[i].last or 0)) for i in asked]
        h, w = model.merge(h[rows], w[rows], np.concatenate(after))
        values, bound = model.rows(layer, h, w, places)
        query = model.query(layer, h, places)
        ends = np.cumsum([len(own) for own in after])
        pieces = [slice(end - len(own), end) for own, end in zip(after, ends, strict=True)]
        read = [
            model.read(layer, query[own], values[own], bound[own], place=int(places[own][0]))
            for own in pieces
        ]
        sums, bounds = (np.concatenate(part) for part in zip(*read, strict=True))
        h, w = model.attend(layer, h, w, sums, bounds)
        _, w = model.experts(layer, h, w)
        for index, own in zip(asked, pieces, strict=True):
            odd = np.arange(len(w[own]), dtype=np.uint64) * u64(2) + u64(1)
            folds[index] = int((odd * w[own]).sum(dtype=np.uint64))
        return folds

    def _seen(self, part: _Part, layer: int, values: F32, bound: U64) -> tuple[F32, U64]:
        """Rows of the known blocks and own rows: all that the last row of a request sees."""
        blocks = [self._blocks[key] for key in part.keys[: part.known]]
        return (
            np.concatenate([*[block.values[layer] for block in blocks], values], dtype=np.float32),
            np.concatenate([*[block.bound[layer] for block in blocks], bound]),
        )

    def _truth(
        self,
        part: _Part,
        span: slice,
        seals: U64,
        tokens: U64,
        logs: list[tuple[U64, U64]],
        kept: list[tuple[F32, U64]],
        fold: int | None,
    ) -> Truth:
        prompt = part.prompt
        odd = part.places[:prompt].astype(np.uint64) * u64(2) + u64(1)
        before = self._blocks[part.keys[part.known - 1]].share if part.known else 0
        shares = np.cumsum(odd * seals[:prompt]) + u64(before)
        per_block = self._settings.block_tokens // self._settings.tokens_per_carried
        for number, key in enumerate(part.keys[part.known :]):
            first = span.start + number * per_block
            rows = slice(first, first + per_block)
            share = int(shares[(number + 1) * per_block - 1])
            values = [layer[rows].astype(np.int8) for layer, _ in kept]
            self._blocks[key] = _Block(values, [layer[rows].copy() for _, layer in kept], share)
        answers = slice(prompt - 1, None)
        log = [(one[span][answers], other[span][answers]) for one, other in logs]
        receipt = (int(seals[-1]) + int(shares[-1])) % 2**64
        return Truth(tokens[answers], seals[answers], receipt, log, draft_fold=fold)


class _Part(msgspec.Struct, frozen=True, eq=False):
    """What of a request is to be computed."""

    seeds: U64
    fed: U64
    keys: list[bytes]
    known: int
    """Leading blocks that are remembered."""
    places: I64
    prompt: int
    """Own rows that are prompt rows."""
    last: int | None
    """The last token, which is not fed back, if the MTP layer is to be folded."""


class _Block(msgspec.Struct, frozen=True, eq=False):
    values: list[npt.NDArray[np.int8]]
    """A layer each: [rows, 20]."""
    bound: list[U64]
    share: int
    """Of the receipt, from the first row of the request to the last of this block."""
