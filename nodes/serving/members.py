"""Who lives, as the gateway sees it: pings, deaths, returns, and the epochs of the decode group.

Owns the set of living nodes and their incarnations. A node that is silent too long is taken as dead
and asked on: what was silent may have been only the way. Every change among decode nodes is an epoch.
Does not own what a death means for requests (``gateway``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from cmnet.launch.agent import Context
from cmnet.topology.machine import Plane
from cmnet.units import format_ps
from nodes.post import Post
from nodes.serving import messages
from nodes.serving.settings import ServingSettings


class Members:
    """All nodes of the machine. ``died`` is told (node, reason); ``forget`` drops the stream to one."""

    def __init__(
        self,
        context: Context,
        post: Post,
        settings: ServingSettings,
        *,
        died: Callable[[int, str], None],
        forget: Callable[[int], None],
    ) -> None:
        machine = context.machine
        self._context = context
        self._loop = context.loop
        self._machine = machine
        self._post = post
        self._interval_ps = settings.ping_interval.amount
        self._timeout_ps = settings.ping_timeout.amount
        self._died = died
        self._forget = forget
        self._port = machine.vpc_port(context.process)
        self._decode = machine.roles.decode
        self._serving = set(self._decode).union(*machine.roles.prefill)
        self.alive = set(range(machine.nodes_count))
        self.returned = asyncio.Event()
        """Set when a node comes back."""
        self.epoch = 0
        self._incarnations = [0] * machine.nodes_count
        self._heard_ps = [0] * machine.nodes_count
        """When a ping was sent that the node has answered."""
        self._died_ps = [0] * machine.nodes_count
        post.on(messages.Pong, self._pong)
        post.on(messages.Up, self._up)

    def send(self, node: int, message: msgspec.Struct) -> None:
        """A message to a node, over VPC."""
        self._post.send(Plane.VPC, self._port, self._machine.vpc_port(node), message)

    def new_epoch(self) -> None:
        """Tell the decode nodes that live of each other."""
        self.epoch += 1
        nodes = tuple(node for node in self._decode if node in self.alive)
        for node in nodes:
            self.send(node, messages.Epoch(self.epoch, nodes))

    async def watch(self, needed: Callable[[], set[int]]) -> None:
        """Ping, for ever, whom open requests need, and whose return they would profit from."""
        asked: dict[int, int] = {}
        while True:
            await self._loop.sleep_ps(self._interval_ps)
            now_ps = self._loop.now_ps
            involved = sorted(needed() & self.alive)
            asked = {node: asked.get(node, now_ps) for node in involved}
            for node, first_ps in asked.items():
                if now_ps - max(first_ps, self._heard_ps[node]) >= self._timeout_ps:
                    self._is_dead(node)
            for node in sorted((self._serving - self.alive).union(involved)):
                self.send(node, messages.Ping(now_ps))

    def _pong(self, message: messages.Pong, _: bytes, source: int) -> None:
        node = self._machine.devices[source].process
        if message.incarnation < self._incarnations[node]:
            return
        self._heard_ps[node] = max(self._heard_ps[node], message.asked_ps)
        answers = node not in self.alive and message.asked_ps >= self._died_ps[node]
        if answers or message.incarnation > self._incarnations[node]:
            self._is_back(node, message.incarnation)

    def _up(self, message: messages.Up, _: bytes, __: int) -> None:
        if message.incarnation > self._incarnations[message.node]:
            self._is_back(message.node, message.incarnation)

    def _is_back(self, node: int, incarnation: int) -> None:
        """It lives (again). What an older incarnation had is gone, even if nobody missed it yet."""
        if node in self.alive:
            self._is_dead(node)
        if incarnation > self._incarnations[node]:
            self._forget(node)
        self._incarnations[node] = incarnation
        self._heard_ps[node] = self._loop.now_ps
        self.alive.add(node)
        self._context.mark(f"node {node} is back")
        self.returned.set()
        if node in self._decode:
            self.new_epoch()

    def _is_dead(self, node: int) -> None:
        self.alive.discard(node)
        self._died_ps[node] = self._loop.now_ps
        self._context.mark(f"node {node} is dead")
        name = self._machine.processes[node].name
        self._died(node, f"{name} died before {format_ps(self._loop.now_ps)}")
        if node in self._decode:
            self.new_epoch()
