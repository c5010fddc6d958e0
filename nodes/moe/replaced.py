"""What a re-placement of experts did, for the report of a ``moe`` run.

Owns the part of the report that compares passes. Does not own their rows (``report``) nor how experts
moved (``rebalancing``): that is taken from what nodes counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nodes.moe import seen

AVERAGED = (
    "rows_max_over_mean",
    "dispatch_mean_ps",
    "dispatch_max_ps",
    "combine_mean_ps",
    "combine_max_ps",
    "layer_ps",
)
"""Of the rows of a pass's layers."""


def build(
    stages: Sequence[str], layers: Sequence[dict[str, Any]], statistics: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """``stages``: of each pass; ``layers``: rows of the report's table of that name; ``statistics``: of
    each process that lived at the end. ``passes`` are means over layers, in which ``layer_ps`` is from
    the first rank's begin to the last one's combine; before and after are the first and the last."""
    passes = [_pass(step, stage, layers) for step, stage in enumerate(stages)]
    nodes = [
        found for each in statistics if (found := seen.found_in(each.get("program", {}), "eplb"))
    ]
    planned = next((node for node in nodes if node["ways"]), {"ways": [], "moves": 0})
    return {
        "passes": passes,
        "before": passes[0],
        "after": passes[-1] if stages[-1] == "after" else None,
        "ways": planned["ways"],
        "moves": planned["moves"],
        "fetched": sum(node["fetched"] for node in nodes),
        "fetched_bytes": sum(node["fetched_bytes"] for node in nodes),
        "fetch_ps": max((node["fetch_ps"] for node in nodes), default=0),
        "gave_up": next((node["gave_up"] for node in nodes if node["gave_up"]), ""),
    }


def _pass(step: int, stage: str, layers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {"step": step, "stage": stage}
    for key in AVERAGED:
        values = [row[key] for row in layers if row["step"] == step and row[key] is not None]
        mean = sum(values) / len(values) if values else None
        found[key] = round(mean) if mean is not None and key.endswith("_ps") else mean
    return found
