"""The report of a ``moe`` run: one object for programs, of which ``tables`` draws what people see.

Owns what is in a report, the definitions printed with it, and what counts as something wrong. Reads only
the run's folder, so that it can be printed again. Instants and lengths are integers of picoseconds.

A rank's operator lasts from its own begin to its own return (``mean``, ``max``, ``min`` over ranks).
``common`` is the mean from the instant at which the last rank has begun, and ``common_max`` the last rank's:
what is left when nobody waits for one that is late, and the same as the mean where all begin together
(``start_spread`` 0). ``links`` is ``common`` without what ``operators`` adds: links, queueing and imbalance.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from cmnet.chaos.plan import Plan
from cmnet.record import record as records
from cmnet.record.record import Record
from nodes import constants, running
from nodes.model.body import I64
from nodes.moe import replaced, seen, setup, verify, waits
from nodes.moe.operators import Operators
from nodes.moe.published import OPERATORS, PRINTED_UNIT, Operator
from nodes.moe.seen import Seen
from nodes.moe.setup import Told
from nodes.moe.verify import Verified

USED = (
    constants.DISPATCH_START,
    constants.DISPATCH_TOKEN,
    constants.COMBINE_START,
    constants.COMBINE_TOKEN,
    constants.EXCHANGE_GROWTH,
    constants.HBM_RATE,
    constants.MEMORY_SHARE,
    constants.INT8_SPEED,
    constants.GEMM_SHARE,
    constants.EXPERT_WEIGHTS,
)


class Sources(msgspec.Struct, frozen=True, kw_only=True):
    """All that a report is made of."""

    folder: Path
    record: Record
    told: Told
    seen: Seen
    statistics: list[dict[str, Any]]
    """Of each process that lived at the end."""
    verified: Verified


def collect(folder: Path) -> Sources:
    """Everything of a run's folder. Raises InputError where it is no moe run."""
    told = setup.read_told(folder)
    return Sources(
        folder=folder,
        record=records.read(folder),
        told=told,
        seen=seen.read(folder, told),
        statistics=running.read_statistics(folder),
        verified=verify.read(folder) if told.verify else Verified(),
    )


def build(sources: Sources) -> dict[str, Any]:
    """The object that ``--json`` prints (design 5)."""
    told, job = sources.told, sources.told.job
    tables = rows(sources)
    report = running.head(sources.record, sources.folder) | {
        "carried_layers": job.model.carried_layers,
        "tokens_per_carried": job.model.tokens_per_carried,
        "fingerprint": told.fingerprint,
        "constants_used": constants_used(told),
        "verified": _verified(sources),
        "ep_size": job.ep_size,
        "batch": job.batch,
        "steps": len(sources.seen.stages),
        "algo": job.algo,
        "engine": job.engine,
        "skew": job.skew,
        "eplb": job.eplb,
        "isolated": job.isolated,
        "redundant": job.redundant,
        "shared_ranks": job.shared_ranks,
        "body": job.body,
        "memory": msgspec.to_builtins(told.memory) | _resident(sources),
        "bundles_per_layer": _bundles_per_layer(sources),
        "rows": tables,
        "traffic": traffic(sources),
        "replaced": _replaced(sources, tables),
        "waits": _waits(sources),
        "errors": sources.seen.errors,
    }
    return report | {"problems": problems(sources) + _given_up(sources, report["replaced"])}


def constants_used(told: Told) -> list[dict[str, Any]]:
    """Numbers of the operators and of the experts' time, beside those of the topology."""
    used = USED if told.job.algo == "fused" else (*USED, constants.UNFUSED_LAUNCH)
    return [msgspec.to_builtins(constant) for constant in used]


# --- what is wrong -------------------------------------------------------------------------------


def problems(sources: Sources) -> list[str]:
    """Why this run did not end well; empty means exit status 0."""
    found = running.ended_badly(sources.record)
    if sources.record.outcome is None:
        return found
    verified = sources.verified
    if verified.wrong:
        total = verified.checked
        found.append(f"{verified.wrong} of {total} token-layers are wrong: {verified.first}")
    if sources.told.verify and not found:
        found += _unverified(sources)
    unexplained = [] if _explained(sources) else sources.seen.errors
    if unexplained:
        first = unexplained[0]
        where = f"step {first['step']}, layer {first['layer']}, rank {first['rank']}"
        what = (
            f"{len(unexplained)} results of ranks failed by no death, and by no fault of the plan"
        )
        found.append(f"{what} that could make them fail; {where}: {first['error']}")
    return found


