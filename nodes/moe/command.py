"""The command ``moe``, and its ``replay`` and ``report``.

Owns the way from options to a run and from a run to its report and exit status. Does not own the options
(``options``), what the run is (``setup``), the table of runs (``sweep``), what a report holds (``report``)
nor what other commands do in the same way (``nodes.running``).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from cmnet.chaos import plan as plans
from cmnet.chaos.plan import Plan
from cmnet.errors import LaunchError
from cmnet.launch.beside import Beside
from cmnet.launch.supervisor import Supervisor
from cmnet.record import record as records
from cmnet.record import tail
from cmnet.record.record import Record
from cmnet.record.screen import Screen
from cmnet.topology import load
from cmnet.topology.machine import Machine
from nodes import running
from nodes.model import bodies
from nodes.moe import options as moe_options
from nodes.moe import report as reports
from nodes.moe import setup, sweep, tables, verify
from nodes.moe.job import MoeJob
from nodes.moe.options import Options
from nodes.serving.job import EXTENSIONS


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """A run before it starts: everything is checked, nothing is written."""

    machine: Machine
    job: MoeJob
    plan: Plan
    options: Options
    command_line: list[str]


def moe(options: Options, *, topology: str, json: bool, command_line: Sequence[str]) -> int:
    """One run, or the table of runs; returns the exit status. Raises InputError."""
    screen = Screen(json=json)
    machine = load.load(topology, extensions=EXTENSIONS)
    if options.table:
        return _table(machine, options, command_line, screen)
    plan = plans.load(options.plan, machine) if options.plan is not None else plans.NO_FAULTS
    prepared = prepare(machine, plan, options, command_line)
    folder = running.run_folder(options.out, "moe")
    run(prepared, folder, screen)
    return _finish(folder, screen, {})


def replay(old_folder: Path, old: Record, screen: Screen) -> int:
    """Repeat a recorded run; unplanned deaths become planned kills."""
    options = moe_options.recorded(old.options)
    machine = records.machine(old, extensions=EXTENSIONS)
    again = prepare(machine, running.unplanned_kills(old), options, old.command_line)
    folder = running.run_folder(None, "replay")
    new = run(again, folder, screen)
    return _finish(folder, screen, running.compared(old_folder, old, new))


def report(folder: Path, screen: Screen) -> int:
    """Print the report of a run again."""
    return _finish(folder, screen, {})


def prepare(
    machine: Machine, plan: Plan, options: Options, command_line: Sequence[str]
) -> Prepared:
    """Check everything that a run needs. Raises InputError."""
    return Prepared(
        machine=machine,
        job=setup.make_job(machine, options),
        plan=plan,
        options=options,
        command_line=list(command_line),
    )


def run(prepared: Prepared, folder: Path, screen: Screen) -> Record:
    """Run and verify; leaves everything that a report needs in the folder."""
    machine, job, options = prepared.machine, prepared.job, prepared.options
    record = _record(prepared)
    records.write(folder, record)
    verifier = _verifier(folder) if options.verify else None  # which gets ready meanwhile
    try:
        told = setup.told(machine, job, fingerprint=_fingerprint(job), verify=options.verify)
        setup.write_told(folder, told)
        from nodes.moe.program import make_program  # with its kernels: only where something runs

        program = make_program(machine, job)
        started_s = tail.wall_s()
        ended = Supervisor(
            machine=machine,
            program=program,
            settings=running.settings(machine, prepared.plan, options),
            folder=folder,
        ).run()
        record = running.with_outcome(record, ended)
        records.write(folder, record)
        if verifier is not None:
            verifier.finish()
    except LaunchError as error:
        screen.line(str(error))
    finally:
        if verifier is not None:
            verifier.stop()
    if verifier is not None:
        record = running.with_verification(record, verify.read(folder).finished_at_s - started_s)
        records.write(folder, record)
    return record


def _verifier(folder: Path) -> Beside:
    return Beside("nodes.moe.verify", str(folder.resolve()), root=str(running.ROOT))


def _fingerprint(job: MoeJob) -> str:
    """Of the model, with the biases that make its skew."""
    return bodies.make(job.body, job.model, skew=job.skew).fingerprint


def _record(prepared: Prepared) -> Record:
    machine, options = prepared.machine, prepared.options
    return Record(
        command="moe",
        command_line=prepared.command_line,
        topology_file=machine.file,
        topology_text=machine.text,
        seed=options.seed,
        plan=prepared.plan.to_data(),
        options=msgspec.to_builtins(options),
        versions=records.versions(),
        started=records.wall_text(),
    )


def _finish(folder: Path, screen: Screen, more: dict[str, Any]) -> int:
    found = reports.build(reports.collect(folder)) | more
    return running.finish(folder, found, tables.show, screen)


# --- the table -----------------------------------------------------------------------------------


def _table(machine: Machine, options: Options, command_line: Sequence[str], screen: Screen) -> int:
    """Every run in a folder of its own; what repeats one that went wrong is printed last."""
    points = sweep.points(machine, options)
    prepared = [prepare(machine, plans.NO_FAULTS, each.options, command_line) for each in points]
    parent = running.run_folder(options.out, "moe-table")
    found = []
    for point, each in zip(points, prepared, strict=True):
        screen.line(f"EP {point.ep_size}, batch {point.batch}")
        folder = records.claim(parent / point.name)
        run(each, folder, screen)
        found.append(
            reports.build(reports.collect(folder)) | {"replay": running.replay_command(folder)}
        )
    whole = sweep.build(points, found, folder=parent)
    for table in tables.sweep_tables(whole):
        screen.table(table)
    screen.line(tables.verified_line(whole))
    screen.line(f"run: {parent}")
    screen.result(whole)
    for problem in whole["problems"]:
        screen.line(f"WRONG: {problem}")
    if whole["problems"]:
        screen.line(whole["replay"])
    return int(bool(whole["problems"]))
