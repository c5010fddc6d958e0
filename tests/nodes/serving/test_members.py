"""Who lives, as the gateway sees it: silence, returns, epochs, and what they mean for requests."""

from __future__ import annotations

import asyncio
from pathlib import Path

from nodes.serving import messages
from tests.nodes.serving.around_gateway import TIMEOUT_S, Nodes, Run, S, request, settle


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
