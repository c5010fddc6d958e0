"""The exact model as its oracle has it: weights, tables and steps, in own plain code.

Owns a second definition of what ``exact_tables`` and ``exact_plain`` define, and imports neither, because
an error in shared code is invisible to any comparison. Keys take the plain form of MLA where the body has
the absorbed one. Values h are float64 [n, 64], seals w uint64 [n]. Does not own what is asked of it
(``exact_oracle``: requests; ``layer_oracle``: layers of experts). Read it beside model.md section 2.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from nodes.model.oracle import mix, u64
from nodes.settings import ModelSettings

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
F32 = npt.NDArray[np.float32]

TILE = 16
"""Queries at once: 16 x 32 heads x 300 keys are 600 KB."""
KEYS = 256
"""Keys summed in float32: 255 x 255 x 256 < 2^24."""
CHOICES = 256
"""Tokens whose scores of all experts are held at once: 512 KB an array."""
EXPERTS = 16
"""Experts whose rows are gathered at once: a pack's 2,300 answers are 1.2 MB."""


def _number(name: str, index: int | str = 0) -> int:
    text = f"cmnet exact {name} {index}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _bytes(name: str, count: int) -> I64:
    key = hashlib.blake2b(f"cmnet exact {name}".encode(), digest_size=16).digest()
    words = np.random.Philox(key=int.from_bytes(key, "little")).random_raw((count + 7) // 8)
    shifts = np.arange(0, 64, 8, dtype=np.uint64)
    return ((words[:, None] >> shifts) & u64(255)).ravel()[:count].astype(np.int64)


def _weights(name: str, *shape: int, most: int = 127) -> F32:
    values = _bytes(name, math.prod(shape)) % (2 * most + 1) - most
    return values.reshape(shape).astype(np.float32)


def _odd(name: str, count: int) -> U64:
    octets = _bytes(name, 8 * count).reshape(count, 8).astype(np.uint64)
    total: U64 = (octets << np.arange(0, 64, 8, dtype=np.uint64)).sum(axis=1, dtype=np.uint64)
    return total | u64(1)


def _table(function: Any, first: int, last: int) -> F64:
    return np.array([float(round(function(i))) for i in range(first, last)])


class _Layer:
    def __init__(self, layer: int | str, settings: ModelSettings, bias: I64) -> None:
        experts = settings.routed_experts
        self.query = _weights(f"query {layer}", 64, 256)
        self.latent = _weights(f"latent {layer}", 64, 20)
        self.key_up = _weights(f"key up {layer}", 4, 16, 32, most=15)
        self.value_up = _weights(f"value up {layer}", 16, 4, 32, most=15)
        self.out = _weights(f"out {layer}", 128, 64)
        self.gate = _weights(f"gate {layer}", 64, experts)
        self.first = _weights(f"first {layer}", experts + 1, 64, 32)
        self.second = _weights(f"second {layer}", experts + 1, 16, 64)
        check = _bytes(f"check {layer}", 64) % 254 - 127
        self.check = np.where(check < 0, check, check + 1)
        self.bias = bias
        self.row, self.place = u64(_number("row", layer)), u64(_number("place", layer) | 1)
        self.attention = u64(_number("attention", layer))
        self.combine = u64(_number("combine", layer))
        self.check_odd = u64(_number("check odd", layer) | 1)
        self.fold_numerator = _odd(f"numerator {layer}", 640).reshape(20, 32)
        self.fold_denominator = _odd(f"denominator {layer}", 32)
        self.fold_bound = _odd(f"bound {layer}", 32)
        self.fold_out = _odd(f"fold out {layer}", 64)
        self.fold_combine = _odd(f"fold combine {layer}", 64)
        self.expert = _odd(f"expert {layer}", experts + 1)


class Content(msgspec.Struct, frozen=True, eq=False):
    """A layer of experts for so many values, all but the seals."""

    h: F64
    """Values after the layer."""
    sent: U64
    asked: U64
    """Word of each slot's expert [n, slots]; the shared one last."""
    odd: U64
    """What each slot's answer counts [n, slots]."""
    summed: U64
    """The combine's own part, with its exact sums."""

    def seals(self, w: U64, which: I64 | slice = slice(None)) -> U64:
        """Seals after the layer of seals w before it; token i has the values of row ``which[i]``."""
        answers = mix((w + self.sent[which])[:, None] + self.asked[which])
        folds = (self.odd[which] * answers).sum(axis=1, dtype=np.uint64)
        return mix(w + self.summed[which] + folds)


class Model:
    """The steps, on values h [n, 64] in float64 and seals w [n]."""

    def __init__(self, settings: ModelSettings, skew: str) -> None:
        self._settings = settings
        self._ramp = 1 + np.arange(64) / 512
        self._cos = _table(lambda i: 2**14 * math.cos(2 * math.pi * i / 4096), 0, 4096)
        self._sin = _table(lambda i: 2**14 * math.sin(2 * math.pi * i / 4096), 0, 4096)
        self._sigmoid = _table(lambda i: 65535 / (1 + math.exp(-i / 256)), -2048, 2048)
        self._exp = _table(lambda i: 1024 * math.exp(i / 128), -512, 512)
        self._head = _weights("head", 64, 512)
        self._embedding = _weights("embedding", 512, 64)
        self._words = np.array([_number("embedding word", i) for i in range(8)], dtype=np.uint64)
        names = [*range(settings.carried_layers), "mtp"]
        self._layers = [_Layer(name, settings, self._bias(name, skew)) for name in names]
        self._merge = _weights("merge mtp", 128, 64)
        self._fold_merge = _odd("fold merge mtp", 64)

    def start(self, seeds: U64, tokens: U64, places: I64) -> tuple[F64, U64]:
        words = mix(seeds[:, None] + self._words)
        octets = (words[:, :, None] >> np.arange(0, 64, 8, dtype=np.uint64)) & u64(255)
        prompt = octets.reshape(len(seeds), 64).astype(np.int8)
        generated = self._embedding[(tokens % u64(512)).astype(np.int64)]
        first = seeds + u64(_number("start prompt"))
        later = mix(tokens + u64(_number("start token")))
        odd = u64(_number("start place") | 1)
        w = mix(np.concatenate([first, later]) + places.astype(np.uint64) * odd)
        return np.concatenate([prompt, generated]).astype(np.float64) * 64, w

    def merge(self, h: F64, w: U64, tokens: U64) -> tuple[F64, U64]:
        """What goes into the MTP layer: states, each with the token that was sampled from it."""
        embedded = self._embedding[(tokens % u64(512)).astype(np.int64)].astype(np.float64) * 64
        roots = [np.sqrt(np.square(part).sum(axis=1) / 64 + 1)[:, None] for part in (h, embedded)]
        u = np.concatenate([h * self._ramp / roots[0], embedded * self._ramp / roots[1]], axis=1)
        most = np.maximum(_most(u), 2.0**-30)
        raw = (np.rint(u * (127 / most)[:, None]).astype(np.float32) @ self._merge).astype(
            np.float64
        )
        scale = (most / 127).astype(np.float32).astype(np.float64) * 5.5
        seal = w + u64(_number("merge", "mtp")) + mix(tokens + u64(_number("start token")))
        values = np.clip(np.rint(raw * self._ramp * scale[:, None]), -(2**20), 2**20)
        return values, mix(seal + _fold(raw, self._fold_merge))

    def _norm(self, h: F64) -> tuple[F32, F64]:
        u = h * self._ramp
        most = np.maximum(_most(u), 1)
        x = np.rint(u * (127 / most)[:, None])
        scale = most / np.sqrt(np.square(h).sum(axis=1) / 64 + 1) / 127
        return x.astype(np.float32), scale.astype(np.float32).astype(np.float64)

    def _turn(self, pairs: F64, places: I64, most: int) -> F64:
        """[n, 4, ...] turned by their places."""
        turned = np.empty_like(pairs)
        for first, step in ((0, 163), (2, 7)):
            angle = places * step % 4096
            shape = (-1,) + (1,) * (pairs.ndim - 2)
            cos, sin = self._cos[angle].reshape(shape), self._sin[angle].reshape(shape)
            a, b = pairs[:, first], pairs[:, first + 1]
            turned[:, first] = np.rint((a * cos - b * sin) / 2**14)
            turned[:, first + 1] = np.rint((a * sin + b * cos) / 2**14)
        return np.clip(turned, -most, most)

    def rows(self, layer: int, h: F64, w: U64, places: I64) -> tuple[F32, U64]:
        """Latent and rotated key [n, 20], and 32 bits of the seal."""
        own = self._layers[layer]
        x, scale = self._norm(h)
        raw = (x @ own.latent).astype(np.float64)
        rms = np.sqrt(np.square(raw[:, :16]).sum(axis=1) / 16 + 1)
        scaled = raw * self._ramp[:20]
        latent = np.clip(np.rint(scaled[:, :16] * (40 / rms)[:, None]), -127, 127)
        key = np.clip(np.rint(scaled[:, 16:] * (scale * 0.07)[:, None]), -127, 127)
        values = np.concatenate([latent, self._turn(key, places, 127)], axis=1)
        return values.astype(np.float32), mix(w + own.row) >> u64(32)

    def query(self, layer: int, h: F64, places: I64) -> F32:
        """[n, 8, heads]: 4 without position, 4 rotated and times 16."""
        x, scale = self._norm(h)
        scaled = (x @ self._layers[layer].query).astype(np.float64) * np.tile(self._ramp, 4)
        query = np.clip(np.rint(scaled * (scale * 0.0105)[:, None]), -31, 31).reshape(-1, 8, 32)
        query[:, 4:] = 16 * self._turn(query[:, 4:], places, 31)
        return query.astype(np.float32)

    def read(
        self, layer: int, query: F32, values: F32, bound: U64, *, place: int = 0
    ) -> tuple[F64, U64]:
        """Sums [n, heads, 21] and folds of the last n rows over all rows up to their own.

        The first of all rows is at ``place``.
        """
        own, count, rows = self._layers[layer], len(query), len(values)
        keys = np.empty((32, 8, rows), dtype=np.float32)
        keys[:, :4] = np.tensordot(own.key_up, values[:, :16], axes=(1, 1)).transpose(1, 0, 2)
        keys[:, 4:] = values[:, 16:].T
        bits = mix(bound + np.arange(place, place + rows, dtype=np.uint64) * own.place) >> u64(40)
        parts = [(bits >> u64(shift)) & u64(255) for shift in (0, 8, 16)]
        terms = np.column_stack([values, np.ones(rows), *parts]).astype(np.float32)
        heads = np.ascontiguousarray(query.transpose(2, 0, 1))
        sums = np.zeros((count, 32, 24))
        for first in range(0, count, TILE):
            tile = slice(first, min(first + TILE, count))
            last = rows - count + tile.stop
            for start in range(0, last, KEYS):
                block = slice(start, min(start + KEYS, last))
                exps = _exps(heads[:, tile] @ keys[:, :, block])
                later = np.arange(block.start, block.stop) > np.arange(
                    rows - count + first, last
                ).reshape(-1, 1)
                exps[:, later] = 0
                sums[tile] += (exps @ terms[block]).transpose(1, 0, 2)
        whole = sums[:, :, 21] + 256 * sums[:, :, 22] + 65536 * sums[:, :, 23]
        return sums[:, :, :21], _fold(whole, own.fold_bound)

    def attend(self, layer: int, h: F64, w: U64, sums: F64, folds: U64) -> tuple[F64, U64]:
        own, count = self._layers[layer], len(h)
        up = own.value_up.transpose(2, 0, 1).astype(np.float64)
        mixed = (sums[:, :, :16].transpose(1, 0, 2) @ up).transpose(1, 2, 0)
        value = np.rint(2 * mixed / sums[:, None, :, 20]).reshape(count, 128)
        most = np.maximum(np.abs(value).max(axis=1), 1)
        x = np.rint(value * (127 / most)[:, None]).astype(np.float32)
        out = (x @ own.out).astype(np.float64)
        scale = (most / 127).astype(np.float32).astype(np.float64)
        h = np.clip(h + np.rint(out * self._ramp * (scale * 1.35e-3)[:, None]), -(2**20), 2**20)
        folds = folds + _fold(sums[:, :, :20].reshape(count, -1), own.fold_numerator.T.ravel())
        folds = folds + _fold(sums[:, :, 20], own.fold_denominator) + _fold(out, own.fold_out)
        return h, mix(w + own.attention + folds)

    def experts(self, layer: int, h: F64, w: U64) -> tuple[F64, U64]:
        content = self.content(layer, h)
        return content.h, content.seals(w)

    def content(self, layer: int, h: F64) -> Content:
        """What gate, experts and combine make of values h, whatever the seals beside them are."""
        own, count, slots = self._layers[layer], len(h), self._settings.top_k + 1
        x, scale = self._norm(h)
        pieces = [slice(i, i + CHOICES) for i in range(0, count, CHOICES)]
        choices = [self._choose(own, x[piece], scale[piece]) for piece in pieces]
        chosen, weight = (np.concatenate(part) for part in zip(*choices, strict=True))
        every = np.full((count, slots), self._settings.routed_experts)
        every[:, :-1] = chosen
        answers = self._answers(own, every.ravel(), x, scale).reshape(count, slots, 64)
        total = answers[:, -1] * np.int32(4096)
        for slot in range(slots - 1):
            total += answers[:, slot] * weight[:, slot : slot + 1].astype(np.int32)
        odd = np.full((count, slots), 3, dtype=np.uint64)
        odd[:, :-1] = weight * 2 + 1
        return Content(
            h=np.clip(h + np.rint(total / 4096), -(2**20), 2**20),
            sent=self._sent(own, x, scale),
            asked=own.expert[every],
            odd=odd,
            summed=own.combine + _fold(total, own.fold_combine),
        )

    def _sent(self, own: _Layer, x: F32, scale: F64) -> U64:
        """What of a message is folded into each expert's answer, beside the seal [n]."""
        bits = scale.astype(np.float32).view(np.uint32).astype(np.uint64)
        return bits + _fold(x.astype(np.float64), own.check.astype(np.uint64)) * own.check_odd

    def _answers(self, own: _Layer, experts: I64, x: F32, scale: F64) -> npt.NDArray[np.int16]:
        """[n * slots, 64]: gated experts, some experts at a time."""
        slots = len(experts) // max(len(x), 1)
        order = np.argsort(experts, kind="stable")
        starts = np.searchsorted(experts[order], np.arange(len(own.first) + 1)).tolist()
        answers = np.empty((len(experts), 64), dtype=np.int16)
        for first in range(0, len(own.first), EXPERTS):
            group = range(first, min(first + EXPERTS, len(own.first)))
            where = order[starts[group.start] : starts[group.stop]]
            ends = [starts[e + 1] - starts[group.start] for e in group]
            tokens = where // slots
            raw = _by_expert(x[tokens], own.first[group.start : group.stop], ends)
            up = raw * self._ramp[:32]
            up *= (scale[tokens] / 512)[:, None]
            inner = up[:, :16] * np.minimum(np.maximum(up[:, :16] + 3, 0), 6) * up[:, 16:]
            most = np.maximum(_most(inner), 2.0**-30)
            z = np.rint(inner * (127 / most)[:, None]).astype(np.float32)
            down = _by_expert(z, own.second[group.start : group.stop], ends)
            y = down * self._ramp
            y *= (most * 0.0088)[:, None]
            np.rint(y, out=y)
            answers[where] = np.clip(y, -32767, 32767, out=y)
        return answers

    def _choose(self, own: _Layer, x: F32, scale: F64) -> tuple[I64, I64]:
        score = self._scores(x @ own.gate, scale)
        best = self._best(score + own.bias)
        score = np.take_along_axis(score, best, axis=1)
        top_k = self._settings.top_k
        part = score * (10240 // top_k) // score.sum(axis=1)[:, None]
        return best, part * top_k + 1 + np.arange(top_k)

    def _scores(self, logits: F32, scale: F64) -> I64:
        index = np.rint(logits.astype(np.float64) * (scale * 0.64)[:, None] - 768)
        return self._sigmoid[np.clip(index, -2048, 2047).astype(np.int64) + 2048].astype(np.int64)

    def _best(self, score: I64) -> I64:
        """Ids of the top_k best of the best groups, best first; equal ones by lower id."""
        model, experts = self._settings, score.shape[1]
        grouped = np.sort(score.reshape(len(score), model.groups, -1), axis=2)
        group = grouped[:, :, -2:].sum(axis=2) * model.groups - np.arange(model.groups)
        least = np.sort(group, axis=1)[:, -model.top_groups]
        inside = np.repeat(group >= least[:, None], experts // model.groups, axis=1)
        key = np.where(inside, score * experts - np.arange(experts), -(2**60))
        top = np.partition(key, -model.top_k, axis=1)[:, -model.top_k :]
        best: I64 = -np.sort(top, axis=1)[:, ::-1] % experts
        return best

    def _bias(self, layer: int | str, skew: str) -> I64:
        """The vector that gives the experts the loads that ``skew`` asks for (``exact_skew``)."""
        experts, tokens = self._settings.routed_experts, 512
        bias = np.zeros(experts, dtype=np.int64)
        if skew == "uniform":
            return bias
        visits = tokens * self._settings.top_k
        wanted = np.array([min(tokens, round(visits * part)) for part in _loads(skew, experts)])
        x = _weights(f"calibration {layer}", tokens, 64)
        scale = 1 / np.sqrt(np.square(x.astype(np.float64)).sum(axis=1) / 64)
        score = self._scores(x @ _weights(f"gate {layer}", 64, experts), scale)
        for round_ in range(108):
            found = np.bincount(self._best(score + bias).ravel(), minlength=experts)
            bias = bias + np.sign(wanted - found) * (4096 >> (round_ // 12))
            bias = np.clip(bias, -65535, 65535)
        return bias

    def tokens(self, h: F64, w: U64) -> U64:
        x, scale = self._norm(h)
        logits = (x @ self._head).astype(np.float64) * (scale * 0.105)[:, None]
        index = np.clip(np.rint(logits), -512, 511).astype(np.int64)
        ends = np.cumsum(self._exp[index + 512], axis=1).astype(np.int64)
        drawn = (mix(w + u64(_number("sample"))) >> u64(28)).astype(np.int64)
        passed = ends <= (drawn * ends[:, -1] >> 36)[:, None]
        tokens: U64 = passed.sum(axis=1).astype(np.uint64)
        return tokens


def _exps(scores: F32) -> F32:
    """(1 + z / 16)^16 times 255, in float32, in place."""
    scores *= np.float32(2**-18)
    scores += np.float32(0.85)
    np.clip(scores, np.float32(0.7), np.float32(1), out=scores)
    for _ in range(4):
        np.multiply(scores, scores, out=scores)
    scores *= np.float32(255)
    return np.rint(scores, out=scores)


def _most(values: F64) -> F64:
    """The largest size in each row: halves against each other, as rows are short."""
    sizes = np.abs(values)
    while sizes.shape[1] > 1:
        half = sizes.shape[1] // 2
        sizes = np.maximum(sizes[:, :half], sizes[:, half:])
    return sizes[:, 0]


def _fold(sums: npt.NDArray[Any], odd: U64) -> U64:
    """Exact sums [n, m] times odd words, modulo 2^64."""
    folded: U64 = sums.astype(np.int64).astype(np.uint64) @ odd
    return folded


def _by_expert(x: F32, weights: F32, ends: list[int]) -> F32:
    parts = np.split(x, ends[:-1])
    return np.concatenate([part @ own for part, own in zip(parts, weights, strict=True)])


def _loads(skew: str, experts: int) -> list[float]:
    """The share of all visits that each expert is to have."""
    kind, *numbers = skew.split(":")
    if kind == "zipf":
        parts = [(rank + 1) ** -float(numbers[0]) for rank in range(experts)]
        return [part / sum(parts) for part in parts]
    hot, factor = (int(numbers[0]), float(numbers[1])) if kind == "hot" else (0, 0.0)
    chosen = [index * experts // hot for index in range(hot)]
    rest = (1 - hot * factor / experts) / (experts - hot)
    return [factor / experts if expert in chosen else rest for expert in range(experts)]
