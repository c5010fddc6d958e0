"""``moe --table``: which runs it makes, and its rows beside the published figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from nodes.moe import options, published, sweep, tables
from tests.nodes.moe import made_up
from tests.nodes.moe.made_up import US, machine
from tests.nodes.serving.test_report import KEYS

ASKED = options.parse(
    {
        **made_up.GIVEN,
        **dict.fromkeys(("ep", "batch", "layers", "model")),
        "table": True,
        "seed": "4",
    }
)


def report(point: sweep.Point, **changes: Any) -> dict[str, Any]:
    """Latencies are 100 us + EP for dispatch, 120 us + batch for combine; links a tenth of them."""
    dispatch, combine = (100 + point.ep_size) * US, (120 + point.batch) * US
    layer = {"table": "layers", "rows_max_over_mean": 1.2}
    for name, took in (("dispatch", dispatch), ("combine", combine)):
        layer |= {f"{name}_common_ps": took, f"{name}_common_max_ps": took + US}
        layer |= {f"{name}_links_ps": took // 10, f"{name}_gb_per_s": 50.0}
        layer |= {f"{name}_gb_per_s_printed": 52.4}
    same = ("seed", "topology", "scale", "carried_layers", "tokens_per_carried", "fingerprint")
    found: dict[str, Any] = dict.fromkeys(
        (*same, "constants_used", "algo", "engine", "skew", "body"), "same"
    )
    found |= dict.fromkeys(("launch_s", "wall_s", "virtual_s", "windows", "grants"), 2)
    found |= {"run": f"runs/x/{point.name}", "command_line": ["moe"], "digest": point.name}
    found |= {"ep_size": point.ep_size, "batch": point.batch, "deaths": [], "replay": "again"}
    checked = point.ep_size * point.batch
    verified = {"checked": checked, "wrong": 0, "failed": 0, "asked": True}
    return found | {"verified": verified, "rows": [layer], "problems": []} | changes


POINTS = sweep.points(machine("cloudmatrix384"), ASKED)
WHOLE = sweep.build(POINTS, [report(point) for point in POINTS], folder=Path("runs/x"))


def row(table: str, key: str, value: int) -> dict[str, Any]:
    (found,) = [each for each in WHOLE["rows"] if each["table"] == table and each[key] == value]
    return found  # type: ignore[no-any-return]  # rows are JSON


def test_each_shape_is_run_once_with_what_was_asked() -> None:
    """EP 128 at batch 128 is in both tables."""
    shapes = [(each.ep_size, each.batch) for each in POINTS]
    assert len(shapes) == len(set(shapes)) == 6 + 8 - 1
    assert {each.options.layers for each in POINTS} == {1}
    assert {each.options.seed for each in POINTS} == {4}
    assert not any(each.options.table for each in POINTS)
    assert all(each.options.isolated for each in POINTS)


def test_routing_is_uniformly_random_unless_asked_otherwise() -> None:
    """As the published latencies are taken to be; a single run has the exact model."""
    assert {each.options.model for each in POINTS} == {"seal"}
    given = {**made_up.GIVEN, "ep": None, "batch": None, "layers": None}
    assert options.parse({**given, "table": True}).model == "exact"
    assert options.parse({**given, "model": None}).model == "exact"


def test_a_small_machine_has_the_rows_that_fit() -> None:
    points = sweep.points(machine("mini"), ASKED)
    assert [(each.ep_size, each.batch) for each in points] == [(8, 128), (16, 128)]
    whole = sweep.build(points, [report(point) for point in points], folder=Path("x"))
    assert [each["table"] for each in whole["rows"]] == ["ep", "ep"]
    assert len(tables.sweep_tables(whole)) == 3


def test_the_object_has_all_keys_that_programs_rely_on() -> None:
    """What was verified is the sum over runs."""
    assert [key for key in KEYS if key not in WHOLE] == []
    assert WHOLE["verified"]["checked"] == sum(each.ep_size * each.batch for each in POINTS)
    assert msgspec.json.decode(msgspec.json.encode(WHOLE))["rows"] == WHOLE["rows"]


def test_rows_are_fitted_or_predicted() -> None:
    """The two to which constants were fitted predict nothing."""
    marks = {each["ep_size"]: each["mark"] for each in WHOLE["rows"] if each["table"] == "ep"}
    assert [ep for ep, mark in marks.items() if mark == "fitted"] == [8, 256]
    assert list(marks) == [8, 16, 32, 64, 128, 256]


def test_errors_are_against_the_published_latency() -> None:
    """With how far that is confirmed; another machine's has none, a missing figure neither."""
    found = row("ep", "ep_size", 16)
    assert (found["dispatch_common_us"], found["dispatch_cann_us"]) == (116.0, 131)
    assert found["dispatch_cann_tag"] == "M"
    assert found["dispatch_cann_error_percent"] == pytest.approx(100 * (116 / 131 - 1))
    assert found["combine_deepep_ascend_error_percent"] == pytest.approx(100 * (248 / 135 - 1))
    assert "dispatch_deepep_error_percent" not in found
    assert found["dispatch_deepep_us"] == 173
    assert row("ep", "ep_size", 64)["dispatch_deepep_ascend_us"] is None
    assert row("batch", "batch", 4)["combine_xdeepserve_us"] == 25
    assert row("batch", "batch", 8)["combine_xdeepserve_error_percent"] is None


