"""Small programs for runs of real processes.

``chatter`` uses all three planes, bursts, signals, holds, timers and marks at instants drawn from its
process's stream, waits for nobody and so survives any death; the run ends at ``end_us``.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import numpy as np

from cmnet import bursts
from cmnet.burst_arrivals import Bundle
from cmnet.bursts import Messages
from cmnet.launch.agent import Context
from cmnet.link import port_kernels  # noqa: F401  # compiled before the fork
from cmnet.messages import Arrival, Route
from cmnet.topology.machine import Operation, Plane

US = 1_000_000
PASS_ON, BURST, SIGNAL = 1, 4, 5


class Chatter:
    """One process's talk."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.fabric = context.fabric
        self.loop = context.loop
        self.stream = context.stream("chatter")
        self.sum = 0
        self.heard = 0
        devices, processes = context.machine.devices, context.machine.processes
        of_nodes = [device for device in devices if processes[device.process].is_node]
        self.ends = {
            Plane.UB: [d.device_id for d in of_nodes if d.kind != "node"],
            Plane.RDMA: [d.device_id for d in of_nodes if d.kind == "die"],
            Plane.VPC: [d.device_id for d in of_nodes if d.kind == "node"],
        }
        self.mine = {
            plane: [end for end in ends if devices[end].process == context.process]
            for plane, ends in self.ends.items()
        }
        for plane in Plane:
            self.fabric.bind(PASS_ON + plane, self.passed_on)
        self.fabric.bind(BURST, self.bundle_came)
        self.fabric.bind(SIGNAL, self.signalled)

    def pick(self, values: list[Any]) -> Any:
        return values[self.stream.below(len(values))]

    def route(self, plane: Plane) -> Route:
        source = self.pick(self.mine[plane])
        target = self.pick([end for end in self.ends[plane] if end != source])
        return self.fabric.route(plane, Operation.WRITE, source, target)

    def send(self, plane: Plane, times: int) -> None:
        self.fabric.send(
            self.route(plane),
            PASS_ON + plane,
            charged_bytes=self.stream.below(200_000),
            body=bytes([times]),
            payload=bytes(self.stream.below(1 << self.stream.below(17))),
        )

    def burst(self) -> None:
        source = self.pick(self.mine[Plane.UB])
        others = [end for end in self.ends[Plane.UB] if end != source]
        targets = [self.pick(others) for _ in range(self.stream.below(40))]
        width = self.stream.below(200)
        self.fabric.send_burst(
            kind=BURST,
            head=b"head",
            messages=self.messages(source, targets, charged_bytes=7680, width=width),
            flags=self.messages(source, sorted(set(targets)), charged_bytes=32, width=8),
        )

    def messages(
        self, source: int, targets: list[int], *, charged_bytes: int, width: int
    ) -> Messages:
        count = len(targets)
        ready_ps = sorted(self.loop.now_ps + self.stream.below(US) for _ in targets)
        return Messages(
            np.full(count, source),
            np.array(targets, np.int64),
            np.full(count, charged_bytes),
            np.array(ready_ps, np.int64),
            np.zeros((count, width), np.uint8),
        )

    def note(self, *numbers: int) -> None:
        for number in numbers:
            self.sum = (self.sum * 31 + number) % (1 << 61)
        self.heard += 1
        if self.heard % 50 == 0:
            self.context.mark(f"{self.heard} {self.sum}")

    def passed_on(self, arrival: Arrival) -> None:
        self.note(self.loop.now_ps, arrival.source, len(arrival.payload))
        if arrival.body[0]:
            self.send(Plane(arrival.plane), arrival.body[0] - 1)

    def bundle_came(self, bundle: Bundle) -> None:
        rows = zip(bundle.targets.tolist(), bundle.delivered_ps.tolist())
        for target, delivered_ps in rows:
            self.note(target, bundle.data.shape[1], delivered_ps)

    def signalled(self, arrival: Arrival) -> None:
        self.note(self.loop.now_ps, arrival.source)

    async def talk(self, number: int) -> None:
        end_ps = self.context.settings["end_us"] * US
        while True:
            at_ps = self.loop.now_ps + 1 + self.stream.below(8 * US)
            if at_ps >= end_ps:
                return
            await self.loop.sleep_until_ps(at_ps)
            match self.stream.below(8):
                case 0:
                    self.burst()
                case 1:
                    route = self.route(Plane.UB)
                    self.fabric.signal(route, SIGNAL, delay_ps=route.path.propagation_ps)
                case 2:
                    pause_s = self.stream.below(300) / 1e6
                    await self.loop.hold(time.sleep, pause_s, duration_ps=self.stream.below(5 * US))
                case other:
                    self.send(Plane(other % 3), 2)
            self.note(number)


