"""Prefill on one instance: prompts in, KV rows and the first token out.

Owns the instance's queue and its batches. Runs on the instance's first node; the other nodes only
hand KV rows on from their dies. The whole prompt is computed on the first rank: the split over the
instance's dies, and its exchanges, are in the cost model (``cost.PrefillCost``) until they are real.
Prefix blocks come from and go to the store; a store that does not answer costs a little time, never a
request.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from cmnet.errors import OperationError
from cmnet.launch.agent import Context
from cmnet.topology.machine import Plane
from nodes.ems.client import StoreClient
from nodes.kv.groups import Groups
from nodes.model import identity
from nodes.model.body import Array, Body
from nodes.moe.layer import Touch
from nodes.post import Post
from nodes.serving import messages
from nodes.serving.cost import PrefillCost, Prompt
from nodes.serving.job import Job


class _Work:
    """One prompt in the queue."""

    __slots__ = ("cached", "cached_tokens", "hit_blocks", "message", "rows")

    def __init__(self, message: messages.Prefill, rows: identity.PromptRows) -> None:
        self.message = message
        self.rows = rows
        self.hit_blocks = 0
        self.cached_tokens = 0
        self.cached: list[bytes] = []

    @property
    def prompt(self) -> Prompt:
        """For the cost model."""
        new_tokens = self.message.input_tokens - self.cached_tokens
        return Prompt(new_tokens=new_tokens, cached_tokens=self.cached_tokens)


class PrefillInstance:
    """The first node of an instance."""

    def __init__(
        self,
        context: Context,
        post: Post,
        job: Job,
        body: Body,
        store: StoreClient,
        *,
        instance: tuple[int, ...],
        touch: Touch,
    ) -> None:
        machine = context.machine
        self._context = context
        self._loop = context.loop
        self._post = post
        self._model = job.model
        self._body = body
        self._store = store
        self._touch = touch
        self._instance = instance
        self._dies = [die for node in instance for die in machine.dies(node)]
        decode_dies = len(machine.roles.decode) * machine.dies_per_node
        self._groups = Groups(
            prefill_tp_size=len(self._dies), decode_tp_size=1, decode_dp_size=decode_dies
        )
        self._cost = PrefillCost(dies=len(self._dies), model=job.model)
        self._batch_tokens_max = job.serving.prefill_tokens_max.amount * len(self._dies)
        self._gateway = machine.vpc_port(machine.roles.gateway or 0)
        self._vpc = machine.vpc_port(context.process)
        self._sender = RowsSender(context, post, job)
        self._queue: list[messages.Prefill] = []
        self._queued = asyncio.Event()
        self.batches = 0
        self.tokens = 0
        self.tokens_cached = 0
        post.on(messages.Prefill, self._enqueue)
        post.on(messages.Cancel, self._cancel)

    def _enqueue(self, message: messages.Prefill, _: bytes, __: int) -> None:
        self._queue.append(message)
        self._queued.set()

    def _cancel(self, message: messages.Cancel, _: bytes, __: int) -> None:
        """Given up while it waited; what is in a batch already is computed to its end."""
        self._queue = [
            each
            for each in self._queue
            if each.request != message.request or each.attempt > message.attempt
        ]

    async def run(self) -> None:
        """Batches for ever."""
        while True:
            while not self._queue:
                self._queued.clear()
                await self._queued.wait()
            await self._batch(self._take())

    def _take(self) -> list[messages.Prefill]:
        batch = [self._queue.pop(0)]
        tokens = batch[0].input_tokens
        while self._queue and tokens + self._queue[0].input_tokens <= self._batch_tokens_max:
            tokens += self._queue[0].input_tokens
            batch.append(self._queue.pop(0))
        return batch

    async def _batch(self, batch: list[messages.Prefill]) -> None:
        works = [_Work(message, self._rows_of(message)) for message in batch]
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(self._load_prefix(work), name=f"prefix {work.message.request}")
        await self._loop.sleep_ps(self._cost.prefill_ps([work.prompt for work in works]))
        self.batches += 1
        for work in works:
            self._finish(work)
        await self._store.room()

    def _rows_of(self, message: messages.Prefill) -> identity.PromptRows:
        return identity.prompt_rows(
            message.hash_ids, input_tokens=message.input_tokens, settings=self._model
        )

    async def _load_prefix(self, work: _Work) -> None:
        """Leading blocks from the store; at least the last row is always computed."""
        rows_per_block = self._model.rows_per_block
        rows = len(work.rows.seeds)
        usable = min(work.rows.full_blocks, (rows - 1) // rows_per_block)
        work.cached = await self._store.load_prefix(work.rows.block_keys[:usable])
        work.hit_blocks = len(work.cached)
        work.cached_tokens = work.hit_blocks * self._model.block_tokens

    def _finish(self, work: _Work) -> None:
        """Compute; first token and rows out, new blocks to the store."""
        message, body = work.message, self._body
        cached, cached_seals = self._cached(work)
        seeds = self._touch("seeds", work.rows.seeds[cached.shape[1] :])
        prefilled = body.prefill(seeds, cached_rows=cached)
        rows = np.concatenate([cached, prefilled.rows], axis=1)
        seals = np.concatenate([cached_seals, body.seals(prefilled.states)])
        share = body.fold_prompt(seals, first_place=0)
        self.tokens += message.input_tokens
        self.tokens_cached += work.cached_tokens
        token = self._answer(work, prefilled.states[-1:], share)
        if message.output_tokens > 1:
            self._send_rows(message, rows, token, share)
        self._store_blocks(work, rows, seals)

    def _cached(self, work: _Work) -> tuple[Array, Array]:
        """Rows [layers, n] and last-layer seals [n] of the blocks that were loaded."""
        layers, count = self._model.carried_layers, self._model.rows_per_block
        rows = [self._body.rows_from_bytes(b"").reshape(layers, 0)]
        seals = [np.empty(0, dtype=np.uint64)]
        blocks = self._touch("blocks", np.array([_words(block) for block in work.cached]))
        for block in blocks:
            held = self._body.rows_from_bytes(block[:-count].tobytes())
            rows.append(held.reshape(layers, count))
            seals.append(block[-count:].astype(np.uint64))
        return np.concatenate(rows, axis=1), np.concatenate(seals)

    def _answer(self, work: _Work, state: Array, share: int) -> int:
        """The first token, to the gateway; with the receipt where it is the only one."""
        message, body = work.message, self._body
        token, seal = int(body.sample(state)[0]), int(body.seals(state)[0])
        last = message.output_tokens == 1
        first = messages.First(
            request=message.request,
            attempt=message.attempt,
            token=token,
            seal=seal,
            blocks=len(work.rows.block_keys),
            blocks_hit=work.hit_blocks,
            receipt=body.receipt(seal, [share]) if last else None,
        )
        self._post.send(Plane.VPC, self._vpc, self._gateway, first)
        return token

    def _send_rows(self, message: messages.Prefill, rows: Array, token: int, share: int) -> None:
        header = messages.Rows(
            request=message.request,
            attempt=message.attempt,
            rank=message.rank,
            input_tokens=message.input_tokens,
            output_tokens=message.output_tokens,
            token=token,
            rows=rows.shape[1],
            share=share,
        )
        source = self._dies[self._groups.prefill_tp_rank(decode_dp_rank=message.rank)]
        self._sender.begin(header, np.ascontiguousarray(rows).tobytes(), source)

    def _store_blocks(self, work: _Work, rows: Array, seals: Array) -> None:
        rows_per_block = self._model.rows_per_block
        charged_bytes = self._model.block_tokens * self._model.kv_bytes_per_token
        for index in range(work.hit_blocks, work.rows.full_blocks):
            span = slice(index * rows_per_block, (index + 1) * rows_per_block)
            block = np.ascontiguousarray(rows[:, span]).tobytes() + seals[span].tobytes()
            self._store.put(work.rows.block_keys[index], block, charged_bytes)

    def statistics(self) -> dict[str, Any]:
        """Counters for the report."""
        return {
            "batches": self.batches,
            "prompt_tokens": self.tokens,
            "prompt_tokens_cached": self.tokens_cached,
            "puts_lost": self._store.puts_lost,
        }


def _words(block: bytes) -> Array:
    return np.frombuffer(block, dtype=np.uint64)


class RowsSender:
    """Sends KV rows from a die of the instance to their decode rank, over RDMA, with retries."""

    def __init__(self, context: Context, post: Post, job: Job) -> None:
        machine = context.machine
        self._context = context
        self._post = post
        self._settings = job.serving
        self._kv_bytes_per_token = job.model.kv_bytes_per_token
        self._decode_dies = [d for node in machine.roles.decode for d in machine.dies(node)]
        self._gateway = machine.vpc_port(machine.roles.gateway or 0)
        self._vpc = machine.vpc_port(context.process)

    def begin(self, header: messages.Rows, payload: bytes, source: int) -> None:
        """Send in the background; if all tries fail, the gateway is told."""
        name = f"rows {header.request}.{header.attempt}"
        self._context.spawn(self._send(header, payload, source), name)

    async def _send(self, header: messages.Rows, payload: bytes, source: int) -> None:
        error: OperationError | None = None
        for number in range(self._settings.transfer_tries.amount):
            if number:
                await self._context.loop.sleep_ps(self._settings.transfer_pause.amount)
            try:
                await self._send_once(header, payload, source)
                return
            except OperationError as failed:
                error = failed
        failure = messages.Failed(header.request, header.attempt, f"KV transfer: {error}")
        self._post.send(Plane.VPC, self._vpc, self._gateway, failure)

    async def _send_once(self, header: messages.Rows, payload: bytes, source: int) -> None:
        """To the decode rank, or to the node of the die that is to send it there."""
        home = self._context.machine.devices[source].process
        if home == self._context.process:
            await self._post.complete(
                Plane.RDMA,
                source,
                self._decode_dies[header.rank],
                header,
                payload=payload,
                charged_bytes=header.input_tokens * self._kv_bytes_per_token,
            )
            return
        # the All-Gather put the rows on every die of the instance; its cost is the cost model's
        own_die = self._context.machine.dies(self._context.process)[0]
        handover = messages.Handover(header)
        await self._post.complete(
            Plane.UB, own_die, source, handover, payload=payload, charged_bytes=1
        )


class PrefillHelper:
    """A further node of an instance: its dies hold the KV rows too, and send them on."""

    def __init__(self, context: Context, post: Post, job: Job, instance: tuple[int, ...]) -> None:
        machine = context.machine
        self._sender = RowsSender(context, post, job)
        self._dies = [die for node in instance for die in machine.dies(node)]
        decode_dies = len(machine.roles.decode) * machine.dies_per_node
        self._groups = Groups(
            prefill_tp_size=len(self._dies), decode_tp_size=1, decode_dp_size=decode_dies
        )
        post.on(messages.Handover, self._hand_over)

    def _hand_over(self, message: messages.Handover, payload: bytes, _: int) -> None:
        header = message.rows
        source = self._dies[self._groups.prefill_tp_rank(decode_dp_rank=header.rank)]
        self._sender.begin(header, payload, source)
