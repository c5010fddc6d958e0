"""How reports of ``moe`` are drawn: from the report's object to lines and tables of text.

Owns wording and order on the screen. Does not own what is in the report.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cmnet.record.screen import Screen, Table
from cmnet.units import format_bytes, format_ps

Report = dict[str, Any]
LISTED = 10
NODES_SHOWN = 8
"""A traffic matrix of more nodes is left to --json."""


def show(report: Report, screen: Screen) -> None:
    """Print a report for people."""
    for line in head(report):
        screen.line(line)
    for table in all_tables(report):
        screen.table(table)
    for line in foot(report):
        screen.line(line)


def head(report: Report) -> Iterator[str]:
    """What ran, and how long."""
    yield ""
    yield (
        f"{report['topology']}, seed {report['seed']}: {report['virtual_s'] * 1e6:.3f} us virtual in"
        f" {report['wall_s']:.2f} s wall (and {report['launch_s']:.2f} s to launch)"
    )
    more = ", EPLB" if report["eplb"] else ""
    more += ", operators begun together" if report["isolated"] else ""
    yield (
        f"EP {report['ep_size']}, {report['batch']} tokens a die, {report['carried_layers']} layers,"
        f" {report['algo']}, {report['engine']}, skew {report['skew']}{more}"
    )
    yield from _deaths(report)
    errors = report["errors"]
    for each in errors[:LISTED]:
        yield f"step {each['step']}, layer {each['layer']}, rank {each['rank']}: {each['error']}"
    if len(errors) > LISTED:
        yield f"and {len(errors) - LISTED} more: --json lists all"
    yield ""


def _deaths(report: Report) -> Iterator[str]:
    for death in report["deaths"]:
        how = "as planned" if death["planned"] else "by itself"
        yield f"{death['node']} died {how} at {format_ps(death['at_ps'])} ({death['at_ps']} ps)"
    for fault in report["not_reached"]:
        yield f"the plan's {fault} is later than the end of the run"


def all_tables(report: Report) -> list[Table]:
    """Operators, bandwidth, loads, traffic, re-placement, memory, planes, constants; of passes of a
    re-placement all but the first and the last are left to its own table."""
    last = report["steps"] - 1
    shown = [row for row in report["rows"] if row.get("step", 0) in (0, last)]
    ends = report if report["replaced"] is None else report | {"rows": shown}
    found = [_operators_table(ends), _bandwidth_table(ends), _loads_table(ends)]
    found += [
        _traffic_table(each)
        for each in report["traffic"]
        if len(each["nodes"]) <= NODES_SHOWN
        and (report["replaced"] is None or each["step"] in (0, last))
    ]
    if report["replaced"] is not None:
        found.append(_replaced_table(report["replaced"]))
    return [*found, _memory_table(report), _planes_table(report), _constants_table(report)]


def foot(report: Report) -> Iterator[str]:
    """Who is slow, verification, identity."""
    for name, finding in report["waits"].items():
        yield f"waits in {name}: {finding['text']}"
    bundles = report["bundles_per_layer"]
    if bundles is not None:
        yield f"{bundles:.1f} bundles of messages on sockets a layer"
    yield verified_line(report)
    yield (
        f"model {report['fingerprint']}: carried layers {report['carried_layers']}, scale"
        f" {report['scale']}"
    )
    yield (
        f"digest {report['digest'] or '(none)'}, {report['windows']} windows,"
        f" {report['grants']} grants"
    )
    if "replay_of" in report:
        words = {True: "the same digest as recorded", False: "ANOTHER DIGEST than recorded"}
        compared = words.get(report["same"], "its record has no end to compare with")
        yield f"replay of {report['replay_of']}: {compared}"
    yield f"run: {report['run']}"


def verified_line(report: Report) -> str:
    """Of one run, or of all of a table."""
    verified = report["verified"]
    if not verified.get("asked", True):
        return "NOT VERIFIED, as asked (--no-verify)"
    line = f"verified: {verified['checked']} token-layers, {verified['wrong']} wrong"
    if verified["failed"]:
        line += f"; {verified['failed']} more have no result, as their ranks say"
    if verified.get("missing_results"):
        line += f"; {verified['missing_results']} results of ranks were never written"
    return line


def _rows(report: Report, table: str) -> list[dict[str, Any]]:
    return [row for row in report["rows"] if row["table"] == table]


def _time(value: int | None) -> str:
    return "-" if value is None else format_ps(value)


def _float(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _operators_table(report: Report) -> Table:
    rows = []
    for row in _rows(report, "layers"):
        for name in ("dispatch", "combine"):
            keys = ("mean", "max", "min", "common", "common_max", "start_spread", "links")
            times = [_time(row[f"{name}_{key}_ps"]) for key in keys]
            rows.append((row["name"], name, str(row["ranks"]), *times))
    columns = (
        *("", "operator", ">ranks", ">mean", ">max", ">min", ">common start", ">its max"),
        *(">start spread", ">links only"),
    )
    note = (
        "from a rank's begin to its return, over ranks; common start: mean from when the last has begun;\n"
        "links only: the same without the operators' own costs"
    )
    return Table(title="Operators", columns=columns, rows=rows, note=note)


def _bandwidth_table(report: Report) -> Table:
    rows = []
    for row in _rows(report, "layers"):
        for name in ("dispatch", "combine"):
            rate, printed = row[f"{name}_gb_per_s"], row[f"{name}_gb_per_s_printed"]
            size = format_bytes(row[f"{name}_bytes"])
            rows.append((row["name"], name, size, _float(rate), _float(printed)))
    columns = ("", "operator", ">bytes a die", ">GB/s", ">x 1.048576")
    note = (
        "tokens x top_k messages (mean of a die) / mean from the common start;\n"
        "the paper's printed column is 1.048576 times that"
    )
    return Table(title="Bandwidth", columns=columns, rows=rows, note=note)


def _loads_table(report: Report) -> Table:
    rows = [
        (
            row["name"],
            _float(row["rows_mean"]),
            "-" if row["rows_max"] is None else str(row["rows_max"]),
            _float(row["rows_max_over_mean"]),
        )
        for row in _rows(report, "loads")
    ]
    columns = ("", ">mean rows a rank", ">max", ">max / mean")
    return Table(
        title="Loads of ranks (rows of their experts, all layers)", columns=columns, rows=rows
    )


def _traffic_table(traffic: dict[str, Any]) -> Table:
    names = traffic["nodes"]
    rows = [(name, *map(str, counts)) for name, counts in zip(names, traffic["rows"], strict=True)]
    title = f"Rows from node to node, step {traffic['step']} {traffic['stage']}".rstrip()
    return Table(title=title, columns=("from", *(f">{name}" for name in names)), rows=rows)


def _replaced_table(replaced: dict[str, Any]) -> Table:
    rows = [
        (
            str(each["step"]),
            each["stage"],
            _float(each["rows_max_over_mean"]),
            *(_time(each[f"{key}_ps"]) for key in ("dispatch_mean", "combine_mean", "layer")),
        )
        for each in replaced["passes"]
    ]
    note = (
        f"means over layers; {replaced['moves']} times the weights of an expert in a layer,"
        f" {format_bytes(replaced['fetched_bytes'])} over UB"
    )
    if replaced["gave_up"]:
        note += f"\ngiven up: {replaced['gave_up']}"
    columns = ("pass", "stage", ">max / mean rows", ">dispatch", ">combine", ">layer")
    return Table(title="Re-placement of experts", columns=columns, rows=rows, note=note)


def _memory_table(report: Report) -> Table:
    memory = report["memory"]
    charged = (
        ("dispatch buffer", "dispatch_buffer_bytes"),
        ("combine buffer", "combine_buffer_bytes"),
        ("of it the slot rule can touch", "combine_touched_bytes"),
        (f"weights of {memory['expert_slots']} experts a layer, all layers", "weights_bytes"),
        ("HBM of a die", "hbm_bytes"),
    )
    rows = [(text, str(memory[key]), f"{memory[key] / 2**20:.1f}") for text, key in charged]
    note = "charged: ep x batch x min(top_k, experts a die) x message, both buffers apart"
    if memory["peak_bytes"] is not None:
        note += (
            f"\nreally used here, at its greatest, {memory['peak_processes']} processes together:"
            f" {format_bytes(memory['peak_bytes'])} (private pages)"
        )
    columns = ("of a die", ">bytes", ">MiB")
    return Table(title="Memory", columns=columns, rows=rows, note=note)


def _planes_table(report: Report) -> Table:
    keys = ("frames", "frames_in_node", "dropped")
    rows = [
        (
            row["name"],
            *(str(row[key]) for key in keys),
            format_bytes(row["charged_bytes"]),
            format_bytes(row["carried_bytes"]),
        )
        for row in _rows(report, "planes")
    ]
    columns = ("plane", ">frames", ">in a node", ">dropped", ">charged", ">carried")
    note = "of processes that lived at the end; charged bytes set the time, carried ones moved"
    return Table(title="Planes", columns=columns, rows=rows, note=note)


def _constants_table(report: Report) -> Table:
    rows = [
        (each["name"], f"{each['value']:g}", each["unit"], each["kind"])
        for each in report["constants_used"]
    ]
    note = "sources and ranges: --json; the machine's own numbers: run.py topology"
    columns = ("constant", ">value", "unit", "kind")
    return Table(title="Constants of the operators", columns=columns, rows=rows, note=note)


# --- the table of runs ---------------------------------------------------------------------------


def sweep_tables(whole: Report) -> list[Table]:
    """By EP degree, by batch, growth."""
    found = [_ep_table(whole, name) for name in ("dispatch", "combine")]
    found += [_batch_table(whole)] if _rows(whole, "batch") else []
    return found + ([_growth_table(whole)] if whole["growth"] else [])


def _published(row: dict[str, Any], key: str) -> str:
    value = row[f"{key}_us"]
    return "-" if value is None else f"{value:g} [{row[f'{key}_tag']}]"


def _ep_table(whole: Report, name: str) -> Table:
    rows = [
        (
            str(row["ep_size"]),
            row["mark"],
            *(_float(row[f"{name}_{key}_us"]) for key in ("common", "common_max", "links")),
            _published(row, f"{name}_cann"),
            _float(row[f"{name}_cann_error_percent"], 1),
            _float(row[f"{name}_gb_per_s"]),
            _float(row[f"{name}_gb_per_s_printed"]),
            _float(row[f"{name}_cann_gb_per_s_printed"], 0),
            _published(row, f"{name}_deepep"),
            _published(row, f"{name}_deepep_ascend"),
            _float(row[f"{name}_deepep_ascend_error_percent"], 1),
        )
        for row in _rows(whole, "ep")
    ]
    columns = (
        *("EP", "mark", ">mean us", ">max us", ">links only", ">paper", ">error %", ">GB/s"),
        *(">x 1.048576", ">paper", ">DeepEP H800", ">DeepEP-Ascend", ">error %"),
    )
    sources = whole["sources"]
    note = (
        f"routing: skew {whole['skew']} of the {whole['body']} model; operators begin together\n"
        f"paper: {sources['cann']}\nDeepEP H800: {sources['deepep']}\n"
        f"DeepEP-Ascend: {sources['deepep_ascend']}"
    )
    return Table(title=f"{name.capitalize()}, batch 128", columns=columns, rows=rows, note=note)


def _batch_table(whole: Report) -> Table:
    rows = []
    for row in _rows(whole, "batch"):
        cells = [str(row["batch"])]
        for name in ("dispatch", "combine"):
            cells += [_float(row[f"{name}_common_us"]), _float(row[f"{name}_common_max_us"])]
            cells += [_published(row, f"{name}_xdeepserve")]
            cells += [_float(row[f"{name}_xdeepserve_error_percent"], 1)]
        rows.append((*cells, row["mark"]))
    four = (">mean us", ">max us", ">xDeepServe", ">error %")
    columns = ("batch", *(f"{each}, dispatch" for each in four), *four, "mark")
    note = whole["sources"]["xdeepserve"]
    title = "Dispatch, then combine, by batch at EP 128"
    return Table(title=title, columns=columns, rows=rows, note=note)


def _growth_table(whole: Report) -> Table:
    rows = [
        (
            each["operator"],
            f"EP {each['from_ep']} to {each['to_ep']}",
            *(_float(each[key], 1) for key in ("mean_us", "links_us", "cann_us")),
        )
        for each in whole["growth"]
    ]
    columns = ("operator", "", ">growth us", ">by links and imbalance alone", ">paper's")
    note = "the rest of the growth is a fitted term of unknown cause"
    return Table(
        title="Growth of the mean with the EP degree", columns=columns, rows=rows, note=note
    )