def _given_up(sources: Sources, found: dict[str, Any] | None) -> list[str]:
    if found is None or not found["gave_up"] or _explained(sources):
        return []
    return [
        f"the re-placement was given up, and no death nor fault explains it: {found['gave_up']}"
    ]


def _explained(sources: Sources) -> bool:
    outcome = sources.record.outcome
    deaths = bool(outcome and outcome.deaths)
    return deaths or running.can_fail(Plan.from_data(sources.record.plan))


def _unverified(sources: Sources) -> list[str]:
    """Lines that neither a death nor an error of their rank explains; a verifier that did not finish."""
    verified, told = sources.verified, sources.told
    if not verified.finished:
        return [f"nothing was verified: {verified.first}"]
    outcome = sources.record.outcome
    dead = {death.node for death in outcome.deaths} if outcome else set()
    failed = {each["rank"] for each in sources.seen.errors}
    lost = [
        each
        for each in verified.missing
        if each.rank not in failed and told.nodes[told.node_of_rank[each.rank]] not in dead
    ]
    if not lost:
        return []
    first = min(lost, key=lambda each: (each.step, each.layer, each.rank))
    where = f"step {first.step}, layer {first.layer}, rank {first.rank}"
    return [f"{sum(each.lines for each in lost)} results were never written; the first: {where}"]


# --- parts ---------------------------------------------------------------------------------------


def _verified(sources: Sources) -> dict[str, Any]:
    names = ("checked", "wrong", "failed", "first")
    verified = sources.verified
    missing = sum(each.lines for each in verified.missing)
    facts = {name: getattr(verified, name) for name in names}
    return facts | {"missing_results": missing, "asked": sources.told.verify}


def _resident(sources: Sources) -> dict[str, Any]:
    """Most private memory of each process, summed; pages that they share are not counted."""
    peaks = [
        seen.found_in(each.get("program", {}), "memory_peak_bytes") for each in sources.statistics
    ]
    known = [int(peak) for peak in peaks if peak is not None]
    return {"peak_bytes": sum(known) if known else None, "peak_processes": len(known)}


def _bundles_per_layer(sources: Sources) -> float | None:
    """Frames on sockets that carried bundles of messages, a layer of a step."""
    counts = [each["planes"].get("UB", {}).get("bundles") for each in sources.statistics]
    known = [count for count in counts if count is not None]
    job = sources.told.job
    layers = len(sources.seen.stages) * job.model.carried_layers
    return sum(known) / layers if known else None


def rows(sources: Sources) -> list[dict[str, Any]]:
    """The tables as one flat list; ``table`` says which."""
    job = sources.told.job
    steps = range(len(sources.seen.stages))
    places = [(step, layer) for step in steps for layer in range(job.model.carried_layers)]
    return [
        *(layer_row(sources.told, sources.seen, step, layer) for step, layer in places),
        *(_load_row(sources, step) for step in steps),
        *running.plane_rows(sources.statistics),
    ]


def layer_row(told: Told, found: Seen, step: int, layer: int) -> dict[str, Any]:
    """What both operators took in one layer of one step."""
    at = (step, layer)
    job, rows_in = told.job, found.rows[at]
    operators = Operators(
        ep_size=job.ep_size, model=job.model, engine_start_ps=told.engine_start_ps
    )
    reorder = np.array([operators.reorder_ps(int(count)) for count in rows_in])
    sums = np.array([operators.sum_ps(count) for count in job.counts])
    began, ended = found.began_ps[at], found.combined_ps[at]
    whole = (began >= 0) & (ended >= 0)
    row = {
        "table": "layers",
        "name": f"{_name(found, step)}, layer {layer}",
        "step": step,
        "layer": layer,
        "stage": found.stages[step],
        "ranks": int(whole.sum()),
        "layer_ps": int(ended[whole].max() - began[whole].min()) if whole.any() else None,
    }
    shares = (operators.dispatch_start_ps + reorder, operators.combine_start_ps + sums)
    spans = (
        (began, found.dispatched_ps[at]),
        (found.combine_began_ps[at], ended),
    )
    for operator, span, share in zip(OPERATORS, spans, shares, strict=True):
        fused = share if job.algo == "fused" else None
        row |= _operator(operator, *span, share_ps=fused) | _bandwidth(told, operator, *span)
    return row | _load(rows_in[found.dispatched_ps[at] >= 0])


