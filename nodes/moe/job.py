"""What one ``moe`` run is: the group, its tokens and how they travel; the same object in every process.

Owns the job and the contents that its tokens have. Does not own how it is made of options and a machine
(``setup``) nor what carries it out (``program``).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from nodes.model import bodies
from nodes.model.tiles import Scale
from nodes.settings import ModelSettings

Algo = Literal["fused", "unfused"]
EngineName = Literal["aiv", "sdma"]

DISTINCT_ROWS = 4096
"""Token g of the group has the content of seed g modulo this, and a seal of its own (its place is g):
the oracle computes each content once and every token's seal (model.md section 5)."""

FIRST_SEED = 0x636D_6E65_7400_0000
"""Seed of content 0; content c has the seed FIRST_SEED + c."""

PERIOD_PS = 10 * 10**9
"""Between the begins of isolated operators: longer than any takes without a fault (assumed, range
1 to 100 ms)."""


class MoeJob(msgspec.Struct, frozen=True, kw_only=True):
    """One run. ``model.carried_layers`` is the number of layers."""

    devices: tuple[int, ...]
    """Device of each rank of the group."""
    batch: int
    """Places for tokens per rank and call: token t of rank r has the index g = r * batch + t."""
    counts: tuple[int, ...]
    """Tokens of each rank, at most ``batch``."""
    steps: int = 1
    """Passes over all layers with the same tokens; with EPLB the least there are (``rebalancing``)."""
    algo: Algo = "fused"
    engine: EngineName = "aiv"
    skew: str = "uniform"
    eplb: bool = False
    redundant: int = 0
    """Slots for replicas of routed experts in the group."""
    shared_ranks: int = 0
    """Ranks that hold a replica of the shared expert; 0: each rank computes its own, no message."""
    body: bodies.Name = "exact"
    model: ModelSettings
    scale: Scale
    isolated: bool = False
    """Operators one by one, as they are published: all ranks begin each together, ``PERIOD_PS`` apart."""
    timeout_ps: int
    """A rank that waits longer than this for a flag gives up."""

    @property
    def ep_size(self) -> int:
        """Ranks of the group."""
        return len(self.devices)
