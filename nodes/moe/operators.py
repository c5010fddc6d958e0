"""How long the operators of dispatch and combine take beside their links. Pure.

Owns what a rank's operator costs before its first write, between writes, and after its last flag is here.
Does not own the links (messages are real) nor the numbers (``nodes.constants``: three are fitted).

    dispatch   start, then a pipeline of three stages per token: (a) copy from memory, (b) quantise to INT8,
               (c) write to each expert; a and b of a token overlap c of those before it
               ... flags of all sources are here: prefix sums and the copy of each row to its expert
    combine    start, then each result row is copied and written
               ... flags of all experts are here: weighted sum of each token

The last terms grow with the group by a fitted amount whose cause is unknown (fidelity: of the published
growth of 36 and 31 us from EP 8 to 256, links and imbalance explain about 11 and 20).
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from nodes import constants as c
from nodes.model.body import I64
from nodes.settings import ModelSettings

GROWTH_FROM = 8
"""EP degree from which the growth counts: the smallest that was published."""


class Operators(msgspec.Struct, frozen=True, kw_only=True):
    """Times of one rank's operators in a group of ``ep_size``."""

    ep_size: int
    model: ModelSettings = ModelSettings()
    engine_start_ps: int = 0
    """Of the engine that writes: 0 for the cores, more for SDMA (topology)."""
    unfused: bool = False

    @property
    def launch_ps(self) -> int:
        """Each exchange of the unfused flow: memory of a dynamic shape, and CPU and NPU in step."""
        return _ps(c.UNFUSED_LAUNCH.value) if self.unfused else 0

    @property
    def dispatch_start_ps(self) -> int:
        """From the operator's begin to its first stage."""
        return _ps(c.DISPATCH_START.value) + self.engine_start_ps + self.launch_ps

    @property
    def combine_start_ps(self) -> int:
        """As ``dispatch_start_ps``."""
        return _ps(c.COMBINE_START.value) + self.engine_start_ps + self.launch_ps

    @property
    def starts_ps_max(self) -> int:
        """The longer start."""
        return max(self.dispatch_start_ps, self.combine_start_ps)

    def tokens_ready_ps(self, tokens: int) -> I64:
        """When each token [tokens] may be written, from the first stage on: stages a and b done."""
        copy_ps, quantise_ps = self._copy_ps(), self._quantise_ps()
        pace_ps = max(copy_ps, quantise_ps)
        return copy_ps + quantise_ps + pace_ps * np.arange(tokens, dtype=np.int64)

    def results_ready_ps(self, rows: int) -> I64:
        """When each result row [rows] may be written, from the first copy on."""
        return self._copy_ps() * (1 + np.arange(rows, dtype=np.int64))

    def reorder_ps(self, rows: float) -> int:
        """Prefix sums and reordering of so many rows, after the last flag of a dispatch."""
        return _ps(rows * self._token_s(c.DISPATCH_TOKEN.value) / self.model.top_k)

    def sum_ps(self, tokens: float) -> int:
        """The weighted sums of so many tokens, after the last flag of a combine."""
        return _ps(tokens * self._token_s(c.COMBINE_TOKEN.value))

    def _token_s(self, at_smallest: float) -> float:
        doublings = max(math.log2(self.ep_size / GROWTH_FROM), 0.0)
        return at_smallest + c.EXCHANGE_GROWTH.value * doublings

    def _copy_ps(self) -> int:
        """One token in BF16 from memory."""
        return _ps(self.model.combine_bytes / (c.HBM_RATE.value * c.MEMORY_SHARE.value))

    def _quantise_ps(self) -> int:
        """One token to INT8, within the cores: assumed to take as long as its copy, no more."""
        return self._copy_ps()


def _ps(seconds: float) -> int:
    return round(seconds * 1e12)
