"""UB write paths of one process's devices as tables, for bursts.

Owns their making. Does not own what a path is (``cmnet.topology.paths``): a sort of pair has one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from cmnet.topology.machine import Operation, Plane

if TYPE_CHECKING:
    from cmnet.fabric import Fabric

I64 = npt.NDArray[np.int64]

_KINDS = {"die": 0, "cpu": 1, "node": 2}


class Paths:
    """UB write paths of one process's devices as tables; a route each would cost more than a burst."""

    def __init__(self, fabric: Fabric) -> None:
        self._machine, self._our_process = fabric.machine, fabric.process
        self._first = 0
        """Of our devices, once a table is made."""
        self._tables: dict[tuple[int, int], I64] = {}

    def of(self, source: int, rate_share: tuple[int, int]) -> I64:
        """[3, devices] of a source: rate (0 where there is no path), propagation, process."""
        tables = self.of_all(rate_share)
        table: I64 = tables[source - self._first]
        return table

    def of_all(self, rate_share: tuple[int, int]) -> I64:
        """[our devices, 3, devices], from the first of ours on."""
        table = self._tables.get(rate_share)
        if table is None:
            table = self._tables[rate_share] = self._make(*rate_share)
        return table

    def _make(self, numerator: int, denominator: int) -> I64:
        devices = self._machine.devices
        process = np.array([device.process for device in devices])
        npu = np.array([device.npu for device in devices])
        kind = np.array([_KINDS[device.kind] for device in devices])
        ours = np.flatnonzero(process == self._our_process)
        self._first = int(ours[0])
        near = process == self._our_process
        same_npu = near & (npu == npu[ours, None])
        sorts = (kind[ours, None] * 3 + kind) * 4 + near * 2 + same_npu
        joined = (kind[ours, None] != _KINDS["node"]) & (kind != _KINDS["node"])
        sorts[~joined | (ours[:, None] == np.arange(len(devices)))] = -1
        of_sorts = np.zeros((2, sorts.max(initial=0) + 2), np.int64)  # the last: of sort -1
        for sort in np.flatnonzero(np.bincount(sorts.ravel() + 1)[1:]).tolist():
            source, target = divmod(int((sorts == sort).argmax()), len(devices))
            path = self._machine.path(
                plane=Plane.UB, operation=Operation.WRITE, source=int(ours[source]), target=target
            )
            rate_bps = path.rate_bps * numerator // denominator
            of_sorts[:, sort] = rate_bps, path.propagation_ps
        table = np.empty((len(ours), 3, len(devices)), np.int64)
        table[:, 0], table[:, 1], table[:, 2] = *of_sorts[:, sorts], process
        return table
