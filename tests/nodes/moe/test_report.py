"""The report of a moe run: right numbers of made up lines, and every reason why a run did not end well."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from cmnet.chaos import plan as plans
from cmnet.record.record import Death
from cmnet.record.screen import Screen
from nodes.constants import CONSTANTS
from nodes.moe import report, tables
from nodes.moe.operators import Operators
from nodes.moe.result import RankLayer
from tests.nodes.moe import made_up
from tests.nodes.moe.made_up import ENDED, US
from tests.nodes.serving.test_report import KEYS

TOLD = made_up.told()
JOB = TOLD.job
GOOD = made_up.lines(JOB)
TOKENS = sum(JOB.counts)


def plan_of(text: str) -> dict[str, Any]:
    machine = made_up.machine()
    data: dict[str, Any] = plans.parse(f"[{text}]", file="test", machine=machine).to_data()
    return data


def build(folder: Path, lines: list[RankLayer], **changes: Any) -> dict[str, Any]:
    told = changes.pop("told", TOLD)
    return report.build(report.collect(made_up.write_run(folder / "run", told, lines, **changes)))


def without(*places: tuple[int, int]) -> list[RankLayer]:
    """Lines but those of these (layer, rank)."""
    return [each for each in GOOD if (each.layer, each.rank) not in places]


def row(found: dict[str, Any], table: str, index: int = 0) -> dict[str, Any]:
    rows = [each for each in found["rows"] if each["table"] == table]
    return rows[index]  # type: ignore[no-any-return]  # rows are JSON


def test_the_object_has_all_keys_that_programs_rely_on(tmp_path: Path) -> None:
    """Names are stable; and it is JSON."""
    found = build(tmp_path, GOOD)
    assert [key for key in KEYS if key not in found] == []
    assert msgspec.json.decode(msgspec.json.encode(found))["rows"] == found["rows"]
    assert (found["verified"]["checked"], found["verified"]["wrong"]) == (2 * TOKENS, 0)
    assert found["carried_layers"] == 2
    assert found["problems"] == []


def test_times_of_operators(tmp_path: Path) -> None:
    """Dispatch 100 to 107 us, combine from 200 to 250..264 us after the begin of each layer."""
    for layer in (0, 1):
        found = row(build(tmp_path / str(layer), GOOD), "layers", layer)
        assert (found["step"], found["layer"], found["ranks"]) == (0, layer, 8)
        assert (found["dispatch_mean_ps"], found["dispatch_max_ps"]) == (103_500_000, 107 * US)
        assert (found["dispatch_min_ps"], found["dispatch_common_ps"]) == (100 * US, 103_500_000)
        assert (found["combine_mean_ps"], found["combine_max_ps"]) == (57 * US, 64 * US)
        assert (found["dispatch_start_spread_ps"], found["layer_ps"]) == (0, 264 * US)


def test_a_common_start_is_when_the_last_has_begun(tmp_path: Path) -> None:
    """One rank begins 30 us early: its own latency grows, the others' times from the start do not."""
    early = [
        msgspec.structs.replace(each, began_ps=each.began_ps - 30 * US) if each.rank == 0 else each
        for each in made_up.lines(made_up.job())
        if each.layer == 1
    ]
    found = row(build(tmp_path, early), "layers", 1)
    assert found["dispatch_max_ps"] == 130 * US
    assert (found["dispatch_common_ps"], found["dispatch_common_max_ps"]) == (103_500_000, 107 * US)
    assert found["dispatch_start_spread_ps"] == 30 * US


def test_links_are_what_is_left_without_the_operators_own_costs(tmp_path: Path) -> None:
    """Which grow with rows (dispatch) and tokens (combine)."""
    found = row(build(tmp_path, GOOD), "layers")
    cost = Operators(ep_size=8, model=JOB.model)
    reorder = [cost.dispatch_start_ps + cost.reorder_ps(10 * (rank + 1)) for rank in range(8)]
    sums = [cost.combine_start_ps + cost.sum_ps(count) for count in JOB.counts]
    assert abs(found["dispatch_links_ps"] - (103_500_000 - sum(reorder) / 8)) <= 1
    assert abs(found["combine_links_ps"] - (57 * US - sum(sums) / 8)) <= 1


def test_bandwidth_is_bytes_over_latency_and_as_the_paper_prints_it(tmp_path: Path) -> None:
    found = row(build(tmp_path, GOOD), "layers")
    moved = 19 * 8 * 7680 / 8
    assert found["dispatch_bytes"] == moved
    assert found["dispatch_gb_per_s"] == pytest.approx(moved / 103.5e-6 / 1e9)
    ratio = found["combine_gb_per_s_printed"] / found["combine_gb_per_s"]
    assert ratio == pytest.approx(1.048576)


