"""The commands of a serving run: ``serve``, ``replay``, ``report``.

Owns the way from options to a run and from a run to its report and exit status. Does not own the
options (``options``), the run (``cmnet.launch.supervisor``) nor what a report holds (``report``).
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

import nodes
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
from cmnet.units import format_ps
from nodes import node
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
    plan = plans.load(options.plan, machine) if options.plan is not None else plans.NO_FAULTS
    prepared = prepare(machine, plan, options, command_line)
    if options.out is None:
        folder = launch.make_run_folder(records.RUNS, "serve")
    else:
        folder = records.claim(Path(options.out))
    run(prepared, folder, screen)
    return _finish(folder, screen, {})


def replay(name: str, *, json: bool) -> int:
    """Repeat a recorded run; unplanned deaths become planned kills."""
    screen = Screen(json=json)
    old_folder = records.find(name)
    old = records.read(old_folder)
    again = _prepare_again(old, result.read_serving(old_folder))
    folder = launch.make_run_folder(records.RUNS, "replay")
    new = run(again, folder, screen)
    same = None
    recorded = old.outcome or records.Outcome()
    if old.outcome is not None and not recorded.interrupted:
        assert new.outcome is not None
        same = recorded.ended_like(new.outcome)
    compared = {"replay_of": str(old_folder), "recorded_digest": recorded.digest, "same": same}
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
    model = machine.sections["model"]
    assert isinstance(model, ModelSettings)
    exact = options.model == "exact"
    scale = serve_options.scale(options.scale, model, exact=exact)
    return Prepared(
        machine=machine,
        job=make_job(machine, _workload(options, model), scale, options.model),
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
    deaths = [] if old.outcome is None else old.outcome.deaths
    kills = [(death.node, death.at_ps) for death in deaths if not death.planned]
    plan = Plan.from_data(old.plan).with_kills(kills)
    machine = records.machine(old, extensions=EXTENSIONS)
    return prepare(machine, plan, options, old.command_line)


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
    verifier = Beside("nodes.serving.verify", str(folder.resolve()), root=str(ROOT))
    try:
        started_s = tail.wall_s()
        record = _with_outcome(record, _supervise(prepared, folder))
        records.write(folder, record)
        screen.line("the run has ended; verifying what is left")
        verifier.finish()
    except LaunchError as error:
        screen.line(str(error))
    finally:
        verifier.stop()
    record = _with_verification(record, verify.read(folder).finished_at_s - started_s)
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
            settings=_settings(prepared),
            folder=folder,
            progress=lambda each: progress.show(each.horizon.horizon_ps),
        ).run()


def _settings(prepared: Prepared) -> launch.Settings:
    options, plan = prepared.options, prepared.plan
    index_of = {process.name: process.index for process in prepared.machine.processes}
    faults = [
        launch.NodeFault(at_ps=fault.at_ps, kind=fault.kind, process=index_of[fault.node])
        for fault in plan.node_faults
    ]
    return launch.Settings(
        seed=options.seed,
        start_order=options.start_order,
        socket_buffer_bytes=options.socket_buffer_bytes,
        journal=options.journal,
        rules=list(plan.rules),
        node_faults=faults,
    )


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
        prefill_npus=sum(map(len, roles.prefill)) * machine.npus_per_node,
        decode_npus=len(roles.decode) * machine.npus_per_node,
        ep_size=len(roles.decode) * machine.dies_per_node,
    )


def _with_outcome(record: Record, ended: launch.RunResult) -> Record:
    deaths = [
        records.Death(node=death.name, at_ps=death.at_ps, planned=death.planned)
        for death in ended.deaths
    ]
    late = [f"{fault.kind} at {format_ps(fault.at_ps)}" for fault in ended.not_reached]
    outcome = records.Outcome(
        digest=ended.digest,
        windows=ended.windows,
        grants=ended.grants,
        virtual_ps=ended.virtual_ps,
        launch_s=ended.launch_s,
        wall_s=ended.wall_s,
        deaths=deaths,
        not_reached=late,
        error=ended.error,
        error_code=ended.error_code,
        detail=ended.detail,
        interrupted=ended.interrupted,
        socket_buffer_bytes=ended.socket_buffer_bytes or None,
    )
    return msgspec.structs.replace(record, outcome=outcome)


def _with_verification(record: Record, verified_s: float) -> Record:
    """Wall time lasts to the last verification, ``verified_s`` after the launch began."""
    outcome = record.outcome
    if outcome is None:
        return record
    wall_s = max(outcome.wall_s, verified_s - outcome.launch_s)
    return msgspec.structs.replace(record, outcome=msgspec.structs.replace(outcome, wall_s=wall_s))


# --- after ---------------------------------------------------------------------------------------


def _finish(folder: Path, screen: Screen, more: dict[str, Any]) -> int:
    """Print the report; returns the exit status. On 1 the last line is the replay's command."""
    report = reports.build(reports.collect(folder)) | more
    if report.get("same") is False:
        recorded = report["recorded_digest"]
        report["problems"].append(f"another digest than recorded: {recorded}")
    report["replay"] = replay_command(folder)
    tables.show(report, screen)
    screen.result(report)
    if not report["problems"]:
        return 0
    for problem in report["problems"]:
        screen.line(f"WRONG: {problem}")
    if report["detail"]:
        screen.line(report["detail"])
    screen.line(report["replay"])
    return 1


def replay_command(folder: Path) -> str:
    """What a user types here to repeat this run."""
    here = Path.cwd()
    script = "run.py" if here == ROOT else str(ROOT / "run.py")
    absolute = folder.resolve()
    near = absolute.is_relative_to(here)
    named = str(absolute.relative_to(here)) if near else str(absolute)
    return shlex.join(["python", script, "replay", named])
