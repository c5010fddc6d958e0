"""Figures of the paper that stand beside ours in a report, and whether ours could have missed them.

Owns these few figures, each with what it was measured with, and the mark *fitted* (a constant of ours
was chosen with this very figure) or *predicted*. Does not own the constants (``constants``). "Paper"
is CloudMatrix384, arXiv 2506.12708; [V2] is confirmed by two independent readings of it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from cmnet.units import PS_PER_S

US = PS_PER_S // 10**6


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One published figure."""

    value: int
    """Picoseconds, or tokens per second and NPU."""
    source: str
    differs: str
    """What is not as it was there."""
    mark: Literal["fitted", "predicted"]


DISPATCH = Figure(
    value=152 * US,
    source="paper, table 6: EP256, 128 tokens a die [V2]; EP320 not published",
    differs="the operator's start per token is derived from this figure; load is the trace's",
    mark="fitted",
)
COMBINE = Figure(
    value=149 * US,
    source="paper, table 6: EP256, 128 tokens a die [V2]; EP320 not published",
    differs="the operator's start per token is derived from this figure; load is the trace's",
    mark="fitted",
)
TTFT = Figure(
    value=2_532_000 * US,
    source="paper, section on reuse: 861 ms saved are 34 %; prompts of 4,096, none reused [V2]",
    differs="derived from two printed figures; here prompts, reuse and queueing are the trace's",
    mark="predicted",
)
TPOT = Figure(
    value=49_400 * US,
    source="paper, table 4: 96 sequences per NPU, 4,096 + 256 tokens, MTP 1.7 tokens a step [V2]",
    differs="two constants are fitted to such figures; here MTP is the options', load the trace's",
    mark="fitted",
)
DECODE_SPEED = Figure(
    value=1943,
    source="paper, table 3: 96 sequences per NPU, 4,096 tokens of KV [V2]",
    differs="there every place is taken; here arrivals set the load",
    mark="fitted",
)
PREFILL_SPEED = Figure(
    value=5655,
    source="paper, table 2: prompts of 4,096, 16,384 tokens per NPU and batch, default EPLB [V2]",
    differs="the hottest expert's load is fitted to it; here arrivals set the load",
    mark="fitted",
)
