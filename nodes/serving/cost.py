"""How long prefill and decode compute: a roofline with published utilisations and five fitted numbers.

Owns the formulas; ``constants`` owns the numbers. Does not own the links: a *carried* layer's dispatch
and combine are real messages, and only their operators' start is charged here; the closed forms of
whole layers stand for layers that are not carried. Per die throughout. Only + - * / and max of
floats, each correctly rounded, then one rounding to picoseconds: the same integers everywhere.

Decode, s sequences and t tokens per die, k KV tokens read in all (FA = attention proper, PROJ = its
projections, EXP = experts, o and a = fitted overheads):

    attention = max(FA compute, FA memory) + max(PROJ compute, PROJ weights) + o + a t
    expert    = max(EXP compute, EXP weights) + o
    layer     = attention + dispatch + expert + combine                  without micro-batches
    layer     = 2 max(attention, dispatch + expert + combine)            with two, on their share of cores
    step      = MoE layers and MTP layers + attention of the dense layers + one LM head a query

The feed-forward part of the three dense layers is left out of decode (1 to 3 % of a step).

Prefill of one batch on an instance, n new and c cached tokens a request (arXiv 2506.12708 and Ascend's
own 3,128 ms without and 2,512 ms with micro-batches fix the last two terms):

    GEMM at 80 % + causal attention at 65.4 % + exposed dispatch and combine + rest
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from nodes import constants as c
from nodes.moe.operators import Operators
from nodes.settings import ModelSettings

Microbatch = Literal["on", "off"]
RestPer = Literal["batch", "token"]

HOT_BY_EPLB = {"on": c.HOTTEST_EXPERT.value, "perfect": 1.0}
"""Load of the hottest expert over the mean, by ``--eplb``."""

PREFILL_DIE_TOKENS = 8192
"""Tokens per die of the batch that ``constants.PREFILL_REST`` was measured with."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What one decode die has to do in one step."""

    sequences: float
    queries: int
    """Tokens of each sequence: 1 and its drafts."""
    kv_tokens: float
    """KV tokens of all sequences together."""

    @property
    def tokens(self) -> float:
        return self.sequences * self.queries

    def halved(self) -> Load:
        """One of two micro-batches."""
        return Load(
            sequences=self.sequences / 2, queries=self.queries, kv_tokens=self.kv_tokens / 2
        )


