"""The report of a serving run: one object for programs, and tables of it for people.

Owns what is in a report, the definitions printed with it, and what counts as something wrong. Reads
only the run's folder, so that it can be printed again. Does not own percentiles, published figures
nor constants. Instants and lengths are integers of picoseconds; floats are for people.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from cmnet.chaos.plan import Plan
from cmnet.record import record as records
from cmnet.record.record import Record
from nodes import running
from nodes.constants import CONSTANTS
from nodes.serving import published, result, verify
from nodes.serving.percentiles import itl_ps, summarize, tpot_ps, ttft_ps
from nodes.serving.published import Figure
from nodes.serving.result import RequestResult, Serving
from nodes.serving.verify import Verified

EXCUSED = re.compile(
    "died|lived|broke|no path|gave up|in error|reconnected|never connected|remote access|was due"
    "|no (answer|acknowledgement|completion|data|rows or flags|results|progress)"
)
"""Errors that name a death, a way that was lost, or a timeout."""


class Sources(msgspec.Struct, frozen=True, kw_only=True):
    """All that a report is made of."""

    folder: Path
    record: Record
    serving: Serving
    results: list[RequestResult]
    statistics: list[dict[str, Any]]
    """Of each process that lived at the end."""
    verified: Verified

    @property
    def answered(self) -> list[RequestResult]:
        return [each for each in self.results if each.status == "ok"]

    @property
    def virtual_s(self) -> float:
        outcome = self.record.outcome
        return 0.0 if outcome is None else outcome.virtual_ps / 1e12

    def program(self, part: str, key: str) -> list[Any]:
        """A counter or list of samples of a part, of every process that has the part."""
        parts = (each.get("program", {}).get(part) for each in self.statistics)
        return [found[key] for found in parts if found is not None]


def collect(folder: Path) -> Sources:
    """Everything of a run's folder. Raises InputError where it is no serving run."""
    record = records.read(folder)
    return Sources(
        folder=folder,
        record=record,
        serving=result.read_serving(folder),
        results=result.read(folder),
        statistics=running.read_statistics(folder),
        verified=verify.read(folder),
    )


def build(sources: Sources) -> dict[str, Any]:
    """The object that ``--json`` prints (design 5)."""
    report = running.head(sources.record, sources.folder) | {
        "carried_layers": sources.serving.model.carried_layers,
        "tokens_per_carried": sources.serving.model.tokens_per_carried,
        "fingerprint": sources.serving.fingerprint,
        "constants_used": constants_used(sources),
        "verified": {
            name: getattr(sources.verified, name)
            for name in ("checked", "wrong", "requests", "first")
        },
        "requests": _requests(sources),
        "prefix": _prefix(sources),
        "rows": rows(sources),
    }
    return report | {"problems": problems(sources)}


# --- what is wrong -------------------------------------------------------------------------------


def problems(sources: Sources) -> list[str]:
    """Why this run did not end well; empty means exit status 0."""
    verified = sources.verified
    found = running.ended_badly(sources.record)
    if sources.record.outcome is None:
        return found
    if verified.wrong:
        found.append(f"{verified.wrong} of {verified.checked} tokens are wrong: {verified.first}")
    elif verified.checked != (tokens := _sum(sources.answered, "output_tokens")):
        found.append(f"{verified.checked} of {tokens} tokens were verified: {verified.first}")
    requests = _requests(sources)
    if requests["unfinished"] and not found:
        found.append(f"{requests['unfinished']} requests have no end")
    if failed := _failed_by_themselves(sources):
        what = f"{len(failed)} requests failed by no death, and by no fault of the plan that could"
        found.append(f"{what} make them fail; request {failed[0].index}: {failed[0].error}")
    return found


def _failed_by_themselves(sources: Sources) -> list[RequestResult]:
    """Failed requests that neither a death nor a lost message explains. A plan that only delays, slows
    or doubles explains none."""
    outcome = sources.record.outcome
    explained = bool(outcome and outcome.deaths) or running.can_fail(
        Plan.from_data(sources.record.plan)
    )
    return [
        each
        for each in sources.results
        if each.status != "ok" and not (explained and EXCUSED.search(each.error))
    ]


# --- parts ---------------------------------------------------------------------------------------


def _requests(sources: Sources) -> dict[str, Any]:
    workload, answered = sources.serving.workload, sources.answered
    failed = [each for each in sources.results if each.status != "ok"]
    return {
        "kind": workload.kind,
        "file": workload.file,
        "rows_asked": workload.rows_asked,
        "rows_read": workload.rows_read,
        "asked": len(workload.requests),
        "ok": len(answered),
        "failed": len(failed),
        "skipped": len(workload.skipped),
        "unfinished": len(workload.requests) - len(sources.results),
        "retried": sum(each.tries > 1 for each in sources.results),
        "prompt_tokens": _sum(answered, "input_tokens"),
        "output_tokens": _sum(answered, "output_tokens"),
        "failures": [
            {"index": each.index, "error": each.error, "tries": each.tries} for each in failed
        ],
        "skipped_rows": [msgspec.to_builtins(row) for row in workload.skipped],
    }


def _prefix(sources: Sources) -> dict[str, Any]:
    """Leading blocks that the store had. ``blocks`` counts all of a prompt, the last one may be partial."""
    blocks, hit = _sum(sources.answered, "blocks"), _sum(sources.answered, "blocks_hit")
    workload = sources.serving.workload
    return {
        "blocks": blocks,
        "blocks_hit": hit,
        "hit_rate": hit / blocks if blocks else 0.0,
        "block_references": workload.block_references,
        "distinct_blocks": workload.distinct_blocks,
    }


