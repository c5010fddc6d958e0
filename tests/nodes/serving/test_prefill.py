"""One prefill instance: its queue and batches, what it answers, and rows that do not get through."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from cmnet.errors import PeerDeadError
from cmnet.topology.machine import Plane
from cmnet.vtime.loop import VirtualLoop
from nodes.model.seal import SealBody
from nodes.serving import messages
from nodes.serving.prefill import PrefillInstance
from tests.nodes.serving import local

MACHINE = local.mini()
JOB = local.job_of(MACHINE, local.busy_requests())
BODY = SealBody(JOB.model)
BATCH_TOKENS = JOB.serving.prefill_tokens_max.amount * 4
"""Of an instance of one node with four dies."""


class Store:
    """Holds what was put, at once; ``held`` limits how many leading blocks it gives back."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, bytes] = {}
        self.asked: list[int] = []
        self.puts_lost = 0
        self.free = asyncio.Event()
        self.free.set()

    async def load_prefix(self, keys: Sequence[bytes]) -> list[bytes]:
        self.asked.append(len(keys))
        await asyncio.sleep(1e-6)
        values = []
        for key in keys:
            if key not in self.blocks:
                break
            values.append(self.blocks[key])
        return values

    def put(self, key: bytes, value: bytes, charged_bytes: int) -> None:
        assert charged_bytes == 512 * JOB.model.kv_bytes_per_token
        self.blocks[key] = value

    async def room(self) -> None:
        await self.free.wait()


class Post:
    def __init__(self) -> None:
        self.handlers: dict[type, Callable[[Any, bytes, int], None]] = {}
        self.said: list[tuple[Plane, msgspec.Struct]] = []
        self.rows: list[tuple[messages.Rows, bytes, tuple[int, int]]] = []
        self.broken = 0
        """Transfers that fail before one succeeds."""

    def on(self, kind: type, handler: Callable[[Any, bytes, int], None]) -> None:
        self.handlers[kind] = handler

    def send(self, plane: Plane, _: int, __: int, message: msgspec.Struct) -> None:
        self.said.append((plane, message))

    async def complete(
        self,
        plane: Plane,
        source: int,
        target: int,
        message: Any,
        *,
        payload: bytes,
        charged_bytes: int,
    ) -> None:
        assert plane == Plane.RDMA
        if self.broken:
            self.broken -= 1
            raise PeerDeadError("no acknowledgement", definite=False)
        assert charged_bytes == message.input_tokens * JOB.model.kv_bytes_per_token
        self.rows.append((message, payload, (source, target)))

    def told(self, kind: type) -> list[Any]:
        return [message for _, message in self.said if isinstance(message, kind)]


