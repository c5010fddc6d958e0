"""The command ``link``: measures a path and prints the closed form beside it.

Owns its options, its words and its exit status: 1 if a delivery is not where the formula puts it, to
the picosecond, or a carried byte is wrong. With a plan, differences are what is looked for. Does not
own the measurement (``planes.measure``).
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from cmnet.chaos import plan as plans
from cmnet.errors import InputError
from cmnet.launch import options
from cmnet.launch.run import make_run_folder
from cmnet.record import record as records
from cmnet.record.screen import Screen, Table
from cmnet.topology.load import load
from cmnet.topology.machine import Machine
from cmnet.units import format_bytes, format_ps, format_rate
from planes import measure
from planes.measure_ends import Asked

NO_MODEL = dict.fromkeys(("scale", "carried_layers", "tokens_per_carried", "fingerprint"))
"""Keys of every command's object (design 5) that mean nothing here."""


def link(
    topology: str,
    asked: Asked,
    *,
    plan_file: str | None,
    json: bool,
    command_line: Sequence[str],
) -> int:
    """Measure and print; returns the exit status. Raises InputError."""
    screen = Screen(json=json)
    machine = load(topology)
    _check(machine, asked)
    plan = plans.NO_FAULTS if plan_file is None else plans.load(plan_file, machine)
    if plan.node_faults:
        expected = "link faults only: nothing is served here"
        raise InputError(
            file=plan_file or "", key="kind", value=plan.node_faults[0].kind, expected=expected
        )
    folder = make_run_folder(records.RUNS, "link")
    found = measure.measure(machine, asked, folder=folder, rules=plan.rules)
    report = _report(machine, str(folder), found, planned=bool(plan.faults))
    _show(report, screen)
    screen.result(report)
    for problem in report["problems"]:
        screen.line(f"WRONG: {problem}")
    if report["problems"]:
        screen.line(shlex.join(["python", "run.py", *command_line]))
    return int(bool(report["problems"]))


def parse(*, plane: str, source: str, target: str, size: str, flows: str, repeat: str) -> Asked:
    """What is asked, from the texts of the command line. Raises InputError."""
    options.choice(plane, option="--plane", built=("ub", "rdma", "vpc"))
    return Asked(
        plane=plane,
        source=source,
        target=target,
        bytes=options.size_bytes(size, option="--bytes", least=1),
        flows=options.count(flows, option="--flows"),
        repeat=options.count(repeat, option="--repeat"),
    )


def _check(machine: Machine, asked: Asked) -> None:
    for option, name in (("--src", asked.source), ("--dst", asked.target)):
        try:
            machine.device(name)
        except InputError as error:
            raise options.wrong(option, name, error.expected) from None
    measure.check(machine, asked)


def _report(
    machine: Machine, folder: str, found: dict[str, Any], *, planned: bool
) -> dict[str, Any]:
    wrong = found["pieces_wrong"]
    problems = [f"{wrong} carried pieces are wrong"] if wrong else []
    if not planned:
        lone = [row["difference_ps"] for row in found["lone"].values()]
        if any((found["difference_ps"], found["flow_difference_ps_max"], *lone)):
            problems.append("a measured time is not the formula's")
        problems += found["errors"]
    common = {
        "run": folder,
        "topology": machine.file,
        "seed": 0,
        "lag_s": 0.0,
        "deaths": [],
        "constants_used": [],
        "verified": {"checked": len(found["rounds_ps"]) * found["flows"], "wrong": wrong},
        "rows": [{"operation": name} | row for name, row in found["lone"].items()],
        "problems": problems,
    }
    return common | NO_MODEL | found


def _show(report: dict[str, Any], screen: Screen) -> None:
    what = f"{report['flows']} x {format_bytes(report['bytes'])}, {report['repeat']} times"
    screen.line(f"{report['plane']}: {report['source']} -> {report['target']}: {what}")
    rate, propagation = format_rate(report["rate_bps"]), format_ps(report["propagation_ps"])
    screen.line(f"rate {rate}, one way {propagation}, {report['chunks']} chunks a flow")
    measured = report["measured_ps"]
    rows = [_row("last delivery of a round", report)]
    rows += [_row(f"lone {row['operation']}, completion", row) for row in report["rows"]]
    columns = ("", ">bytes", ">measured_ps", ">formula_ps", ">difference_ps", ">measured")
    screen.table(Table(title="", columns=columns, rows=rows))
    if measured is None:
        screen.line("nothing was delivered")
    else:
        screen.line(f"goodput {format_rate(report['goodput_bps'])}")
    for error in report["errors"]:
        screen.line(f"error: {error}")


def _row(name: str, row: dict[str, Any]) -> tuple[str, ...]:
    times = (row["measured_ps"], row["formula_ps"], row["difference_ps"])
    measured = "-" if row["measured_ps"] is None else format_ps(row["measured_ps"])
    return (name, str(row["bytes"]), *("-" if at is None else str(at) for at in times), measured)