def _name(found: Seen, step: int) -> str:
    stage = found.stages[step]
    return f"step {step} ({stage})" if stage else f"step {step}"


def _operator(name: str, began: I64, ended: I64, *, share_ps: I64 | None) -> dict[str, Any]:
    whole = (began >= 0) & (ended >= 0)
    keys = ("mean", "max", "min", "common", "common_max", "start_spread", "links")
    if not whole.any():
        return {f"{name}_{key}_ps": None for key in keys}
    took = (ended - began)[whole]
    last_begin = int(began[whole].max())
    common = (ended - last_begin)[whole]
    links = None if share_ps is None else round(float((common - share_ps[whole]).mean()))
    values = (
        round(float(took.mean())),
        int(took.max()),
        int(took.min()),
        round(float(common.mean())),
        int(common.max()),
        last_begin - int(began[whole].min()),
        links,
    )
    return {f"{name}_{key}_ps": value for key, value in zip(keys, values, strict=True)}


def _bandwidth(told: Told, name: Operator, began: I64, ended: I64) -> dict[str, Any]:
    """Bytes of a rank (its routed messages, mean) over the mean latency from a common start; ``printed`` is
    in the unit of the paper's column."""
    job, whole = told.job, (began >= 0) & (ended >= 0)
    size = job.model.dispatch_bytes if name == "dispatch" else job.model.combine_bytes
    moved = round(sum(job.counts) / job.ep_size * job.model.top_k * size)
    rate = None
    if whole.any():
        rate = moved / float((ended[whole] - began[whole].max()).mean()) * 1e3
    return {
        f"{name}_bytes": moved,
        f"{name}_gb_per_s": rate,
        f"{name}_gb_per_s_printed": None if rate is None else rate * PRINTED_UNIT,
    }


def _load(rows_in: I64) -> dict[str, Any]:
    """Rows that experts of a rank got."""
    if not len(rows_in):
        return {"rows_mean": None, "rows_max": None, "rows_max_over_mean": None}
    mean, most = float(rows_in.mean()), int(rows_in.max())
    return {
        "rows_mean": mean,
        "rows_max": most,
        "rows_max_over_mean": most / mean if mean else None,
    }


def _load_row(sources: Sources, step: int) -> dict[str, Any]:
    loads = sources.seen.rows[step].sum(axis=0)
    found = sources.seen
    row = {"table": "loads", "name": _name(found, step), "step": step, "stage": found.stages[step]}
    row |= {"rows": loads.tolist()}
    return row | _load(loads)


def traffic(sources: Sources) -> list[dict[str, Any]]:
    """Rows that went from node to node in each step; its first index is the sender."""
    told, found = sources.told, []
    count, of = len(told.nodes), np.array(told.node_of_rank)
    for step, stage in enumerate(sources.seen.stages):
        matrix = np.zeros((count, count), dtype=np.int64)
        np.add.at(matrix, (of[:, None], of[None, :]), sources.seen.sent[step])
        found.append(
            {
                "step": step,
                "stage": stage,
                "nodes": list(told.nodes),
                "rows": matrix.tolist(),
            }
        )
    return found


def _replaced(sources: Sources, tables: list[dict[str, Any]]) -> dict[str, Any] | None:
    """What EPLB did; None without it."""
    if not sources.told.job.eplb:
        return None
    layers = [row for row in tables if row["table"] == "layers"]
    return replaced.build(sources.seen.stages, layers, sources.statistics)


def _waits(sources: Sources) -> dict[str, Any]:
    """Who is slow, by how long ranks wait for each other's flags."""
    told, found = sources.told, {}
    for name, matrix in (
        ("dispatch", sources.seen.dispatch_waits()),
        ("combine", sources.seen.combine_waits(start_ps=_operators(told).combine_start_ps)),
    ):
        finding = waits.judge(matrix, names=list(told.die_of_rank))
        found[name] = msgspec.json.decode(
            msgspec.json.encode(finding)
        )  # lists, as it is read again
    return found


def _operators(told: Told) -> Operators:
    job = told.job
    return Operators(
        ep_size=job.ep_size,
        model=job.model,
        engine_start_ps=told.engine_start_ps,
        unfused=job.algo == "unfused",
    )