class DecodeCost(msgspec.Struct, frozen=True, kw_only=True):
    """Times of one decode die in an expert-parallel group of ``dies``."""

    dies: int
    model: ModelSettings = ModelSettings()
    layer_overhead: float = c.LAYER_OVERHEAD.value
    token_overhead: float = c.TOKEN_OVERHEAD.value
    hottest_expert: float = c.HOTTEST_EXPERT.value

    def attention_ps(self, load: Load, *, microbatch: Microbatch = "off") -> int:
        """Attention stream of one layer: projections, attention, overheads. With micro-batches,
        ``load`` is of one of them."""
        cores = c.ATTENTION_CORES.value if microbatch == "on" else 1.0
        return _ps(self._attention(load, cores=cores))

    def expert_ps(
        self, *, rows: float, experts: int | None = None, microbatch: Microbatch = "off"
    ) -> int:
        """Experts of this die in one layer, for so many rows received (a token once per expert).

        ``experts``: how many of the die's experts had a row; all by default. Weights of an expert
        without rows are not read.
        """
        cores = c.MOE_CORES.value if microbatch == "on" else 1.0
        return _ps(self._expert(rows=rows, experts=experts, cores=cores))

    def dispatch_ps(self, tokens: float) -> int:
        """Dispatch of a layer that is not carried: operator and the hottest die's port."""
        operators = self._operators()
        beside = operators.dispatch_start_ps + operators.reorder_ps(tokens * self.model.top_k)
        return beside + _ps(self._link(tokens, self.model.dispatch_bytes))

    def combine_ps(self, tokens: float) -> int:
        """Combine of a layer that is not carried."""
        operators = self._operators()
        beside = operators.combine_start_ps + operators.sum_ps(tokens)
        return beside + _ps(self._link(tokens, self.model.combine_bytes))

    def _operators(self) -> Operators:
        return Operators(ep_size=self.dies, model=self.model)

    def layer_ps(self, load: Load, *, microbatch: Microbatch) -> int:
        """One MoE layer that is not carried."""
        if microbatch == "on":
            half = load.halved()
            attention_ps = self.attention_ps(half, microbatch="on")
            return 2 * max(attention_ps, self._moe_ps(half, cores=c.MOE_CORES.value))
        return self.attention_ps(load) + self._moe_ps(load, cores=1.0)

    def head_ps(self, queries: int) -> int:
        """The LM heads of one step, one for the model and one for each draft; weights bound."""
        return _ps(queries * _weights_s(c.HEAD_WEIGHTS.value))

    def launches_ps(self, queries: int, *, graphs: Literal["fused", "naive"]) -> int:
        """Before a step with drafts: a bubble for each of its graphs, or none where metadata are made
        once a step and sampling is in the graph."""
        bubbles = queries if graphs == "naive" and queries > 1 else 0
        return bubbles * _ps(c.GRAPH_LAUNCH.value)

    def step_overhead_ps(self, load: Load) -> int:
        """A step's part that no MoE layer has: dense layers' attention and the LM heads."""
        return self.model.dense_layers * self.attention_ps(load) + self.head_ps(load.queries)

    def layers(self, queries: int) -> int:
        """MoE layers of one step: the model's, and one MTP layer for each draft."""
        return self.model.moe_layers + queries - 1

    def step_ps(self, load: Load, *, microbatch: Microbatch) -> int:
        """One step with no layer carried."""
        layers_ps = self.layers(load.queries) * self.layer_ps(load, microbatch=microbatch)
        return layers_ps + self.step_overhead_ps(load)

    def _attention(self, load: Load, *, cores: float) -> float:
        pairs = load.queries * load.kv_tokens
        compute = pairs * c.HEADS.value * c.ABSORBED_DIMENSIONS.value * 2 / _mla_speed()
        core = max(compute, load.kv_tokens * c.KV_BYTES.value / _memory_rate())
        projections = _gemm_s(load.tokens * c.ATTENTION_WEIGHTS.value) / cores
        overhead = self.layer_overhead + self.token_overhead * load.tokens / cores
        return core / cores + max(projections, _weights_s(c.ATTENTION_WEIGHTS.value)) + overhead

    def _expert(self, *, rows: float, experts: int | None, cores: float) -> float:
        held = experts_per_die(self.model, self.dies) if experts is None else experts
        compute = _gemm_s(rows * c.EXPERT_WEIGHTS.value)
        longest = max(compute, _weights_s(held * c.EXPERT_WEIGHTS.value))
        return longest / cores + self.layer_overhead

    def _moe_ps(self, load: Load, *, cores: float) -> int:
        tokens = load.tokens
        expert_ps = _ps(self._expert(rows=self._hot_rows(tokens), experts=None, cores=cores))
        return self.dispatch_ps(tokens) + expert_ps + self.combine_ps(tokens)

    def _hot_rows(self, tokens: float) -> float:
        visited = self.model.top_k + self.model.shared_experts
        return visited * tokens * self.hottest_expert

    def _link(self, tokens: float, message_bytes: int) -> float:
        return self._hot_rows(tokens) * message_bytes / c.UB_WRITE_RATE.value


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a prefill batch."""

    new_tokens: int
    cached_tokens: int = 0
    """Leading tokens whose KV rows are there already."""


class PrefillTime(msgspec.Struct, frozen=True, kw_only=True):
    """One prefill batch, by what the time goes to."""

    gemm_ps: int
    attention_ps: int
    exchange_ps: int
    """Dispatch and combine, the part that computation does not hide."""
    rest_ps: int

    @property
    def total_ps(self) -> int:
        return self.gemm_ps + self.attention_ps + self.exchange_ps + self.rest_ps


class PrefillCost(msgspec.Struct, frozen=True, kw_only=True):
    """Times of one prefill instance of ``dies`` (32 in the paper), SP-TP-SP and expert parallel.

    ``rest_per`` says what the fitted rest belongs to, which no published figure tells apart: a
    *batch* (then no TTFT is below 0.9 s) or a *token*, cached ones included (then it vanishes for
    short prompts). Reports print the choice.
    """

    dies: int
    model: ModelSettings = ModelSettings()
    hottest_expert: float = c.HOTTEST_EXPERT.value
    rest_per: RestPer = "batch"

    def batch_time(self, prompts: Sequence[Prompt], *, microbatch: Microbatch) -> PrefillTime:
        """A batch of whole prompts, packed and padded to a multiple of the dies."""
        new = -(-sum(prompt.new_tokens for prompt in prompts) // self.dies)
        hidden = c.PREFILL_HIDDEN.value if microbatch == "on" else 0.0
        return PrefillTime(
            gemm_ps=_ps(self._gemm(new)),
            attention_ps=_ps(self._attention(prompts)),
            exchange_ps=_ps(self._exchange(new) * (1.0 - hidden)),
            rest_ps=_ps(self._rest(prompts)),
        )

    def prefill_ps(self, prompts: Sequence[Prompt], *, microbatch: Microbatch = "on") -> int:
        """The whole time of one batch."""
        return self.batch_time(prompts, microbatch=microbatch).total_ps

    def _gemm(self, new: int) -> float:
        model = self.model
        visited = model.shared_experts + model.top_k * self.hottest_expert
        every_token = self._attention_and_dense_weights()
        compute = new * (every_token + model.moe_layers * visited * c.EXPERT_WEIGHTS.value)
        experts = model.moe_layers * experts_per_die(self.model, self.dies)
        return max(_gemm_s(compute), _weights_s(every_token + experts * c.EXPERT_WEIGHTS.value))

    def _attention_and_dense_weights(self) -> float:
        layers = self.model.moe_layers + self.model.dense_layers
        dense = self.model.dense_layers * c.DENSE_WEIGHTS.value
        return layers * c.ATTENTION_WEIGHTS.value + dense

    def _attention(self, prompts: Sequence[Prompt]) -> float:
        """Causal: a token sees those before it. Heads are split over the dies."""
        twice_pairs = sum(p.new_tokens * (2 * p.cached_tokens + p.new_tokens) for p in prompts)
        layers = self.model.moe_layers + self.model.dense_layers
        heads = -(-int(c.HEADS.value) // self.dies)
        return layers * heads * twice_pairs * c.PLAIN_DIMENSIONS.value / _mla_speed()

    def _exchange(self, new: int) -> float:
        """Dispatch and combine of all layers, the hottest die's port."""
        messages = new * self.model.top_k * self.model.moe_layers * self.hottest_expert
        dispatch = messages * self.model.dispatch_bytes / c.PREFILL_DISPATCH_RATE.value
        return dispatch + messages * self.model.combine_bytes / c.PREFILL_COMBINE_RATE.value

    def _rest(self, prompts: Sequence[Prompt]) -> float:
        if self.rest_per == "batch":
            return c.PREFILL_REST.value
        tokens = sum(prompt.new_tokens + prompt.cached_tokens for prompt in prompts)
        return c.PREFILL_REST.value * tokens / (self.dies * PREFILL_DIE_TOKENS)


def experts_per_die(model: ModelSettings, dies: int) -> int:
    """The most experts that a die of the group holds, at least 1 (replicas fill the rest)."""
    return -(-(model.routed_experts + model.shared_experts) // dies)


def _ps(seconds: float) -> int:
    return round(seconds * 1e12)


def _mla_speed() -> float:
    return c.BF16_SPEED.value * c.MLA_COMPUTE_SHARE.value


def _memory_rate() -> float:
    return c.HBM_RATE.value * c.MEMORY_SHARE.value


def _gemm_s(multiplications: float) -> float:
    """INT8 GEMM of so many multiply-adds."""
    return 2 * multiplications / (c.INT8_SPEED.value * c.GEMM_SHARE.value)


def _weights_s(weights: float) -> float:
    """Reading so many INT8 weights from memory once: the floor of any GEMM."""
    return weights / _memory_rate()
