"""What the nodes of the bench do: programs for the emulator, one per kind of load.

Owns nothing that is measured elsewhere: each program ends the run with ``finish`` and puts its counts
into the statistics that a node writes at the end.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import msgspec

from cmnet.launch.agent import Context
from cmnet.messages import Arrival, Route
from cmnet.topology.machine import Operation, Plane
from cmnet.units import NEVER_PS

KIND = 1
PAYLOAD = bytes(200)


class Token(msgspec.Struct, array_like=True):
    """A small body, as a protocol of the application has it."""

    round: int
    source: int
    text: str


def first_dies(context: Context) -> list[int]:
    """The first die of each node."""
    return [context.machine.dies(node)[0] for node in range(context.machine.nodes_count)]


def routes_from(context: Context) -> list[Route]:
    """Routes to the first die of every other node, the next node first."""
    dies, ours = first_dies(context), context.process
    order = [*range(ours + 1, len(dies)), *range(ours)]
    return [
        context.fabric.route(Plane.UB, Operation.WRITE, dies[ours], dies[peer]) for peer in order
    ]


async def forever(context: Context) -> None:
    """Wait for the end of the run."""
    await context.loop.create_future()


def measure(context: Context) -> None:
    """Have the node write what it used, at the end of the run."""
    began_s = time.process_time()
    context.on_statistics = lambda: {
        "private_bytes": private_bytes(),
        "cpu_s": time.process_time() - began_s,
    }


def private_bytes() -> int:
    """Private memory of this process (smaps_rollup)."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_"))


async def all_to_all(context: Context) -> None:
    """Rounds in which each node sends to each other one; the handler only counts."""
    measure(context)
    if not context.machine.processes[context.process].is_node:
        return
    fabric, routes = context.fabric, routes_from(context)
    rounds, payload = context.settings["rounds"], bytes(context.settings["payload_bytes"])
    due, seen = len(routes), 0

    def send() -> None:
        for route in routes:
            fabric.send(route, KIND, charged_bytes=len(payload), payload=payload)

    def handle(_: Arrival) -> None:
        nonlocal seen
        seen += 1
        if seen % due == 0:
            if seen < due * rounds:
                send()
            else:
                context.finish()

    fabric.bind(KIND, handle)
    send()
    await forever(context)


async def all_to_all_tasks(context: Context) -> None:
    """The same as a protocol has it: typed bodies, a queue, a task that is woken and sends."""
    measure(context)
    if not context.machine.processes[context.process].is_node:
        return
    fabric, routes = context.fabric, routes_from(context)
    rounds, text = context.settings["rounds"], "x" * (context.settings["payload_bytes"] - 10)
    encode, decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(Token).decode
    tokens: asyncio.Queue[Token] = asyncio.Queue()
    fabric.bind(KIND, lambda arrival: tokens.put_nowait(decode(arrival.body)))
    for number in range(rounds):
        for route in routes:
            body = encode(Token(number, context.process, text))
            fabric.send(route, KIND, charged_bytes=len(body), body=body)
        for _ in routes:
            await tokens.get()
    context.finish()
    await forever(context)


async def sparse(context: Context) -> None:
    """Nodes that wake at random instants; 7 of 10 times one sends a frame to a random node."""
    measure(context)
    if not context.machine.processes[context.process].is_node:
        return
    fabric, routes, draws = context.fabric, routes_from(context), context.stream("sparse")
    mean_ps, until_ps = context.settings["mean_ps"], context.settings["until_ps"]
    fabric.bind(KIND, lambda _: None)
    while context.loop.now_ps < until_ps:
        await context.loop.sleep_ps(1 + draws.below(2 * mean_ps))
        if draws.below(10) < 7:
            fabric.send(routes[draws.below(len(routes))], KIND, charged_bytes=200, payload=PAYLOAD)
    context.finish()
    await forever(context)


async def everyone(context: Context) -> None:
    """Every node has an event in every window, and sends nothing."""
    measure(context)
    if not context.machine.processes[context.process].is_node:
        return
    lookahead_ps = context.machine.lookahead.lookahead_ps
    for _ in range(context.settings["rounds"]):
        await context.loop.sleep_ps(lookahead_ps)
    context.finish()
    await forever(context)


async def chain(context: Context) -> None:
    """Two nodes send one message to and fro."""
    measure(context)
    if context.process > 1:
        return
    fabric, route = context.fabric, routes_from(context)[0 if context.process == 0 else -1]
    left = context.settings["rounds"]

    def send() -> None:
        fabric.send(route, KIND, charged_bytes=200, payload=PAYLOAD)

    def handle(_: Arrival) -> None:
        nonlocal left
        left -= 1
        if left:
            send()
        else:
            context.finish()

    fabric.bind(KIND, handle)
    if context.process == 0:
        send()
    await forever(context)


async def idle(context: Context) -> None:
    """An hour in which nothing happens, or one timer per node every ``every_ps``."""
    measure(context)
    every_ps, until_ps = context.settings["every_ps"], context.settings["until_ps"]
    if context.process == 0:
        context.loop.call_at_ps(until_ps, context.finish)
    if every_ps and context.machine.processes[context.process].is_node:
        await context.loop.sleep_ps(context.stream("idle").below(every_ps))
        while context.loop.now_ps < NEVER_PS:
            await context.loop.sleep_ps(every_ps)
    await forever(context)
