"""Dispatch and combine between two nodes, over a fabric that delivers as the test says."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cmnet.bursts import Bundle
from cmnet.errors import LinkError, PeerDeadError
from cmnet.vtime.loop import VirtualLoop
from nodes.model.body import Array
from nodes.model.seal import SealBody
from nodes.model.tiles import parse_scale
from nodes.moe.exchange import FLAG_BYTES, Exchange, Key, Rows
from nodes.moe.placement import place
from nodes.settings import ModelSettings
from tests.rig import machine

MODEL = ModelSettings()
BODY = SealBody(MODEL)
MINI = machine("mini")
DEVICES = (*MINI.dies(2), *MINI.dies(3))
EP = len(DEVICES)
FIRSTS = [0, EP // 2]
PLACEMENT = place(experts=MODEL.routed_experts, ep_size=EP, alive=frozenset(range(EP)))
TIMEOUT_PS = 5_000_000
KEY: Key = (1, 1, 0)

Message = tuple[int, int, bytes, int, bytes]
"""(kind, source device, head, target device, data)"""


class Fabric:
    """Of one node: keeps what bursts send, one message each."""

    def __init__(self) -> None:
        self.machine = MINI
        self.handlers: dict[int, Callable[[Any], None]] = {}
        self.sent: list[Message] = []
        self.asked: list[tuple[int, int]] = []
        """(device, bytes) that somebody waited to have room for."""
        self.lost: Callable[[list[int]], None] = lambda _: None

    def bind(self, kind: int, handler: Callable[[Any], None]) -> None:
        self.handlers[kind] = handler

    def route(self, *way: int) -> tuple[int, ...]:
        return way[2:]

    async def room(self, route: tuple[int, int], charged_bytes: int) -> None:
        self.asked.append((route[0], charged_bytes))

    def send_burst(
        self, *, source: int, kind: int, head: bytes, items: Any, lost: Any, **_: object
    ) -> None:
        self.lost = lost
        self.sent += [(kind, source, head, target, data) for target, _, data in items]


class Pair:
    """The two nodes of a decode group; ranks 0 to 3 on the first one."""

    def __init__(self, loop: VirtualLoop, scale: str = "64") -> None:
        self.loop = loop
        self.fabrics = [Fabric(), Fabric()]
        self.nodes = [self._exchange(fabric, scale) for fabric in self.fabrics]

    def _exchange(self, fabric: Fabric, scale: str) -> Exchange:
        context: Any = SimpleNamespace(loop=self.loop, fabric=fabric, machine=MINI)
        return Exchange(
            context,
            BODY,
            parse_scale(scale, MODEL),
            devices=DEVICES,
            timeout_ps=TIMEOUT_PS,
            touch=lambda _, items: items,
        )

    def sent(self) -> list[Message]:
        """All that is on its way, taken off it."""
        messages = [message for fabric in self.fabrics for message in fabric.sent]
        for fabric in self.fabrics:
            fabric.sent = []
        return messages

    def deliver(self, messages: list[Message]) -> None:
        """One bundle each."""
        for kind, source, head, target, data in messages:
            node = MINI.devices[target].process - 2
            bundle = Bundle(source, head, [(target, data, self.loop.now_ps)], 0)
            self.fabrics[node].handlers[kind](bundle)

    def dispatch(self, rank: int, states: Array, key: Key = KEY) -> None:
        """A rank's tokens, and what its node waits for."""
        gate = BODY.gate(states, layer=0)
        owed = {
            (DEVICES[rank], token, k): target
            for token, experts in enumerate(gate.experts.tolist())
            for k, target in enumerate(
                [*(PLACEMENT.ranks[expert] for expert in experts), PLACEMENT.shared[rank]]
            )
        }
        node = self.nodes[rank * 2 // EP]
        node.expect_results(key, len(states), owed)
        node.dispatch(
            key,
            rank,
            first_token=0,
            vectors=BODY.dispatch(states),
            experts=gate.experts,
            placement=PLACEMENT,
            nodes_first_ranks=FIRSTS,
            began_ps=self.loop.now_ps,
        )

    def answer(self, node: int, rows: Rows) -> None:
        """The experts of a node compute and write back."""
        results = BODY.expert(rows.experts, rows.vectors, layer=0)
        for device in sorted(set(rows.targets)):
            chosen = [index for index, target in enumerate(rows.targets) if target == device]
            self.nodes[node].combine(KEY, device, rows, results, chosen, began_ps=0)


def states_of(count: int) -> Array:
    return BODY.start_tokens(np.arange(count, dtype=np.int64), places=np.zeros(count, np.int64))


def expected_results(states: Array) -> Array:
    """By the body alone: what comes back for each token and slot."""
    gate = BODY.gate(states, layer=0)
    shared = np.full((len(states), 1), MODEL.shared_expert)
    experts = np.concatenate([gate.experts, shared], axis=1)
    vectors = np.repeat(BODY.dispatch(states), experts.shape[1], axis=0)
    results = BODY.expert(experts.reshape(-1), vectors, layer=0)
    return results.reshape(len(states), experts.shape[1], -1)


def run(work: Callable[[Pair], Awaitable[None]], scale: str = "64") -> None:
    loop = VirtualLoop()

    async def main() -> None:
        await work(Pair(loop, scale))

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(main())


@settings(deadline=None, max_examples=25)
@given(data=st.data(), scale=st.sampled_from(["64", "full"]))
def test_any_order_and_any_duplicate_give_the_same_results(data: st.DataObject, scale: str) -> None:
    """Rows, flags and results are written to places of their own, so order and copies are nothing."""

    def shuffled(messages: list[Message]) -> list[Message]:
        copies = data.draw(st.lists(st.sampled_from(messages), max_size=5))
        return list(data.draw(st.permutations(messages + copies)))

    async def work(pair: Pair) -> None:
        states = states_of(3)
        pair.dispatch(1, states)
        waits = [pair.loop.create_task(node.rows(KEY, (1,))) for node in pair.nodes]
        await asyncio.sleep(0)
        pair.deliver(shuffled(pair.sent()))
        for node, wait in enumerate(waits):
            pair.answer(node, await wait)
        results = pair.loop.create_task(pair.nodes[0].results(KEY))
        await asyncio.sleep(0)
        pair.deliver(shuffled(pair.sent()))
        assert np.array_equal(await results, expected_results(states))

    run(work, scale)


def test_the_experts_get_each_row_once_and_in_one_order() -> None:
    """By (source rank, token, k), so that results do not depend on arrival."""

    async def work(pair: Pair) -> None:
        for rank in (5, 0):
            pair.dispatch(rank, states_of(2))
        messages = pair.sent()
        pair.deliver(messages[::-1] + messages)
        await asyncio.sleep(0)
        rows = [await node.rows(KEY, (0, 5)) for node in pair.nodes]
        slots = 2 * 2 * (MODEL.top_k + 1)
        assert sum(len(each.slots) for each in rows) == slots
        for each in rows:
            order = list(zip(each.sources, each.slots, strict=True))
            assert order == sorted(set(order))

    run(work)


def test_a_rank_without_tokens_still_sends_its_flags() -> None:
    """The experts cannot know otherwise that nothing comes; and each node gets exactly one."""

    async def work(pair: Pair) -> None:
        pair.dispatch(2, states_of(0))
        messages = pair.sent()
        assert [target for *_, target, _ in messages] == [DEVICES[first] for first in FIRSTS]
        pair.deliver(messages)
        assert all([(await node.rows(KEY, (2,))).slots == [] for node in pair.nodes])
        assert (await pair.nodes[0].results(KEY)).shape[0] == 0

    run(work)


@pytest.mark.parametrize("lost", ["a flag", "a row", "everything"])
def test_the_experts_name_the_ranks_that_are_late(lost: str) -> None:
    async def work(pair: Pair) -> None:
        pair.dispatch(0, states_of(2))
        pair.dispatch(4, states_of(2))
        messages = [m for m in pair.sent() if MINI.devices[m[3]].process == 3]
        of_late = [m for m in messages if m[1] == DEVICES[0]]
        drop = {"a flag": of_late[-1:], "a row": of_late[:1], "everything": of_late}[lost]
        pair.deliver([m for m in messages if m not in drop])
        with pytest.raises(PeerDeadError, match=r"no rows or flags of ranks 0$"):
            await pair.nodes[1].rows(KEY, (0, 4))
        assert pair.loop.now_ps == TIMEOUT_PS
        assert pair.nodes[1]._expected == {}

    run(work)


def test_the_source_names_the_ranks_that_owe_results() -> None:
    async def work(pair: Pair) -> None:
        pair.dispatch(0, states_of(1))
        pair.deliver(pair.sent())
        rows = await pair.nodes[1].rows(KEY, (0,))
        pair.answer(1, rows)
        pair.deliver(pair.sent()[1:])
        there = pair.nodes[0]
        owing = sorted(set(there._awaited[KEY].missing.values()))
        with pytest.raises(PeerDeadError) as raised:
            await there.results(KEY)
        assert str(raised.value) == f"no results of ranks {', '.join(map(str, owing))}"
        assert there._awaited == {}

    run(work)


def test_a_message_that_the_link_gave_up_ends_the_wait_at_once() -> None:
    """Before or while somebody waits; the error names the die that was not reached."""

    async def work(pair: Pair) -> None:
        node = pair.nodes[0]
        for waits_already in (False, True):
            pair.dispatch(0, states_of(1))
            results = pair.loop.create_task(node.results(KEY))
            if waits_already:
                await asyncio.sleep(0)
            index, (*_, target, _) = list(enumerate(pair.sent()))[-1]
            pair.fabrics[0].lost([index])
            with pytest.raises(LinkError, match=f"no path to {MINI.devices[target].name}"):
                await results
        assert pair.loop.now_ps == 0

    run(work)


def test_what_comes_for_an_earlier_step_is_ignored_and_forgotten() -> None:
    """Memory does not grow with what is late: neither of an earlier step nor of an earlier epoch."""

    async def work(pair: Pair) -> None:
        for key in [(1, 9, 0), (2, 1, 0), (2, 2, 0), (2, 2, 1)]:
            pair.dispatch(0, states_of(1), key)
            pair.deliver(pair.sent())
        node = pair.nodes[1]
        assert len(node._expected) == 4
        node.begin(2, 2)
        pair.nodes[0].begin(2, 2)
        assert sorted(node._expected) == sorted(pair.nodes[0]._awaited) == [(2, 2, 0), (2, 2, 1)]
        for key in [(1, 10, 0), (2, 1, 1)]:
            pair.dispatch(0, states_of(1), key)
        pair.deliver(pair.sent())
        assert sorted(node._expected) == [(2, 2, 0), (2, 2, 1)]

    run(work)


def test_latencies_are_from_the_first_start_to_the_last_arrival() -> None:
    """Not to the moment at which the program asked."""

    async def work(pair: Pair) -> None:
        pair.dispatch(0, states_of(1))
        messages = pair.sent()
        pair.deliver(messages[:-1])
        await asyncio.sleep(2e-6)
        pair.deliver(messages[-1:])
        await asyncio.sleep(2e-6)
        await pair.nodes[1].rows(KEY, (0,))
        assert pair.nodes[1].statistics() == {"dispatch_ps": [2_000_000], "combine_ps": []}

    run(work)


def test_room_is_asked_for_all_that_a_burst_may_charge() -> None:
    """At the port of the die that sends: 3 tokens to 9 experts each and a flag to both nodes; 5 results."""

    async def work(pair: Pair) -> None:
        node = pair.nodes[0]
        await node.room_to_dispatch(2, 3, 2)
        await node.room_to_combine(DEVICES[1], 5)
        tokens_bytes = 27 * MODEL.dispatch_bytes + 2 * FLAG_BYTES
        asked = [(DEVICES[2], tokens_bytes), (DEVICES[1], 5 * MODEL.combine_bytes)]
        assert pair.fabrics[0].asked == asked

    run(work)
