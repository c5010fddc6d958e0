"""The commands of a serving run: ``serve``, and its ``replay`` and ``report``.

Owns the way from options to a run and from a run to its report and exit status. Does not own the
options (``options``), the run (``cmnet.launch.supervisor``), what a report holds (``report``) nor what
other commands do in the same way (``nodes.running``).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from cmnet.chaos import plan as plans
from cmnet.chaos.plan import Plan
from cmnet.errors import InputError, LaunchError
from cmnet.launch import run as launch
from cmnet.launch.beside import Beside
from cmnet.launch.supervisor import Supervisor
from cmnet.record import record as records
from cmnet.record import tail
from cmnet.record.progress import Progress
from cmnet.record.record import Record
from cmnet.record.screen import Screen
from cmnet.topology import load
from cmnet.topology.machine import Machine
from nodes import node, running
from nodes.kv.groups import Groups
from nodes.model import bodies
from nodes.serving import options as serve_options
from nodes.serving import report as reports
from nodes.serving import result, tables, verify, workload
from nodes.serving.job import EXTENSIONS, Job, make_job
from nodes.serving.options import GENERATED_REQUESTS, Options
from nodes.serving.result import Serving
from nodes.serving.workload import Workload
from nodes.settings import ModelSettings


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
    plan = plans.load(options.plan, machine) if options.plan is not None else plans.NO_FAULTS
    prepared = prepare(machine, plan, options, command_line)
    folder = running.run_folder(options.out, "serve")
    run(prepared, folder, screen)
    return _finish(folder, screen, {})


def replay(old_folder: Path, old: Record, screen: Screen) -> int:
    """Repeat a recorded run; unplanned deaths become planned kills."""
    again = _prepare_again(old, result.read_serving(old_folder))
    folder = running.run_folder(None, "replay")
    new = run(again, folder, screen)
    return _finish(folder, screen, running.compared(old_folder, old, new))


def report(folder: Path, screen: Screen) -> int:
    """Print the report of a run again."""
    return _finish(folder, screen, {})


def _finish(folder: Path, screen: Screen, more: dict[str, Any]) -> int:
    found = reports.build(reports.collect(folder)) | more
    return running.finish(folder, found, tables.show, screen)


# --- before --------------------------------------------------------------------------------------


def prepare(
    machine: Machine, plan: Plan, options: Options, command_line: Sequence[str]
) -> Prepared:
    """Check everything that a run needs. Raises InputError."""
    _check_roles(machine)
    model = machine.sections["model"]
    assert isinstance(model, ModelSettings)
    exact = options.model == "exact"
    scale = serve_options.scale(options.scale, model, exact=exact)
    return Prepared(
        machine=machine,
        job=make_job(machine, _workload(options, model), scale, options.model, options.decoding),
        plan=plan,
        options=options,
        command_line=list(command_line),
        trace_sha256="" if options.trace is None else records.sha256(options.trace),
    )


def _prepare_again(old: Record, serving: Serving) -> Prepared:
    """The run of a record, with its unplanned deaths as kills. Raises InputError."""
    options = serve_options.recorded(old.options)
    trace = options.trace
    if trace is not None and records.sha256(trace) != serving.trace_sha256:
        expected = "the trace as it was when the run was recorded"
        raise InputError(file=trace, key="", value="another content", expected=expected)
    machine = records.machine(old, extensions=EXTENSIONS)
    return prepare(machine, running.unplanned_kills(old), options, old.command_line)


def _check_roles(machine: Machine) -> None:
    roles = machine.roles
    held = {"prefill": roles.prefill, "decode": roles.decode, "ems": roles.ems}
    for name, nodes_of_role in held.items():
        if not nodes_of_role:
            raise InputError(
                file=machine.file, key=f"roles.{name}", value="none", expected="a node, to serve"
            )
    if roles.gateway is None:
        key, expected = "roles.gateway", "true, to serve"
        raise InputError(file=machine.file, key=key, value=False, expected=expected)
    _check_groups(machine)


def _check_groups(machine: Machine) -> None:
    """Every instance can be joined to the decode group."""
    dies = machine.dies_per_node
    for index, instance in enumerate(machine.roles.prefill):
        try:
            Groups(
                prefill_tp_size=len(instance) * dies,
                decode_dp_size=len(machine.roles.decode) * dies,
            )
        except ValueError:
            raise InputError(
                file=machine.file,
                key=f"roles.prefill[{index}]",
                value=f"{len(instance)} nodes",
                expected=f"a divisor of the {len(machine.roles.decode)} decode nodes",
            ) from None


def _workload(options: Options, model: ModelSettings) -> Workload:
    if options.trace is None:
        return workload.generate(
            seed=options.seed,
            max_tokens=model.max_tokens,
            block_tokens=model.block_tokens,
            requests=options.requests or GENERATED_REQUESTS,
            rate=options.speed_up,
        )
    return workload.read_trace(
        options.trace,
        max_tokens=model.max_tokens,
        block_tokens=model.block_tokens,
        requests=options.requests,
        rate=options.speed_up,
    )


# --- the run -------------------------------------------------------------------------------------


def run(prepared: Prepared, folder: Path, screen: Screen) -> Record:
    """Run and verify; leaves everything that a report needs in the folder."""
    record = _record(prepared)
    records.write(folder, record)
    result.write_serving(folder, _serving(prepared))
    verifier = Beside("nodes.serving.verify", str(folder.resolve()), root=str(running.ROOT))
    try:
        started_s = tail.wall_s()
        record = running.with_outcome(record, _supervise(prepared, folder))
        records.write(folder, record)
        screen.line("the run has ended; verifying what is left")
        verifier.finish()
    except LaunchError as error:
        screen.line(str(error))
    finally:
        verifier.stop()
    record = running.with_verification(record, verify.read(folder).finished_at_s - started_s)
    records.write(folder, record)
    return record


def _supervise(prepared: Prepared, folder: Path) -> launch.RunResult:
    """The run itself, with a progress bar."""
    job, machine = prepared.job, prepared.machine
    total = len(job.workload.requests)
    with Progress(folder / result.REQUESTS, total=total) as progress:
        return Supervisor(
            machine=machine,
            program=node.make_program(machine, job),
            settings=running.settings(machine, prepared.plan, prepared.options),
            folder=folder,
            progress=lambda each: progress.show(each.horizon.horizon_ps),
        ).run()


def _record(prepared: Prepared) -> Record:
    machine, options = prepared.machine, prepared.options
    return Record(
        command="serve",
        command_line=prepared.command_line,
        topology_file=machine.file,
        topology_text=machine.text,
        seed=options.seed,
        plan=prepared.plan.to_data(),
        options=msgspec.to_builtins(options),
        versions=records.versions(),
        started=records.wall_text(),
    )


def _serving(prepared: Prepared) -> Serving:
    machine, job = prepared.machine, prepared.job
    roles = machine.roles
    return Serving(
        workload=job.workload,
        trace_sha256=prepared.trace_sha256,
        model=job.model,
        body=job.body,
        fingerprint=bodies.make(job.body, job.model).fingerprint,
        settings=job.serving,
        decoding=job.decoding,
        prefill_npus=sum(map(len, roles.prefill)) * machine.npus_per_node,
        decode_npus=len(roles.decode) * machine.npus_per_node,
        ep_size=len(roles.decode) * machine.dies_per_node,
    )
