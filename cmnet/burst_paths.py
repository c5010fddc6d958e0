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


class Paths:
    """UB write paths of one process's devices as tables; a route each would cost more than a burst."""

    def __init__(self, fabric: Fabric) -> None:
        self._machine = machine = fabric.machine
        self._process = np.array([device.process for device in machine.devices])
        self._npu = np.array([device.npu for device in machine.devices])
        kinds = {"die": 0, "cpu": 1, "node": 2}
        self._kind = np.array([kinds[device.kind] for device in machine.devices])
        self._ours = np.flatnonzero(self._process == fabric.process).tolist()
        self._tables: dict[tuple[int, tuple[int, int]], I64] = {}
        self._every: dict[tuple[int, int], I64] = {}

    def of(self, source: int, rate_share: tuple[int, int]) -> I64:
        """[3, devices] of a source: rate (0 where there is no path), propagation, process."""
        key = (source, rate_share)
        table = self._tables.get(key)
        if table is None:
            table = self._tables[key] = self._make(source, rate_share)
        return table

    def of_all(self, rate_share: tuple[int, int]) -> I64:
        """[our devices, 3, devices], from the first of ours on; what is no die or CPU has no path."""
        every = self._every.get(rate_share)
        if every is None:
            ours = [place for place in self._ours if self._kind[place] != 2]
            every = np.zeros((len(self._ours), 3, len(self._kind)), np.int64)
            for place in ours:
                every[place - self._ours[0]] = self.of(place, rate_share)
            self._every[rate_share] = every
        return every

    def _make(self, source: int, rate_share: tuple[int, int]) -> I64:
        near = self._process == self._process[source]
        same_npu = near & (self._npu == self._npu[source])
        sorts = self._kind * 4 + near * 2 + same_npu
        sorts[source] = -1
        sorts[self._kind == 2] = -1
        table = np.zeros((3, len(sorts)), np.int64)
        table[2] = self._process
        numerator, denominator = rate_share
        for sort in range(8):
            targets = np.flatnonzero(sorts == sort)
            if not len(targets):
                continue
            path = self._machine.path(
                plane=Plane.UB, operation=Operation.WRITE, source=source, target=int(targets[0])
            )
            table[0, targets] = path.rate_bps * numerator // denominator
            table[1, targets] = path.propagation_ps
        return table