def test_loads_and_traffic(tmp_path: Path) -> None:
    """Rank r gets 10 (r + 1) rows a layer, and sends r + 1 to each: node to node of four ranks each."""
    found = build(tmp_path, GOOD)
    assert row(found, "layers")["rows_max_over_mean"] == pytest.approx(80 / 45)
    loads = row(found, "loads")
    assert loads["rows"] == [20 * (rank + 1) for rank in range(8)]
    assert (loads["rows_mean"], loads["rows_max"]) == (90.0, 160)
    first = sum(2 * 4 * (rank + 1) for rank in range(4))
    second = sum(2 * 4 * (rank + 1) for rank in range(4, 8))
    traffic = found["traffic"][0]
    assert traffic["rows"] == [[first, first], [second, second]]
    assert traffic["nodes"] == ["node02", "node03"]


def test_eplb_names_the_stage_of_each_pass(tmp_path: Path) -> None:
    """Before and after, with loads and traffic of both."""
    told = made_up.told(eplb="on", redundant="8", layers="1")
    stages = ("before", "after")
    lines = [
        msgspec.structs.replace(each, stage=stages[each.step]) for each in made_up.lines(told.job)
    ]
    found = build(tmp_path, lines, told=told)
    rows = [each for each in found["rows"] if each["table"] == "loads"]
    assert [each["name"] for each in rows] == ["step 0 (before)", "step 1 (after)"]
    assert [each["stage"] for each in found["traffic"]] == ["before", "after"]
    assert found["replaced"]["after"]["layer_ps"] == 264 * US
    assert found["verified"]["checked"] == 2 * TOKENS


def test_frames_and_memory_are_summed_over_processes(tmp_path: Path) -> None:
    """Bundles a layer: 6 in each of two processes, two layers."""
    found = build(tmp_path, GOOD)
    assert found["bundles_per_layer"] == 6.0
    assert (found["memory"]["peak_bytes"], found["memory"]["peak_processes"]) == (2000, 2)
    assert found["memory"]["combine_touched_bytes"] == 3 * 8 * 14_336


def test_constants_are_those_of_the_list(tmp_path: Path) -> None:
    """With source; the unfused flow's launches only where they count."""
    names = [each["name"] for each in build(tmp_path / "a", GOOD)["constants_used"]]
    assert set(names) < {constant.name for constant in CONSTANTS}
    assert {"dispatch_token", "combine_token", "exchange_growth"} < set(names)
    told = made_up.told(algo="unfused")
    found = build(tmp_path / "b", made_up.lines(told.job), told=told)
    assert [each["name"] for each in found["constants_used"]] == [*names, "unfused_launch"]


def test_a_slow_sender_is_named(tmp_path: Path) -> None:
    """Its flags come late everywhere, in each layer."""
    late = []
    for each in GOOD:
        flags = np.frombuffer(each.dispatch_flags_ps, dtype="<i8").copy()
        flags[3] += 5000 * US
        late.append(msgspec.structs.replace(each, dispatch_flags_ps=flags.tobytes()))
    found = build(tmp_path, late)["waits"]
    assert (found["dispatch"]["kind"], list(found["dispatch"]["ranks"])) == ("slow sender", [3])
    assert TOLD.die_of_rank[3] in found["dispatch"]["text"]
    assert found["combine"]["kind"] == "none"


def test_waits_that_never_ended_are_not_averaged(tmp_path: Path) -> None:
    lines = [
        msgspec.structs.replace(each, error="x", dispatch_flags_ps=np.full(8, -1, "<i8").tobytes())
        if each.rank == 2
        else each
        for each in GOOD
    ]
    sources = report.collect(made_up.write_run(tmp_path / "run", TOLD, lines))
    waits = sources.seen.dispatch_waits()
    assert (waits[2] == -1).all()
    assert (waits[[0, 1, 3]] == 90 * US).all()
    silent = without(*((layer, 4) for layer in (0, 1)))
    sources = report.collect(made_up.write_run(tmp_path / "silent", TOLD, silent))
    assert (sources.seen.combine_waits(start_ps=0)[4] == -1).all()


# --- what is wrong -------------------------------------------------------------------------------

