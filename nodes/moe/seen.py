"""All lines of a ``moe`` run as arrays, step by layer by rank.

Owns the reading of ``moe-*.jsonl`` for reports. Does not own the lines' format (``result``) nor what is
made of the arrays. Instants that never came are -1. A line is taken once: that none comes twice is the
verifier's to say.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from cmnet.errors import InputError
from nodes.model.body import I64
from nodes.moe import rebalancing, result, waits
from nodes.moe.result import RankLayer
from nodes.moe.setup import Told


class Seen:
    """What the ranks of a run saw."""

    def __init__(
        self, *, steps: int, layers: int, ranks: int, steps_max: int | None = None
    ) -> None:
        """``steps_max``: of a run in which lines say how many passes there were, at least ``steps``."""
        shape = (steps, layers, ranks)
        self._steps_max = steps if steps_max is None else steps_max
        self.stages = ["" for _ in range(steps)]
        """Of each pass, "" unless experts are re-placed."""
        self.began_ps: I64 = np.full(shape, -1, dtype=np.int64)
        self.dispatched_ps: I64 = self.began_ps.copy()
        self.combine_began_ps: I64 = self.began_ps.copy()
        self.combined_ps: I64 = self.began_ps.copy()
        self.rows: I64 = np.zeros(shape, dtype=np.int64)
        self.sent: I64 = np.zeros((steps, ranks, ranks), dtype=np.int64)
        """Rows from rank to rank, over all layers."""
        self.errors: list[dict[str, Any]] = []
        self._dispatch = _Waits(ranks)
        self._results: dict[tuple[int, int, int], I64] = {}
        """(step, layer, rank) -> when each flag of its combine was here."""

    def take(self, line: RankLayer) -> None:
        """One line. Raises ValueError at one of no place that the run has, or with an array of neither
        nothing nor an element for each rank."""
        at, (_, layers, ranks) = (line.step, line.layer, line.rank), self.rows.shape
        sent = _of_ranks("sent_rows", result.sent_rows(line), ranks)
        dispatch_ps = _of_ranks("dispatch_flags_ps", result.instants(line.dispatch_flags_ps), ranks)
        combine_ps = _of_ranks("combine_flags_ps", result.instants(line.combine_flags_ps), ranks)
        for name, value, count in zip(
            ("step", "layer", "rank"), at, (self._steps_max, layers, ranks)
        ):
            if not 0 <= value < count:
                raise ValueError(f"{name} {value} of {count}")
        self._make_room(line.step)
        if not self.stages[line.step] or self.stages[line.step] == "stopped":
            self.stages[line.step] = line.stage
        self.began_ps[at], self.dispatched_ps[at] = line.began_ps, line.dispatched_ps
        self.combine_began_ps[at], self.combined_ps[at] = line.combine_began_ps, line.combined_ps
        self.rows[at] = line.rows
        if len(sent):
            self.sent[line.step, line.rank] += sent
        self._dispatch.take(line.rank, line.began_ps, dispatch_ps)
        if len(combine_ps):
            self._results[at] = combine_ps
        if line.error:
            place = {"step": line.step, "layer": line.layer, "rank": line.rank}
            self.errors.append(place | {"error": line.error})

    def _make_room(self, step: int) -> None:
        """For a pass that is the first of its number."""
        more = step + 1 - len(self.stages)
        if more <= 0:
            return
        self.stages += ["" for _ in range(more)]
        for name in (
            "began_ps",
            "dispatched_ps",
            "combine_began_ps",
            "combined_ps",
            "rows",
            "sent",
        ):
            old = getattr(self, name)
            fill = -1 if name.endswith("_ps") else 0
            new = np.full((more, *old.shape[1:]), fill, dtype=np.int64)
            setattr(self, name, np.concatenate([old, new]))

    def dispatch_waits(self) -> I64:
        """Mean wait [targets, sources] of each rank for each other's flag; -1 where one never came."""
        return self._dispatch.mean()

    def combine_waits(self, *, start_ps: int) -> I64:
        """Mean transit [targets, sources] of each rank's results, from the begin of that rank's own
        operator, as for equally many rows everywhere (``waits.levelled``); -1 where a flag never came."""
        ranks = self.rows.shape[2]
        sums: I64 = np.zeros((ranks, ranks), dtype=np.int64)
        counts, never = sums.copy(), np.zeros((ranks, ranks), dtype=np.bool_)
        for (step, layer, rank), flags_ps in self._results.items():
            began_ps = self.combine_began_ps[step, layer]
            known = (flags_ps >= 0) & (began_ps >= 0)
            sums[rank] += np.where(known, flags_ps - began_ps, 0)
            counts[rank] += known
            never[rank] |= flags_ps < 0
        transits = np.where(never | (counts == 0), waits.NEVER, sums // np.maximum(counts, 1))
        served = np.maximum((self.combine_began_ps >= 0).sum(axis=(0, 1)), 1)
        rows = self.rows.sum(axis=(0, 1)) / served
        return waits.levelled(transits, rows=rows, start_ps=start_ps)


class _Waits:
    """Sums over layers."""

    def __init__(self, ranks: int) -> None:
        self._sum: I64 = np.zeros((ranks, ranks), dtype=np.int64)
        self._count: I64 = np.zeros((ranks, 1), dtype=np.int64)
        self._never = np.zeros((ranks, ranks), dtype=np.bool_)

    def take(self, rank: int, began_ps: int, flags_ps: I64) -> None:
        """What one rank saw in one layer; nothing where its operator never began."""
        if began_ps < 0 or not len(flags_ps):
            return
        self._never[rank] |= flags_ps < 0
        self._sum[rank] += np.maximum(flags_ps - began_ps, 0)
        self._count[rank] += 1

    def mean(self) -> I64:
        """Of a rank that has said nothing, nothing came."""
        nothing = self._never | (self._count == 0)
        return np.where(nothing, -1, self._sum // np.maximum(self._count, 1))


def _of_ranks(name: str, array: I64, ranks: int) -> I64:
    """The array, of all ranks or empty. Raises ValueError."""
    if len(array) not in (0, ranks):
        raise ValueError(f"{name} of {len(array)} ranks, not {ranks}")
    return array


def read(folder: Path, told: Told) -> Seen:
    """All whole lines of a run. Raises InputError."""
    job = told.job
    seen = Seen(
        steps=job.steps,
        layers=job.model.carried_layers,
        ranks=job.ep_size,
        steps_max=rebalancing.PASSES_MAX if job.eplb else None,
    )
    for node in told.nodes:
        path = result.path(folder, node)
        data = path.read_bytes() if path.exists() else b""
        for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), 1):
            try:
                seen.take(result.decode(line))
            except (msgspec.DecodeError, ValueError) as error:
                key, expected = f"line {number}", "what a rank saw of a layer"
                value = str(error)
                raise InputError(file=str(path), key=key, value=value, expected=expected) from None
    seen.errors.sort(key=lambda each: (each["step"], each["layer"], each["rank"]))
    return seen


def found_in(data: Any, key: str) -> Any:
    """The first value of this key in nested objects; None where there is none."""
    if not isinstance(data, dict):
        return None
    if key in data:
        return data[key]
    return next(
        (found for each in data.values() if (found := found_in(each, key)) is not None), None
    )
