"""The machine: every process and device, and the path between any two.

Owns numbering (process indices, device ids), names, and look-up of paths, which is cached. Built
once, before the fork; frozen apart from that cache. Does not own the file (``load``), the arithmetic
of paths (``paths``) nor who does what (``roles``).

Processes: nodes in file order, then further ones (gateway). Devices, dense from 0: of each node its
dies (npu0/die0, npu0/die1, npu1/die0, ...), its CPUs, the node itself (its VPC port); then one
device (its VPC port) of each further process.
"""

from __future__ import annotations

import difflib
from typing import Literal

import msgspec

from cmnet import units
from cmnet.errors import InputError
from cmnet.topology import checks, paths, roles, schema
from cmnet.topology.paths import Operation as Operation
from cmnet.topology.paths import Path as Path
from cmnet.topology.paths import Plane as Plane
from cmnet.topology.roles import Roles as Roles
from cmnet.topology.schema import (
    EngineSection,
    RdmaSection,
    Topology,
    UbSection,
    VpcSection,
)

DeviceKind = Literal["die", "cpu", "node"]


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """An end of links: a die, a CPU, or a process's port on the VPC plane (kind ``node``)."""

    device_id: int
    name: str
    process: int
    kind: DeviceKind
    npu: int = -1
    """Index of the die's NPU in its node; -1 for others."""


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """One OS process of a run: a node, or a further one such as the gateway."""

    index: int
    name: str
    is_node: bool
    roles: tuple[str, ...]


class Lookahead(msgspec.Struct, frozen=True, kw_only=True):
    """Least propagation between two processes: how far a window may reach (design 1.3)."""

    lookahead_ps: int
    source: str


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """What moves a die's data: paid before an egress, and its part of the path's rate."""

    name: str
    start_ps: int
    rate_num: int
    rate_den: int

    def rate_bps(self, path_rate_bps: int) -> int:
        """The effective rate of a path with this engine, rounded down."""
        return path_rate_bps * self.rate_num // self.rate_den


class UbRetry(msgspec.Struct, frozen=True, kw_only=True):
    """Link retry: each try counts as delay; after ``tries`` the operation fails."""

    tries: int
    delay_ps: int


class RdmaRetry(msgspec.Struct, frozen=True, kw_only=True):
    """Go-back-N by chunks."""

    tries: int
    timeout_ps: int
    acknowledge_chunks: int


class VpcRetry(msgspec.Struct, frozen=True, kw_only=True):
    """In-order retransmission; the timeout doubles with each try."""

    tries: int
    timeout_ps: int
    window_bytes: int


