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
from nodes.model import bodies
from nodes.model.oracle import ClaimedRequest
from nodes.model.tiles import parse_scale
from nodes.moe.layer import Touch
from nodes.node import make_program, untouched
from nodes.serving.decoding import PLAIN, Decoding
from nodes.serving.job import EXTENSIONS, Job, make_job
from nodes.serving.workload import Request, Workload
from nodes.settings import ModelSettings

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


def a_request(
    index: int, arrival_ps: int, input_tokens: int, output_tokens: int, hash_ids: tuple[int, ...]
) -> Request:
    return Request(
        index=index,
        arrival_ps=arrival_ps,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        hash_ids=hash_ids,
    )


def busy_requests(count: int = 10, *, gap_ps: int = 700_000_000_000) -> list[Request]:
    """Requests that share prefixes, overlap in decode, and among which are single tokens."""
    requests = []
    for index in range(count):
        input_tokens, output_tokens = 900 + 200 * (index % 4), (6, 1, 12, 40)[index % 4]
        shared = (1, 2, 3, 4)[: -(-input_tokens // 512) - 1]
        hash_ids = (*shared, 100 + index)
        requests.append(a_request(index, index * gap_ps, input_tokens, output_tokens, hash_ids))
    return requests


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


def job_of(
    machine: Machine,
    requests: Iterable[Request],
    scale: str = "64",
    body: bodies.Name = "seal",
    decoding: Decoding = PLAIN,
) -> Job:
    model = machine.sections["model"]
    assert isinstance(model, ModelSettings)
    parsed = parse_scale(scale, model, exact=body == "exact")
    return make_job(machine, workload(requests), parsed, body, decoding)


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
    oracle = bodies.judge(job.body, job.model)
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
        draft_fold=record["draft_fold"],
    )
