"""The gateway: replays the workload, chooses where requests go, collects their tokens.

Owns the requests, their attempts and the record of each (``requests.jsonl``); who lives, as far as
pings tell; and the epochs of the decode group. A request whose nodes die begins again elsewhere, from
its prompt; tokens that came twice must be equal. When its tries are used up it ends with an error that
names the reason; it is never lost.
"""

from __future__ import annotations

import asyncio
from typing import Any, BinaryIO

import msgspec

from cmnet.launch.agent import Context
from cmnet.topology.machine import Plane
from cmnet.units import format_ps
from nodes.post import Post
from nodes.serving import messages
from nodes.serving.job import Job
from nodes.serving.workload import Request


class Attempt(Exception):
    """This attempt cannot go on; says why."""


class Progress:
    """What is known of one request."""

    __slots__ = ("attempt", "blocks", "blocks_hit", "done", "first_ps", "instance", "kept", "moved_ps", "rank",
                 "receipt", "request", "seals", "token_ps", "tokens")  # fmt: skip

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
        self.done: asyncio.Future[None] | None = None
        self.first_ps = -1
        self.moved_ps = 0
        self.kept = 0
        """Tokens of this attempt, from its first."""


class Gateway:
    """The one process that clients would talk to."""

    def __init__(self, context: Context, post: Post, job: Job) -> None:
        machine = context.machine
        self._context = context
        self._loop = context.loop
        self._machine = machine
        self._post = post
        self._job = job
        self._port = machine.vpc_port(context.process)
        self._instances = machine.roles.prefill
        self._decode = machine.roles.decode
        self._dies = machine.dies_per_node
        self._alive = set(range(machine.nodes_count))
        self._incarnations = [0] * machine.nodes_count
        self._heard_ps = [0] * machine.nodes_count
        self._epoch = 0
        self._open: dict[int, Progress] = {}
        self._prompt_tokens = [0] * len(self._instances)
        self._rank_sequences = [0] * (len(self._decode) * self._dies)
        self._file: BinaryIO = (context.run_folder / "requests.jsonl").open("wb", buffering=0)
        self._left = len(job.workload.requests)
        self.counts = {"ok": 0, "error": 0, "retried": 0}
        self._wake = asyncio.Event()
        post.on(messages.First, self._first)
        post.on(messages.Tokens, self._tokens)
        post.on(messages.Failed, self._failed)
        post.on(messages.Pong, self._pong)
        post.on(messages.Up, self._up)

    async def run(self) -> None:
        """The whole workload, then the end of the run."""
        try:
            await self._run()
        finally:
            self._file.close()
        self._context.finish()

    async def _run(self) -> None:
        self._new_epoch()
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(self._watch(), name="watch")
            for request in self._job.workload.requests:
                await self._loop.sleep_until_ps(max(request.arrival_ps, self._loop.now_ps))
                self._context.outstanding(1)
                group.create_task(self._serve(request), name=f"request {request.index}")
            while self._left:
                self._wake.clear()
                await self._wake.wait()
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
        progress.instance = instance = self._least_loaded_instance()
        progress.rank = rank = self._least_loaded_rank()
        progress.done = self._loop.create_future()
        progress.kept = 0
        progress.moved_ps = self._loop.now_ps
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
            self._send(self._instances[instance][0], message)
            await progress.done
        finally:
            if progress.kept == 0:
                self._prompt_tokens[instance] -= request.input_tokens
            self._rank_sequences[rank] -= 1
            progress.done = None

    def _least_loaded_instance(self) -> int:
        alive = [
            index for index, nodes in enumerate(self._instances) if self._alive.issuperset(nodes)
        ]
        if not alive:
            raise Attempt("no prefill instance lives")
        return min(alive, key=lambda index: (self._prompt_tokens[index], index))

    def _least_loaded_rank(self) -> int:
        alive = [
            rank
            for rank in range(len(self._rank_sequences))
            if self._decode[rank // self._dies] in self._alive
        ]
        if not alive:
            raise Attempt("no decode node lives")
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
        }
        self._file.write(msgspec.json.encode(record) + b"\n")

    # --- what comes back --------------------------------------------------------------------------

    def _current(self, request: int, attempt: int) -> Progress | None:
        progress = self._open.get(request)
        if progress is None or progress.attempt != attempt or progress.done is None:
            return None
        return None if progress.done.done() else progress

    def _first(self, message: messages.First, _: bytes, __: int) -> None:
        progress = self._current(message.request, message.attempt)
        if progress is None:
            return
        self._prompt_tokens[progress.instance] -= progress.request.input_tokens
        if progress.first_ps < 0:
            progress.first_ps = self._loop.now_ps
            progress.blocks, progress.blocks_hit = message.blocks, message.blocks_hit
        self._take(progress, 0, message.token, message.seal, message.receipt)

    def _tokens(self, message: messages.Tokens, _: bytes, source: int) -> None:
        for request, attempt, index, token, seal, receipt in message.tokens:
            progress = self._current(request, attempt)
            if progress is not None:
                self._take(progress, index, token, seal, receipt)
            else:  # of an attempt whose node was dead when it was given up
                node = self._machine.devices[source].process
                self._send(node, messages.Cancel(request, attempt))

    def _take(
        self, progress: Progress, index: int, token: int, seal: int, receipt: int | None
    ) -> None:
        assert progress.done is not None
        if index != progress.kept:
            self._give_up(progress, f"token {index} came, {progress.kept} was due")
            return
        progress.kept += 1
        progress.moved_ps = self._loop.now_ps
        if index < len(progress.tokens):
            if (progress.tokens[index], progress.seals[index]) != (token, seal):
                self._give_up(progress, f"token {index} differs from an earlier try's")
                return
        else:
            progress.tokens.append(token)
            progress.seals.append(seal)
            progress.token_ps.append(self._loop.now_ps)
        if progress.kept == progress.request.output_tokens:
            progress.receipt = receipt
            progress.done.set_result(None)

    def _failed(self, message: messages.Failed, _: bytes, __: int) -> None:
        progress = self._current(message.request, message.attempt)
        if progress is not None:
            self._give_up(progress, message.error)

    def _give_up(self, progress: Progress, reason: str) -> None:
        """End the current attempt; its sequence, wherever it is, is cancelled."""
        assert progress.done is not None
        cancel = messages.Cancel(progress.request.index, progress.attempt)
        node = self._decode[progress.rank // self._dies]
        if node in self._alive:
            self._send(node, cancel)
        if not progress.done.done():
            progress.done.set_exception(Attempt(reason))

    # --- who lives --------------------------------------------------------------------------------

    def _send(self, node: int, message: msgspec.Struct) -> None:
        self._post.send(Plane.VPC, self._port, self._machine.vpc_port(node), message)

    def _new_epoch(self) -> None:
        self._epoch += 1
        nodes = tuple(node for node in self._decode if node in self._alive)
        for node in nodes:
            self._send(node, messages.Epoch(self._epoch, nodes))

    def _involved(self) -> set[int]:
        """Nodes that open requests need: all of decode (experts are everywhere), and instances."""
        nodes = set(self._decode) if self._open else set()
        for progress in self._open.values():
            if progress.kept <= 1 and progress.instance >= 0:
                nodes.update(self._instances[progress.instance])
        return nodes & self._alive

    async def _watch(self) -> None:
        """Ping whom open requests need; a node that is silent too long is taken as dead."""
        interval_ps = self._job.serving.ping_interval.amount
        timeout_ps = self._job.serving.ping_timeout.amount
        asked: dict[int, int] = {}
        while True:
            await self._loop.sleep_ps(interval_ps)
            now_ps = self._loop.now_ps
            involved = sorted(self._involved())
            for node in involved:
                first_ask = asked.setdefault(node, now_ps)
                if now_ps - max(first_ask, self._heard_ps[node]) >= timeout_ps:
                    self._is_dead(node)
                    asked.pop(node)
                else:
                    self._send(node, messages.Ping())
            for node in sorted(set(asked) - set(involved)):
                del asked[node]
            self._end_stuck()

    def _end_stuck(self) -> None:
        """Whatever went wrong unseen: a request without progress for long ends its try."""
        timeout_ps = self._job.serving.progress_timeout.amount
        for progress in list(self._open.values()):
            done = progress.done
            if done is not None and not done.done():
                if self._loop.now_ps - progress.moved_ps >= timeout_ps:
                    self._give_up(progress, f"no progress for {format_ps(timeout_ps)}")

    def _pong(self, message: messages.Pong, _: bytes, source: int) -> None:
        node = self._machine.devices[source].process
        self._heard_ps[node] = self._loop.now_ps
        if message.incarnation > self._incarnations[node]:
            self._is_back(node, message.incarnation)

    def _up(self, message: messages.Up, _: bytes, __: int) -> None:
        self._heard_ps[message.node] = self._loop.now_ps
        if message.incarnation > self._incarnations[message.node]:
            self._is_back(message.node, message.incarnation)

    def _is_back(self, node: int, incarnation: int) -> None:
        """A new incarnation: what the old one had is gone, even if nobody missed it yet."""
        if node in self._alive:
            self._is_dead(node)
        self._post.forget(node)
        self._incarnations[node] = incarnation
        self._alive.add(node)
        self._context.mark(f"node {node} is back")
        if node in self._decode:
            self._new_epoch()

    def _is_dead(self, node: int) -> None:
        self._alive.discard(node)
        name = self._machine.processes[node].name
        self._context.mark(f"node {node} is dead")
        reason = f"{name} died before {format_ps(self._loop.now_ps)}"
        for progress in list(self._open.values()):
            if progress.done is None or progress.done.done():
                continue
            in_decode = self._decode[progress.rank // self._dies] == node
            # the first token may be here while the KV rows are still on their way
            in_prefill = progress.kept <= 1 and node in self._instances[progress.instance]
            if in_decode or in_prefill:
                self._give_up(progress, reason)
        if node in self._decode:
            self._new_epoch()

    def statistics(self) -> dict[str, Any]:
        """Counters for the report."""
        return {"requests": self.counts, "epochs": self._epoch}
