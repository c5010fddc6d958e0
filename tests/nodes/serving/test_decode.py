"""One decode node: which sequences it takes, keeps, gives up, and which steps it believes in."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from cmnet import bursts
from cmnet.errors import LinkError
from cmnet.topology.machine import Plane
from cmnet.vtime.loop import VirtualLoop
from nodes.model.seal import SealBody
from nodes.serving import messages
from nodes.serving.decode import DecodeNode
from tests.nodes.serving import local

MACHINE = local.mini()
JOB = local.job_of(MACHINE, local.busy_requests())
BODY = SealBody(JOB.model)
LEADER, NODE = 2, 3
"""Ranks 4 to 7 are the node's."""
EPOCH = messages.Epoch(1, (LEADER, NODE))
PAUSE_S = JOB.serving.step_pause.amount / 10**12


class Post:
    """Keeps what the node says; ``broken`` makes completions fail."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.handlers: dict[type, Callable[[Any, bytes, int], None]] = {}
        self.said: list[msgspec.Struct] = []
        self.tries = 0
        self.broken = False

    def on(self, kind: type, handler: Callable[[Any, bytes, int], None]) -> None:
        self.handlers[kind] = handler

    def send(self, _: Plane, __: int, ___: int, message: msgspec.Struct) -> None:
        self.said.append(message)

    async def complete(self, plane: Plane, _: int, target: int, message: msgspec.Struct) -> None:
        assert (plane, MACHINE.devices[target].process) == (Plane.UB, LEADER)
        self.tries += 1
        if self.broken:
            raise LinkError("the link gave up", definite=True)
        self.said.append(message)

    def come(self, message: msgspec.Struct, payload: bytes = b"") -> None:
        self.handlers[type(message)](message, payload, -1)

    def told(self, kind: type) -> list[Any]:
        return [message for message in self.said if isinstance(message, kind)]


@pytest.fixture(autouse=True)
def no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bursts are only counted."""
    monkeypatch.setattr(bursts, "send", lambda burst: burst.fabric.send_burst())