class Played:
    def __init__(self, loop: VirtualLoop) -> None:
        context: Any = SimpleNamespace(
            loop=loop,
            machine=MACHINE,
            process=0,
            spawn=lambda work, name: loop.create_task(work, name=name),
        )
        self.store, self.post = Store(), Post()
        post: Any = self.post
        store: Any = self.store
        self.instance = PrefillInstance(
            context, post, JOB, BODY, store, instance=(0,), touch=lambda _, items: items
        )

    def ask(
        self,
        request: int,
        input_tokens: int,
        *,
        output_tokens: int = 2,
        rank: int = 0,
        same: int = 0,
    ) -> None:
        """A prompt whose first ``same`` blocks are those of all others."""
        blocks = -(-input_tokens // 512)
        ids = (*range(same), *range(1000 * (request + 1) + same, 1000 * (request + 1) + blocks))
        prompt = messages.Prefill(request, 0, input_tokens, output_tokens, ids[:blocks], rank)
        self.post.handlers[messages.Prefill](prompt, b"", -1)

    async def answered(self, count: int) -> list[messages.First]:
        for _ in range(60_000):
            if len(firsts := self.post.told(messages.First)) >= count:
                return firsts
            await asyncio.sleep(0.01)
        raise TimeoutError(f"{count} answers in ten minutes")


def play(work: Callable[[Played], Awaitable[None]]) -> None:
    loop = VirtualLoop()

    async def main() -> None:
        played = Played(loop)
        running = asyncio.create_task(played.instance.run())
        await work(played)
        running.cancel()

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(main())


def test_a_batch_takes_what_fits_in_order() -> None:
    """The first prompt runs alone, since the instance was idle; then as many as fit, never past one
    that does not."""

    async def work(played: Played) -> None:
        played.ask(0, 100)
        await asyncio.sleep(0)
        for request, tokens in enumerate([20_000, 10_000, 10_000, 100, BATCH_TOKENS], 1):
            played.ask(request, tokens)
        batches = []
        take = played.instance._take

        def kept() -> list[messages.Prefill]:
            batch = take()
            batches.append([message.request for message in batch])
            return batch

        played.instance._take = kept  # type: ignore[method-assign]  # a stand-in
        firsts = await played.answered(6)
        assert batches == [[1, 2], [3, 4], [5]]
        assert [first.request for first in firsts] == list(range(6))

    play(work)


def test_a_prompt_longer_than_any_batch_is_a_batch_of_its_own() -> None:
    async def work(played: Played) -> None:
        played.ask(0, 100)
        await asyncio.sleep(0)
        for request, tokens in enumerate([100, BATCH_TOKENS + 1, 100], 1):
            played.ask(request, tokens)
        await played.answered(4)
        assert played.instance.batches == 4

    play(work)


def test_a_prompt_that_was_given_up_while_it_waited_is_not_computed() -> None:
    """Nor does an empty queue confuse the instance."""

    async def work(played: Played) -> None:
        for request in range(3):
            played.ask(request, 100)
        cancel = played.post.handlers[messages.Cancel]
        for request in range(3):
            cancel(messages.Cancel(request, 0), b"", -1)
        await asyncio.sleep(1)
        played.ask(3, 100)
        cancel(messages.Cancel(2, 1), b"", -1)
        (first,) = await played.answered(1)
        assert (first.request, played.instance.batches) == (3, 1)

    play(work)


def test_all_attempts_up_to_the_one_given_up_leave_the_queue() -> None:
    """The Cancel of an earlier one may have been lost; a later one stays."""

    async def work(played: Played) -> None:
        played.ask(0, 100)
        await asyncio.sleep(0)
        for attempt in range(3):
            prompt = messages.Prefill(1, attempt, 100, 2, (7,), 0)
            played.post.handlers[messages.Prefill](prompt, b"", -1)
        played.post.handlers[messages.Cancel](messages.Cancel(1, 1), b"", -1)
        await asyncio.sleep(10)
        firsts = [(each.request, each.attempt) for each in played.post.told(messages.First)]
        assert firsts == [(0, 0), (1, 2)]

    play(work)


def test_the_next_batch_waits_until_the_store_takes_more() -> None:
    """Otherwise blocks that wait to be stored would pile up without limit."""

    async def work(played: Played) -> None:
        played.store.free.clear()
        played.ask(0, 600)
        await played.answered(1)
        played.ask(1, 600)
        await asyncio.sleep(10)
        assert len(played.post.told(messages.First)) == 1
        played.store.free.set()
        await played.answered(2)

    play(work)


def test_a_single_token_needs_no_decode() -> None:
    """Its receipt comes with it, and no rows leave."""

    async def work(played: Played) -> None:
        played.ask(0, 700, output_tokens=1)
        played.ask(1, 700, output_tokens=2)
        firsts = await played.answered(2)
        assert [first.receipt is not None for first in firsts] == [True, False]
        await asyncio.sleep(0.1)
        assert [rows.request for rows, _, _ in played.post.rows] == [1]

    play(work)


@pytest.mark.parametrize("input_tokens", [1, 128, 129, 511, 512, 513, 1024, 1025, 1500])
def test_a_prefix_from_the_store_changes_nothing_but_what_is_computed(input_tokens: int) -> None:
    """Full blocks before the last row are taken; token, seal and rows are those without a store."""

    async def work(played: Played) -> None:
        for request in (0, 1):
            played.ask(request, input_tokens, same=3)
            await played.answered(request + 1)
        await asyncio.sleep(0.1)
        cold, warm = played.post.told(messages.First)
        assert (cold.token, cold.seal) == (warm.token, warm.seal)
        assert (cold.blocks_hit, warm.blocks_hit) == (0, (input_tokens - 1) // 512)
        (first, rows, _), (second, again, _) = played.post.rows
        assert (rows, first.share) == (again, second.share)
        assert played.instance.tokens_cached == (input_tokens - 1) // 512 * 512

    play(work)


def test_rows_leave_from_the_die_of_their_group() -> None:
    """Ranks 0 and 1 belong to the first die of the four, 6 and 7 to the last."""

    async def work(played: Played) -> None:
        for request, rank in enumerate((0, 7)):
            played.ask(request, 100, rank=rank)
        await played.answered(2)
        await asyncio.sleep(0.1)
        own, decode = MACHINE.dies(0), [*MACHINE.dies(2), *MACHINE.dies(3)]
        ways = [way for _, _, way in played.post.rows]
        assert ways == [(own[0], decode[0]), (own[3], decode[7])]

    play(work)


@pytest.mark.parametrize(("failures", "arrives"), [(2, True), (3, False)])
def test_a_transfer_is_tried_three_times_then_the_gateway_is_told(
    failures: int, arrives: bool
) -> None:
    async def work(played: Played) -> None:
        played.post.broken = failures
        played.ask(0, 100)
        await played.answered(1)
        await asyncio.sleep(10)
        assert len(played.post.rows) == arrives
        expected = messages.Failed(0, 0, "KV transfer: no acknowledgement")
        assert played.post.told(messages.Failed) == ([] if arrives else [expected])

    play(work)
