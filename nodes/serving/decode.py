"""Decode on one node: its ranks' sequences, its experts, one step after the other.

Owns which sequences this node's ranks hold and which of them are in the step, and both sides of the
exchange. Does not own what happens within a step (``walk``), when one is done (``leader``) nor who lives
(the gateway's epochs). A step changes a sequence only at its end, so a step that is given up is simply
done again; the beginning of the next one gives up the one in progress, so no sequence is ever in two.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from cmnet.errors import LinkError, OperationError, PeerDeadError
from cmnet.launch.agent import Context
from cmnet.topology.machine import Machine, Plane
from nodes.model.body import Body
from nodes.moe import placement
from nodes.moe.exchange import Exchange
from nodes.moe.experts import Experts
from nodes.moe.layer import Group, Key, Phase, Touch
from nodes.moe.operators import Operators
from nodes.post import Post
from nodes.serving import messages
from nodes.serving.cost import DecodeCost, Load
from nodes.serving.job import Job
from nodes.serving.sequences import Sequence, Turn
from nodes.serving.walk import Walk


class DecodeNode:
    """The decode ranks of one node."""

    def __init__(self, context: Context, post: Post, job: Job, body: Body, touch: Touch) -> None:
        machine = context.machine
        self._context = context
        self._loop = context.loop
        self._post = post
        self._body = body
        self._touch = touch
        self._devices = tuple(die for node in machine.roles.decode for die in machine.dies(node))
        """Device of each rank of the group."""
        self._dies = machine.dies_per_node
        self._first_rank = machine.roles.decode.index(context.process) * self._dies
        self._control = machine.dies(context.process)[0]
        self._gateway = _vpc_port_of_gateway(context)
        self._vpc = machine.vpc_port(context.process)
        self._pause_ps = job.serving.step_pause.amount
        self._decoding = job.decoding
        self._exchange, self._walk = self._make_layers(context, job)
        sequences_max = job.serving.decode_sequences_max.amount
        self._batch = -(-sequences_max // job.decoding.parts) * job.decoding.queries
        self._waiting: dict[tuple[int, int], Sequence] = {}
        """By (request, attempt): a given-up attempt may still be on its way here."""
        self._active: dict[tuple[int, int], Sequence] = {}
        self._attempts: dict[int, int] = {}
        """Rows of earlier attempts than this are not taken: given up, or here already."""
        self._epoch = messages.Epoch(0, ())
        self._number = 0
        """Of the last step begun in this epoch."""
        shared_ranks, redundant = _deployment(job, machine)
        self._placement = placement.initial(
            experts=job.model.routed_experts,
            ep_size=len(self._devices),
            redundant=redundant,
            shared_ranks=shared_ranks,
        )
        self._alive: list[int] = []
        """Ranks of this epoch."""
        self._task: asyncio.Task[None] | None = None
        """The step in progress."""
        self.counts = dict.fromkeys(("steps", "turns", "tokens", "fed", "proposed", "accepted"), 0)
        """``turns``: sequences that went through a step; ``fed`` tokens went with them."""
        post.on(messages.Step, self._begin_step)
        post.on(messages.Rows, self._rows_came)
        post.on(messages.Cancel, self._cancel)
        post.on(messages.GiveUp, self._give_up)

    def _make_layers(self, context: Context, job: Job) -> tuple[Exchange, Walk]:
        """Both sides of the exchange: experts serve from now on, sources when a step says so."""
        ep_size, decoding = len(self._devices), job.decoding
        cost = DecodeCost(dies=ep_size, model=job.model)
        operators = Operators(ep_size=ep_size, model=job.model)
        exchange = Exchange(
            context,
            self._body,
            job.scale,
            devices=self._devices,
            operators=operators,
            timeout_ps=job.serving.step_timeout.amount,
        )
        exchange.on_late = self._late
        exchange.on_lost = self._lost
        exchange.on_wrong = self._fail
        walk = Walk(
            context.loop,
            exchange,
            self._body,
            cost=cost,
            operators=operators,
            decoding=decoding,
            touch=self._touch,
        )
        experts = Experts(
            context.loop,
            exchange,
            self._body,
            operators,
            expert_ps=functools.partial(cost.expert_ps, microbatch=decoding.microbatch),
            layer_of=walk.layer_of,
            touch=self._touch,
        )
        context.spawn(experts.run(), "experts")
        return exchange, walk

    # --- sequences --------------------------------------------------------------------------------

    def _rows_came(self, message: messages.Rows, payload: bytes, _: int) -> None:
        rows = self._body.rows_from_bytes(payload).reshape(-1, message.rows)
        rows = self._touch("rows", rows.T).T
        if message.attempt < self._attempts.get(message.request, 0):
            return  # given up while its rows were on the way, or here already
        self._attempts[message.request] = message.attempt + 1
        sequence = Sequence(message, rows)
        self._waiting[sequence.key] = sequence
        self._announce(sequence)

    def _announce(self, sequence: Sequence) -> None:
        """Tell the leader of a sequence that waits; without an epoch, the Hello will."""
        epoch = self._epoch
        if not epoch.nodes:
            return

        def waits() -> bool:
            return self._epoch is epoch and self._waiting.get(sequence.key) is sequence

        joined = messages.Joined(
            epoch.number, sequence.request, sequence.attempt, sequence.rank, sequence.kv_tokens
        )
        self.assure(epoch.nodes[0], joined, waits)

    def _cancel(self, message: messages.Cancel, _: bytes, __: int) -> None:
        least = self._attempts.get(message.request, 0)
        self._attempts[message.request] = max(least, message.attempt + 1)
        for held in (self._waiting, self._active):
            for request, attempt in list(held):
                if request == message.request and attempt <= message.attempt:
                    del held[request, attempt]

    def _give_up(self, message: messages.GiveUp, _: bytes, __: int) -> None:
        if message.epoch != self._epoch.number or message.number < self._number:
            return  # sequences of a later step have another chance
        for sequence in self._active.values():
            failed = messages.Failed(sequence.request, sequence.attempt, message.error)
            self._post.send(Plane.VPC, self._vpc, self._gateway, failed)
        self._active = {}

    # --- between decode nodes ---------------------------------------------------------------------

    def send(self, node: int, message: msgspec.Struct) -> None:
        """A message to a decode node, over UB, which may lose it; to itself at once."""
        device = self._context.machine.dies(node)[0]
        if device == self._control:
            self._loop.call_soon(self._post.deliver, message)
        else:
            self._post.send(Plane.UB, self._control, device, message)

    def assure(
        self, node: int, message: msgspec.Struct, holds: Callable[[], bool] | None = None
    ) -> None:
        """A message to a decode node, again until it is there, while it holds and in this epoch."""
        if node == self._context.process:
            self._loop.call_soon(self._post.deliver, message)
            return
        epoch = self._epoch
        again = self._assure(node, message, holds or (lambda: self._epoch is epoch))
        self._context.spawn(again, f"{type(message).__name__} to node {node}")

    async def _assure(self, node: int, message: msgspec.Struct, holds: Callable[[], bool]) -> None:
        device = self._context.machine.dies(node)[0]
        while holds():
            try:
                await self._post.complete(Plane.UB, self._control, device, message)
                return
            except OperationError:
                await self._loop.sleep_ps(self._pause_ps)

    def enter(self, epoch: messages.Epoch) -> None:
        """A new epoch: give up the step in progress, place experts anew, say who is here."""
        machine = self._context.machine
        self._alive = [
            r for r, d in enumerate(self._devices) if machine.devices[d].process in epoch.nodes
        ]
        self._begin(epoch, 0, [])
        self._waiting = self._active | self._waiting
        self._active = {}
        held = tuple((*s.key, s.rank, s.kv_tokens) for s in self._waiting.values())
        hello = messages.Hello(epoch.number, self._context.process, held)
        self.assure(epoch.nodes[0], hello)

    def _begin(self, epoch: messages.Epoch, number: int, sources: list[int]) -> None:
        """Whatever step was in progress is given up."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self._epoch, self._number = epoch, number
        dead = frozenset(range(len(self._devices))).difference(self._alive)
        group = Group(
            sources=np.array(sources, dtype=np.int64),
            experts=np.array(self._alive, dtype=np.int64),
            placements=(
                placement.without(self._placement, dead=dead) if dead else self._placement,
            ),
            batch=self._batch,
        )
        self._exchange.begin(epoch.number, number, group)

    # --- a step -----------------------------------------------------------------------------------

    def _begin_step(self, step: messages.Step, _: bytes, __: int) -> None:
        if step.epoch != self._epoch.number or step.number <= self._number:
            return
        self._begin(self._epoch, step.number, [rank for rank, _ in step.sources])
        for key in step.admitted:
            if key in self._waiting:
                self._active[key] = self._waiting.pop(key)
        self._set_aside(self._ranks_in(step))
        if self._ranks_in(step):
            name = f"step {step.epoch}.{step.number}"
            self._task = self._context.spawn(self._step(step), name)

    def _set_aside(self, counted: list[int]) -> None:
        """Sequences on ranks that the leader does not count on, it does not know: they wait again."""
        for sequence in [s for s in self._active.values() if s.rank not in counted]:
            self._waiting[sequence.key] = self._active.pop(sequence.key)
            self._announce(sequence)

    async def _step(self, step: messages.Step) -> None:
        most = max(count for _, count in step.sources)
        load = Load(sequences=most, queries=self._decoding.queries, kv_tokens=step.kv_tokens)
        try:
            turns = await self._walk.run(
                (step.epoch, step.number),
                load,
                ranks=self._ranks_in(step),
                sequences=list(self._active.values()),
            )
        except OperationError as error:
            self._say_done(str(error))
        else:
            self._commit(turns)
            self._say_done("")

    def _say_done(self, error: str) -> None:
        node = self._context.process
        active = tuple((*key, sequence.kv_tokens) for key, sequence in self._active.items())
        done = messages.StepDone(self._epoch.number, self._number, node, active, error)
        self.send(self._epoch.nodes[0], done)

    def _fail(self, key: Key, error: OperationError) -> None:
        """The step in progress cannot be completed here."""
        if key[:2] != (self._epoch.number, self._number):
            return
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self._say_done(str(error))

    def _late(self, key: Key, phase: Phase, found: dict[int, list[int]]) -> None:
        ranks = ", ".join(map(str, sorted({rank for late in found.values() for rank in late})[:8]))
        what = "results of" if phase == "combine" else "rows or flags of"
        self._fail(key, PeerDeadError(f"no {what} ranks {ranks}", definite=False))

    def _lost(self, key: Key, phase: Phase, targets: list[int]) -> None:
        """The link gave up on messages of ours. Who waits for results gives up by itself."""
        if phase == "dispatch":
            devices = self._context.machine.devices
            names = sorted(devices[self._devices[target]].name for target in targets)
            self._fail(key, LinkError(f"no path to {', '.join(names[:3])}", definite=True))

    def _ranks_in(self, step: messages.Step) -> list[int]:
        """Ranks of this node that the leader counts on in this step."""
        first = self._first_rank
        return [rank for rank, _ in step.sources if first <= rank < first + self._dies]

    def _commit(self, turns: list[tuple[Sequence, Turn]]) -> None:
        """The step happened: tokens out, sequences move on or end."""
        self.counts["steps"] += 1
        out: list[messages.Token] = []
        folds: list[tuple[int, int, int]] = []
        for sequence, turn in turns:
            if self._active.get(sequence.key) is not sequence:
                continue  # cancelled meanwhile
            self._count(turn)
            index = sequence.produced
            sequence.commit(turn)
            for token, seal in zip(turn.tokens, turn.seals, strict=True):
                out.append((*sequence.key, index, token, seal, None))
                index += 1
            if sequence.ended:
                receipt = self._body.receipt(turn.seals[-1], [sequence.share])
                out[-1] = (*out[-1][:5], receipt)
                folds += [(*sequence.key, sequence.fold)] if self._decoding.drafts else []
                del self._active[sequence.key]
        if out:
            tokens = messages.Tokens(tuple(out), tuple(folds))
            self._post.send(Plane.VPC, self._vpc, self._gateway, tokens)

    def _count(self, turn: Turn) -> None:
        counts = self.counts
        counts["turns"] += 1
        counts["tokens"] += len(turn.tokens)
        counts["fed"] += 1 + turn.proposed
        counts["proposed"] += turn.proposed
        counts["accepted"] += turn.accepted

    def statistics(self) -> dict[str, Any]:
        """Counters and samples for the report."""
        return self.counts | self._exchange.statistics() | self._walk.timeline.statistics()


def _deployment(job: Job, machine: Machine) -> tuple[int, int]:
    """Ranks with the shared expert, and redundant ones: 32 each in the group of 320, else none."""
    ranks = len(machine.roles.decode) * machine.dies_per_node
    extra = ranks - job.model.routed_experts
    return (extra // 2, extra - extra // 2) if extra > 0 else (0, 0)


def _vpc_port_of_gateway(context: Context) -> int:
    gateway = context.machine.roles.gateway
    assert gateway is not None
    return context.machine.vpc_port(gateway)
