"""The report: right numbers of a small run, and every reason why a run did not end well."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from cmnet.chaos import plan as plans
from cmnet.record.record import Death, Outcome
from nodes.serving import report, result, tables, verify
from nodes.serving.decoding import Decoding
from nodes.serving.result import RequestResult
from tests.nodes.serving import answers
from tests.nodes.serving.answers import ENDED, MS
from tests.rig import machine

GOOD = [answers.right(0), answers.right(1)]


def plan_of(text: str) -> dict[str, Any]:
    """A plan as the record keeps it."""
    data: dict[str, Any] = plans.parse(f"[{text}]", file="test", machine=machine("mini")).to_data()
    return data


KILL = plan_of("{at: 1 s, target: node02, kind: kill}")
LOSS = plan_of("{at: 0 s, target: plane vpc, kind: loss, p: 0.5}")
HARMLESS = plan_of(
    "{at: 0 s, target: plane ub, kind: delay, delay: 1 ms},"
    "{at: 0 s, target: plane ub, kind: jitter, jitter: 1 ms},"
    "{at: 0 s, target: plane ub, kind: rate, factor: 0.5},"
    "{at: 0 s, target: plane ub, kind: duplicate, p: 0.5},"
    "{at: 0 s, target: subplane 3, kind: subplane_down}"
)
ALL_DOWN = plan_of(
    ",".join(f"{{at: 0 s, target: subplane {n}, kind: subplane_down}}" for n in range(7))
)
DIED = Death(node="node02", at_ps=1_500_000, planned=False)

KEYS = (
    *("run", "launch_s", "wall_s", "virtual_s", "digest", "windows", "grants", "lag_s", "deaths"),
    *("seed", "topology", "scale", "carried_layers", "tokens_per_carried", "fingerprint"),
    *("constants_used", "verified", "rows"),
)
"""What every command's object has (design 5)."""


def build(folder: Path, results: list[RequestResult], **changes: Any) -> dict[str, Any]:
    return report.build(report.collect(answers.write_run(folder / "run", results, **changes)))


def row(found: dict[str, Any], name: str) -> dict[str, Any]:
    return next(each for each in found["rows"] if each["name"] == name)


def test_the_object_has_all_keys_that_programs_rely_on(tmp_path: Path) -> None:
    """Names are stable; and it is JSON."""
    found = build(tmp_path, GOOD)
    assert [key for key in KEYS if key not in found] == []
    assert msgspec.json.decode(msgspec.json.encode(found)).keys() == found.keys()
    assert found["problems"] == []
    assert found["verified"] == found["verified"] | {"checked": 4, "wrong": 0}


def test_latencies_are_those_of_the_lines(tmp_path: Path) -> None:
    """Exact, by hand: tokens at 20, 21, 22 ms after arrival."""
    found = build(tmp_path, GOOD)
    ttft, tpot, itl = (row(found, name) for name in ("TTFT", "TPOT", "ITL"))
    assert (ttft["count"], ttft["mean_ps"], ttft["max_ps"]) == (2, 20 * MS, 20 * MS)
    assert (tpot["count"], tpot["p50_ps"]) == (1, MS)
    assert (itl["count"], itl["p99_ps"]) == (2, MS)


def test_speeds_are_tokens_by_virtual_time_and_npus(tmp_path: Path) -> None:
    """4 tokens in 50 ms on 2 NPUs; 1,130 prompt tokens on 4."""
    found = build(tmp_path, GOOD)
    assert row(found, "decode")["tokens_per_s_npu"] == pytest.approx(40)
    assert row(found, "prefill")["tokens_per_s_npu"] == pytest.approx(5650)


def test_planes_and_exchanges_are_of_all_processes(tmp_path: Path) -> None:
    """Counters add, samples are put together, and a missing one is no zero."""
    found = build(tmp_path, GOOD)
    assert row(found, "UB") == {
        "table": "planes",
        "name": "UB",
        "frames": 10,
        "frames_in_node": 2,
        "dropped": 0,
        "charged_bytes": 14_000,
        "carried_bytes": 140,
    }
    dispatch, combine = row(found, "dispatch"), row(found, "combine")
    assert (dispatch["count"], dispatch["max_ps"], dispatch["ep_size"]) == (2, 17, 4)
    assert dispatch["tokens_per_die"] == 0.5
    assert combine["count"] == 0 and "mean_ps" not in combine