class Machine:
    """A topology, ready to use."""

    def __init__(self, topology: Topology, *, file: str, text: str) -> None:
        """Raises FieldError where keys contradict each other."""
        self.topology = topology
        self.name, self.file, self.text = topology.name, file, text
        schema.check_limits(topology)
        self._ub = paths.ub_paths(topology.planes.ub)
        self._ports = paths.port_paths(topology.planes)
        checks.check(topology, self._ub)
        self._number()
        self._set_planes()
        self.lookahead = self._least_propagation()
        self.sections: dict[str, msgspec.Struct] = {}
        self.raw_sections: dict[str, object] = {}
        self._found: dict[int, Path] = {}

    def _number(self) -> None:
        machine = self.topology.machine
        self.nodes_count = machine.nodes.amount
        self.npus_per_node = machine.npus_per_node.amount
        self.dies_per_npu = machine.dies_per_npu.amount
        self.dies_per_node = self.npus_per_node * self.dies_per_npu
        self.cpus_per_node = machine.cpus_per_node.amount
        self.hbm_bytes_per_die = machine.hbm_per_die.amount
        self._devices_per_node = self.dies_per_node + self.cpus_per_node + 1
        digits = max(2, len(str(self.nodes_count - 1)))
        names = [f"node{index:0{digits}}" for index in range(self.nodes_count)]
        self.roles = roles.resolve(self.topology.roles, names)
        self.processes = self._make_processes(names)
        self.devices = self._make_devices()
        self._vpc_ports = [device.device_id for device in self.devices if device.kind == "node"]
        self._by_name = {device.name: device for device in self.devices}

    def _make_processes(self, names: list[str]) -> tuple[Process, ...]:
        members = {
            "prefill": {node for instance in self.roles.prefill for node in instance},
            "decode": set(self.roles.decode),
            "ems": set(self.roles.ems),
        }
        nodes = [
            Process(
                index=index,
                name=name,
                is_node=True,
                roles=tuple(role for role, nodes in members.items() if index in nodes),
            )
            for index, name in enumerate(names)
        ]
        if (gateway := self.roles.gateway) is not None:
            nodes.append(Process(index=gateway, name="gateway", is_node=False, roles=("gateway",)))
        return tuple(nodes)

    def _make_devices(self) -> tuple[Device, ...]:
        shapes: list[tuple[str, DeviceKind, int]] = [
            (f"/npu{npu}/die{die}", "die", npu)
            for npu in range(self.npus_per_node)
            for die in range(self.dies_per_npu)
        ]
        shapes += [(f"/cpu{cpu}", "cpu", -1) for cpu in range(self.cpus_per_node)]
        port: tuple[str, DeviceKind, int] = ("", "node", -1)
        places = [
            (process, shape)
            for process in self.processes
            for shape in ([*shapes, port] if process.is_node else [port])
        ]
        return tuple(
            Device(
                device_id=index, name=process.name + end, process=process.index, kind=kind, npu=npu
            )
            for index, (process, (end, kind, npu)) in enumerate(places)
        )

    def _set_planes(self) -> None:
        planes = self.topology.planes
        sections: dict[Plane, UbSection | RdmaSection | VpcSection] = {
            Plane.UB: planes.ub,
            Plane.RDMA: planes.rdma,
            Plane.VPC: planes.vpc,
        }
        self.chunk_bytes = {plane: section.chunk.amount for plane, section in sections.items()}
        self.queue_bytes_max = {
            plane: section.queue_max.amount for plane, section in sections.items()
        }
        self.bundle_slice_ps = planes.ub.bundle_slice.amount
        self.subplanes = planes.ub.subplanes.amount
        self.l2_chips_per_subplane = planes.ub.l2_chips_per_subplane.amount
        engines = planes.ub.engines
        self.engines = {"aiv": _engine("aiv", engines.aiv), "sdma": _engine("sdma", engines.sdma)}
        self._set_retries()

    def _set_retries(self) -> None:
        ub, rdma, vpc = (
            self.topology.planes.ub.retry,
            self.topology.planes.rdma,
            self.topology.planes.vpc,
        )
        self.ub_retry = UbRetry(tries=ub.tries.amount, delay_ps=ub.delay.amount)
        self.rdma_retry = RdmaRetry(
            tries=rdma.tries.amount,
            timeout_ps=rdma.timeout.amount,
            acknowledge_chunks=rdma.acknowledge_chunks.amount,
        )
        self.vpc_retry = VpcRetry(
            tries=vpc.tries.amount,
            timeout_ps=vpc.retransmit_timeout.amount,
            window_bytes=vpc.window.amount,
        )

    def _least_propagation(self) -> Lookahead:
        if len(self.processes) == 1:
            alone = "one process only: nothing crosses, windows of 1 s"
            return Lookahead(lookahead_ps=units.PS_PER_S, source=alone)
        vpc = self._ports[Plane.VPC, True]
        least = vpc
        if self.nodes_count > 1:
            ub, rdma = checks.least_between_nodes(self._ub), self._ports[Plane.RDMA, True]
            least = min(ub, rdma, vpc, key=lambda path: path.propagation_ps)
        one_way = units.format_ps(least.propagation_ps)
        return Lookahead(
            lookahead_ps=least.propagation_ps, source=f"{least.key}: one way {one_way}"
        )

    def device(self, name: str) -> Device:
        """The device of this name. Raises InputError."""
        found = self._by_name.get(name)
        if found is None:
            close = difflib.get_close_matches(name, self._by_name, n=1)
            last = self.processes[self.nodes_count - 1].name
            expected = (
                f"a device such as node00/npu{self.npus_per_node - 1}/die{self.dies_per_npu - 1},"
                f" node00/cpu{self.cpus_per_node - 1} or node00, up to {last}"
            )
            expected += f"; did you mean {close[0]!r}?" if close else ""
            raise InputError(file=self.file, key="device", value=name, expected=expected)
        return found

    def dies(self, node: int) -> range:
        """Device ids of a node's dies, in order."""
        first = node * self._devices_per_node
        return range(first, first + self.dies_per_node)

    def cpus(self, node: int) -> range:
        """Device ids of a node's CPUs, in order."""
        first = node * self._devices_per_node + self.dies_per_node
        return range(first, first + self.cpus_per_node)

    def vpc_port(self, process: int) -> int:
        """Device id of a process's port on the VPC plane."""
        return self._vpc_ports[process]

    def path(self, *, plane: Plane, operation: Operation, source: int, target: int) -> Path:
        """The path between two devices. Raises InputError if the plane does not join them.

        On RDMA and VPC both operations have the one path.
        """
        count = len(self.devices)
        index = ((plane * 2 + operation) * count + source) * count + target
        path = self._found.get(index)
        if path is None:
            path = self._found[index] = self._find(plane, operation, source, target)
        return path

    def paths(self) -> list[tuple[Plane, Operation | None, Path]]:
        """Every path of the topology in file order; RDMA and VPC (no operation) once each."""
        ub: list[tuple[Plane, Operation | None, Path]] = [
            (Plane.UB, operation, path) for (_, operation), path in self._ub.items()
        ]
        return ub + [
            (plane, None, path) for (plane, crosses), path in self._ports.items() if crosses
        ]

    def _find(self, plane: Plane, operation: Operation, source: int, target: int) -> Path:
        assert 0 <= source < len(self.devices)
        assert 0 <= target < len(self.devices)
        ends = self.devices[source], self.devices[target]
        if source == target:
            raise self._no_path(plane, ends, "two devices that differ")
        kinds = sorted({end.kind for end in ends})
        if plane != Plane.UB:
            kind = "die" if plane == Plane.RDMA else "node"
            if kinds != [kind]:
                joins = "two dies" if kind == "die" else "two nodes (or a node and the gateway)"
                raise self._no_path(plane, ends, f"{joins}, which this plane joins")
            return self._ports[plane, ends[0].process != ends[1].process]
        if "node" in kinds:
            raise self._no_path(plane, ends, "two dies or CPUs, which this plane joins")
        return self._ub[_ub_row(*ends), operation]

    def _no_path(self, plane: Plane, ends: tuple[Device, Device], expected: str) -> InputError:
        value = f"{ends[0].name} to {ends[1].name}"
        key = f"path on {Plane(plane).name}"
        return InputError(file=self.file, key=key, value=value, expected=expected)


def _ub_row(source: Device, target: Device) -> paths.PathKey:
    crosses = source.process != target.process
    if source.kind == target.kind == "die":
        same_npu = not crosses and source.npu == target.npu
        return ("same_npu" if same_npu else "npu_npu", crosses)
    return ("cpu_cpu" if source.kind == target.kind else "npu_cpu", crosses)


def _engine(name: str, section: EngineSection) -> Engine:
    share = section.rate_share.amount
    return Engine(name=name, start_ps=section.start.amount, rate_num=share, rate_den=10**6)
