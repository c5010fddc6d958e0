"""The oracle of layers of experts alone: the seal that each token must have after each of them.

Tokens begin as prompt rows do and go from the gate of one layer to the gate of the next, without
attention: what a run of dispatch and combine alone does with them. So tokens of equal content keep equal
values and differ in their seals only: gate scores, choices and answers are computed once for each content,
and per token no more than its seal. Owns that memory. Does not own the steps: they are those of the two
oracles, whose plain code shares nothing with what it checks.
"""

from __future__ import annotations

from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from nodes.model import oracle
from nodes.model.exact_oracle_model import Content, Model
from nodes.settings import ModelSettings

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]

PACK_CONTENTS = 4096
"""Contents that go through a layer at once: some 140 rows an expert."""
PACK_TOKENS = 2048
"""Tokens whose seals are folded at once: 9 words each are 150 KB, in a core's cache."""


class Layers(Protocol):
    """Tokens and their seals."""

    def seals(self, layer: int) -> U64:
        """Seals [tokens] after this layer; computed when first asked for, with those before it."""


def make(
    body: Literal["exact", "seal"],
    settings: ModelSettings,
    *,
    seeds: U64,
    places: I64,
    skew: str = "uniform",
) -> Layers:
    """Tokens of these contents at these places, of the model with this body. Only the exact one has
    a ``skew`` (``exact_skew``)."""
    if body == "exact":
        return ExactLayers(settings, seeds=seeds, places=places, skew=skew)
    assert skew == "uniform", "a body of seals has no biases"
    return SealLayers(settings, seeds=seeds, places=places)


class ExactLayers:
    """Of the exact model."""

    def __init__(
        self, settings: ModelSettings, *, seeds: U64, places: I64, skew: str = "uniform"
    ) -> None:
        self._model = Model(settings, skew)
        contents, self._content_of = np.unique(seeds, return_inverse=True)
        none = np.empty(0, dtype=np.uint64)
        self._values, _ = self._model.start(contents, none, np.zeros(len(contents), dtype=np.int64))
        _, first = self._model.start(seeds, none, places)
        self._seals = [first]

    def seals(self, layer: int) -> U64:
        """See ``Layers``."""
        while len(self._seals) <= layer + 1:
            self._go_on(len(self._seals) - 1)
        return self._seals[layer + 1]

    def _go_on(self, layer: int) -> None:
        before = self._seals[-1]
        if not len(before):
            self._seals.append(before)
            return
        packs = range(0, len(self._values), PACK_CONTENTS)
        values = [self._values[i : i + PACK_CONTENTS] for i in packs]
        content = _joined([self._model.content(layer, each) for each in values])
        after = np.empty_like(before)
        for start in range(0, len(before), PACK_TOKENS):
            some = slice(start, start + PACK_TOKENS)
            after[some] = content.seals(before[some], self._content_of[some])
        self._values = content.h
        self._seals.append(after)


class SealLayers:
    """Of the model of seals alone: a seal is all that a token has, so nothing is shared."""

    def __init__(self, settings: ModelSettings, *, seeds: U64, places: I64) -> None:
        self._model = oracle.Model(settings)
        none = np.empty(0, dtype=np.uint64)
        self._seals = [self._model.start(seeds, none, places.astype(np.uint64))]

    def seals(self, layer: int) -> U64:
        """See ``Layers``."""
        while len(self._seals) <= layer + 1:
            before = self._seals[-1]
            layer_before = len(self._seals) - 1
            after = self._model.experts(layer_before, before) if len(before) else before
            self._seals.append(after)
        return self._seals[layer + 1]


def _joined(parts: list[Content]) -> Content:
    if len(parts) == 1:
        return parts[0]
    names = Content.__struct_fields__
    return Content(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))
