"""The gateway alone, with nodes that the test plays: balance, tries, order, who lives."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

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
        self.marks: list[str] = []

    def on(self, kind: type, handler: Callable[[Any, bytes, int], None]) -> None:
        self.handlers[kind] = handler

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


def test_requests_go_to_the_instance_and_the_rank_with_least(tmp_path: Path) -> None:
    """Instances are weighed by prompt tokens that wait, ranks by sequences; ties to the lower."""
    sizes = [100, 30, 30, 30, 30, 500, 1, 1, 1]

    async def play(nodes: Nodes) -> None:
        await settle()
        prefills = nodes.told(messages.Prefill)
        assert [node for node, _ in prefills] == [0, 1, 1, 1, 1, 0, 1, 1, 1]
        assert [message.rank for _, message in prefills] == [0, 1, 2, 3, 4, 5, 6, 7, 0]
        for index in range(len(sizes)):
            nodes.first(index, last=True)

    records = Run(tmp_path, [request(i, size) for i, size in enumerate(sizes)])(play)
    assert [record["status"] for record in records] == ["ok"] * len(sizes)


def test_a_prompt_counts_until_its_first_token_and_a_sequence_until_its_last(
    tmp_path: Path,
) -> None:
    async def play(nodes: Nodes) -> None:
        await settle()
        nodes.first(0)
        await asyncio.sleep(1)
        await settle()
        (_, second) = nodes.told(messages.Prefill)[1]
        assert (nodes.told(messages.Prefill)[1][0], second.rank) == (0, 1)
        nodes.token(0, 1, last=True)
        nodes.first(1)
        await asyncio.sleep(1)
        await settle()
        assert nodes.told(messages.Prefill)[2][1].rank == 0
        nodes.token(1, 1, last=True)
        nodes.first(2)
        nodes.token(2, 1, last=True)

    records = Run(tmp_path, [request(i, 100, 2, i) for i in range(3)])(play)
    assert [record["tokens"] for record in records] == [[1000, 1001]] * 3


def test_tokens_of_decode_may_overtake_the_first_one(tmp_path: Path) -> None:
    """Prefill and decode have streams of their own; a retransmission delays one of them."""

    async def play(nodes: Nodes) -> None:
        await settle()
        nodes.token(0, 1)
        nodes.token(0, 2, last=True)
        await asyncio.sleep(0.2)
        nodes.first(0)

    (record,) = Run(tmp_path, [request(0, 100, 3)])(play)
    assert (record["status"], record["tries"], record["tokens"]) == ("ok", 1, [1000, 1001, 1002])
    assert record["receipt"] == 7


def test_a_token_that_is_missing_ends_the_try(tmp_path: Path) -> None:
    """Its stream broke: the rest is of no use; the sequence is cancelled, the second try compared."""

    async def play(nodes: Nodes) -> None:
        await settle()
        nodes.first(0)
        nodes.token(0, 1)
        nodes.token(0, 3)
        await settle()
        assert nodes.told(messages.Cancel) == [(2, messages.Cancel(0, 0))]
        nodes.first(0, 1)
        for index in (1, 2, 3):
            nodes.token(0, index, 1, last=index == 3)

    (record,) = Run(tmp_path, [request(0, 100, 4)])(play)
    assert (record["status"], record["tries"]) == ("ok", 2)
    assert record["tokens"] == [1000, 1001, 1002, 1003]


def test_a_try_that_contradicts_an_earlier_one_is_no_answer(tmp_path: Path) -> None:
    async def play(nodes: Nodes) -> None:
        await settle()
        nodes.first(0)
        nodes.token(0, 1)
        nodes.say(2, messages.Failed(0, 0, "steps fail"))
        await settle()
        nodes.first(0, 1)
        nodes.token(0, 1, 1, token=5)

    (record,) = Run(tmp_path, [request(0, 100, 3)])(play)
    assert record["error"] == "token 1 differs from an earlier try's"


def test_messages_of_a_try_that_was_given_up_are_ignored(tmp_path: Path) -> None:
    """Its tokens are answered with a Cancel, so that nobody decodes for nothing."""

    async def play(nodes: Nodes) -> None:
        await settle()
        nodes.say(0, messages.Failed(0, 0, "no way"))
        await settle()
        nodes.said.clear()
        nodes.first(0, 0)
        nodes.token(0, 1, 0)
        nodes.say(0, messages.Failed(0, 0, "again"))
        await settle()
        assert nodes.said == [(2, messages.Cancel(0, 0))]
        nodes.first(0, 1)
        nodes.token(0, 1, 1, last=True)

    (record,) = Run(tmp_path, [request(0, 100, 2)])(play)
    assert (record["status"], record["tries"]) == ("ok", 2)


def test_a_silent_node_is_dead_and_its_requests_begin_anew(tmp_path: Path) -> None:
    """A prefill node that dies takes its queue along; the other instance takes over."""

    async def play(nodes: Nodes) -> None:
        await settle()
        nodes.silent.add(0)
        await asyncio.sleep(TIMEOUT_S)
        assert [(node, m.attempt) for node, m in nodes.told(messages.Prefill)] == [(0, 0), (1, 1)]
        nodes.first(0, 1, last=True)

    (record,) = Run(tmp_path, [request(0)])(play)
    assert (record["status"], record["tries"], record["instance"]) == ("ok", 2, 1)


def test_every_change_of_the_decode_group_is_an_epoch(tmp_path: Path) -> None:
    async def play(nodes: Nodes) -> None:
        await settle()
        nodes.silent.add(2)
        await asyncio.sleep(TIMEOUT_S)
        nodes.silent.clear()
        nodes.incarnations[2] = 1
        nodes.say(2, messages.Up(2, 1))
        await asyncio.sleep(TIMEOUT_S)
        epochs = nodes.told(messages.Epoch)
        assert epochs == [
            *((node, messages.Epoch(1, (2, 3))) for node in (2, 3)),
            (3, messages.Epoch(2, (3,))),
            *((node, messages.Epoch(3, (2, 3))) for node in (2, 3)),
        ]
        assert nodes.forgotten == [2]
        nodes.first(0, 1, last=True)

    Run(tmp_path, [request(0)])(play)


def test_a_node_that_comes_back_unmissed_loses_what_it_had(tmp_path: Path) -> None:
    """Its sequences are gone with its memory: the request begins anew at once, not at a timeout."""

    async def play(nodes: Nodes) -> None:
        await settle()
        nodes.first(0)
        nodes.say(2, messages.Up(2, 1))
        await settle()
        assert [m.attempt for _, m in nodes.told(messages.Prefill)] == [0, 1]
        assert [m.nodes for _, m in nodes.told(messages.Epoch)[-3:]] == [(3,), (2, 3), (2, 3)]
        nodes.first(0, 1)
        nodes.token(0, 1, 1, last=True)

    (record,) = Run(tmp_path, [request(0, 100, 2)])(play)
    assert (record["status"], record["tries"]) == ("ok", 2)


def test_an_answer_to_a_ping_from_before_its_death_revives_nobody(tmp_path: Path) -> None:
    """It may have been on its way for long; an answer to a later ping does, and without a restart."""

    async def play(nodes: Nodes) -> None:
        await settle()
        nodes.silent.add(3)
        await asyncio.sleep(TIMEOUT_S)
        epochs = len(nodes.told(messages.Epoch))
        nodes.say(3, messages.Pong(1 * S, 0))
        assert len(nodes.told(messages.Epoch)) == epochs
        nodes.silent.clear()
        await asyncio.sleep(1.5)
        assert nodes.told(messages.Epoch)[-1] == (3, messages.Epoch(3, (2, 3)))
        assert nodes.forgotten == []
        nodes.first(0, last=True)

    Run(tmp_path, [request(0)])(play)


def test_a_request_waits_a_while_for_somebody_to_serve_it(tmp_path: Path) -> None:
    """The first comes when one node is back in time, the second not; the error says what was missing."""

    async def play(nodes: Nodes) -> None:
        await settle()
        nodes.silent.update((2, 3))
        await asyncio.sleep(20)
        assert [m.request for _, m in nodes.told(messages.Prefill)] == [0]
        nodes.silent.discard(3)
        await asyncio.sleep(2)
        assert [(m.request, m.rank) for _, m in nodes.told(messages.Prefill)[1:]] == [
            (0, 4),
            (1, 5),
        ]
        nodes.first(0, 1, last=True)
        nodes.first(1, last=True)
        nodes.silent.add(3)

    requests = [request(0), request(1, at_s=10), request(2, at_s=40)]
    records = Run(tmp_path, requests)(play)
    assert [record["status"] for record in records] == ["ok", "ok", "error"]
    assert records[2]["error"] == "no decode node lived for 30 s"


def test_the_last_resort_does_not_measure_queues(tmp_path: Path) -> None:
    """A prompt that waits while its instance works on is not stuck; one that nobody works on is."""

    async def play(nodes: Nodes) -> None:
        await settle()
        for index in range(0, 8, 2):
            await asyncio.sleep(200)
            nodes.first(index, last=True)
        assert nodes.told(messages.Cancel) != []
        nodes.first(8, last=True)

    records = Run(tmp_path, [request(index) for index in range(9)])(play)
    tries = {record["index"]: record["tries"] for record in records}
    assert [tries[index] for index in range(0, 9, 2)] == [1] * 5
    assert {r["error"] for r in records if r["index"] % 2} == {"no progress for 300 s"}


@pytest.mark.parametrize("tokens", [1, 600])
def test_long_answers_show_the_watchdog_that_they_move(tmp_path: Path, tokens: int) -> None:
    """An answer may take longer than 600 s, which without a mark counts as a stall."""
    run = Run(tmp_path, [request(0, 100, tokens)])

    async def play(nodes: Nodes) -> None:
        await settle()
        nodes.first(0, last=tokens == 1)
        for index in range(1, tokens):
            nodes.token(0, index, last=index == tokens - 1)

    run(play)
    expected = [f"request 0 token {index}" for index in range(0, tokens, 256)]
    assert run.nodes.marks == [*expected, "request 0 ok"]
