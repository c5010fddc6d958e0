"""A small moe run's files without a run: right lines of the model, with instants made up. Test code only."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from cmnet.record import record as records
from cmnet.record.record import Outcome, Record
from cmnet.topology.load import load
from cmnet.topology.machine import Machine
from nodes.model import bodies
from nodes.moe import options, result, setup, verify
from nodes.moe.job import DISTINCT_ROWS, FIRST_SEED, MoeJob
from nodes.moe.result import RankLayer
from nodes.moe.setup import Told
from nodes.serving.job import EXTENSIONS
from tests.rig import TOPOLOGIES

US = 10**6
_TEXTS = (
    "ep=8 batch=3 layers=2 algo=fused engine=aiv skew=uniform eplb=off model=exact seed=0 scale=64"
)
GIVEN: dict[str, Any] = {
    **dict(text.split("=") for text in _TEXTS.split()),
    "start_order": "listed",
    "socket_buffer": "4MiB",
    **dict.fromkeys(("redundant", "plan", "counts", "out")),
    **dict.fromkeys(("table", "isolated", "no_verify", "journal"), False),
}
"""As the command line gives them: on mini.yaml, its two decode nodes."""

COUNTS = "3x5,0,2x2"


@functools.cache
def machine(name: str = "mini") -> Machine:
    return load(str(TOPOLOGIES / f"{name}.yaml"), extensions=EXTENSIONS)


@functools.cache
def job(**changes: Any) -> MoeJob:
    """Options as texts to a job on mini.yaml."""
    return setup.make_job(machine(), options.parse({**GIVEN, "counts": COUNTS, **changes}))


@functools.cache
def told(**changes: Any) -> Told:
    return setup.told(machine(), job(**changes), fingerprint="f" * 32, verify=True)


@functools.cache
def seals(job: MoeJob) -> tuple[tuple[bytes, ...], ...]:
    """[layer][rank]: what a rank's tokens are, by the body."""
    body = bodies.make(job.body, job.model, skew=job.skew)
    states = []
    for rank, count in enumerate(job.counts):
        index = rank * job.batch + np.arange(count)
        seeds = np.uint64(FIRST_SEED) + (index % DISTINCT_ROWS).astype(np.uint64)
        states.append(body.start_prompt(seeds, first_place=rank * job.batch))
    found = []
    for layer in range(job.model.carried_layers):
        states = [body.moe_here(each, layer=layer) for each in states]
        found.append(tuple(body.seals(each).astype("<u8").tobytes() for each in states))
    return tuple(found)


def line(job: MoeJob, step: int, layer: int, rank: int, **changes: Any) -> RankLayer:
    """All began together at 1 ms a layer; dispatch takes 100 us + 1 a rank, combine 50 us + 2 a rank."""
    began = (step * job.model.carried_layers + layer) * 1000 * US
    count = job.counts[rank]
    flags = np.full(job.ep_size, began + 90 * US, dtype="<i8")
    line = RankLayer(
        step=step,
        layer=layer,
        rank=rank,
        tokens=count,
        index=np.arange(count, dtype="<i4").tobytes(),
        seals=seals(job)[layer][rank],
        began_ps=began,
        dispatched_ps=began + (100 + rank) * US,
        rows=10 * (rank + 1),
        combine_began_ps=began + 200 * US,
        combined_ps=began + (250 + 2 * rank) * US,
        dispatch_flags_ps=flags.tobytes(),
        combine_flags_ps=(flags + 130 * US).tobytes(),
        sent_rows=np.full(job.ep_size, rank + 1, dtype="<i4").tobytes(),
    )
    return msgspec.structs.replace(line, **changes)


def lines(job: MoeJob) -> list[RankLayer]:
    """Of a run in which all went well."""
    return [
        line(job, step, layer, rank)
        for step in range(job.steps)
        for layer in range(job.model.carried_layers)
        for rank in range(job.ep_size)
    ]


def record(outcome: Outcome | None, *, plan: dict[str, Any] | None = None) -> Record:
    return Record(
        command="moe",
        command_line=["moe"],
        topology_file="mini.yaml",
        topology_text="",
        seed=3,
        plan=plan or {},
        options={"scale": "64"},
        outcome=outcome,
    )


ENDED = Outcome(digest="ab" * 16, windows=10, grants=20, virtual_ps=3000 * US, wall_s=0.5)


def statistics(process: str) -> dict[str, Any]:
    counters = {"frames": 5, "frames_in_node": 1, "dropped": 0, "bundles": 6}
    ub = counters | {"charged_bytes": 7000, "carried_bytes": 70}
    return {"process": process, "planes": {"UB": ub}, "program": {"memory_peak_bytes": 1000}}


def write_run(
    folder: Path,
    told: Told,
    lines: list[RankLayer],
    *,
    outcome: Outcome | None = ENDED,
    plan: dict[str, Any] | None = None,
) -> Path:
    """A run's folder, verified."""
    (folder / "statistics").mkdir(parents=True)
    records.write(folder, record(outcome, plan=plan))
    setup.write_told(folder, told)
    verifier = verify.Verifier(told.job)
    for each in lines:
        data = result.encode(each)
        verifier.take(data)
        with result.path(folder, told.nodes[told.node_of_rank[each.rank]]).open("ab") as stream:
            stream.write(data + b"\n")
    if told.verify:
        (folder / verify.FILE).write_bytes(msgspec.json.encode(verifier.finish()))
    for node in told.nodes:
        path = folder / "statistics" / f"{node}.json"
        path.write_bytes(msgspec.json.encode(statistics(node)))
    return folder
