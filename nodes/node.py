"""Assembles a node from its roles: the one program that every process of a serving run runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from cmnet.launch.agent import Context, Program
from cmnet.topology.machine import Machine, Plane
from nodes.carriers import RdmaCarrier, UbCarrier, VpcCarrier
from nodes.ems.client import StoreClient
from nodes.ems.placement import NodeWeight, View, make_view
from nodes.ems.server import StoreServer
from nodes.model import bodies
from nodes.model.body import Body
from nodes.moe.layer import Touch
from nodes.post import Post
from nodes.serving import messages
from nodes.serving.decode import DecodeNode
from nodes.serving.gateway import Gateway
from nodes.serving.job import Job
from nodes.serving.leader import Leader
from nodes.serving.prefill import PrefillHelper, PrefillInstance

CALLS_SHIFT = 40
"""Calls of incarnation i begin at i << 40: an answer to one before a restart is nobody's."""


def untouched(_: str, items: Any) -> Any:
    """What a run does to data on its way: nothing. Tests put a fault here."""
    return items


def make_program(machine: Machine, job: Job, touch: Touch = untouched) -> Program:
    """The program of a serving run; made before the fork, so that nodes share what it holds."""
    body = bodies.make(job.body, job.model)
    view = make_view(1, [NodeWeight(machine.processes[node].name) for node in machine.roles.ems])

    async def program(context: Context) -> None:
        await Node(context, job, body, view, touch).run()

    return program


class Node:
    """One process: gateway, or a node with its roles."""

    def __init__(self, context: Context, job: Job, body: Body, view: View, touch: Touch) -> None:
        self._context = context
        self._job = job
        self._body = body
        self._view = view
        self._touch = touch
        self._vpc = VpcCarrier(context)
        carriers: dict[Plane, Any] = {Plane.VPC: self._vpc}
        if context.machine.processes[context.process].is_node:
            carriers |= {Plane.UB: UbCarrier(context), Plane.RDMA: RdmaCarrier(context)}
        self._carriers = carriers
        self._post = Post(
            context.loop, carriers, messages.TYPES, first_call=context.incarnation << CALLS_SHIFT
        )
        self._statistics: dict[str, Any] = {}
        context.on_statistics = self._collect

    def _collect(self) -> dict[str, Any]:
        parts = {name: part() for name, part in self._statistics.items()}
        return parts | {plane.name: c.statistics() for plane, c in self._carriers.items()}

    async def run(self) -> None:
        """The parts of this process's roles, for ever; the gateway's ends the run."""
        context, machine = self._context, self._context.machine
        if context.process == machine.roles.gateway:
            gateway = Gateway(context, self._post, self._job, forget=self._vpc.forget)
            self._statistics["gateway"] = gateway.statistics
            await gateway.run()
            return
        self._post.on(messages.Ping, self._pong)
        if context.process in machine.roles.ems:
            server = StoreServer(context, self._post)
            self._statistics["store"] = lambda: server.counts
        if context.process in machine.roles.decode:
            self._decode()
        async with asyncio.TaskGroup() as group:
            for instance in machine.roles.prefill:
                if context.process == instance[0]:
                    group.create_task(self._prefill(instance).run(), name="prefill")
                elif context.process in instance:
                    PrefillHelper(context, self._post, self._job, instance)
            if context.incarnation:
                up = messages.Up(context.process, context.incarnation)
                self._to_gateway(up)

    def _pong(self, message: messages.Ping, _: bytes, __: int) -> None:
        self._to_gateway(messages.Pong(message.asked_ps, self._context.incarnation))

    def _to_gateway(self, message: Any) -> None:
        machine = self._context.machine
        assert machine.roles.gateway is not None
        source = machine.vpc_port(self._context.process)
        self._post.send(Plane.VPC, source, machine.vpc_port(machine.roles.gateway), message)

    def _prefill(self, instance: tuple[int, ...]) -> PrefillInstance:
        store = StoreClient(
            self._context,
            self._post,
            self._view,
            timeout_ps=self._job.serving.store_timeout.amount,
        )
        prefill = PrefillInstance(
            self._context,
            self._post,
            self._job,
            self._body,
            store,
            instance=instance,
            touch=self._touch,
        )
        self._statistics["prefill"] = prefill.statistics
        return prefill

    def _decode(self) -> None:
        decode = DecodeNode(self._context, self._post, self._job, self._body, self._touch)
        self._statistics["decode"] = decode.statistics
        _Leading(self._context, self._post, self._job, decode)


class _Leading:
    """Begins and ends this node's leadership as the epochs say."""

    def __init__(self, context: Context, post: Post, job: Job, decode: DecodeNode) -> None:
        self._context = context
        self._job = job
        self._decode = decode
        self._leader: Leader | None = None
        self._task: asyncio.Task[None] | None = None
        self._epoch = 0
        self._early: list[tuple[Callable[[Leader, Any], None], Any]] = []
        post.on(messages.Epoch, self._epoch_came)
        post.on(messages.Hello, self._hello)
        post.on(messages.Joined, self._joined)
        post.on(messages.StepDone, self._done)

    def _epoch_came(self, epoch: messages.Epoch, _: bytes, __: int) -> None:
        if epoch.number <= self._epoch:
            return
        self._epoch = epoch.number
        if self._task is not None:
            self._task.cancel()
            self._leader = self._task = None
        if epoch.nodes[0] == self._context.process:
            self._lead(epoch)
        self._early = [each for each in self._early if each[1].epoch > epoch.number]
        self._decode.enter(epoch)

    def _lead(self, epoch: messages.Epoch) -> None:
        decode = self._context.machine.roles.decode
        dies = self._context.machine.dies_per_node
        self._leader = Leader(
            self._context.loop,
            epoch,
            send=self._decode.send,
            assure=self._decode.assure,
            node_of_rank=lambda rank: decode[rank // dies],
            settings=self._job.serving,
        )
        for handle, message in self._early:
            if message.epoch == epoch.number:
                handle(self._leader, message)
        self._task = self._context.spawn(self._leader.run(), "leader")

    def _hello(self, message: messages.Hello, _: bytes, __: int) -> None:
        self._tell(Leader.hello, message)

    def _joined(self, message: messages.Joined, _: bytes, __: int) -> None:
        self._tell(Leader.joined, message)

    def _done(self, message: messages.StepDone, _: bytes, __: int) -> None:
        self._tell(Leader.done, message)

    def _tell(self, handle: Callable[[Leader, Any], None], message: Any) -> None:
        """For the leader of this epoch; of a later one, once we know of it."""
        if self._leader is not None and message.epoch == self._epoch:
            handle(self._leader, message)
        elif message.epoch > self._epoch:
            self._early.append((handle, message))
