"""How a report is drawn: from the report's object to lines and tables of text.

Owns wording and order on the screen. Does not own what is in the report.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from cmnet.record.screen import Screen, Table
from cmnet.units import format_bytes, format_ps

Report = dict[str, Any]
LISTED = 10
_TIMES = ("mean_ps", "p50_ps", "p90_ps", "p99_ps", "max_ps")


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
    requests = report["requests"]
    yield ""
    yield (
        f"{report['topology']}, seed {report['seed']}: {report['virtual_s']:.6f} s virtual in"
        f" {report['wall_s']:.2f} s wall (and {report['launch_s']:.2f} s to launch)"
    )
    where = requests["file"] or "generated"
    yield (
        f"{requests['asked']} requests ({where}): {requests['ok']} ok, {requests['failed']} failed,"
        f" {requests['skipped']} skipped, {requests['unfinished']} unfinished,"
        f" {requests['retried']} retried; {requests['prompt_tokens']} prompt tokens,"
        f" {requests['output_tokens']} output tokens"
    )
    for death in report["deaths"]:
        how = "as planned" if death["planned"] else "by itself"
        yield f"{death['node']} died {how} at {format_ps(death['at_ps'])} ({death['at_ps']} ps)"
    yield from _first(
        f"skipped line {row['line']}: {row['reason']}" for row in requests["skipped_rows"]
    )
    yield from _first(
        f"request {each['index']} failed after {each['tries']} tries: {each['error']}"
        for each in requests["failures"]
    )
    for fault in report["not_reached"]:
        yield f"the plan's {fault} is later than the end of the run"
    yield ""


def _first(lines: Iterable[str]) -> Iterator[str]:
    """Enough of a list to see what it is about; all of it is in the report's object."""
    whole = list(lines)
    yield from whole[:LISTED]
    if len(whole) > LISTED:
        yield f"and {len(whole) - LISTED} more: --json lists all"


def all_tables(report: Report) -> list[Table]:
    """Latency, exchange, steps, drafts, speed, planes, constants."""
    return [
        _times_table(report, "latency", "Latency of answered requests (percentiles: nearest rank)"),
        _times_table(report, "exchange", _exchange_title(report)),
        _times_table(report, "steps", _steps_title(report)),
        *_drafts_tables(report),
        _speed_table(report),
        _published_table(report),
        _planes_table(report),
        _constants_table(report),
    ]


def foot(report: Report) -> Iterator[str]:
    """Prefix hits, verification, identity."""
    prefix, verified = report["prefix"], report["verified"]
    yield (
        f"prefix: {prefix['blocks_hit']} of {prefix['blocks']} blocks hit"
        f" ({prefix['hit_rate']:.4f}); {prefix['distinct_blocks']} distinct blocks of"
        f" {prefix['block_references']} in the prompts"
    )
    yield (
        f"verified: {verified['checked']} tokens and seals of {verified['requests']} requests,"
        f" {verified['wrong']} wrong"
    )
    yield (
        f"model {report['fingerprint']}: carried layers {report['carried_layers']}, tokens per"
        f" carried row {report['tokens_per_carried']}, scale {report['scale']}"
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


def _rows(report: Report, table: str) -> list[dict[str, Any]]:
    return [row for row in report["rows"] if row["table"] == table]


def _exchange_title(report: Report) -> str:
    row = _rows(report, "exchange")[0]
    return f"Expert exchange over UB, EP{row['ep_size']}, {row['tokens_per_die']:.3f} tokens a die"


def _steps_title(report: Report) -> str:
    return f"Decode steps, micro-batches {_rows(report, 'steps')[0]['microbatch']}"


def _drafts_tables(report: Report) -> list[Table]:
    """One, where the run had drafts."""
    return [
        Table(
            title=f"Drafts (MTP), {row['accept']} asked to be right, {row['graphs']} graphs",
            columns=("", ">proposed", ">accepted", ">share", ">turns", ">tokens", ">tokens/turn"),
            rows=[
                (
                    row["name"],
                    str(row["proposed"]),
                    str(row["accepted"]),
                    _ratio(row["acceptance"]),
                    str(row["turns"]),
                    str(row["tokens"]),
                    _ratio(row["tokens_per_turn"]),
                )
            ],
            note=row["definition"],
        )
        for row in _rows(report, "drafts")
        if row["drafts"]
    ]


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _times_table(report: Report, name: str, title: str) -> Table:
    rows = []
    for row in _rows(report, name):
        times = (format_ps(row[key]) if key in row else "-" for key in _TIMES)
        rows.append((row["name"], str(row["count"]), *times))
    what = {row["definition"]: row["name"] for row in _rows(report, name)}
    note = "; ".join(f"{first}: {definition}" for definition, first in what.items())
    if len(what) < len(rows):
        note = next(iter(what))
    columns = ("", ">n", ">mean", ">p50", ">p90", ">p99", ">max")
    return Table(title=title, columns=columns, rows=rows, note=note)


def _speed_table(report: Report) -> Table:
    rows = [
        (row["name"], str(row["tokens"]), str(row["npus"]), f"{row['tokens_per_s_npu']:.2f}")
        for row in _rows(report, "speed")
    ]
    columns = ("", ">tokens", ">NPUs", ">tokens/s per NPU")
    note = (
        "tokens of answered requests (of prefill with reused ones, of decode with each first one)"
        " / virtual seconds of the whole run / NPUs of the role"
    )
    return Table(title="Speed (virtual)", columns=columns, rows=rows, note=note)


def _published_table(report: Report) -> Table:
    rows, notes = [], []
    for row in report["rows"]:
        if row.get("published") is None:
            continue
        speed = row["table"] == "speed"
        ours = f"{row['tokens_per_s_npu']:.2f} tok/s/NPU" if speed else _mean(row)
        theirs = f"{row['published']} tok/s/NPU" if speed else format_ps(row["published"])
        rows.append((row["name"], ours, theirs, row["mark"]))
        notes.append(f"{row['name']}: {row['published_source']}; {row['differs']}")
    columns = ("", ">here, mean", ">published", "mark")
    return Table(
        title="Beside published figures", columns=columns, rows=rows, note="\n".join(notes)
    )


def _mean(row: dict[str, Any]) -> str:
    return format_ps(row["mean_ps"]) if "mean_ps" in row else "-"


def _planes_table(report: Report) -> Table:
    rows = [
        (
            row["name"],
            str(row["frames"]),
            str(row["frames_in_node"]),
            str(row["dropped"]),
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
        (each["name"], _number(each["value"]), each["unit"], each["kind"], _range(each))
        for each in report["constants_used"]
        if each["kind"] in ("fitted", "assumed")
    ]
    kinds = [each["kind"] for each in report["constants_used"]]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    note = f"constants used: {counts}; all of them, with sources: --json, and run.py topology"
    columns = ("constant", ">value", "unit", "kind", "range to try")
    return Table(title="Fitted and assumed constants", columns=columns, rows=rows, note=note)


def _number(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _range(constant: dict[str, Any]) -> str:
    tried = constant.get("range")
    return f"{_number(tried[0])} to {_number(tried[1])}" if tried else ""