def constants_used(sources: Sources) -> list[dict[str, Any]]:
    """Every number of the cost model, and the settings of the serving system."""
    found: list[dict[str, Any]] = [msgspec.to_builtins(constant) for constant in CONSTANTS]
    settings = sources.serving.settings
    for name in settings.__struct_fields__:
        number = msgspec.to_builtins(getattr(settings, name))
        found.append({"name": f"serving.{name}", "unit": ""} | number)
    return found


def rows(sources: Sources) -> list[dict[str, Any]]:
    """The tables as one flat list; ``table`` says which."""
    counts = {key: value for key, value in _requests(sources).items() if type(value) is int}
    return [
        {"table": "requests", "name": sources.serving.workload.kind} | counts,
        {"table": "prefix", "name": "blocks"} | _prefix(sources),
        *_latency_rows(sources),
        *_exchange_rows(sources),
        *_step_rows(sources),
        _draft_row(sources),
        *_speed_rows(sources),
        *running.plane_rows(sources.statistics),
    ]


def _latency_rows(sources: Sources) -> list[dict[str, Any]]:
    answered = sources.answered
    ttft = [ttft_ps(sent_ps=each.arrival_ps, received_ps=each.token_ps) for each in answered]
    tpot = [value for each in answered if (value := tpot_ps(each.token_ps)) is not None]
    itl = [gap for each in answered for gap in itl_ps(each.token_ps)]
    return [
        _times("latency", "TTFT", ttft, "request sent to first token received", published.TTFT),
        _times("latency", "TPOT", tpot, "(last - first) / (tokens - 1), a request", published.TPOT),
        _times("latency", "ITL", itl, "gap between two tokens, each gap"),
    ]


def _exchange_rows(sources: Sources) -> list[dict[str, Any]]:
    dispatch = [sample for each in sources.program("decode", "dispatch_ps") for sample in each]
    combine = [sample for each in sources.program("decode", "combine_ps") for sample in each]
    what = "first operator's start to last message in, a node and carried layer"
    here = {
        "ep_size": sources.serving.ep_size,
        "tokens_per_die": _tokens_per_die(sources),
    }
    return [
        _times("exchange", "dispatch", dispatch, what, published.DISPATCH) | here,
        _times("exchange", "combine", combine, what, published.COMBINE) | here,
    ]


def _step_rows(sources: Sources) -> list[dict[str, Any]]:
    """Decode steps: their length, and how busy each stream was in the carried layers."""
    parts = {
        "step": ("step_ps", "first attention to sampling, a node and step"),
        "attention stream": ("attention_ps", "busy in carried layers, a node and step"),
        "MoE stream": ("moe_ps", "gate to combine in carried layers, a node and step"),
        "both streams": ("both_ps", "busy at once in carried layers, a node and step"),
    }
    microbatch = {"microbatch": sources.serving.decoding.microbatch}
    return [
        _times("steps", name, [s for each in sources.program("decode", key) for s in each], what)
        | microbatch
        for name, (key, what) in parts.items()
    ]


def _draft_row(sources: Sources) -> dict[str, Any]:
    """What became of drafts. ``acceptance`` of none proposed is none."""
    decoding = sources.serving.decoding
    counts = {
        name: sum(sources.program("decode", name))
        for name in ("turns", "tokens", "proposed", "accepted")
    }
    proposed, turns = counts["proposed"], counts["turns"]
    return {
        "table": "drafts",
        "name": "MTP",
        "definition": "turns: sequences that went through a step; tokens per turn: the paper's per step",
        "drafts": decoding.drafts,
        "accept": decoding.accept if decoding.drafts else None,
        "graphs": decoding.graphs if decoding.drafts else None,
        "acceptance": counts["accepted"] / proposed if proposed else None,
        "tokens_per_turn": counts["tokens"] / turns if turns else None,
    } | counts


def _tokens_per_die(sources: Sources) -> float:
    """Mean tokens of a die in a decode step; the published figures are at 128."""
    steps = max(sources.program("decode", "steps"), default=0)
    tokens: int = sum(sources.program("decode", "fed"))
    return tokens / (steps * sources.serving.ep_size or 1)


def _times(
    table: str, name: str, values_ps: list[int], definition: str, figure: Figure | None = None
) -> dict[str, Any]:
    summary = summarize(values_ps)
    facts = {"count": 0} if summary is None else msgspec.to_builtins(summary)
    return {"table": table, "name": name, "definition": definition} | facts | _beside(figure)


def _beside(figure: Figure | None) -> dict[str, Any]:
    if figure is None:
        return {"published": None, "published_source": "", "differs": "", "mark": ""}
    return {
        "published": figure.value,
        "published_source": figure.source,
        "differs": figure.differs,
        "mark": figure.mark,
    }


def _speed_rows(sources: Sources) -> list[dict[str, Any]]:
    serving = sources.serving
    made = _sum(sources.answered, "output_tokens")
    read = _sum(sources.answered, "input_tokens")
    return [
        _speed(sources, "decode", made, serving.decode_npus, published.DECODE_SPEED),
        _speed(sources, "prefill", read, serving.prefill_npus, published.PREFILL_SPEED),
    ]


def _speed(sources: Sources, name: str, tokens: int, npus: int, figure: Figure) -> dict[str, Any]:
    seconds = sources.virtual_s * npus
    facts = {"tokens": tokens, "npus": npus, "tokens_per_s_npu": tokens / seconds if seconds else 0}
    what = "tokens of answered requests / virtual seconds / NPUs of this role"
    return {"table": "speed", "name": name, "definition": what} | facts | _beside(figure)


def _sum(results: list[RequestResult], field: str) -> int:
    return sum(getattr(each, field) for each in results)