def test_growth_is_from_the_least_to_the_greatest_group() -> None:
    """Ours 248 us here, 24.8 by links; the paper's 36 and 31."""
    dispatch, combine = WHOLE["growth"]
    assert (dispatch["from_ep"], dispatch["to_ep"], dispatch["mean_us"]) == (8, 256, 248.0)
    assert dispatch["links_us"] == pytest.approx(24.8)
    assert (dispatch["cann_us"], combine["cann_us"]) == (36, 31)


def test_the_papers_bandwidth_is_bytes_over_latency_times_a_unit_slip() -> None:
    """All twelve printed numbers, both columns rounded: why it is compared with ours x 1.048576."""
    for ep, pair in published.CANN.items():
        for size, name in ((7_680, "dispatch"), (14_336, "combine")):
            latency = getattr(pair, name).value
            printed = getattr(published.CANN_PRINTED_GB_PER_S[ep], name).value
            moved = 128 * 8 * size * published.PRINTED_UNIT / 1e3
            assert moved / (latency + 0.5) - 0.5 <= printed <= moved / (latency - 0.5) + 0.5


def test_a_problem_of_one_run_is_one_of_the_table() -> None:
    """And what repeats that run is what is printed last."""
    reports = [report(point) for point in POINTS]
    reports[3] |= {"problems": ["node12 died"], "replay": "python run.py replay this"}
    found = sweep.build(POINTS, reports, folder=Path("runs/x"))
    assert found["problems"] == [f"{reports[3]['run']}: node12 died"]
    assert found["replay"] == "python run.py replay this"


def test_a_run_without_result_leaves_holes() -> None:
    """No latency: no error, no growth; all is drawn."""
    reports = [report(point) for point in POINTS]
    layer = reports[0]["rows"][0]
    reports[0]["rows"] = [{key: value if key == "table" else None for key, value in layer.items()}]
    found = sweep.build(POINTS, reports, folder=Path("runs/x"))
    assert found["rows"][0]["dispatch_cann_error_percent"] is None
    assert found["growth"][0]["mean_us"] is None
    assert [len(table.rows) for table in tables.sweep_tables(found)] == [6, 6, 8, 2]


def test_people_see_both_tables_and_the_sources() -> None:
    text = "\n".join(
        line for table in tables.sweep_tables(WHOLE) for line in (table.title, table.note)
    )
    for part in ("Dispatch, batch 128", "at EP 128", "sgl-kernel-npu", "unknown cause", "figure 6"):
        assert part in text
    first = tables.sweep_tables(WHOLE)[0].rows[0]
    assert first[:6] == ("8", "fitted", "108.00", "109.00", "10.80", "116 [V2]")
