"""A small serving run's files without a run: right answers of the model, on disk. Test code only."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import msgspec

from cmnet.record import record as records
from cmnet.record.record import Outcome, Record
from nodes.model.oracle import ClaimedRequest
from nodes.model.seal import SealBody
from nodes.serving import result, verify
from nodes.serving.result import RequestResult, Serving
from nodes.serving.settings import ServingSettings
from nodes.serving.workload import Request, Skipped, Workload
from nodes.settings import ModelSettings
from tests.nodes.model import stepwise

MODEL = ModelSettings()
BODY = SealBody(MODEL)
MS = 10**9
REQUESTS = (
    Request(index=0, arrival_ps=0, input_tokens=1100, output_tokens=3, hash_ids=(1, 2, 3)),
    Request(index=1, arrival_ps=5 * MS, input_tokens=30, output_tokens=1, hash_ids=(4,)),
)
WORKLOAD = Workload(
    kind="mooncake",
    file="small.jsonl",
    requests=REQUESTS,
    skipped=(Skipped(line=3, reason="too long"),),
    rows_asked=None,
    rows_read=3,
)
SERVING = Serving(
    workload=WORKLOAD,
    trace_sha256="",
    model=MODEL,
    fingerprint=BODY.fingerprint,
    settings=ServingSettings(),
    prefill_npus=4,
    decode_npus=2,
    ep_size=4,
)
STATISTICS: list[dict[str, Any]] = [
    {
        "process": f"node0{node}",
        "planes": {
            "UB": {
                "frames": 5,
                "frames_in_node": 1,
                "dropped": 0,
                "charged_bytes": 7000,
                "carried_bytes": 70,
            }
        },
        "program": {
            "decode": {
                "steps": 3,
                "turns": 2,
                "tokens": 3,
                "fed": 3,
                "proposed": 2,
                "accepted": 1,
                "dispatch_ps": [17 * node],
                "combine_ps": [],
                "step_ps": [5 * MS, 7 * MS],
                "attention_ps": [2 * MS, 2 * MS],
                "moe_ps": [3 * MS, 3 * MS],
                "both_ps": [0, node * MS],
            },
        },
    }
    for node in range(2)
]


@functools.cache
def claimed_of(index: int) -> ClaimedRequest:
    """The model's right answer."""
    request = REQUESTS[index]
    return stepwise.serve(
        BODY,
        hash_ids=request.hash_ids,
        input_tokens=request.input_tokens,
        output_tokens=request.output_tokens,
    )


def right(index: int, **changes: Any) -> RequestResult:
    """What the gateway writes when all went well."""
    request, claimed = REQUESTS[index], claimed_of(index)
    fields: dict[str, Any] = {
        "index": index,
        "arrival_ps": request.arrival_ps,
        "input_tokens": request.input_tokens,
        "output_tokens": request.output_tokens,
        "status": "ok",
        "blocks": len(request.hash_ids),
        "blocks_hit": index,
        "token_ps": [request.arrival_ps + (20 + step) * MS for step in range(len(claimed.tokens))],
        "tokens": list(claimed.tokens),
        "seals": list(claimed.seals),
        "receipt": claimed.receipt,
    }
    return RequestResult(**{**fields, **changes})


def failed(index: int, error: str = "node02 died") -> RequestResult:
    """What it writes when the tries are used up."""
    return right(index, status="error", error=error, tokens=[], seals=[], token_ps=[])


def record(outcome: Outcome | None, *, plan: dict[str, Any] | None = None) -> Record:
    return Record(
        command="serve",
        command_line=["serve"],
        topology_file="mini.yaml",
        topology_text="",
        seed=3,
        plan=plan or {},
        options={"scale": "64"},
        outcome=outcome,
    )


ENDED = Outcome(digest="ab" * 16, windows=10, grants=20, virtual_ps=50 * MS, wall_s=0.5)


def write_run(
    folder: Path,
    results: list[RequestResult],
    *,
    outcome: Outcome | None = ENDED,
    plan: dict[str, Any] | None = None,
) -> Path:
    """A run's folder, verified."""
    (folder / "statistics").mkdir(parents=True)
    records.write(folder, record(outcome, plan=plan))
    result.write_serving(folder, SERVING)
    verifier = verify.Verifier(SERVING)
    lines = [msgspec.json.encode(each) for each in results]
    for line in lines:
        verifier.take(line)
    (folder / result.REQUESTS).write_bytes(b"".join(line + b"\n" for line in lines))
    (folder / verify.FILE).write_bytes(msgspec.json.encode(verifier.verified))
    for statistics in STATISTICS:
        path = folder / "statistics" / f"{statistics['process']}.json"
        path.write_bytes(msgspec.json.encode(statistics))
    return folder
