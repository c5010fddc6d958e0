"""Every number that the times of computation rest on, with its kind and source.

Owns the one list, CONSTANTS. Does not own formulas (``nodes.serving.cost``,
``nodes.moe.operators``) nor the machine's links (topologies).
At most 9 numbers of the product may be fitted; 8 are, here: three of the exchange (an offset for each
operator, one growth with EP), the two overheads of a decode layer, the
load of the hottest expert, the rest of a prefill batch and the hidden share of its exchange. More
cannot be told apart from what is published (three directions for decode, two and the load for
prefill). "Paper" below is CloudMatrix384, arXiv 2506.12708.
"""

from __future__ import annotations

import msgspec

from cmnet.topology.quantity import Kind


class Constant(msgspec.Struct, frozen=True):
    """One number. ``range`` says what was tried, for what is fitted or assumed."""

    name: str
    value: float
    unit: str
    kind: Kind
    source: str
    range: tuple[float, float] | None = None


BF16_SPEED = Constant(
    "bf16_speed", 376e12, "FLOP/s per die", Kind.PUBLISHED, "paper, MLA table: 246 / 65.4 %"
)
INT8_SPEED = Constant(
    "int8_speed", 752e12, "OP/s per die", Kind.DERIVED, "paper: 5,655 tok/s / 3.76 per TFLOPS, / 2"
)
HBM_RATE = Constant("hbm_rate", 1.6e12, "B/s per die", Kind.PUBLISHED, "paper, hardware section")
MLA_COMPUTE_SHARE = Constant(
    "mla_compute_share", 0.654, "of bf16_speed", Kind.PUBLISHED, "paper, MLA table, compute bound"
)
MEMORY_SHARE = Constant(
    "memory_share", 0.841, "of hbm_rate", Kind.PUBLISHED, "paper, MLA table, memory bound"
)
GEMM_SHARE = Constant(
    "gemm_share",
    0.80,
    "of int8_speed",
    Kind.DERIVED,
    "paper, GEMM table: middle of 77.4 and 82.7 %",
)

HEADS = Constant("heads", 128, "per layer", Kind.PUBLISHED, "DeepSeek-V3, arXiv 2412.19437, 4.2")
ABSORBED_DIMENSIONS = Constant(
    "absorbed_dimensions",
    1088,
    "per head",
    Kind.DERIVED,
    "scores 512 + 64, values 512 (absorbed MLA)",
)
PLAIN_DIMENSIONS = Constant(
    "plain_dimensions", 320, "per head", Kind.DERIVED, "scores 128 + 64, values 128 (plain MLA)"
)
KV_BYTES = Constant(
    "kv_bytes", 1152, "B per token and layer", Kind.DERIVED, "(512 latent + 64 rope) x 2 B, BF16"
)
ATTENTION_WEIGHTS = Constant(
    "attention_weights",
    187_105_280,
    "per layer",
    Kind.DERIVED,
    "DeepSeek-V3: 7168x1536 + 1536x24576 + 7168x576 + 512x32768 + 16384x7168",
)
EXPERT_WEIGHTS = Constant(
    "expert_weights", 44_040_192, "per expert", Kind.DERIVED, "DeepSeek-V3: 3 x 7168 x 2048"
)
DENSE_WEIGHTS = Constant(
    "dense_weights", 396_361_728, "per dense layer", Kind.DERIVED, "DeepSeek-V3: 3 x 7168 x 18432"
)
HEAD_WEIGHTS = Constant(
    "head_weights", 926_679_040, "LM head", Kind.DERIVED, "DeepSeek-V3: 129280 x 7168, INT8"
)

