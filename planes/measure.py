"""Measures a path: N flows of S bytes between two devices, against the closed form (design 5, ``link``).

Owns what is asked, the program that every process of the run executes, and the comparison. The flows
of a round are posted at one instant; a round begins when the last one's completions are in. Deliveries
are taken at the target, completions at the source; each leaves its times in its process's statistics.
Does not own the planes nor the run (``cmnet.launch``).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from cmnet.errors import OperationError, RunError
from cmnet.launch import options
from cmnet.launch.agent import Context
from cmnet.launch.run import Settings
from cmnet.launch.supervisor import Supervisor
from cmnet.link import formula
from cmnet.link.rules import Rule
from cmnet.topology.machine import Device, Machine, Operation, Plane
from cmnet.topology.machine import Path as LinkPath
from planes.bulk import chunks_count
from planes.measure_ends import SETTINGS_KEY, Asked, Posted, Seen, charge_factor, make_ends

CHARGED_BYTES_MAX = 64 << 30
"""Of one round: at most so much, so that a measurement ends within a minute (a million chunks)."""
CARRIED_BYTES_MAX = 8 << 30
"""Of one round on VPC, where a size that is no whole KiB is carried in larger part, or all of it."""
FLOWS_MAX = 100_000
REPEAT_MAX = 1_000


def check(machine: Machine, asked: Asked) -> None:
    """Raises InputError that names the option."""
    options.choice(asked.plane, option="--plane", built=("ub", "rdma", "vpc"))
    source, target = machine.device(asked.source), machine.device(asked.target)
    _path(machine, asked, Operation.WRITE, source, target)
    if not 1 <= asked.flows <= FLOWS_MAX:
        raise options.wrong("--flows", asked.flows, f"a whole number from 1 to {FLOWS_MAX}")
    if not 1 <= asked.repeat <= REPEAT_MAX:
        raise options.wrong("--repeat", asked.repeat, f"a whole number from 1 to {REPEAT_MAX}")
    most = CHARGED_BYTES_MAX // asked.flows
    if not 1 <= asked.bytes <= most:
        right = f"1 B to {most} B with --flows {asked.flows}: at most 64 GiB in a round"
        raise options.wrong("--bytes", f"{asked.bytes} B", right)
    carried_bytes = asked.flows * asked.bytes // charge_factor(asked.bytes)
    if asked.plane == "vpc" and carried_bytes > CARRIED_BYTES_MAX:
        right = "whole KiB, for so much on vpc: a stream carries a fixed part of what it charges"
        raise options.wrong("--bytes", f"{asked.bytes} B", right)


async def program(context: Context) -> None:
    """What every process runs; only the two ends do something."""
    asked = msgspec.convert(context.settings[SETTINGS_KEY], Asked)
    ends = make_ends(context, asked)
    seen, posted = Seen(), Posted()
    context.on_statistics = lambda: {
        "seen": msgspec.to_builtins(seen),
        "posted": msgspec.to_builtins(posted),
    }
    if context.process == ends.target.process:
        ends.receive(seen)
    if context.process != ends.source.process:
        return
    context.outstanding(+1)
    try:
        await ends.prepare(posted)
        for number in range(asked.repeat):
            posted.at_ps.append(context.loop.now_ps)
            posted.completed_ps.append(await ends.round(number, posted))
            context.mark(f"round {number}")
        await ends.lone(posted)
    except OperationError as error:
        posted.errors.append(f"{error.code}: {error}")
    context.outstanding(-1)
    context.finish()


def result(
    machine: Machine, asked: Asked, programs: Mapping[str, dict[str, Any]]
) -> dict[str, Any]:
    """The comparison, JSON-able; ``programs``: what each process left, by its name.

    ``difference_ps`` is measured minus formula of the last delivery of the round that deviates most;
    ``flow_difference_ps_max`` the largest deviation of any flow. None where nothing was delivered.
    """
    source, target = machine.device(asked.source), machine.device(asked.target)
    seen = _left(machine, programs, target, "seen", Seen)
    posted = _left(machine, programs, source, "posted", Posted)
    path = _path(machine, asked, Operation.WRITE, source, target)
    formulas = formula.deliveries_ps(
        asked.flows,
        asked.bytes,
        chunk_bytes=machine.chunk_bytes[_plane(asked)],
        rate_bps=path.rate_bps,
        propagation_ps=path.propagation_ps,
    )
    took = [
        {flow: at_ps - begin_ps for flow, at_ps in seen.rounds.get(number, {}).items()}
        for number, begin_ps in enumerate(posted.at_ps)
    ]
    lasts = [max(flows.values()) for flows in took if flows]
    measured = max(lasts, key=lambda last: abs(last - formulas[-1]), default=None)
    flows = [abs(at - formulas[flow]) for one in took for flow, at in one.items()]
    return {
        "plane": asked.plane,
        "source": asked.source,
        "target": asked.target,
        "bytes": asked.bytes,
        "flows": asked.flows,
        "repeat": asked.repeat,
        "measured_ps": measured,
        "formula_ps": formulas[-1],
        "difference_ps": None if measured is None else measured - formulas[-1],
        "flow_difference_ps_max": max(flows, default=None),
        "rounds_ps": lasts,
        "charged_bytes": asked.bytes * sum(len(one) for one in took),
        "goodput_bps": None if measured is None else _goodput_bps(asked, took, lasts),
        "rate_bps": path.rate_bps,
        "propagation_ps": path.propagation_ps,
        "chunks": chunks_count(asked.bytes, machine.chunk_bytes[_plane(asked)]),
        "failed": len(posted.errors),
        "errors": posted.errors[:10],
        "pieces_wrong": seen.wrong,
        "lone": _lone(machine, asked, posted),
    }


def measure(
    machine: Machine,
    asked: Asked,
    *,
    folder: Path,
    rules: tuple[Rule, ...] = (),
    seed: int = 0,
) -> dict[str, Any]:
    """Measure with real processes. Raises InputError, and RunError if the run failed."""
    check(machine, asked)
    settings = Settings(
        seed=seed, rules=list(rules), program={SETTINGS_KEY: msgspec.to_builtins(asked)}
    )
    run = Supervisor(machine=machine, program=program, settings=settings, folder=folder).run()
    if run.error:
        raise RunError(run.error)
    names = {machine.device(name).process for name in (asked.source, asked.target)}
    programs = {}
    for process in sorted(names):
        name = machine.processes[process].name
        left = msgspec.json.decode((folder / "statistics" / f"{name}.json").read_bytes())
        programs[name] = left["program"]
    facts = {
        "digest": run.digest,
        "windows": run.windows,
        "grants": run.grants,
        "launch_s": run.launch_s,
        "wall_s": run.wall_s,
        "virtual_s": run.virtual_ps / 1e12,
    }
    return result(machine, asked, programs) | facts


def _lone(machine: Machine, asked: Asked, posted: Posted) -> dict[str, Any]:
    """Completions of one lone operation of each sort, as the source saw them."""
    source, target = machine.device(asked.source), machine.device(asked.target)
    is_ub = _plane(asked) == Plane.UB
    compared = {}
    for name, measured in posted.lone_ps.items():
        operation = Operation.READ if name.startswith("read") else Operation.WRITE
        path = _path(machine, asked, operation, source, target)
        size_bytes = posted.lone_bytes[name]
        form = formula.read_completion_ps if operation == Operation.READ else formula.completion_ps
        expected = form(
            size_bytes,
            rate_bps=path.rate_bps,
            propagation_ps=path.propagation_ps,
            completion_ps=path.completion_ps if is_ub or form is formula.completion_ps else 0,
        )
        compared[name] = {
            "bytes": size_bytes,
            "measured_ps": measured,
            "formula_ps": expected,
            "difference_ps": measured - expected,
            "printed_ps": _printed_ps(machine, path, size_bytes),
        }
    return compared


def _printed_ps(machine: Machine, path: LinkPath, size_bytes: int) -> int | None:
    """The latency that the topology file prints for an operation of this size, if it does."""
    ub = machine.topology.planes.ub
    if size_bytes != ub.latency_bytes.amount or path.key.count(".") != 4:
        return None
    row: Any = machine.topology
    for key in path.key.split("."):
        row = getattr(row, key)
    latency_ps: int = row.latency.amount
    return latency_ps


def _goodput_bps(asked: Asked, took: list[dict[int, int]], lasts: list[int]) -> int:
    """Bits delivered by the time that the rounds took, rounded down."""
    bits = 8 * asked.bytes * sum(len(one) for one in took)
    return bits * 10**12 // max(sum(lasts), 1)


def _left(
    machine: Machine,
    programs: Mapping[str, dict[str, Any]],
    device: Device,
    key: str,
    shape: type[Any],
) -> Any:
    left = programs[machine.processes[device.process].name]
    return msgspec.convert(left[key], shape, strict=False)


def _path(
    machine: Machine, asked: Asked, operation: Operation, source: Device, target: Device
) -> LinkPath:
    return machine.path(
        plane=_plane(asked),
        operation=operation,
        source=source.device_id,
        target=target.device_id,
    )


def _plane(asked: Asked) -> Plane:
    return Plane[asked.plane.upper()]
