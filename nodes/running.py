"""What the commands that run something on a machine share: from options to settings, from end to status.

Owns what a run of any program is told (``settings``), how its end enters its record, what every report
says, its printing with the exit status, and the command that repeats the run. Does not own programs,
options, nor what is measured.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

import nodes
from cmnet.chaos.plan import Plan
from cmnet.launch import run as launch
from cmnet.link.effects import BurstLoss, Corrupt, Flap, Loss, Partition, SubplaneDown
from cmnet.link.rules import CLOUDMATRIX
from cmnet.record import record as records
from cmnet.record.record import Outcome, Record
from cmnet.record.screen import Screen
from cmnet.topology.machine import Machine
from cmnet.units import format_ps

ROOT = Path(nodes.__file__).resolve().parent.parent
Order = Literal["listed", "random", "reverse"]

HARMFUL = (Loss, BurstLoss, Partition, Flap, Corrupt)
"""Link faults that can keep work from its end, beside sub-planes that are all down."""


class Common(Protocol):
    """Options that every such command has."""

    @property
    def seed(self) -> int: ...
    @property
    def start_order(self) -> Order: ...
    @property
    def socket_buffer_bytes(self) -> int: ...
    @property
    def journal(self) -> bool: ...


def settings(machine: Machine, plan: Plan, options: Common) -> launch.Settings:
    """What the supervisor is told."""
    index_of = {process.name: process.index for process in machine.processes}
    faults = [
        launch.NodeFault(
            at_ps=fault.at_ps,
            kind=fault.kind,
            process=index_of[fault.node],
            sudden=fault.sudden,
        )
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


def run_folder(out: str | None, word: str) -> Path:
    """The folder that ``--out`` names, or a new one in ``runs/``. Raises InputError."""
    if out is None:
        return launch.make_run_folder(records.RUNS, word)
    return records.claim(Path(out))


def with_outcome(record: Record, ended: launch.RunResult) -> Record:
    """The record with how the run ended."""
    deaths = [
        records.Death(node=death.name, at_ps=death.at_ps, planned=death.planned)
        for death in ended.deaths
    ]
    late = [f"{fault.kind} at {format_ps(fault.at_ps)}" for fault in ended.not_reached]
    outcome = Outcome(
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


def with_verification(record: Record, verified_s: float) -> Record:
    """Wall time lasts to the last verification, ``verified_s`` after the launch began."""
    outcome = record.outcome
    if outcome is None:
        return record
    wall_s = max(outcome.wall_s, verified_s - outcome.launch_s)
    return msgspec.structs.replace(record, outcome=msgspec.structs.replace(outcome, wall_s=wall_s))


def unplanned_kills(old: Record) -> Plan:
    """The plan of a recorded run, its unplanned deaths as kills."""
    deaths = [] if old.outcome is None else old.outcome.deaths
    kills = [(death.node, death.at_ps) for death in deaths if not death.planned]
    return Plan.from_data(old.plan).with_kills(kills)


def compared(old_folder: Path, old: Record, new: Record) -> dict[str, Any]:
    """What a replay's report says of the run that it repeats."""
    same = None
    recorded = old.outcome or Outcome()
    if old.outcome is not None and not recorded.interrupted:
        assert new.outcome is not None
        same = recorded.ended_like(new.outcome)
    return {"replay_of": str(old_folder), "recorded_digest": recorded.digest, "same": same}


def head(record: Record, folder: Path) -> dict[str, Any]:
    """Keys of every report that the record alone decides (design 5)."""
    outcome = record.outcome or Outcome()
    return {
        "run": str(folder),
        "command": record.command,
        "command_line": record.command_line,
        "launch_s": outcome.launch_s,
        "wall_s": outcome.wall_s,
        "virtual_s": outcome.virtual_ps / 1e12,
        "virtual_ps": outcome.virtual_ps,
        "digest": outcome.digest,
        "windows": outcome.windows,
        "grants": outcome.grants,
        "lag_s": 0.0,
        "deaths": [msgspec.to_builtins(death) for death in outcome.deaths],
        "seed": record.seed,
        "topology": record.topology_file,
        "scale": record.options["scale"],
        "interrupted": outcome.interrupted,
        "error": outcome.error,
        "error_code": outcome.error_code,
        "detail": outcome.detail,
        "not_reached": outcome.not_reached,
        "socket_buffer_bytes": outcome.socket_buffer_bytes,
    }


def ended_badly(record: Record) -> list[str]:
    """What is wrong with the run's end, whatever it was to do."""
    outcome = record.outcome
    if outcome is None:
        return ["the run has no end: its supervisor was ended"]
    found = [outcome.error] if outcome.error else []
    if outcome.interrupted:
        found.append("interrupted: this is what was done so far")
    return found


def can_fail(plan: Plan) -> bool:
    """Whether a plan has a fault that can keep a request, or a rank, from its tokens. One that only
    delays, slows or doubles has none."""
    down = {each.effect.subplane for each in plan.rules if isinstance(each.effect, SubplaneDown)}
    return (
        bool(plan.node_faults)
        or any(isinstance(each.effect, HARMFUL) for each in plan.rules)
        or len(down) >= CLOUDMATRIX.subplanes
    )


def read_statistics(folder: Path) -> list[dict[str, Any]]:
    """Counters of each process that lived at the end."""
    files = sorted((folder / "statistics").glob("*.json"))
    expected = "what a process of the run counted"
    return [records.decoded(path, dict[str, Any], expected=expected) for path in files]


def plane_rows(statistics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each plane: its counters, added over processes."""
    found: dict[str, dict[str, Any]] = {}
    for each in statistics:
        for plane, counters in each["planes"].items():
            row = found.setdefault(plane, {"table": "planes", "name": plane})
            for counter, value in counters.items():
                row[counter] = row.get(counter, 0) + value
    return list(found.values())


def finish(
    folder: Path,
    report: dict[str, Any],
    show: Callable[[dict[str, Any], Screen], None],
    screen: Screen,
) -> int:
    """Print the report; returns the exit status. On 1 the last line is the replay's command."""
    if report.get("same") is False:
        recorded = report["recorded_digest"]
        report["problems"].append(f"another digest than recorded: {recorded}")
    report["replay"] = replay_command(folder)
    show(report, screen)
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
