"""Who is named slow in whole runs: what a plan makes slow, and nobody else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from cmnet.chaos import plan as plans
from cmnet.errors import InputError
from nodes.moe import result, seen, setup, waits
from nodes.moe.operators import Operators
from nodes.moe.seen import Seen
from nodes.moe.waits import Finding
from tests.nodes.moe import made_up
from tests.nodes.moe.moe_run import Run, make_job, mini

US = 10**6
PLANS = Path(__file__).resolve().parents[2] / "plans"
SLOW = "node03/npu0/die1"
TARGET = "node02/npu0/die0"


def findings(folder: Path, plan: str | None, **options: Any) -> dict[str, Finding]:
    """What the rule says of a run on mini under a plan of ``tests/plans``."""
    rules = () if plan is None else plans.load(str(PLANS / f"{plan}.yaml"), mini()).rules
    job = make_job(**options)
    run = Run(job, folder, rules=rules)
    assert run.wrong() == (job.model.carried_layers * sum(job.counts), 0, 0)
    told = setup.told(mini(), job, fingerprint="", verify=False)
    found = seen.read(folder, told)
    operators = Operators(
        ep_size=job.ep_size,
        model=job.model,
        engine_start_ps=told.engine_start_ps,
        unfused=job.algo == "unfused",
    )
    names = list(told.die_of_rank)
    matrices = {
        "dispatch": found.dispatch_waits(),
        "combine": found.combine_waits(start_ps=operators.combine_start_ps),
    }
    return {name: waits.judge(matrix, names=names) for name, matrix in matrices.items()}


HEALTHY: dict[str, dict[str, Any]] = {
    "a few tokens": {},
    "one token": {"batch": 1, "layers": 1},
    "many": {"batch": 96},
    "four nodes": {"ep": 16, "batch": 24},
    "unfused": {"algo": "unfused"},
    "some have no tokens": {"counts": "6x4,0x4"},
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", HEALTHY)
def test_nobody_stands_out_where_nothing_is_broken(shape: str, tmp_path: Path) -> None:
    """Experts differ in rows, so ranks begin their combines at different times: nobody's fault."""
    found = findings(tmp_path, None, **HEALTHY[shape])
    assert [finding.text for finding in found.values()] == ["none stands out"] * 2


PLANTED: dict[str, tuple[str, dict[str, Any], str]] = {
    "slow sender": ("moe_slow_sender", {}, f"{SLOW} slow to send"),
    "slow sender, many tokens": ("moe_slow_sender", {"batch": 96}, f"{SLOW} slow to send"),
    "slow receiver": (
        "moe_slow_receiver",
        {"batch": 96, "layers": 1},
        f"{SLOW} slow to receive",
    ),
    "slow path": ("moe_slow_path", {"layers": 1}, f"slow path {SLOW} to {TARGET}"),
    "slow path, four nodes": (
        "moe_slow_path",
        {"ep": 16, "layers": 1},
        f"slow path {SLOW} to {TARGET}",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_what_a_plan_makes_slow_is_named_and_nothing_else(name: str, tmp_path: Path) -> None:
    """In the dispatch and in the combine, by rank or by both ends of a path."""
    plan, options, text = PLANTED[name]
    for operator, finding in findings(tmp_path, plan, **options).items():
        assert finding.text.startswith(text), operator
        assert finding.also == (), operator


def test_a_receiver_slow_in_one_layer_is_late_for_the_next(tmp_path: Path) -> None:
    """It begins its next dispatch late: as a sender, and it is still the slow receiver that it was."""
    found = findings(tmp_path, "moe_slow_receiver", batch=48)["dispatch"]
    assert [found.kind, *(other.kind for other in found.also)] == ["slow sender", "slow receiver"]
    assert {rank for one in (found, *found.also) for rank in one.ranks} == {5}


# --- arrays ---------------------------------------------------------------------------------------

JOB = made_up.job()


def read(**changes: dict[int, Any]) -> Seen:
    """A made-up run; ``changes`` of fields by rank."""
    found = Seen(steps=JOB.steps, layers=JOB.model.carried_layers, ranks=JOB.ep_size)
    for line in made_up.lines(JOB):
        mine = {name: by[line.rank] for name, by in changes.items() if line.rank in by}
        found.take(msgspec.structs.replace(line, **mine))
    return found


def test_a_combine_that_begins_late_is_no_wait() -> None:
    """Rank 6 computes for 700 us longer and its flags come 700 us later: the same transit."""
    lines = []
    for line in made_up.lines(JOB):
        flags = np.frombuffer(line.combine_flags_ps, dtype="<i8").copy()
        flags[6] += 700 * US
        began_ps = line.combine_began_ps + (700 * US if line.rank == 6 else 0)
        lines.append(
            msgspec.structs.replace(
                line, combine_began_ps=began_ps, combine_flags_ps=flags.tobytes(), rows=40
            )
        )
    found = Seen(steps=JOB.steps, layers=JOB.model.carried_layers, ranks=JOB.ep_size)
    for line in lines:
        found.take(line)
    assert (found.combine_waits(start_ps=11 * US) == 20 * US).all()


def test_a_source_that_never_began_has_no_transit() -> None:
    """Nothing is known of it; of all others it is."""
    found = read(combine_began_ps={4: -1}, rows=dict.fromkeys(range(8), 10))
    transits = found.combine_waits(start_ps=11 * US)
    assert (transits[:, 4] == waits.NEVER).all()
    assert (np.delete(transits, 4, axis=1) == 20 * US).all()


def test_a_flag_that_never_came_in_one_layer_never_came() -> None:
    """However it was in the others."""
    first = made_up.line(JOB, 0, 0, 2)
    flags = np.frombuffer(first.combine_flags_ps, dtype="<i8").copy()
    flags[3] = -1
    found = Seen(steps=JOB.steps, layers=JOB.model.carried_layers, ranks=JOB.ep_size)
    for line in made_up.lines(JOB):
        spoilt = (line.layer, line.rank) == (0, 2)
        found.take(
            msgspec.structs.replace(line, combine_flags_ps=flags.tobytes()) if spoilt else line
        )
    transits = found.combine_waits(start_ps=11 * US)
    assert transits[2, 3] == waits.NEVER
    assert (transits == waits.NEVER).sum() == 1


ODD: dict[str, dict[str, Any]] = {
    "layer -1 of 2": {"layer": -1},
    "layer 2 of 2": {"layer": 2},
    "rank -1 of 8": {"rank": -1},
    "rank 8 of 8": {"rank": 8},
    "step -1 of 1": {"step": -1},
    "step 1 of 1": {"step": 1},
    "sent_rows of 7 ranks, not 8": {"sent_rows": bytes(4 * 7)},
    "dispatch_flags_ps of 9 ranks, not 8": {"dispatch_flags_ps": bytes(8 * 9)},
    "combine_flags_ps of 1 ranks, not 8": {"combine_flags_ps": bytes(8)},
}


@pytest.mark.parametrize("text", ODD)
def test_a_line_that_no_rank_writes_is_refused(text: str, tmp_path: Path) -> None:
    """Nothing is skipped, and no place counts from the end; the error names the file and the line."""
    told = made_up.told()
    odd = msgspec.structs.replace(made_up.line(JOB, 0, 0, 1), **ODD[text])
    lines = [made_up.line(JOB, 0, 0, 0), odd]
    path = result.path(tmp_path, told.nodes[0])
    path.write_bytes(b"".join(result.encode(line) + b"\n" for line in lines))
    with pytest.raises(InputError, match=rf"line 2: '{text}'") as found:
        seen.read(tmp_path, told)
    assert found.value.file == str(path)
