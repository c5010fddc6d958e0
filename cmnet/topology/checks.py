"""Rules between several keys of a topology.

Owns what one number alone cannot tell: that switches are not oversubscribed, that nothing between
nodes takes less than the lookahead, that queues hold a chunk. Each rule raises FieldError with the
whole dotted key; ``load`` adds the file. What roles name is checked where they are resolved
(``machine``).
"""

from __future__ import annotations

from cmnet import units
from cmnet.topology.paths import Operation, Path, PathKey
from cmnet.topology.quantity import FieldError
from cmnet.topology.schema import Topology

UbTable = dict[tuple[PathKey, Operation], Path]


def check(topology: Topology, ub: UbTable) -> None:
    """Raises FieldError for the first rule broken. ``ub`` is ``paths.ub_paths`` of it."""
    _check_not_oversubscribed(topology)
    _check_lookahead(topology, ub)
    _check_queues(topology)


def least_between_nodes(ub: UbTable) -> Path:
    """The UB path between nodes of least propagation; the first in file order of equals."""
    between = [path for path in ub.values() if path.crosses_nodes]
    return min(between, key=lambda path: path.propagation_ps)


def _check_not_oversubscribed(topology: Topology) -> None:
    """A node's dies must fit through its L1 chips' links up; the emulator models no other case."""
    machine, ub = topology.machine, topology.planes.ub
    dies = machine.npus_per_node.amount * machine.dies_per_npu.amount
    if dies > ub.l2_chips_per_subplane.amount:
        expected = (
            f"at least {dies}, one link up per die of a node and sub-plane"
            " (the emulator models non-blocking switches only)"
        )
        raise FieldError("planes.ub.l2_chips_per_subplane.value", expected)


def _check_lookahead(topology: Topology, ub: UbTable) -> None:
    """Nothing that crosses processes may take less than the least UB propagation between nodes.

    (No acknowledgement on UB does: ``paths`` lets none be faster than its path.)
    """
    least = least_between_nodes(ub)
    least_text = f"at least {units.format_ps(least.propagation_ps)}, the least one-way time on UB"
    for name, section in (("rdma", topology.planes.rdma), ("vpc", topology.planes.vpc)):
        if section.propagation.amount < least.propagation_ps:
            expected = f"{least_text} between nodes ({least.key})"
            raise FieldError(f"planes.{name}.propagation.value", expected)


def _check_queues(topology: Topology) -> None:
    planes = topology.planes
    for name, section in (("ub", planes.ub), ("rdma", planes.rdma), ("vpc", planes.vpc)):
        if section.queue_max.amount < section.chunk.amount:
            expected = f"at least one chunk, {section.chunk.value}"
            raise FieldError(f"planes.{name}.queue_max.value", expected)
    if planes.vpc.window.amount < planes.vpc.chunk.amount:
        expected = f"at least one chunk, {planes.vpc.chunk.value}"
        raise FieldError("planes.vpc.window.value", expected)
