"""``moe --table``: which runs it is made of, and its object beside the published figures. Pure.

Owns both tables: latencies by EP degree at batch 128, and by batch at EP 128, mean over ranks from the
common start to the return, with the last rank's beside it. A run that both have is made
once. Does not own the runs (``command``) nor the figures (``published``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from cmnet.launch import options as values
from cmnet.topology.machine import Machine
from nodes.moe import published
from nodes.moe.options import Options
from nodes.moe.published import OPERATORS, Figure, Pair

US = 10**6


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the table."""

    ep_size: int
    batch: int
    options: Options

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"ep{self.ep_size}-batch{self.batch}"


def points(machine: Machine, options: Options) -> list[Point]:
    """The runs, each shape once; on a smaller machine those that have room on it. Raises InputError
    where none has."""
    dies = machine.nodes_count * machine.dies_per_node
    shapes = [(ep, published.EP_TABLE_BATCH) for ep in published.EP_TABLE]
    shapes += [(published.BATCH_TABLE_EP, batch) for batch in published.BATCH_TABLE]
    least = min(ep for ep, _ in shapes)
    if dies < least:
        raise values.wrong(
            "--table", machine.file, f"a machine of at least {least} dies, not {dies}"
        )
    return [
        Point(
            ep_size=ep,
            batch=batch,
            options=msgspec.structs.replace(
                options, ep=ep, batch=batch, layers=1, table=False, isolated=True, out=None
            ),
        )
        for ep, batch in dict.fromkeys(shapes)
        if ep <= dies
    ]


def build(
    points: Sequence[Point], reports: Sequence[dict[str, Any]], *, folder: Path
) -> dict[str, Any]:
    """The object that ``--json`` prints: design 5's keys, summed over runs where that means something."""
    by_shape = {
        (each.ep_size, each.batch): report for each, report in zip(points, reports, strict=True)
    }
    first, wrong = reports[0], [report for report in reports if report["problems"]]
    same = ("command_line", "seed", "topology", "scale", "carried_layers", "tokens_per_carried")
    alike = {
        key: first[key]
        for key in (*same, "fingerprint", "constants_used", "algo", "engine", "body", "skew")
    }
    sums = {key: sum(each[key] for each in reports) for key in _SUMMED}
    checked = {
        key: sum(each["verified"][key] for each in reports)
        for key in ("checked", "wrong", "failed")
    }
    rows = [*_ep_rows(by_shape), *_batch_rows(by_shape)]
    return (
        alike
        | sums
        | {
            "run": str(folder),
            "command": "moe",
            "lag_s": 0.0,
            "digest": hashlib.blake2b(
                b"".join(each["digest"].encode() for each in reports), digest_size=16
            ).hexdigest(),
            "deaths": [death for each in reports for death in each["deaths"]],
            "verified": checked,
            "runs": [_run(each) for each in reports],
            "rows": rows,
            "growth": growth(rows),
            "sources": {
                "cann": published.CANN_SOURCE,
                "deepep": published.DEEPEP_SOURCE,
                "deepep_ascend": published.DEEPEP_ASCEND_SOURCE,
                "xdeepserve": published.XDEEPSERVE_SOURCE,
            },
            "problems": [
                f"{each['run']}: {problem}" for each in wrong for problem in each["problems"]
            ],
            "replay": wrong[0]["replay"] if wrong else "",
        }
    )


_SUMMED = ("launch_s", "wall_s", "virtual_s", "windows", "grants")


def _run(report: dict[str, Any]) -> dict[str, Any]:
    keys = ("run", "ep_size", "batch", "digest", "launch_s", "wall_s", "virtual_s", "verified")
    return {key: report[key] for key in keys}


def growth(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """From the least EP degree to the greatest: ours, ours by links and imbalance alone, the paper's."""
    by_ep = {row["ep_size"]: row for row in rows if row["table"] == "ep"}
    if len(by_ep) < 2:
        return []
    low, high = by_ep[min(by_ep)], by_ep[max(by_ep)]
    found = []
    for name in OPERATORS:
        keys = (f"{name}_common_us", f"{name}_links_us", f"{name}_cann_us")
        mean, links, cann = (_difference(low[key], high[key]) for key in keys)
        found.append(
            {
                "operator": name,
                "from_ep": low["ep_size"],
                "to_ep": high["ep_size"],
                "mean_us": mean,
                "links_us": links,
                "cann_us": cann,
            }
        )
    return found


def _difference(low: float | None, high: float | None) -> float | None:
    return None if low is None or high is None else high - low


def _ep_rows(reports: dict[tuple[int, int], dict[str, Any]]) -> list[dict[str, Any]]:
    batch = published.EP_TABLE_BATCH
    return [
        _measured("ep", ep, batch, reports[ep, batch])
        | {"mark": "fitted" if ep in published.FITTED_EP else "predicted"}
        | _beside("cann", published.CANN.get(ep), reports[ep, batch])
        | _printed(published.CANN_PRINTED_GB_PER_S.get(ep))
        | _beside("deepep", published.DEEPEP.get(ep), None)
        | _beside("deepep_ascend", published.DEEPEP_ASCEND.get(ep), reports[ep, batch])
        for ep in published.EP_TABLE
        if (ep, batch) in reports
    ]


def _batch_rows(reports: dict[tuple[int, int], dict[str, Any]]) -> list[dict[str, Any]]:
    ep = published.BATCH_TABLE_EP
    return [
        _measured("batch", ep, batch, reports[ep, batch])
        | {"mark": "fitted" if batch == min(published.XDEEPSERVE) else "predicted"}
        | _beside("xdeepserve", published.XDEEPSERVE.get(batch), reports[ep, batch])
        for batch in published.BATCH_TABLE
        if (ep, batch) in reports
    ]


def _layer(report: dict[str, Any]) -> dict[str, Any]:
    layer: dict[str, Any] = next(row for row in report["rows"] if row["table"] == "layers")
    return layer


def _measured(table: str, ep: int, batch: int, report: dict[str, Any]) -> dict[str, Any]:
    layer = _layer(report)
    row: dict[str, Any] = {"table": table, "name": f"EP {ep}, batch {batch}"}
    row |= {"ep_size": ep, "batch": batch}
    for name in OPERATORS:
        for key in ("common", "common_max", "links"):
            value = layer[f"{name}_{key}_ps"]
            row[f"{name}_{key}_us"] = None if value is None else value / US
        for key in ("gb_per_s", "gb_per_s_printed"):
            row[f"{name}_{key}"] = layer[f"{name}_{key}"]
    return row | {"rows_max_over_mean": layer["rows_max_over_mean"]}


def _beside(name: str, pair: Pair | None, report: dict[str, Any] | None) -> dict[str, Any]:
    """A published latency with its tag, and our error against it in % where there is a report."""
    row: dict[str, Any] = {}
    for operator in OPERATORS:
        figure: Figure | None = None if pair is None else getattr(pair, operator)
        row[f"{operator}_{name}_us"] = None if figure is None else figure.value
        row[f"{operator}_{name}_tag"] = "" if figure is None else figure.tag
        if report is not None:
            mean_ps = _layer(report)[f"{operator}_common_ps"]
            error = None
            if figure is not None and mean_ps is not None:
                error = 100 * (mean_ps / US / figure.value - 1)
            row[f"{operator}_{name}_error_percent"] = error
    return row


def _printed(pair: Pair | None) -> dict[str, Any]:
    return {
        f"{operator}_cann_gb_per_s_printed": None if pair is None else getattr(pair, operator).value
        for operator in OPERATORS
    }
