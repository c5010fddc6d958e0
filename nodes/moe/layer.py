"""One layer of one step at one node, and who takes part: the records of ``exchange``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from cmnet.errors import CorruptError
from nodes.model.body import I64, U64
from nodes.moe.arrivals import Arrivals, Bools
from nodes.moe.layout import Tokens
from nodes.moe.placement import Placement

Key = tuple[int, int, int]
"""(epoch, step, layer)"""
Touch = Callable[[str, Any], Any]
Phase = Literal["count", "dispatch", "combine"]
KINDS: dict[Phase, int] = {"dispatch": 72, "combine": 73, "count": 74}
Complete = Callable[[Key, dict[int, int]], None]
"""(key, rank -> the instant at which it was complete)"""
Late = Callable[[Key, Phase, dict[int, list[int]]], None]
"""(key, phase, rank -> ranks that it still waits for)"""
Lost = Callable[[Key, Phase, list[int]], None]
"""(key, phase, ranks that the link did not reach)"""
Wrong = Callable[[Key, CorruptError], None]
"""(key, what was wrong with messages that came)"""


class Group(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """Who takes part in a step."""

    sources: I64
    """Ranks that dispatch, with tokens or without."""
    experts: I64
    """Ranks that serve experts."""
    placement: Placement
    batch: int
    """The most tokens of a source."""


class Layer:
    """One layer of one step at this node."""

    __slots__ = ("arrivals", "filled", "refused", "results", "timers", "unsent")

    def __init__(self) -> None:
        self.arrivals: dict[Phase, Arrivals] = {}
        self.timers: dict[Phase, Any] = {}
        self.results: U64 | None = None
        """[local ranks, batch, slots, words]"""
        self.filled: Bools | None = None
        self.refused: Bools | None = None
        """[local ranks, sources] whose rows are not taken: they did not all come."""
        self.unsent: dict[int, Tokens] = {}
        """Tokens of local ranks that wait for the counts (unfused)."""
