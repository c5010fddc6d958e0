"""Bursts of writes between ranks, on the links of one node.

Owns the way from ranks to devices, the engine that writes, and the wait for room in a port. Does not own
what is written (``sending``).
"""

from __future__ import annotations

from cmnet import bursts
from cmnet.bursts import Burst, Lost, Messages
from cmnet.launch.agent import Context
from cmnet.link import copy_kernels as copy_kernels  # compiled before the fork (``cmnet.bursts``)
from cmnet.link import port_kernels as port_kernels
from cmnet.messages import Route
from cmnet.topology.machine import Operation, Plane
from nodes.model.body import I64
from nodes.moe.sending import Writes


class Writer:
    """Writes of local ranks. ``devices``: of each rank of the group."""

    def __init__(self, context: Context, devices: I64, *, engine: str) -> None:
        self._fabric, self._devices = context.fabric, devices
        self._routes: dict[int, Route] = {}
        share = context.machine.engines[engine]
        self._rate_share = (share.rate_num, share.rate_den)

    def make(self, kind: int, head: bytes, writes: Writes, flags: Writes, lost: Lost) -> Burst:
        """Writes from local ranks to others, and flags behind, a rank's own among them, of 0 bytes, which
        is there when all before it has left. ``lost`` gets the indices of writes that the link gave up
        on. What is sent later is made ahead."""
        tables = self._messages(writes), self._messages(flags)
        return Burst(self._fabric, kind, head, *tables, lost, self._rate_share)

    async def send(self, ranks: list[int], burst: Burst) -> None:
        """Send what these local ranks write. Waits, in virtual time, until each port takes so much
        (design 2.1); a port takes more than one collective, so this waits only behind other traffic."""
        if len(self._devices) > 1 and not all(map(self._is_free, ranks)):
            await self._room(sorted(ranks), burst.tables[0])
        bursts.send(burst)

    def _is_free(self, rank: int) -> bool:
        """Nothing waits at its port: anything may."""
        port = (self._routes.get(rank) or self._any_route(rank)).egress
        return port.waiting_bytes == 0 and not port.waiters

    async def _room(self, ranks: list[int], messages: Messages) -> None:
        for rank in ranks:
            charged = messages.charged_bytes[messages.sources == self._devices[rank]]
            await self._fabric.room(self._any_route(rank), int(charged.sum()))

    def _any_route(self, rank: int) -> Route:
        """Room is the port's, whatever the route."""
        route = self._routes.get(rank)
        if route is None:
            device = int(self._devices[rank])
            other = int(self._devices[(rank + 1) % len(self._devices)])
            route = self._fabric.route(Plane.UB, Operation.WRITE, device, other)
            self._routes[rank] = route
        return route

    def _messages(self, writes: Writes) -> Messages:
        return Messages(
            sources=self._devices.take(writes.sources),
            targets=self._devices.take(writes.targets),
            charged_bytes=writes.charged_bytes,
            ready_ps=writes.ready_ps,
            data=writes.data,
        )