class Played:
    """The node and all around it."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.bursts = 0
        self.room = asyncio.Event()
        """Set: the ports take all."""
        self.room.set()
        fabric = SimpleNamespace(
            machine=MACHINE,
            bind=lambda *_: None,
            arriving=SimpleNamespace(wanted={}, silences={}, repeats={}, deliver=lambda: None),
            send_burst=self._sent,
            route=lambda *_: SimpleNamespace(egress=self),
            room=lambda *_: self.room.wait(),
        )
        context: Any = SimpleNamespace(
            loop=loop,
            fabric=fabric,
            machine=MACHINE,
            process=NODE,
            spawn=lambda work, name: loop.create_task(work, name=name),
        )
        self.post = Post(loop)
        post: Any = self.post
        self.node = DecodeNode(context, post, JOB, BODY, lambda _, items: items)

    waiters = ()

    @property
    def waiting_bytes(self) -> int:
        """As a port of the node's: more than it takes, or none."""
        return 0 if self.room.is_set() else 1 << 40

    def _sent(self) -> None:
        self.bursts += 1

    def rows(self, request: int, *, attempt: int = 0, rank: int = 5) -> None:
        """KV rows of a prompt of one carried row arrive."""
        layers = JOB.model.carried_layers
        payload = np.zeros((layers, 1), dtype=np.uint64).tobytes()
        self.post.come(messages.Rows(request, attempt, rank, 100, 9, 7, 1, 0), payload)

    def step(self, number: int, *admitted: tuple[int, int], ranks: tuple[int, ...] = (5,)) -> None:
        sources = tuple((rank, 1) for rank in ranks)
        self.post.come(messages.Step(self.node._epoch.number, number, admitted, sources, 100))

    def held(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Who waits, who is active."""
        return list(self.node._waiting), list(self.node._active)


def play(work: Callable[[Played], Awaitable[None]]) -> None:
    loop = VirtualLoop()

    async def main() -> None:
        played = Played(loop)
        played.node.enter(EPOCH)
        await asyncio.sleep(0)
        await work(played)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(main())


def test_rows_are_announced_and_wait_for_a_step_that_names_them() -> None:
    async def work(played: Played) -> None:
        played.rows(1)
        await asyncio.sleep(0)
        assert played.post.told(messages.Joined) == [messages.Joined(1, 1, 0, 5, 100)]
        assert played.held() == ([(1, 0)], [])
        played.step(1, (1, 0), (8, 0))
        assert played.held() == ([], [(1, 0)])

    play(work)


def test_rows_that_come_twice_or_too_late_are_not_taken() -> None:
    """A transfer whose completion was lost is sent again; a try that was given up may still arrive."""

    async def work(played: Played) -> None:
        played.rows(1)
        played.step(1, (1, 0))
        played.rows(1)
        assert played.held() == ([], [(1, 0)])
        played.post.come(messages.Cancel(1, 0))
        played.rows(1)
        played.post.come(messages.Cancel(2, 1))
        played.rows(2, attempt=0)
        played.rows(2, attempt=1)
        assert played.held() == ([], [])
        played.rows(2, attempt=2)
        assert played.held() == ([(2, 2)], [])

    play(work)


def test_all_attempts_up_to_the_one_given_up_are_dropped() -> None:
    """Active or waiting: the Cancel of an earlier one may have been lost."""

    async def work(played: Played) -> None:
        played.rows(1, attempt=0)
        played.step(1, (1, 0))
        played.rows(1, attempt=1)
        played.rows(1, attempt=2)
        played.rows(2, attempt=0)
        assert played.held() == ([(1, 1), (1, 2), (2, 0)], [(1, 0)])
        played.post.come(messages.Cancel(1, 1))
        assert played.held() == ([(1, 2), (2, 0)], [])

    play(work)


def test_tokens_leave_when_the_port_has_room() -> None:
    """A full port makes the step wait; it is not given more."""

    async def work(played: Played) -> None:
        played.room.clear()
        played.rows(1)
        played.step(1, (1, 0))
        await asyncio.sleep(1)
        assert played.bursts == 0
        played.room.set()
        await asyncio.sleep(1)
        assert played.bursts == 1

    play(work)


def test_a_step_that_was_overtaken_is_not_begun() -> None:
    """UB restores no order: a late step would end the one in progress and do an old one over."""

    async def work(played: Played) -> None:
        played.step(2)
        running = played.node._task
        played.step(1)
        played.step(2)
        assert (played.node._number, played.node._task) == (2, running)
        played.post.come(messages.Step(9, 3, (), ((5, 1),), 100))
        assert played.node._number == 2

    play(work)


def test_the_next_step_gives_up_the_one_in_progress() -> None:
    """A sequence in two steps at once would get one token twice."""

    async def work(played: Played) -> None:
        played.rows(1)
        played.step(1, (1, 0))
        await asyncio.sleep(0)
        first = played.node._task
        assert first is not None
        played.step(2)
        await asyncio.sleep(0.001)
        assert first.cancelled()
        assert played.node._task is not None and not played.node._task.done()

    play(work)


def test_sequences_that_the_leader_does_not_count_on_announce_themselves_anew() -> None:
    """It gave them up, but the message was late: nobody may wait for a step that never comes."""

    async def work(played: Played) -> None:
        played.rows(1, rank=5)
        played.rows(2, rank=6)
        played.step(1, (1, 0), (2, 0), ranks=(5, 6))
        await asyncio.sleep(0)
        played.post.said.clear()
        played.step(2, ranks=(6,))
        await asyncio.sleep(0)
        assert played.held() == ([(1, 0)], [(2, 0)])
        assert played.post.told(messages.Joined) == [messages.Joined(1, 1, 0, 5, 100)]
        played.step(3, (1, 0), ranks=(5, 6))
        assert played.held() == ([], [(2, 0), (1, 0)])

    play(work)


def test_giving_up_fails_what_was_in_that_step_only() -> None:
    """Of another epoch, or late, it means others; who waits has another chance."""

    async def work(played: Played) -> None:
        for request in (1, 2):
            played.rows(request)
        played.step(4, (1, 0))
        played.post.come(messages.GiveUp(0, 4, "x"))
        played.post.come(messages.GiveUp(1, 3, "x"))
        assert played.post.told(messages.Failed) == []
        played.post.come(messages.GiveUp(1, 4, "no path"))
        assert played.post.told(messages.Failed) == [messages.Failed(1, 0, "no path")]
        assert played.held() == ([(2, 0)], [])

    play(work)


def test_a_new_epoch_brings_all_sequences_along() -> None:
    """Active ones first; what they have computed stays, the step in progress is given up."""

    async def work(played: Played) -> None:
        for request in (1, 2):
            played.rows(request)
        played.step(1, (2, 0))
        await asyncio.sleep(0)
        task = played.node._task
        played.node.enter(messages.Epoch(2, (LEADER, NODE)))
        await asyncio.sleep(0.001)
        hello = played.post.told(messages.Hello)[-1]
        assert hello == messages.Hello(2, NODE, ((2, 0, 5, 100), (1, 0, 5, 100)))
        assert played.held() == ([(2, 0), (1, 0)], [])
        assert task is not None and task.cancelled()
        played.step(1)
        assert played.node._number == 1

    play(work)


def test_what_must_be_known_is_said_until_it_is_there() -> None:
    """Hello and Joined over a link that is down: again after each pause, and no more once untrue."""

    async def work(played: Played) -> None:
        post = played.post
        post.said.clear()
        post.broken, post.tries = True, 0
        played.rows(1)
        played.rows(2)
        await asyncio.sleep(2.5 * PAUSE_S)
        assert (post.tries, post.said) == (2 * 3, [])
        post.come(messages.Cancel(1, 0))
        post.broken = False
        await asyncio.sleep(5 * PAUSE_S)
        assert post.said == [messages.Joined(1, 2, 0, 5, 100)]

    play(work)