async def chatter(context: Context) -> None:
    if not context.machine.processes[context.process].is_node:
        await context.loop.sleep_until_ps(context.settings["end_us"] * US)
        context.finish()
        return
    talker = Chatter(context)
    async with asyncio.TaskGroup() as group:
        for number in range(3):
            group.create_task(talker.talk(number), name=f"talk {number}")


async def lively(context: Context) -> None:
    """Runs on, with little to do, for ever."""
    while True:
        await context.loop.sleep_ps(100 * US)
        context.mark("alive")


async def spins(context: Context) -> None:
    await context.loop.sleep_ps(5 * US)
    while context.name == "node01":
        await no_progress()


async def no_progress() -> None:
    await asyncio.sleep(0)


async def spins_on_timers(context: Context) -> None:
    def again() -> None:
        context.loop.call_later(0, again)

    await context.loop.sleep_ps(5 * US)
    if context.name == "node01":
        again()


def stuck_here(context: Context) -> None:
    while context.name == "node01":
        time.sleep(0.05)


async def silent(context: Context) -> None:
    await context.loop.sleep_ps(5 * US)
    stuck_here(context)


async def waits_for_ever(context: Context) -> None:
    context.outstanding(+1)
    await an_answer(context)


async def an_answer(context: Context) -> None:
    await context.loop.create_future()


async def raises(context: Context) -> None:
    await context.loop.sleep_ps(5 * US)
    if context.name == "node01":
        raise ValueError("so it is " + "\udce9" * 100_000)


async def all_raise(context: Context) -> None:
    """Within one window, the last node first."""
    await context.loop.sleep_ps(5 * US - context.process)
    raise ValueError(context.name)


async def raises_in_a_handler(context: Context) -> None:
    await context.loop.sleep_ps(5 * US)
    if context.name == "node01":
        context.loop.call_later(1e-6, lambda: 1 // 0)


async def dies_at_once(context: Context) -> None:
    if context.name == "node01":
        os._exit(3)


async def dies_when_asked(context: Context) -> None:
    """At the very end: its statistics are asked for."""
    if context.name == "node01":
        context.on_statistics = lambda: os._exit(3)


async def gateway_dies(context: Context) -> None:
    await context.loop.sleep_ps(5 * US)
    if context.name == "gateway":
        os._exit(3)


async def sends_slowly(context: Context) -> None:
    """One burst of node 0: a message every microsecond, for 100, of which node 1 says how many came."""
    fabric, machine = context.fabric, context.machine
    target = machine.dies(1)[0]

    def came(bundle: Bundle) -> None:
        if not bundle.flags:
            context.mark(f"{len(bundle.targets)} came")

    fabric.bind(BURST, came)
    if context.process == 0:
        source = machine.dies(0)[0]
        ready_ps = np.arange(100) * US
        messages = Messages(
            np.full(100, source),
            np.full(100, target),
            np.full(100, 100),
            ready_ps,
            np.zeros((100, 1), np.uint8),
        )
        fabric.send_burst(kind=BURST, head=b"", messages=messages, flags=bursts.nothing())
    await context.loop.sleep_ps(200 * US)
    if context.process == 1:
        fabric.arriving.deliver()
        context.finish()


async def quiet(context: Context) -> None:
    """Ends by itself."""


async def ends_when_back(context: Context) -> None:
    """Only a process that was started again ends the run."""
    if context.incarnation:
        context.finish()
        return
    await lively(context)


async def seldom_works(context: Context) -> None:
    """With more time between two pieces of work than a stall takes."""
    if context.name != "gateway":
        return
    for _ in range(3):
        context.outstanding(+1)
        for _ in range(300):
            await context.loop.sleep_ps(10**12)
        context.mark("done")
        context.outstanding(-1)
        await context.loop.sleep_ps(700 * 10**12)
    context.finish()


async def achieves_nothing(context: Context) -> None:
    """Ticks, with work taken on."""
    context.outstanding(+1)
    while True:
        await context.loop.sleep_ps(10**12)