KILL = plan_of("{at: 1 s, target: node02, kind: kill}")
LOSS = plan_of("{at: 0 s, target: plane ub, kind: loss, p: 0.5}")
SLOW = plan_of("{at: 0 s, target: plane ub, kind: delay, delay: 1 ms}")
DIED = msgspec.structs.replace(ENDED, deaths=[Death(node="node02", at_ps=5, planned=True)])
FAILED = [
    made_up.line(JOB, 0, 0, 2, index=b"", seals=b"", error="no results of ranks 5"),
    made_up.line(JOB, 0, 1, 2, index=b"", seals=b""),
    *without((0, 2), (1, 2)),
]
BAD_SEALS = GOOD[1].seals
PROBLEMS: dict[str, tuple[list[RankLayer], dict[str, Any], str]] = {
    "no end": (GOOD, {"outcome": None}, "the run has no end"),
    "an error": (
        GOOD,
        {"outcome": msgspec.structs.replace(ENDED, error="node02 spins")},
        "node02 spins",
    ),
    "interrupted": (
        GOOD[:4],
        {"outcome": msgspec.structs.replace(ENDED, interrupted=True)},
        "interrupted",
    ),
    "a wrong seal": (
        [made_up.line(JOB, 0, 0, 0, seals=BAD_SEALS), *GOOD[1:]],
        {},
        "3 of 38 token-layers are wrong: step 0, layer 0, rank 0, token 0",
    ),
    "a line is missing": (
        without((1, 6)),
        {},
        "1 results were never written; the first: step 0, layer 1, rank 6",
    ),
    "a line is missing on a living node": (
        without((1, 6)),
        {"outcome": DIED, "plan": KILL},
        "the first: step 0, layer 1, rank 6",
    ),
    "an error that nothing explains": (
        FAILED,
        {},
        "no fault of the plan that could make them fail; step 0, layer 0, rank 2: no results of ranks 5",
    ),
    "an error that a slow plan does not explain": (FAILED, {"plan": SLOW}, "no fault of the plan"),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_what_did_not_end_well_is_a_problem(name: str, tmp_path: Path) -> None:
    """One each, in words."""
    lines, changes, text = PROBLEMS[name]
    found = build(tmp_path, lines, **changes)["problems"]
    assert len(found) == 1, found
    assert text in found[0]


NO_PROBLEMS: dict[str, tuple[list[RankLayer], dict[str, Any]]] = {
    "lines of a node that died": (
        without((1, 0), (1, 1), (1, 2), (1, 3)),
        {"outcome": DIED, "plan": KILL},
    ),
    "an error after a death": (FAILED, {"outcome": DIED, "plan": KILL}),
    "an error under loss": (FAILED, {"plan": LOSS}),
    "lines after a rank's error": ([FAILED[0], *FAILED[2:]], {"plan": LOSS}),
}


@pytest.mark.parametrize("name", NO_PROBLEMS)
def test_what_a_death_or_a_fault_explains_is_none(name: str, tmp_path: Path) -> None:
    """Right tokens or a named error."""
    lines, changes = NO_PROBLEMS[name]
    found = build(tmp_path, lines, **changes)
    assert found["problems"] == []
    assert found["verified"]["checked"] < 2 * TOKENS


def test_a_verifier_that_did_not_finish_is_a_problem(tmp_path: Path) -> None:
    folder = made_up.write_run(tmp_path / "run", TOLD, GOOD)
    (folder / "verified.json").unlink()
    found = report.build(report.collect(folder))
    assert found["problems"] == ["nothing was verified: the verifier did not finish"]


def test_a_run_without_verification_says_so(tmp_path: Path, capsys: Any) -> None:
    """It is no problem, and nobody can take it for a verified one."""
    told = msgspec.structs.replace(TOLD, verify=False)
    found = build(tmp_path, GOOD, told=told)
    assert (found["problems"], found["verified"]["checked"]) == ([], 0)
    tables.show(found, Screen(json=False))
    assert "NOT VERIFIED, as asked (--no-verify)" in capsys.readouterr().out


# --- for people ----------------------------------------------------------------------------------


def test_people_see_times_loads_and_what_was_verified(tmp_path: Path, capsys: Any) -> None:
    tables.show(build(tmp_path, GOOD), Screen(json=False))
    said = capsys.readouterr().out
    for part in (
        "EP 8, 3 tokens a die, 2 layers, fused, aiv, skew uniform",
        "step 0, layer 1  combine       8     57 us",
        "Rows from node to node, step 0",
        "6.0 bundles of messages on sockets a layer",
        "waits in dispatch: none stands out",
        "verified: 38 token-layers, 0 wrong\n",
    ):
        assert part in said, said


def test_people_see_errors_and_what_is_missing(tmp_path: Path, capsys: Any) -> None:
    """The first ten, and how many more there are."""
    lost = {"index": b"", "seals": b"", "error": "no results of ranks 5"}
    lines = [
        msgspec.structs.replace(each, **lost) for each in GOOD if (each.layer, each.rank) != (1, 7)
    ]
    tables.show(build(tmp_path, lines, plan=LOSS), Screen(json=False))
    said = capsys.readouterr().out
    assert "step 0, layer 0, rank 0: no results of ranks 5" in said
    assert "and 5 more: --json lists all" in said
    assert "0 wrong; 36 more have no result, as their ranks say; 1 results of ranks" in said


def test_a_report_without_any_line_is_drawn(tmp_path: Path, capsys: Any) -> None:
    """A run that failed at once."""
    outcome = msgspec.structs.replace(ENDED, error="node02 failed")
    tables.show(build(tmp_path, [], outcome=outcome), Screen(json=False))
    assert "step 0, layer 0  dispatch      0  " in capsys.readouterr().out
