"""How a node is put together: who leads, and what is told apart after a restart."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from cmnet.testing import LocalMachine
from cmnet.vtime.loop import VirtualLoop
from nodes.ems.placement import NodeWeight, make_view
from nodes.model.seal import SealBody
from nodes.node import Node, _Leading, untouched
from nodes.serving import messages
from tests.nodes.serving import local

MACHINE = local.mini()
JOB = local.job_of(MACHINE, local.busy_requests())
LEADER, OTHER = 2, 3


def test_calls_of_a_restarted_node_have_numbers_of_their_own(tmp_path: Path) -> None:
    """An answer to its predecessor that is still on its way must not be taken for one to it."""
    numbers = []
    for incarnation in (0, 1, 2):
        context = LocalMachine(MACHINE, folder=tmp_path).contexts[0]
        context.incarnation = incarnation
        view = make_view(1, [NodeWeight("node00")])
        node = Node(context, JOB, SealBody(JOB.model), view, untouched)
        numbers.append(node._post._calls)
    assert numbers == [0, 1 << 40, 2 << 40]


class Decode:
    """The decode part of a node, as its leadership sees it."""

    def __init__(self) -> None:
        self.entered: list[int] = []
        self.sent: list[tuple[int, msgspec.Struct]] = []

    def enter(self, epoch: messages.Epoch) -> None:
        self.entered.append(epoch.number)

    def send(self, node: int, message: msgspec.Struct) -> None:
        self.sent.append((node, message))

    def assure(self, node: int, message: msgspec.Struct) -> None:
        self.sent.append((node, message))


async def led(say: Any, decode: Decode) -> None:
    """A group of two forms, loses its leader, and is led by another node."""

    async def settle() -> list[int]:
        decode.sent.clear()
        await asyncio.sleep(1e-9)
        return [m.epoch for _, m in decode.sent if isinstance(m, messages.Step)]

    say(messages.Hello(2, OTHER, ((1, 0, 4, 100),)))
    say(messages.Hello(2, LEADER, ()))
    say(messages.Hello(1, OTHER, ()))
    say(messages.Epoch(1, (LEADER, OTHER)))
    assert await settle() == []
    say(messages.Epoch(2, (LEADER, OTHER)))
    assert await settle() == [2, 2]
    say(messages.Epoch(1, (LEADER,)))
    say(messages.StepDone(1, 1, OTHER, (), ""))
    assert await settle() == []
    say(messages.Epoch(3, (OTHER,)))
    say(messages.StepDone(2, 1, OTHER, ((1, 0, 100),), ""))
    assert await settle() == []
    say(messages.Hello(5, LEADER, ()))
    say(messages.Epoch(6, (LEADER,)))
    assert decode.entered == [1, 2, 3, 6]


def test_a_node_leads_the_epochs_whose_first_it_is() -> None:
    """What came for an epoch before the epoch itself is kept for it, and not longer."""
    decode = Decode()
    handlers: dict[type, Any] = {}

    async def main() -> None:
        loop = asyncio.get_running_loop()
        context: Any = SimpleNamespace(
            loop=loop,
            machine=MACHINE,
            process=LEADER,
            spawn=lambda work, name: loop.create_task(work, name=name),
        )
        post: Any = SimpleNamespace(on=handlers.__setitem__)
        part: Any = decode
        leading = _Leading(context, post, JOB, part)
        await led(lambda message: handlers[type(message)](message, b"", -1), decode)
        assert leading._early == []
        assert leading._task is not None
        leading._task.cancel()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main())
