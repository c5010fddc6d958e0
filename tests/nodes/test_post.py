"""Messages and calls between the parts, over a carrier that the test holds in its hand."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from cmnet.errors import LinkError, PeerDeadError
from cmnet.messages import Payload
from cmnet.topology.machine import Plane
from cmnet.vtime.loop import VirtualLoop
from nodes.post import Post, Reply


class Question(msgspec.Struct, frozen=True, tag=True):
    number: int


class Answer(msgspec.Struct, frozen=True, tag=True):
    number: int


class Told(msgspec.Struct, frozen=True, tag=True):
    text: str


TYPES = (Question, Answer, Told)
OnMessage = Callable[[int, int, bytes, bytes], None]


class HandCarrier:
    """Keeps what is sent, until the test delivers it to a post; ``error`` fails completions."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, int, bytes, bytes, int]] = []
        self.handler: OnMessage | None = None
        self.error: LinkError | None = None

    def on_message(self, handler: OnMessage) -> None:
        self.handler = handler

    def send(
        self, source: int, target: int, body: bytes, payload: Payload, charged_bytes: int
    ) -> None:
        self.sent.append((source, target, body, bytes(payload), charged_bytes))

    async def complete(
        self, source: int, target: int, body: bytes, payload: Payload, charged_bytes: int
    ) -> None:
        if self.error is not None:
            raise self.error
        self.send(source, target, body, payload, charged_bytes)

    def deliver_to(self, other: HandCarrier, index: int = -1) -> None:
        """What this side sent arrives at the other."""
        assert other.handler is not None
        source, target, body, payload, _ = self.sent[index]
        other.handler(source, target, body, payload)


class Ends:
    """Two posts: one asks, one answers."""

    def __init__(self, loop: VirtualLoop, first_call: int = 0) -> None:
        self.loop = loop
        self.near, self.far = HandCarrier(), HandCarrier()
        self.asking = Post(loop, {Plane.UB: self.near}, TYPES, first_call=first_call)
        self.answering = Post(loop, {Plane.UB: self.far}, TYPES)

    def ask(self, number: int, timeout_ps: int = 1000) -> asyncio.Task[tuple[Any, bytes]]:
        call = self.asking.call(Plane.UB, 1, 2, Question(number), timeout_ps=timeout_ps)
        return self.loop.create_task(call)

    def serve(self) -> list[Reply]:
        """The answering side only keeps how to reply."""
        replies: list[Reply] = []
        self.answering.serve(Question, lambda _, __, reply: replies.append(reply))
        return replies


def run(work: Callable[[VirtualLoop], Awaitable[None]]) -> None:
    loop = VirtualLoop()

    async def main() -> None:
        await work(loop)

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(main())


def test_a_message_comes_with_payload_and_source() -> None:
    async def work(loop: VirtualLoop) -> None:
        ends, came = Ends(loop), []
        ends.answering.on(Told, lambda *all_of_it: came.append(all_of_it))
        ends.asking.send(Plane.UB, 1, 2, Told("hello"), payload=b"rows", charged_bytes=7)
        ends.near.deliver_to(ends.far)
        assert came == [(Told("hello"), b"rows", 1)]
        assert ends.near.sent[0][4] == 7

    run(work)


def test_charged_bytes_are_what_is_carried_unless_said() -> None:
    async def work(loop: VirtualLoop) -> None:
        ends = Ends(loop)
        ends.asking.send(Plane.UB, 1, 2, Told("hello"), payload=b"rows")
        _, _, body, payload, charged_bytes = ends.near.sent[0]
        assert charged_bytes == len(body) + len(payload)

    run(work)


def test_an_answer_finds_its_call() -> None:
    """Two calls are open; the second is answered first."""

    async def work(loop: VirtualLoop) -> None:
        ends = Ends(loop)
        replies = ends.serve()
        first, second = ends.ask(1), ends.ask(2)
        await asyncio.sleep(0)
        ends.near.deliver_to(ends.far, 0)
        ends.near.deliver_to(ends.far, 1)
        replies[1](Answer(2), b"two", 0)
        ends.far.deliver_to(ends.near)
        assert await second == (Answer(2), b"two")
        assert not first.done()
        replies[0](Answer(1), b"", 0)
        ends.far.deliver_to(ends.near)
        assert await first == (Answer(1), b"")

    run(work)


def test_a_call_without_an_answer_ends_at_its_timeout() -> None:
    """The error names the question and the time; the answer that comes later is nobody's."""

    async def work(loop: VirtualLoop) -> None:
        ends = Ends(loop)
        replies = ends.serve()
        late = ends.ask(1, timeout_ps=5_000_000)
        await asyncio.sleep(0)
        ends.near.deliver_to(ends.far)
        with pytest.raises(PeerDeadError, match="no answer to Question in 5 us") as raised:
            await late
        assert (loop.now_ps, raised.value.definite) == (5_000_000, False)
        replies[0](Answer(1), b"", 0)
        ends.far.deliver_to(ends.near)
        assert ends.asking._answers == {}

    run(work)


def test_a_second_answer_changes_nothing() -> None:
    async def work(loop: VirtualLoop) -> None:
        ends = Ends(loop)
        replies = ends.serve()
        call = ends.ask(1)
        await asyncio.sleep(0)
        ends.near.deliver_to(ends.far)
        replies[0](Answer(1), b"", 0)
        ends.far.deliver_to(ends.near)
        ends.far.deliver_to(ends.near)
        assert await call == (Answer(1), b"")

    run(work)


def test_an_answer_to_an_earlier_incarnation_is_nobodys() -> None:
    """A restarted node counts its calls anew: an answer to its predecessor must not look like one."""

    async def work(loop: VirtualLoop) -> None:
        before, after = Ends(loop), Ends(loop, first_call=1 << 40)
        replies = before.serve()
        old, new = before.ask(1), after.ask(1)
        await asyncio.sleep(0)
        before.near.deliver_to(before.far)
        replies[0](Answer(99), b"", 0)
        before.far.deliver_to(after.near)
        await asyncio.sleep(0)
        assert not new.done()
        for call in (old, new):
            with pytest.raises(PeerDeadError):
                await call

    run(work)


def test_a_cancelled_call_leaves_nothing() -> None:
    async def work(loop: VirtualLoop) -> None:
        ends = Ends(loop)
        call = ends.ask(1)
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert ends.asking._answers == {}
        await asyncio.sleep(1)

    run(work)


def test_complete_says_what_its_carrier_says() -> None:
    async def work(loop: VirtualLoop) -> None:
        ends, came = Ends(loop), []
        ends.answering.on(Told, lambda message, _, __: came.append(message))
        await ends.asking.complete(Plane.UB, 1, 2, Told("surely"), charged_bytes=3)
        ends.near.deliver_to(ends.far)
        assert came == [Told("surely")]
        ends.near.error = LinkError("the link gave up", definite=True)
        with pytest.raises(LinkError):
            await ends.asking.complete(Plane.UB, 1, 2, Told("surely"))

    run(work)


def test_a_type_has_one_handler() -> None:
    """A second part that takes the same messages is a bug, seen at the start."""

    async def work(loop: VirtualLoop) -> None:
        ends = Ends(loop)
        ends.serve()
        with pytest.raises(AssertionError):
            ends.answering.on(Question, lambda *_: None)

    run(work)