UB_WRITE_RATE = Constant(
    "ub_write_rate",
    135e9,
    "B/s per die",
    Kind.PUBLISHED,
    "paper, table 1, NPU-NPU write between nodes",
)
DISPATCH_START = Constant(
    "dispatch_start", 17e-6, "s", Kind.DERIVED, "xDeepServe, arXiv 2508.02520, figure 6: 20 us at 4"
)
DISPATCH_TOKEN = Constant(
    "dispatch_token",
    0.365e-6,
    "s per token",
    Kind.FITTED,
    "paper, table 6, EP8 and EP256 at batch 128: the offset of dispatch, after dispatch_start",
    (0.3e-6, 0.45e-6),
)
COMBINE_START = Constant(
    "combine_start", 11e-6, "s", Kind.DERIVED, "xDeepServe, arXiv 2508.02520, figure 6: 25 us at 4"
)
COMBINE_TOKEN = Constant(
    "combine_token",
    0.052e-6,
    "s per token",
    Kind.FITTED,
    "paper, table 6, EP8 and EP256 at batch 128: the offset of combine, after combine_start",
    (0.0, 0.1e-6),
)
EXCHANGE_GROWTH = Constant(
    "exchange_growth",
    0.0245e-6,
    "s per token and doubling of EP beyond 8",
    Kind.FITTED,
    "paper, table 6, EP8 and EP256: growth that links do not explain, cause unknown",
    (0.02e-6, 0.04e-6),
)
UNFUSED_LAUNCH = Constant(
    "unfused_launch",
    50e-6,
    "s per exchange",
    Kind.ASSUMED,
    "paper says only that dynamic shapes cost an allocation and a CPU-NPU synchronisation each",
    (10e-6, 800e-6),
)
ATTENTION_CORES = Constant(
    "attention_cores", 16 / 24, "of AIC", Kind.PUBLISHED, "paper, micro-batch pipeline, stream 0"
)
MOE_CORES = Constant(
    "moe_cores", 8 / 24, "of AIC", Kind.PUBLISHED, "paper, micro-batch pipeline, stream 1"
)
PREFILL_DISPATCH_RATE = Constant(
    "prefill_dispatch_rate", 98e9, "B/s per die", Kind.PUBLISHED, "StrataCL, arXiv 2607.26444, EP32"
)
PREFILL_COMBINE_RATE = Constant(
    "prefill_combine_rate", 85e9, "B/s per die", Kind.PUBLISHED, "StrataCL, arXiv 2607.26444, EP32"
)
PREFILL_GATHER_EXPOSED = Constant(
    "prefill_gather_exposed",
    0.0,
    "of the SP-TP-SP exchanges",
    Kind.ASSUMED,
    "exposed they cost 0.6 s a batch and the published throughput is 21 % away",
    (0.0, 1.0),
)

GRAPH_LAUNCH = Constant(
    "graph_launch",
    0.7e-3,
    "s per graph of a step with drafts, naive",
    Kind.DERIVED,
    "paper, MTP: 0.6 to 0.8 ms of CPU-NPU bubble; the middle",
    (0.6e-3, 0.8e-3),
)

LAYER_OVERHEAD = Constant(
    "layer_overhead",
    70.9e-6,
    "s per layer and stream",
    Kind.FITTED,
    "ten published decode figures, with token_overhead, hottest_expert given",
    (50e-6, 90e-6),
)
TOKEN_OVERHEAD = Constant(
    "token_overhead",
    1.34e-6,
    "s per token and layer",
    Kind.FITTED,
    "ten published decode figures, with layer_overhead, hottest_expert given",
    (1.0e-6, 2.0e-6),
)
HOTTEST_EXPERT = Constant(
    "hottest_expert",
    1.51,
    "of the mean load",
    Kind.FITTED,
    "paper, prefill: 5,655 with default against 6,688 tok/s per NPU with perfect EPLB",
    (1.0, 1.6),
)
PREFILL_REST = Constant(
    "prefill_rest",
    0.879,
    "s per batch of 8,192 tokens per die",
    Kind.FITTED,
    "Ascend's own figure for 32 dies, 64 prompts of 4K: 3,128 ms",
    (0.879, 0.899),
)
PREFILL_HIDDEN = Constant(
    "prefill_hidden",
    0.656,
    "of dispatch and combine",
    Kind.FITTED,
    "the same with two micro-batches: 2,512 ms",
    (0.5, 0.8),
)

CONSTANTS: tuple[Constant, ...] = tuple(
    value for value in list(globals().values()) if isinstance(value, Constant)
)
"""All of the above, in this order."""
