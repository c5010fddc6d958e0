"""How decode goes about its steps in one run: micro-batches and drafts, as the options say. Pure.

Owns these settings. Tokens, seals and receipts depend on none of them; times and messages do.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Literal

import msgspec

from nodes.serving.cost import Microbatch

Graphs = Literal["fused", "naive"]


class Decoding(msgspec.Struct, frozen=True, kw_only=True):
    """The same in every process of a run."""

    microbatch: Microbatch = "off"
    """The paper has it on at 24 sequences per NPU and more, off at 8 (arXiv 2506.12708, 3.3)."""
    drafts: int = 0
    """Tokens of the MTP layer that each step verifies beside the last one: 0 or 1."""
    accept: str = "0.7"
    """How many of the drafts are right, an exact number as text: 70 % (same, 3.4 [V2])."""
    graphs: Graphs = "fused"
    """naive: a step is a graph for the model and one for each draft, each with a bubble before it."""
    seed: int = 0
    """Of the coins that decide which drafts are right."""

    @property
    def queries(self) -> int:
        """Tokens of a sequence in a step."""
        return 1 + self.drafts

    @property
    def parts(self) -> int:
        """Micro-batches of a step."""
        return 2 if self.microbatch == "on" else 1

    @property
    def chance(self) -> Fraction:
        """``accept`` as a number."""
        return Fraction(self.accept)


PLAIN = Decoding()
"""Neither micro-batches nor drafts."""
