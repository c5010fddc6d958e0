"""Bursts of writes between ranks, on the links of one node.

Owns the way from ranks to devices, the engine that writes, and the wait for room in a port. Does not own
what is written (``sending``).
"""

from __future__ import annotations

import numpy as np

from cmnet.bursts import Lost, Messages
from cmnet.launch.agent import Context
from cmnet.link import port_kernels as port_kernels  # compiled before the fork (``cmnet.bursts``)
from cmnet.messages import Route
from cmnet.topology.machine import Operation, Plane
from nodes.model.body import I64
from nodes.moe.sending import Writes


class Writer:
    """Writes of local ranks. ``devices``: of each rank of the group."""

    def __init__(self, context: Context, devices: I64, *, engine: str) -> None:
        self._loop, self._fabric, self._devices = context.loop, context.fabric, devices
        self._routes: dict[int, Route] = {}
        share = context.machine.engines[engine]
        self._rate_share = (share.rate_num, share.rate_den)

    async def burst(
        self, kind: int, head: bytes, writes: Writes, flags: Writes, lost: Lost
    ) -> None:
        """Write to other ranks and set flags behind, a rank's own among them, of 0 bytes, which is there
        when all before it has left. Waits, in virtual time, until each port takes so much (design
        2.1); a port takes more than one collective, so this waits only behind other traffic. ``lost``
        gets the indices of writes that the link gave up on."""
        charged = np.bincount(
            writes.sources, weights=writes.charged_bytes, minlength=len(self._devices)
        )
        sources = np.unique(flags.sources).tolist() if len(self._devices) > 1 else []
        for source in sources:
            await self._fabric.room(self._any_route(source), int(charged[source]))
        self._fabric.send_burst(
            kind=kind,
            head=head,
            messages=self._messages(writes),
            flags=self._messages(flags),
            lost=lost,
            rate_share=self._rate_share,
        )

    def _any_route(self, source: int) -> Route:
        """Room is the port's, whatever the route."""
        route = self._routes.get(source)
        if route is None:
            device = int(self._devices[source])
            other = int(self._devices[(source + 1) % len(self._devices)])
            route = self._fabric.route(Plane.UB, Operation.WRITE, device, other)
            self._routes[source] = route
        return route

    def _messages(self, writes: Writes) -> Messages:
        return Messages(
            sources=self._devices[writes.sources],
            targets=self._devices[writes.targets],
            charged_bytes=writes.charged_bytes,
            ready_ps=np.maximum(writes.ready_ps, self._loop.now_ps),
            data=writes.data,
        )