def test_steps_say_how_much_the_streams_overlap(tmp_path: Path) -> None:
    """A sample a node and step; the row says whether there were micro-batches."""
    found = build(tmp_path, GOOD)
    step, both = row(found, "step"), row(found, "both streams")
    assert (step["count"], step["mean_ps"], step["max_ps"]) == (4, 6 * MS, 7 * MS)
    assert (both["count"], both["max_ps"], both["microbatch"]) == (4, MS, "off")


def test_drafts_are_counted_and_drawn_where_there_are_some(tmp_path: Path) -> None:
    """2 of 4 accepted; 6 tokens of 4 turns. Without drafts there is no such table."""
    folder = answers.write_run(tmp_path / "run", GOOD)
    plain = report.build(report.collect(folder))
    serving = msgspec.structs.replace(answers.SERVING, decoding=Decoding(drafts=1, accept="0.6"))
    result.write_serving(folder, serving)
    found = report.build(report.collect(folder))
    drafts = row(found, "MTP")
    assert (drafts["proposed"], drafts["accepted"], drafts["acceptance"]) == (4, 2, 0.5)
    assert (drafts["tokens_per_turn"], drafts["accept"], drafts["graphs"]) == (1.5, "0.6", "fused")
    assert (row(plain, "MTP")["accept"], row(plain, "MTP")["drafts"]) == (None, 0)
    titles = [[t.title for t in tables.all_tables(each)] for each in (plain, found)]
    assert set(titles[1]) - set(titles[0]) == {"Drafts (MTP), 0.6 asked to be right, fused graphs"}


def test_every_row_beside_a_published_figure_is_marked(tmp_path: Path) -> None:
    """Fitted or predicted: a reader must know whether it could have missed."""
    beside = [each for each in build(tmp_path, GOOD)["rows"] if each.get("published")]
    assert {each["mark"] for each in beside} <= {"fitted", "predicted"}
    assert len(beside) == 6
    assert all(each["published_source"] and each["differs"] for each in beside)


def test_constants_come_with_kind_and_source(tmp_path: Path) -> None:
    """At most nine numbers of the product are fitted."""
    constants = build(tmp_path, GOOD)["constants_used"]
    assert all(each["kind"] and each["source"] for each in constants)
    assert sum(each["kind"] == "fitted" for each in constants) <= 9


def test_requests_are_all_accounted_for(tmp_path: Path) -> None:
    """Asked = ok + failed + unfinished; skipped rows were never asked."""
    requests = build(tmp_path, [GOOD[1], answers.failed(0)])["requests"]
    counts = [requests[key] for key in ("asked", "ok", "failed", "unfinished", "skipped")]
    assert counts == [2, 1, 1, 0, 1]
    assert requests["failures"] == [{"index": 0, "error": "node02 died", "tries": 1}]
    assert requests["skipped_rows"] == [{"line": 3, "reason": "too long"}]


