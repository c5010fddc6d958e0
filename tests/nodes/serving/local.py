"""A serving run of the mini machine in one process, and what its oracle says. Test code only."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from cmnet.link.rules import Rule
from cmnet.testing import LocalMachine
from cmnet.topology import load
from cmnet.topology.machine import Machine
from nodes.model.oracle import ClaimedRequest, Oracle
from nodes.model.tiles import parse_scale
from nodes.moe.exchange import Touch
from nodes.node import make_program, untouched
from nodes.serving.job import EXTENSIONS, Job, make_job
from nodes.serving.workload import Request, Workload

TOPOLOGIES = Path(__file__).parents[3] / "topologies"


class Served(msgspec.Struct):
    """What a run left behind."""

    digest: str
    requests: list[dict[str, Any]]
    checked: int
    wrong: int
    first: str | None


def mini() -> Machine:
    return load.load(str(TOPOLOGIES / "mini.yaml"), extensions=EXTENSIONS)


def workload(requests: Iterable[Request]) -> Workload:
    requests = tuple(requests)
    count = len(requests)
    return Workload(
        kind="generated",
        file="",
        requests=requests,
        skipped=(),
        rows_asked=count,
        rows_read=count,
    )


def job_of(machine: Machine, requests: Iterable[Request], scale: str = "64") -> Job:
    model = machine.sections["model"]
    return make_job(machine, workload(requests), parse_scale(scale, model))  # type: ignore[arg-type]


def serve(
    machine: Machine,
    job: Job,
    folder: Path,
    *,
    seed: int = 0,
    rules: tuple[Rule, ...] = (),
    touch: Touch = untouched,
) -> Served:
    """Run it and ask the oracle about every request that ended well."""
    local = LocalMachine(machine, folder=folder, seed=seed, rules=rules)
    digest = local.run(make_program(machine, job, touch))
    return judge(job, folder, digest)


def judge(job: Job, folder: Path, digest: str) -> Served:
    oracle = Oracle(job.model)
    served = Served(digest=digest, requests=[], checked=0, wrong=0, first=None)
    for line in (folder / "requests.jsonl").read_bytes().splitlines():
        record = json.loads(line)
        served.requests.append(record)
        if record["status"] == "ok":
            verdict = oracle.check(claimed(record))
            served.checked += verdict.checked_tokens
            served.wrong += verdict.wrong
            served.first = served.first or verdict.first
    return served


def claimed(record: dict[str, Any]) -> ClaimedRequest:
    return ClaimedRequest(
        name=str(record["index"]),
        hash_ids=record["hash_ids"],
        input_tokens=record["input_tokens"],
        output_tokens=record["output_tokens"],
        tokens=record["tokens"],
        seals=record["seals"],
        receipt=record["receipt"],
    )
