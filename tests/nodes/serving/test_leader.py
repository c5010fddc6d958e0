"""The leader of the decode group, with nodes that the test plays."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import msgspec

from cmnet.vtime.loop import VirtualLoop
from nodes.serving import messages
from nodes.serving.leader import Leader
from nodes.serving.settings import ServingSettings

NODES = (4, 5)
"""Two nodes with two ranks each: 0 and 1, 2 and 3."""
S = 10**12
SETTINGS = ServingSettings()
STEP_PS = 2 * SETTINGS.step_timeout.amount
PAUSE_PS = SETTINGS.step_pause.amount


class Group:
    """A leader and all that it says, in order."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.said: list[tuple[int, msgspec.Struct]] = []
        self.assured: list[tuple[int, msgspec.Struct]] = []
        self.kv_tokens: dict[int, int] = {}
        self.leader = Leader(
            loop,
            messages.Epoch(7, NODES),
            send=lambda node, message: self.said.append((node, message)),
            assure=lambda node, message: self.assured.append((node, message)),
            node_of_rank=lambda rank: NODES[rank // 2],
            settings=SETTINGS,
        )

    def hello(self, *sequences: tuple[int, int, int, int]) -> None:
        """Both nodes are here; the first brings the sequences."""
        self.kv_tokens |= {request: kv_tokens for request, _, _, kv_tokens in sequences}
        self.leader.hello(messages.Hello(7, NODES[0], sequences))
        self.leader.hello(messages.Hello(7, NODES[1], ()))

    def join(self, request: int, rank: int, kv_tokens: int = 100) -> None:
        self.kv_tokens.setdefault(request, kv_tokens)
        self.leader.joined(messages.Joined(7, request, 0, rank, kv_tokens))

    def done(
        self,
        node: int,
        *active: int,
        error: str = "",
        number: int | None = None,
        tokens: int = 1,
    ) -> None:
        """A node answers the step in progress; these requests are still with it, and are longer by so
        many tokens each, unless there was an error."""
        number = self.leader.number if number is None else number
        for request in active:
            self.kv_tokens[request] += 0 if error else tokens
        held = tuple((request, 0, self.kv_tokens[request]) for request in active)
        self.leader.done(messages.StepDone(7, number, node, held, error))

    async def step(self) -> messages.Step:
        """The step that both nodes are told of now."""
        self.said.clear()
        await settle()
        assert [node for node, _ in self.said] == list(NODES)
        steps = [message for _, message in self.said]
        assert isinstance(steps[0], messages.Step) and steps[0] == steps[1]
        return steps[0]


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def led(work: Callable[[Group], Awaitable[None]]) -> None:
    """Run a test beside a leader."""
    loop = VirtualLoop()

    async def main() -> None:
        group = Group(loop)
        task = asyncio.create_task(group.leader.run())
        await work(group)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(main())


def test_no_step_before_all_nodes_are_here() -> None:
    """A node that has not placed its experts yet would not answer."""

    async def work(group: Group) -> None:
        group.join(1, 0)
        group.leader.hello(messages.Hello(7, NODES[0], ()))
        await settle()
        assert group.said == []
        group.leader.hello(messages.Hello(7, NODES[1], ()))
        assert (await group.step()).admitted == ((1, 0),)

    led(work)


def test_a_step_names_ranks_with_tokens_and_the_longest_kv() -> None:
    async def work(group: Group) -> None:
        group.hello((1, 0, 3, 50))
        group.join(2, 0, 70)
        group.join(3, 0, 10)
        step = await group.step()
        assert step == messages.Step(7, 1, ((1, 0), (2, 0), (3, 0)), ((0, 2), (3, 1)), 80)

    led(work)


def test_steps_follow_each_other_until_nobody_is_left() -> None:
    """KV grows by what a node says; who is not active any more is not counted."""

    async def work(group: Group) -> None:
        group.hello()
        group.join(1, 0, 100)
        group.join(2, 2, 10)
        await group.step()
        group.done(NODES[0], 1)
        group.said.clear()
        group.done(NODES[1])
        step = await group.step()
        assert (step.number, step.admitted, step.sources, step.kv_tokens) == (2, (), ((0, 1),), 101)
        group.said.clear()
        group.done(NODES[0], 1, tokens=2)
        assert (await group.step()).kv_tokens == 103
        group.done(NODES[0])
        group.said.clear()
        await settle()
        assert group.said == []

    led(work)


def test_more_sequences_than_places_wait_their_turn() -> None:
    """A rank works on 64; the next ones join when places are free, first come first served."""

    async def work(group: Group) -> None:
        group.hello()
        for request in range(66):
            group.join(request, 0)
        group.join(100, 1)
        step = await group.step()
        assert step.sources == ((0, 64), (1, 1))
        group.done(NODES[0], *range(1, 64), 100)
        step = await group.step()
        assert (step.admitted, step.sources) == (((64, 0),), ((0, 64), (1, 1)))

    led(work)


def test_an_admission_is_repeated_until_its_node_has_answered() -> None:
    """The step that named it may have been lost on its way to just that node."""

    async def work(group: Group) -> None:
        group.hello()
        group.join(1, 0)
        group.join(2, 2)
        await group.step()
        group.done(NODES[0], 1)
        await asyncio.sleep((STEP_PS + PAUSE_PS) / S - 0.001)
        group.said.clear()
        await asyncio.sleep(0.01)
        step = group.said[0][1]
        assert isinstance(step, messages.Step)
        assert (step.number, step.admitted, step.sources) == (2, ((2, 0),), ((0, 1), (2, 1)))

    led(work)


def test_a_sequence_that_joins_twice_is_counted_once() -> None:
    """Joined is said again when its completion was lost."""

    async def work(group: Group) -> None:
        group.hello()
        group.join(1, 0)
        await group.step()
        group.join(1, 0)
        group.done(NODES[0], 1)
        step = await group.step()
        assert (step.sources, step.admitted, step.kv_tokens) == (((0, 1),), (), 101)

    led(work)


def test_an_answer_to_an_earlier_step_is_ignored() -> None:
    async def work(group: Group) -> None:
        group.hello()
        group.join(1, 0)
        await group.step()
        group.done(NODES[0], 1)
        await group.step()
        group.said.clear()
        group.done(NODES[0], number=1)
        await settle()
        assert group.said == [] and (1, 0) in group.leader._active

    led(work)


def test_a_step_that_failed_is_done_again_after_a_pause() -> None:
    async def work(group: Group) -> None:
        group.hello()
        group.join(1, 0)
        await group.step()
        failed_ps = group.loop.now_ps
        group.done(NODES[0], 1, error="no path")
        group.said.clear()
        await settle()
        assert group.said == []
        await asyncio.sleep(PAUSE_PS / S)
        await settle()
        step = group.said[0][1]
        assert isinstance(step, messages.Step)
        assert (step.number, step.kv_tokens) == (2, 100)
        assert group.loop.now_ps == failed_ps + PAUSE_PS

    led(work)


def test_three_failures_in_a_row_end_the_sequences_with_the_reason() -> None:
    """Failures that are not in a row do not; who waits for a place has another chance."""

    async def work(group: Group) -> None:
        group.hello()
        group.join(1, 0)
        await settle()
        for error in ("a", "b", "", "c", "d", "e"):
            assert group.assured == []
            group.done(NODES[0], 1, error=error)
            if error == "e":
                group.join(2, 0)
            await settle()
            await asyncio.sleep(PAUSE_PS / S if error else 0)
            await settle()
        assert group.assured == [(node, messages.GiveUp(7, 6, "e")) for node in NODES]
        step = group.said[-1][1]
        assert isinstance(step, messages.Step) and step.admitted == ((2, 0),)

    led(work)


def test_nodes_that_do_not_answer_are_named() -> None:
    """Three times silent: bounded by twice the exchange's timeout each."""

    async def work(group: Group) -> None:
        group.hello()
        group.join(1, 0)
        group.join(2, 2)
        await settle()
        group.done(NODES[0], 1)
        await asyncio.sleep(3 * STEP_PS / S + 2 * PAUSE_PS / S + 0.001)
        expected = messages.GiveUp(7, 3, "no end of the step from nodes 4, 5")
        assert group.assured == [(node, expected) for node in NODES]

    led(work)


def test_a_late_answer_in_the_pause_still_counts() -> None:
    """Its sequences may have ended in that step; they are not asked for again."""

    async def work(group: Group) -> None:
        group.hello()
        group.join(1, 0)
        await settle()
        await asyncio.sleep(STEP_PS / S)
        group.done(NODES[0])
        group.said.clear()
        await asyncio.sleep(2 * PAUSE_PS / S)
        assert group.said == []

    led(work)
