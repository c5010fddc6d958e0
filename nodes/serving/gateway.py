"""The gateway: replays the workload, chooses where requests go, collects their tokens.

Owns the requests, their attempts and the record of each (``requests.jsonl``). A request whose nodes die
begins again elsewhere, from its prompt; tokens that came twice must be equal. When its tries are used
up it ends with an error that names the reason; it is never lost. Does not own who lives (``members``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, BinaryIO

import msgspec

from cmnet.launch.agent import Context
from cmnet.topology.machine import Plane
from cmnet.units import format_ps
from nodes.post import Post
from nodes.serving import messages
from nodes.serving.job import Job
from nodes.serving.members import Members
from nodes.serving.workload import Request

MARK_TOKENS = 256
"""A request marks its first token and every so manieth: the stall watchdog sees that it moves."""

Token = tuple[int, int, int, int | None]
"""(index, token, seal, receipt with the last)"""


class Attempt(Exception):
    """This attempt cannot go on; says why."""


class Progress:
    """What is known of one request."""

    __slots__ = ("attempt", "blocks", "blocks_hit", "done", "draft_fold", "early", "first_ps",
                 "instance", "kept", "moved_ps", "rank", "receipt", "request", "seals", "token_ps",
                 "tokens")  # fmt: skip  # one line a thing

    def __init__(self, request: Request) -> None:
        self.request = request
        self.attempt = -1
        self.instance = -1
        self.rank = -1
        self.blocks = self.blocks_hit = 0
        self.tokens: list[int] = []
        self.seals: list[int] = []
        self.token_ps: list[int] = []
        self.receipt: int | None = None
        self.draft_fold = 0
        self.done: asyncio.Future[None] | None = None
        self.first_ps = -1
        self.moved_ps = 0
        self.kept = 0
        """Tokens of this attempt, from its first."""
        self.early: list[Token] = []
        """Of decode, while the first token is on its way from prefill: two streams, no order."""

    def begin(self, *, instance: int, rank: int, now_ps: int, done: asyncio.Future[None]) -> None:
        """A new attempt, from the prompt."""
        self.instance, self.rank, self.moved_ps, self.done = instance, rank, now_ps, done
        self.kept = 0
        self.early = []

    @property
    def open(self) -> bool:
        """An attempt is on its way."""
        return self.done is not None and not self.done.done()


class Gateway:
    """The one process that clients would talk to."""

    def __init__(
        self, context: Context, post: Post, job: Job, *, forget: Callable[[int], None]
    ) -> None:
        machine = context.machine
        self._context = context
        self._loop = context.loop
        self._machine = machine
        self._job = job
        self._instances = machine.roles.prefill
        self._decode = machine.roles.decode
        self._dies = machine.dies_per_node
        self._members = Members(context, post, job.serving, died=self._died, forget=forget)
        self._open: dict[int, Progress] = {}
        self._prompt_tokens = [0] * len(self._instances)
        self._rank_sequences = [0] * (len(self._decode) * self._dies)
        self._instance_moved_ps = [0] * len(self._instances)
        self._rank_moved_ps = [0] * len(self._rank_sequences)
        self._file: BinaryIO = (context.run_folder / "requests.jsonl").open("wb", buffering=0)
        self._left = len(job.workload.requests)
        self.counts = {"ok": 0, "error": 0, "retried": 0}
        self._wake = asyncio.Event()
        post.on(messages.First, self._first)
        post.on(messages.Tokens, self._tokens)
        post.on(messages.Failed, self._failed)
        post.on_lost(Plane.VPC, self._lost)

    async def run(self) -> None:
        """The whole workload, then the end of the run."""
        try:
            await self._run()
        finally:
            self._file.close()
        self._context.finish()

    async def _run(self) -> None:
        self._members.new_epoch()
        async with asyncio.TaskGroup() as group:
            watches = [
                group.create_task(self._members.watch(self._involved), name="watch"),
                group.create_task(self._end_stuck(), name="last resort"),
            ]
            for request in self._job.workload.requests:
                await self._loop.sleep_until_ps(max(request.arrival_ps, self._loop.now_ps))
                self._context.outstanding(1)
                group.create_task(self._serve(request), name=f"request {request.index}")
            while self._left:
                self._wake.clear()
                await self._wake.wait()
            for watch in watches:
                watch.cancel()

    # --- one request ------------------------------------------------------------------------------

    async def _serve(self, request: Request) -> None:
        progress = Progress(request)
        self._open[request.index] = progress
        error = ""
        for attempt in range(self._job.serving.request_tries.amount):
            progress.attempt = attempt
            self.counts["retried"] += attempt > 0
            try:
                await self._try(progress)
                error = ""
                break
            except Attempt as reason:
                error = str(reason)
        del self._open[request.index]
        self._write(progress, error)
        self._context.mark(f"request {request.index} {'error' if error else 'ok'}")
        self._context.outstanding(-1)
        self._left -= 1
        self._wake.set()

    async def _try(self, progress: Progress) -> None:
        request = progress.request
        await self._somebody_lives()
        instance, rank = self._least_loaded_instance(), self._least_loaded_rank()
        done = self._loop.create_future()
        progress.begin(instance=instance, rank=rank, now_ps=self._loop.now_ps, done=done)
        self._prompt_tokens[instance] += request.input_tokens
        self._rank_sequences[rank] += 1
        try:
            message = messages.Prefill(
                request=request.index,
                attempt=progress.attempt,
                input_tokens=request.input_tokens,
                output_tokens=request.output_tokens,
                hash_ids=request.hash_ids,
                rank=rank,
            )
            self._members.send(self._instances[instance][0], message)
            await done
        finally:
            if not progress.kept:
                self._prompt_tokens[instance] -= request.input_tokens
            self._rank_sequences[rank] -= 1
            progress.done = None

    async def _somebody_lives(self) -> None:
        """Wait, for a while, for nodes that could serve. Raises Attempt."""
        timeout_ps = self._job.serving.return_timeout.amount
        deadline_ps = self._loop.now_ps + timeout_ps
        while missing := self._missing_role():
            if self._loop.now_ps >= deadline_ps:
                raise Attempt(f"no {missing} lived for {format_ps(timeout_ps)}")
            self._members.returned.clear()
            timer = self._loop.call_at_ps(deadline_ps, self._members.returned.set)
            await self._members.returned.wait()
            timer.cancel()

    def _missing_role(self) -> str:
        if not self._living_instances():
            return "prefill instance"
        return "" if self._members.alive.intersection(self._decode) else "decode node"

    def _living_instances(self) -> list[int]:
        """Instances of which all nodes live."""
        return [
            index
            for index, nodes in enumerate(self._instances)
            if self._members.alive.issuperset(nodes)
        ]

    def _least_loaded_instance(self) -> int:
        return min(self._living_instances(), key=lambda index: (self._prompt_tokens[index], index))

    def _least_loaded_rank(self) -> int:
        alive = [
            rank
            for rank in range(len(self._rank_sequences))
            if self._decode[rank // self._dies] in self._members.alive
        ]
        return min(alive, key=lambda rank: (self._rank_sequences[rank], rank))

    def _write(self, progress: Progress, error: str) -> None:
        request = progress.request
        self.counts["error" if error else "ok"] += 1
        record = {
            "index": request.index,
            "arrival_ps": request.arrival_ps,
            "input_tokens": request.input_tokens,
            "output_tokens": request.output_tokens,
            "hash_ids": request.hash_ids,
            "status": "error" if error else "ok",
            "error": error,
            "tries": progress.attempt + 1,
            "instance": progress.instance,
            "rank": progress.rank,
            "blocks": progress.blocks,
            "blocks_hit": progress.blocks_hit,
            "first_token_ps": progress.first_ps,
            "ended_ps": self._loop.now_ps,
            "token_ps": progress.token_ps,
            "tokens": progress.tokens,
            "seals": progress.seals,
            "receipt": progress.receipt,
            "draft_fold": progress.draft_fold if self._job.decoding.drafts else None,
        }
        self._file.write(msgspec.json.encode(record) + b"\n")

    # --- what comes back --------------------------------------------------------------------------

    def _current(self, request: int, attempt: int) -> Progress | None:
        progress = self._open.get(request)
        if progress is None or progress.attempt != attempt or not progress.open:
            return None
        return progress

    def _first(self, message: messages.First, _: bytes, __: int) -> None:
        progress = self._current(message.request, message.attempt)
        if progress is None:
            return
        self._prompt_tokens[progress.instance] -= progress.request.input_tokens
        self._instance_moved_ps[progress.instance] = self._loop.now_ps
        if progress.first_ps < 0:
            progress.first_ps = self._loop.now_ps
            progress.blocks, progress.blocks_hit = message.blocks, message.blocks_hit
        early, progress.early = progress.early, []
        for each in [(0, message.token, message.seal, message.receipt), *early]:
            self._take(progress, each)

    def _tokens(self, message: messages.Tokens, _: bytes, source: int) -> None:
        for request, attempt, fold in message.folds:
            progress = self._current(request, attempt)
            if progress is not None:
                progress.draft_fold = fold
        for request, attempt, index, token, seal, receipt in message.tokens:
            progress = self._current(request, attempt)
            came = (index, token, seal, receipt)
            if progress is None:  # of an attempt whose node was dead when it was given up
                node = self._machine.devices[source].process
                self._members.send(node, messages.Cancel(request, attempt))
                continue
            self._rank_moved_ps[progress.rank] = self._loop.now_ps
            if progress.kept:
                self._take(progress, came)
            else:
                progress.early.append(came)

    def _take(self, progress: Progress, came: Token) -> None:
        """The next token of the current attempt."""
        index, token, seal, receipt = came
        if not progress.open:
            return
        if index != progress.kept:
            self._give_up(progress, f"token {index} came, {progress.kept} was due")
            return
        progress.kept += 1
        progress.moved_ps = self._loop.now_ps
        if not self._agrees(progress, index, token, seal):
            self._give_up(progress, f"token {index} differs from an earlier try's")
        elif progress.kept == progress.request.output_tokens:
            progress.receipt = receipt
            assert progress.done is not None
            progress.done.set_result(None)

    def _agrees(self, progress: Progress, index: int, token: int, seal: int) -> bool:
        """Keep a new token, or compare one that an earlier try gave already."""
        if index < len(progress.tokens):
            return (progress.tokens[index], progress.seals[index]) == (token, seal)
        progress.tokens.append(token)
        progress.seals.append(seal)
        progress.token_ps.append(self._loop.now_ps)
        if index % MARK_TOKENS == 0:
            self._context.mark(f"request {progress.request.index} token {index}")
        return True

    def _failed(self, message: messages.Failed, _: bytes, __: int) -> None:
        progress = self._current(message.request, message.attempt)
        if progress is not None:
            self._give_up(progress, message.error)

    def _lost(self, message: msgspec.Struct) -> None:
        """A prompt that may not have arrived need not wait for the last resort. Of other messages
        of ours, none is waited for but pings, whose loss is a sign by itself."""
        if isinstance(message, messages.Prefill):
            progress = self._current(message.request, message.attempt)
            if progress is not None and not progress.kept:
                node = self._instances[progress.instance][0]
                name = self._machine.processes[node].name
                self._give_up(progress, f"the way to {name} broke")

    def _give_up(self, progress: Progress, reason: str) -> None:
        """End the current attempt; its prompt or sequence, wherever it is, is cancelled."""
        cancel = messages.Cancel(progress.request.index, progress.attempt)
        holders = [self._decode[progress.rank // self._dies]]
        if not progress.kept:
            holders.append(self._instances[progress.instance][0])
        for node in holders:
            if node in self._members.alive:
                self._members.send(node, cancel)
        assert progress.done is not None
        progress.done.set_exception(Attempt(reason))

    # --- what ends a try --------------------------------------------------------------------------

    def _involved(self) -> set[int]:
        """Nodes that open requests need: all of decode (experts are everywhere), and instances."""
        nodes = set(self._decode) if self._open else set()
        for progress in self._open.values():
            if progress.kept <= 1 and progress.instance >= 0:
                nodes.update(self._instances[progress.instance])
        return nodes

    def _died(self, node: int, reason: str) -> None:
        """Requests that need what the node held begin anew."""
        for progress in list(self._open.values()):
            if not progress.open:
                continue
            in_decode = self._decode[progress.rank // self._dies] == node
            # the first token may be here while the KV rows are still on their way
            in_prefill = progress.kept <= 1 and node in self._instances[progress.instance]
            if in_decode or in_prefill:
                self._give_up(progress, reason)

    async def _end_stuck(self) -> None:
        """Whatever went wrong unseen: a try ends when nothing moves for long, neither it nor what it
        may be queueing for."""
        settings = self._job.serving
        timeout_ps = settings.progress_timeout.amount
        while True:
            await self._loop.sleep_ps(settings.ping_interval.amount)
            for progress in list(self._open.values()):
                if progress.open and self._loop.now_ps - self._moved_ps(progress) >= timeout_ps:
                    self._give_up(progress, f"no progress for {format_ps(timeout_ps)}")

    def _moved_ps(self, progress: Progress) -> int:
        queue_ps = self._rank_moved_ps[progress.rank]
        if not progress.kept:
            queue_ps = max(queue_ps, self._instance_moved_ps[progress.instance])
        return max(progress.moved_ps, queue_ps)

    def statistics(self) -> dict[str, Any]:
        """Counters for the report."""
        return {"requests": self.counts, "epochs": self._members.epoch}