PROBLEMS: dict[str, tuple[list[RequestResult], dict[str, Any], str]] = {
    "no end": (GOOD, {"outcome": None}, "no end"),
    "error": (GOOD, {"outcome": Outcome(error="node03 failed", error_code="BUG")}, "node03 failed"),
    "interrupted": (
        GOOD[:1],
        {"outcome": msgspec.structs.replace(ENDED, interrupted=True)},
        "interrupted",
    ),
    "wrong token": ([answers.right(0, tokens=[1, 2, 3]), GOOD[1]], {}, "of 4 tokens are wrong"),
    "unfinished": (GOOD[:1], {}, "1 requests have no end"),
    "failed": ([answers.failed(0), GOOD[1]], {}, "request 0: node02 died"),
    "failed, nothing of the plan": (
        [answers.failed(0), GOOD[1]],
        {"plan": HARMLESS},
        "request 0: node02 died",
    ),
    "failed, not by the death": (
        [answers.failed(0, "a token for expert 900"), GOOD[1]],
        {"plan": KILL},
        "a token for expert 900",
    ),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_what_went_wrong_is_a_problem(name: str, tmp_path: Path) -> None:
    """One reason each; exit status 1 comes from here alone."""
    results, changes, words = PROBLEMS[name]
    problems = build(tmp_path, results, **changes)["problems"]
    assert len(problems) == 1, problems
    assert words in problems[0]


EXCUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "planned death": ("node02 died before 5 s", {"plan": KILL}),
    "unplanned death": (
        "no decode node lived for 30 s",
        {"outcome": msgspec.structs.replace(ENDED, deaths=[DIED])},
    ),
    "lost messages": ("KV transfer: no acknowledgement in 1 s", {"plan": LOSS}),
    "all sub-planes down": ("message to node02: the link gave up", {"plan": ALL_DOWN}),
    "lost way": ("no path to node02/npu0/die1", {"plan": LOSS}),
}


@pytest.mark.parametrize("name", EXCUSED)
def test_a_request_that_failed_by_a_fault_is_no_problem(name: str, tmp_path: Path) -> None:
    """It ended with an error and the others are right: that is what is promised."""
    error, changes = EXCUSED[name]
    found = build(tmp_path, [answers.failed(0, error), GOOD[1]], **changes)
    assert found["problems"] == []


def test_counters_are_those_of_the_part_that_is_named(tmp_path: Path) -> None:
    """Another part may have one of the same name, and come first."""
    folder = answers.write_run(tmp_path / "run", GOOD)
    for path in sorted((folder / "statistics").glob("*.json")):
        data = msgspec.json.decode(path.read_bytes())
        data["program"] = {"another": {"tokens": 900, "steps": 1}} | data["program"]
        path.write_bytes(msgspec.json.encode(data))
    assert row(report.build(report.collect(folder)), "dispatch")["tokens_per_die"] == 0.5


def test_tokens_that_were_not_verified_are_a_problem(tmp_path: Path) -> None:
    """A verifier that ended early has not said that the rest is right."""
    folder = answers.write_run(tmp_path / "run", GOOD)
    (folder / verify.FILE).unlink()
    found = report.build(report.collect(folder))
    assert found["problems"] == ["0 of 4 tokens were verified: the verifier did not finish"]


def test_people_read_the_same(tmp_path: Path) -> None:
    """Deaths with their instants, failures with their reasons, and what was verified."""
    ended = msgspec.structs.replace(ENDED, deaths=[DIED], not_reached=["kill at 9 s"])
    found = build(tmp_path, [GOOD[1], answers.failed(0)], outcome=ended, plan=KILL)
    text = "\n".join([*tables.head(found), *tables.foot(found)])
    for words in (
        "node02 died by itself at 1.5 us (1500000 ps)",
        "request 0 failed after 1 tries: node02 died",
        "skipped line 3: too long",
        "kill at 9 s is later than the end",
        "verified: 1 tokens and seals of 1 requests, 0 wrong",
        "prefix: 1 of 1 blocks hit (1.0000)",
        "digest abab",
    ):
        assert words in text, words


def test_long_lists_are_cut_for_people_only(tmp_path: Path) -> None:
    """A trace may have thousands of rows that the model cannot serve."""
    found = build(tmp_path, GOOD)
    found["requests"]["skipped_rows"] = [{"line": n, "reason": "long"} for n in range(50)]
    lines = [line for line in tables.head(found) if "skipped line" in line or "more" in line]
    assert len(lines) == tables.LISTED + 1
    assert lines[-1] == f"and {50 - tables.LISTED} more: --json lists all"


def test_all_tables_can_be_drawn(tmp_path: Path) -> None:
    """Also of a run without a single answer."""
    for results in (GOOD, []):
        found = build(tmp_path / str(len(results)), results)
        for table in tables.all_tables(found):
            assert all(len(cells) == len(table.columns) for cells in table.rows)
