"""The commands of a serving run: ``serve``, ``replay``, ``report``.

Owns the way from options to a run and from a run to its report and exit status. Does not own the
options (``options``), the run (``cmnet.launch.supervisor``) nor what a report holds (``report``).
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

import nodes
from cmnet.chaos import plan as plans
from cmnet.chaos.plan import Plan
from cmnet.errors import InputError
from cmnet.launch import supervisor as launch
from cmnet.launch.beside import Beside
from cmnet.launch.supervisor import Supervisor
from cmnet.record import record as records
from cmnet.record import tail
from cmnet.record.progress import Progress
from cmnet.record.record import Record
from cmnet.record.screen import Screen
from cmnet.topology import load
from cmnet.topology.machine import Machine
from nodes import node
from nodes.model.seal import SealBody
from nodes.serving import options as serve_options
from nodes.serving import report as reports
from nodes.serving import result, workload
from nodes.serving.job import EXTENSIONS, Job, make_job
from nodes.serving.options import GENERATED_REQUESTS, Options
from nodes.serving.workload import Workload

ROOT = Path(nodes.__file__).resolve().parent.parent


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """A run before it starts: everything is checked, nothing is written."""

    machine: Machine
    job: Job
    plan: Plan
    options: Options
    command_line: list[str]
    trace_sha256: str


def serve(options: Options, *, topology: str, json: bool, command_line: Sequence[str]) -> int:
    """Serve a workload; returns the exit status."""
    screen = Screen(json=json)
    machine = load.load(topology, extensions=EXTENSIONS)
    plan = plans.NO_FAULTS if options.plan is None else _load_plan(options.plan, machine)
    prepared = prepare(machine, plan, options, command_line)
    folder = launch.make_run_folder(records.RUNS, "serve") if options.out is None else None
    folder = folder or records.claim(Path(options.out or ""))
    run(prepared, folder, screen)
    return _finish(folder, screen, {})


def replay(name: str, *, json: bool) -> int:
    """Repeat a recorded run; unplanned deaths become planned kills."""
    screen = Screen(json=json)
    old_folder = records.find(name)
    old = records.read(old_folder)
    if old.outcome is None:
        raise InputError(file=str(old_folder), key="outcome", value=None, expected="a run with an end")
    again = _prepare_again(old)
    folder = launch.make_run_folder(records.RUNS, "replay")
    new = run(again, folder, screen)
    assert new.outcome is not None
    same = (old.outcome.digest, old.outcome.error_code) == (new.outcome.digest, new.outcome.error_code)
    if old.outcome.interrupted:
        same = True
    compared = {"replay_of": str(old_folder), "recorded_digest": old.outcome.digest, "same": same}
    return _finish(folder, screen, compared)


def report(name: str, *, json: bool) -> int:
    """Print the report of a run again."""
    return _finish(records.find(name), Screen(json=json), {})


# --- before --------------------------------------------------------------------------------------


def prepare(
    machine: Machine, plan: Plan, options: Options, command_line: Sequence[str]
) -> Prepared:
    """Check everything that a run needs. Raises InputError."""
    _check_roles(machine)
    model = msgspec.convert(machine.sections["model"], EXTENSIONS["model"])
    assert isinstance(model, serve_options.ModelSettings)
    scale = serve_options.scale(options.scale, model)
    trace = options.trace
    return Prepared(
        machine=machine,
        job=make_job(machine, _workload(options, model), scale),
        plan=plan,
        options=options,
        command_line=list(command_line),
        trace_sha256="" if trace is None else records.sha256(trace),
    )
