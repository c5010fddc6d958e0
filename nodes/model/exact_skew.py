"""Which experts are loaded how much: bias vectors of the gate, made by the gate's own mechanism.

A bias is added to an expert's score for the choice only (DeepSeek-V3 report, section 2.1.2), so a
skew changes where tokens go and nothing of how they are weighed. ``uniform`` is no bias: the loads
that the weights give. ``balanced``, ``zipf:S`` and ``hot:K:X`` (K experts with X times the mean
load) are calibrated on fixed random tokens by b += step * sign(wanted - found), as in training.
Does not own the gate.
"""

from __future__ import annotations

import numpy as np

from nodes.model import exact_tables as t
from nodes.model.body import I64
from nodes.model.exact_plain import choose
from nodes.settings import ModelSettings

TOKENS = 512
"""Of the calibration: 16 visits an expert in the mean."""
STEPS = tuple(4096 >> (i // 12) for i in range(108))
"""From a sixteenth of a score's range down to a step that moves no choice."""


def biases(settings: ModelSettings, skew: str) -> list[I64]:
    """One bias vector a layer, the MTP layer's last. ValueError says what would be right."""
    names = t.layer_names(settings)
    if skew == "uniform":
        return [np.zeros(settings.routed_experts, dtype=np.int64) for _ in names]
    loads = wanted(settings, skew)
    return [_calibrated(settings, loads, name) for name in names]


def wanted(settings: ModelSettings, skew: str) -> I64:
    """Visits of each expert that are asked for, of ``TOKENS`` tokens."""
    count = settings.routed_experts
    shares = _shares(skew, count)
    visits = TOKENS * settings.top_k
    return np.array([min(TOKENS, round(visits * share)) for share in shares], dtype=np.int64)


def _shares(skew: str, count: int) -> list[float]:
    match skew.split(":"):
        case ["balanced"]:
            return [1 / count] * count
        case ["zipf", exponent] if _is_number(exponent):
            parts = [(rank + 1) ** -float(exponent) for rank in range(count)]
            return [part / sum(parts) for part in parts]
        case ["hot", hot, factor] if hot.isdecimal() and _is_number(factor):
            return _hot(int(hot), float(factor), count)
    raise ValueError("'uniform', 'balanced', 'zipf:S' or 'hot:K:X' (K experts at X times the mean)")


def _hot(hot: int, factor: float, count: int) -> list[float]:
    """The hot ones are spread over the groups: ids i * count // hot."""
    if not 0 < hot < count or hot * factor > count:
        raise ValueError(f"'hot:K:X' with 0 < K < {count} and K x X at most {count}")
    ids = {index * count // hot for index in range(hot)}
    rest = (1 - hot * factor / count) / (count - hot)
    return [factor / count if expert in ids else rest for expert in range(count)]


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdecimal() and float(text) <= 1000


def _calibrated(settings: ModelSettings, loads: I64, layer: int | str) -> I64:
    scores = _scores(settings, layer)
    bias = np.zeros(settings.routed_experts, dtype=np.int64)
    for step in STEPS:
        chosen = choose(scores + bias, settings.groups, settings.top_groups, settings.top_k)
        found = np.bincount(chosen.ravel(), minlength=len(bias))
        bias += step * np.sign(loads - found)
        np.clip(bias, -65535, 65535, out=bias)
    return bias


def _scores(settings: ModelSettings, layer: int | str) -> I64:
    """Scores of fixed random tokens: what the gate sees of states whose values are independent."""
    x = t.signed(f"calibration {layer}", TOKENS, t.HIDDEN)
    logits = (x @ t.signed(f"gate {layer}", t.HIDDEN, settings.routed_experts)).astype(np.float64)
    scale = 1 / np.sqrt((x.astype(np.float64) ** 2).sum(axis=1) / t.HIDDEN)
    index = np.rint(logits * (scale * t.GATE_SCALE)[:, None] - t.GATE_SHIFT)
    scores: I64 = t.sigmoid_table()[np.clip(index, -2048, 2047).astype(np.int64) + 2048]
    return scores
