"""The gateway alone: balance, tries, the order of tokens, the last resort."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from nodes.serving import messages
from tests.nodes.serving.around_gateway import Nodes, Run, request, settle


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


def test_a_prompt_that_was_lost_is_sent_anew_at_once(tmp_path: Path) -> None:
    """Not after 300 s; one that is lost late or of an earlier try ends nothing."""

    async def play(nodes: Nodes) -> None:
        await settle()
        (_, prompt) = nodes.told(messages.Prefill)[0]
        nodes.lost(prompt)
        await settle()
        assert [each.attempt for _, each in nodes.told(messages.Prefill)] == [0, 1]
        nodes.lost(prompt)
        nodes.lost(messages.Epoch(1, (2, 3)))
        nodes.first(0, 1)
        nodes.lost(nodes.told(messages.Prefill)[1][1])
        nodes.token(0, 1, 1, last=True)

    (record,) = Run(tmp_path, [request(0, output_tokens=2)])(play)
    assert (record["status"], record["tries"]) == ("ok", 2)
    assert record["ended_ps"] < 10**12
