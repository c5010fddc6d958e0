"""Paths: how long and how fast between two devices of each sort (design 2.3).

Owns the arithmetic that turns a topology's measured latencies into propagation, and the table of
all paths. Does not own which devices exist (``machine``) nor ports (``cmnet.link``).

The measured latency is the completion of a small operation (512 B). A read is a request of no
charged bytes there and the data back, so two propagations and one serialization:

    propagation = (read latency - serialization of 512 B at the read rate) // 2

and the picosecond that the division may leave is added at the reader. Both operations of a path
share this propagation. A write is visible at propagation + serialization; the writer knows one
``completion`` later, so that a write of 512 B completes at its measured latency:

    completion = write latency - propagation - serialization of 512 B at the write rate
"""

from __future__ import annotations

import enum

import msgspec

from cmnet import units
from cmnet.topology.quantity import Duration, FieldError, Rate
from cmnet.topology.schema import (
    Operations,
    PackageSection,
    PathSection,
    PlanesSection,
    RdmaSection,
    UbSection,
    VpcSection,
)


class Plane(enum.IntEnum):
    """One of the machine's three networks."""

    UB = 0
    RDMA = 1
    VPC = 2


class Operation(enum.IntEnum):
    """Which effective rate a UB frame gets; RDMA and VPC know one rate."""

    WRITE = 0
    READ = 1


class Path(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What a frame meets between two devices on an idle machine without faults."""

    key: str
    """Where the topology file says it, such as ``planes.ub.npu_npu.inter.read``."""
    propagation_ps: int
    rate_bps: int
    """Effective rate at both ports."""
    line_rate_bps: int
    """The slower port's line rate: an upper bound that no measurement may pass."""
    completion_ps: int
    """UB write: delivered to known by the writer (bypasses the ports). UB read: 0 or 1 ps, added at
    the reader. RDMA, VPC: propagation of the acknowledgement."""
    crosses_nodes: bool
    """Between two processes; on UB, through an L2 chip."""
    in_package: bool = False
    """Two dies of one NPU: no sub-plane is part of it."""


PathKey = tuple[str, bool]
"""Row of the UB table and whether it crosses nodes."""


def split_latency(row: Operations, latency_bytes: int) -> tuple[int, int, int]:
    """(propagation, completion of a read, completion of a write) of one row; module docstring.

    May be negative where the latencies contradict the rates; ``ub_paths`` refuses that, and a write
    whose acknowledgement would be faster than the path.
    """
    read_wire_ps = units.serialization_delay_ps(latency_bytes, row.read.rate.amount)
    write_wire_ps = units.serialization_delay_ps(latency_bytes, row.write.rate.amount)
    propagation_ps, left_over_ps = divmod(row.read.latency.amount - read_wire_ps, 2)
    write_completion_ps = row.write.latency.amount - propagation_ps - write_wire_ps
    return propagation_ps, left_over_ps, write_completion_ps


def ub_paths(ub: UbSection) -> dict[tuple[PathKey, Operation], Path]:
    """All paths of the UB plane. Raises FieldError where latencies contradict rates."""
    die_bps, cpu_bps = die_line_rate_bps(ub), ub.cpu_port_rate.amount
    lines = {"npu_npu": die_bps, "npu_cpu": min(die_bps, cpu_bps), "cpu_cpu": cpu_bps}
    table = _package_paths(ub.same_npu)
    for name, line_rate_bps in lines.items():
        section: PathSection = getattr(ub, name)
        for crosses, row in ((False, section.intra), (True, section.inter)):
            key = f"planes.ub.{name}.{'inter' if crosses else 'intra'}"
            split = split_latency(row, ub.latency_bytes.amount)
            _check_row(key, row, split, line_rate_bps)
            for operation, path in _row_paths(key, row, split, line_rate_bps).items():
                crossing = msgspec.structs.replace(path, crosses_nodes=crosses)
                table[((name, crosses), operation)] = crossing
    return table


def die_line_rate_bps(ub: UbSection) -> int:
    """Line rate of a die's UB port: one link into each sub-plane."""
    return ub.subplanes.amount * ub.link_rate.amount


def _row_paths(
    key: str, row: Operations, split: tuple[int, int, int], line_rate_bps: int
) -> dict[Operation, Path]:
    propagation_ps, read_completion_ps, write_completion_ps = split
    sides = {
        Operation.READ: ("read", row.read, read_completion_ps),
        Operation.WRITE: ("write", row.write, write_completion_ps),
    }
    return {
        operation: Path(
            key=f"{key}.{word}",
            propagation_ps=propagation_ps,
            rate_bps=effective.rate.amount,
            line_rate_bps=line_rate_bps,
            completion_ps=completion_ps,
            crosses_nodes=False,
        )
        for operation, (word, effective, completion_ps) in sides.items()
    }


def _package_paths(package: PackageSection) -> dict[tuple[PathKey, Operation], Path]:
    _check_rate("planes.ub.same_npu.rate", package.rate, package.line_rate.amount)
    propagation_ps = package.propagation.amount
    completions_ps = {Operation.READ: 0, Operation.WRITE: propagation_ps}
    return {
        (("same_npu", False), operation): Path(
            key="planes.ub.same_npu",
            propagation_ps=propagation_ps,
            rate_bps=package.rate.amount,
            line_rate_bps=package.line_rate.amount,
            completion_ps=completion_ps,
            crosses_nodes=False,
            in_package=True,
        )
        for operation, completion_ps in completions_ps.items()
    }


def _check_row(key: str, row: Operations, split: tuple[int, int, int], line_rate_bps: int) -> None:
    _check_rate(f"{key}.read.rate", row.read.rate, line_rate_bps)
    _check_rate(f"{key}.write.rate", row.write.rate, line_rate_bps)
    propagation_ps, _, write_completion_ps = split
    if propagation_ps <= 0:
        expected = "more than the serialization of planes.ub.latency_bytes at the read rate"
        raise FieldError(f"{key}.read.latency.value", f"{expected}, so that propagation is above 0")
    if write_completion_ps < propagation_ps:
        least_ps = row.write.latency.amount - write_completion_ps + propagation_ps
        expected = (
            f"at least {units.format_ps(least_ps)}: propagation + serialization of the write,"
            f" and {units.format_ps(propagation_ps)} for the acknowledgement's way back"
        )
        raise FieldError(f"{key}.write.latency.value", expected)


def _check_rate(key: str, rate: Rate, line_rate_bps: int) -> None:
    if rate.amount > line_rate_bps:
        expected = f"at most the line rate, {units.format_rate(line_rate_bps)}"
        raise FieldError(f"{key}.value", expected)


def _port_path(key: str, rate: Rate, propagation: Duration, *, crosses: bool) -> Path:
    return Path(
        key=f"planes.{key}",
        propagation_ps=propagation.amount,
        rate_bps=rate.amount,
        line_rate_bps=rate.amount,
        completion_ps=propagation.amount,
        crosses_nodes=crosses,
    )


def port_paths(planes: PlanesSection) -> dict[tuple[Plane, bool], Path]:
    """The path of RDMA and of VPC, within a node and between two."""
    sections: dict[Plane, RdmaSection | VpcSection] = {
        Plane.RDMA: planes.rdma,
        Plane.VPC: planes.vpc,
    }
    return {
        (plane, crosses): _port_path(
            plane.name.lower(), section.port_rate, section.propagation, crosses=crosses
        )
        for plane, section in sections.items()
        for crosses in (False, True)
    }
