"""A gateway alone, with nodes that the test plays. Test code only."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from cmnet.topology.machine import Plane
from cmnet.vtime.loop import VirtualLoop
from nodes.serving import messages
from nodes.serving.gateway import Gateway
from nodes.serving.workload import Request
from tests.nodes.serving import local

MACHINE = local.mini()
S = 10**12
TIMEOUT_S = 5.0
"""By then a silent node is known to be dead: three pings and one interval."""


class Nodes:
    """All nodes as the gateway sees them: what it said to whom, and who answers pings."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.said: list[tuple[int, msgspec.Struct]] = []
        self.handlers: dict[type, Callable[[Any, bytes, int], None]] = {}
        self.silent: set[int] = set()
        self.incarnations = dict.fromkeys(range(4), 0)
        self.forgotten: list[int] = []
        self.lost: Callable[[Any], None]
        """Tells the gateway that a message of its own may not have arrived."""
        self.marks: list[str] = []

    def on(self, kind: type, handler: Callable[[Any, bytes, int], None]) -> None:
        self.handlers[kind] = handler

    def on_lost(self, _: Plane, handler: Callable[[Any], None]) -> None:
        self.lost = handler

    def send(self, plane: Plane, source: int, target: int, message: msgspec.Struct) -> None:
        node = MACHINE.devices[target].process
        if not isinstance(message, messages.Ping):
            self.said.append((node, message))
        elif node not in self.silent:
            pong = messages.Pong(message.asked_ps, self.incarnations[node])
            self.loop.call_soon(self.say, node, pong)

    def say(self, node: int, message: msgspec.Struct) -> None:
        self.handlers[type(message)](message, b"", MACHINE.vpc_port(node))

    def told(self, kind: type) -> list[tuple[int, Any]]:
        return [(node, message) for node, message in self.said if isinstance(message, kind)]

    # --- the whole way of an attempt ---

    def first(self, request: int, attempt: int = 0, *, last: bool = False) -> None:
        receipt = 7 if last else None
        self.say(0, messages.First(request, attempt, 1000, 2000, 1, 0, receipt))

    def token(
        self, request: int, index: int, attempt: int = 0, *, last: bool = False, token: int = 0
    ) -> None:
        receipt = 7 if last else None
        token = token or 1000 + index
        self.say(2, messages.Tokens(((request, attempt, index, token, 2000 + index, receipt),)))


class Run:
    """A gateway with a workload, and what it wrote."""

    def __init__(self, folder: Path, requests: list[Request]) -> None:
        self.loop = VirtualLoop()
        self.nodes = Nodes(self.loop)
        self.folder = folder
        self.requests = requests

    def __call__(self, play: Callable[[Nodes], Awaitable[None]]) -> list[dict[str, Any]]:
        """Play beside the gateway until it has finished."""

        async def main() -> None:
            context: Any = SimpleNamespace(
                loop=self.loop,
                machine=MACHINE,
                process=MACHINE.roles.gateway,
                run_folder=self.folder,
                outstanding=lambda _: None,
                mark=self.nodes.marks.append,
                finish=lambda: None,
            )
            post: Any = self.nodes
            gateway = Gateway(
                context,
                post,
                local.job_of(MACHINE, self.requests),
                forget=self.nodes.forgotten.append,
            )
            async with asyncio.TaskGroup() as group:
                group.create_task(gateway.run())
                await asyncio.sleep(0)
                await play(self.nodes)

        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.run(main())
        lines = (self.folder / "requests.jsonl").read_bytes().splitlines()
        return [json.loads(line) for line in lines]


def request(
    index: int, input_tokens: int = 100, output_tokens: int = 1, at_s: float = 0
) -> Request:
    return local.a_request(index, int(at_s * S), input_tokens, output_tokens, (index,))


async def settle() -> None:
    """All that is to happen now has."""
    await asyncio.sleep(1e-9)
