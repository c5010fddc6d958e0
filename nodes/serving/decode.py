"""Decode on one node: its ranks' sequences, its experts, one step after the other.

Owns the sequences (KV rows, last token) of this node's ranks, and both sides of the exchange. Does not
own when a step is done (``leader``) nor who lives (the gateway's epochs). A step changes a sequence
only at its end, so a step that is given up is simply done again; the beginning of the next one gives
up the one in progress, so no sequence is ever in two.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from cmnet.errors import LinkError, OperationError, PeerDeadError
from cmnet.launch.agent import Context
from cmnet.topology.machine import Machine, Plane
from nodes.model.body import Array, Body
from nodes.moe import placement
from nodes.moe.exchange import Exchange
from nodes.moe.experts import Experts
from nodes.moe.layer import Group, Key, Phase, Touch
from nodes.moe.layout import Tokens
from nodes.moe.operators import Operators
from nodes.moe.sending import Leg
from nodes.post import Post
from nodes.serving import messages
from nodes.serving.cost import DecodeCost, Load
from nodes.serving.job import Job


class Sequence:
    """One request being decoded. ``rows`` is [carried layers, room], of which ``length`` are used."""

    __slots__ = (
        "attempt",
        "kv_tokens",
        "length",
        "produced",
        "rank",
        "request",
        "rows",
        "share",
        "token",
        "total",
    )

    def __init__(self, message: messages.Rows, rows: Array) -> None:
        self.request = message.request
        self.attempt = message.attempt
        self.rank = message.rank
        self.kv_tokens = message.input_tokens
        self.token = message.token
        self.produced = 1
        self.total = message.output_tokens
        self.length = message.rows
        self.share = message.share
        room = message.rows + message.output_tokens
        self.rows = np.zeros((rows.shape[0], room), dtype=rows.dtype)
        self.rows[:, : message.rows] = rows

    @property
    def key(self) -> tuple[int, int]:
        """(request, attempt)"""
        return self.request, self.attempt


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
        self._cost = DecodeCost(dies=len(self._devices), model=job.model)
        self._settings = job.model
        self._pause_ps = job.serving.step_pause.amount
        self._operators = Operators(ep_size=len(self._devices), model=job.model)
        self._exchange = Exchange(
            context,
            body,
            job.scale,
            devices=self._devices,
            operators=self._operators,
            timeout_ps=job.serving.step_timeout.amount,
        )
        self._exchange.on_combined = self._combined
        self._exchange.on_late = self._late
        self._exchange.on_lost = self._lost
        self._exchange.on_wrong = lambda key, error: self._fail(key, error)
        self._experts = Experts(
            context.loop,
            self._exchange,
            body,
            self._operators,
            expert_ps=self._cost.expert_ps,
            layer_of=lambda key: key[2],
            touch=touch,
        )
        context.spawn(self._experts.run(), "experts")
        self._batch = job.serving.decode_sequences_max.amount
        self._returned: dict[int, int] = {}
        """Local rank -> when its combine returned, of the layer in progress."""
        self._all_returned: asyncio.Future[None] | None = None
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
        self.steps = 0
        self.tokens = 0
        post.on(messages.Step, self._begin_step)
        post.on(messages.Rows, self._rows_came)
        post.on(messages.Cancel, self._cancel)
        post.on(messages.GiveUp, self._give_up)

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
            placements=(placement.without(self._placement, dead=dead) if dead else self._placement,),
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
        mine = list(self._active.values())
        try:
            self._commit(await self._run_tokens(step, mine), mine)
        except OperationError as error:
            self._say_done(str(error))
        else:
            self._say_done("")

    def _say_done(self, error: str) -> None:
        node, active = self._context.process, tuple(self._active)
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

    async def _run_tokens(self, step: messages.Step, mine: list[Sequence]) -> Array:
        """All layers for this node's tokens; returns their states after the last one."""
        body, layers = self._body, self._settings.carried_layers
        places = self._touch("places", np.array([s.length for s in mine], dtype=np.int64))
        tokens = np.array([s.token for s in mine], dtype=np.int64)
        states = body.start_tokens(tokens, places=places)
        most = max(count for _, count in step.sources)
        load = Load(sequences=most, queries=1, kv_tokens=step.kv_tokens)
        skipped = self._settings.moe_layers - layers
        layer_ps = self._cost.layer_ps(load, microbatch="off")
        for layer in range(layers):
            states = self._attend(mine, states, layer)
            states = await self._moe(step, mine, states, layer, load)
            share = skipped * (layer + 1) // layers - skipped * layer // layers
            await self._loop.sleep_ps(share * layer_ps)
        await self._loop.sleep_ps(self._cost.step_overhead_ps(load))
        return states

    def _attend(self, mine: list[Sequence], states: Array, layer: int) -> Array:
        body = self._body
        if not mine:
            return states
        own = body.kv_rows(states, layer=layer)
        sums = []
        for index, sequence in enumerate(mine):
            sequence.rows[layer, sequence.length] = own[index]
            rows = sequence.rows[layer, : sequence.length + 1]
            sums.append(body.read(states[index : index + 1], rows, layer=layer, first_place=0))
        return body.attend(states, np.concatenate(sums), layer=layer)

    async def _moe(
        self, step: messages.Step, mine: list[Sequence], states: Array, layer: int, load: Load
    ) -> Array:
        """The tokens' visit to their experts; results come in the order of ranks."""
        loop, key = self._loop, (step.epoch, step.number, layer)
        by_rank: dict[int, list[int]] = {rank: [] for rank in self._ranks_in(step)}
        for index, sequence in enumerate(mine):
            by_rank[sequence.rank].append(index)
        order = [index for rank in by_rank for index in by_rank[rank]]
        await loop.sleep_ps(self._cost.attention_ps(load))
        gate = self._body.gate(states[order], layer=layer)
        tokens = Tokens(
            ranks=np.repeat(list(by_rank), [len(chosen) for chosen in by_rank.values()]),
            numbers=np.concatenate([np.arange(len(chosen)) for chosen in by_rank.values()]),
            experts=gate.experts,
            vectors=self._body.dispatch(states[order]),
        )
        began_ps = loop.now_ps
        await loop.sleep_ps(self._operators.dispatch_start_ps)
        legs = dict.fromkeys(by_rank, Leg(began_ps, loop.now_ps))
        self._returned, self._all_returned = dict.fromkeys(by_rank, -1), loop.create_future()
        await self._exchange.dispatch(key, tokens, legs)
        await self._all_returned
        most = max(len(chosen) for chosen in by_rank.values())
        read_ps = max(self._returned.values()) + self._operators.sum_ps(most)
        await loop.sleep_until_ps(max(read_ps, loop.now_ps))
        results, _ = self._exchange.results(key, tokens.ranks, tokens.numbers)
        self._exchange.results_read(key, dict.fromkeys(by_rank, read_ps))
        if layer:
            self._exchange.end((*key[:2], layer - 1))
        after = self._combine(states[order], gate.weights, results, layer)
        return after[np.argsort(order)]

    def _combined(self, key: Key, done_ps: dict[int, int]) -> None:
        self._returned |= done_ps
        done = self._all_returned
        if done is not None and not done.done() and min(self._returned.values()) >= 0:
            done.set_result(None)

    def _combine(self, states: Array, weights: Array, results: Array, layer: int) -> Array:
        tokens, top_k = len(states), self._settings.top_k
        routed = self._touch("results", results[:, :top_k].reshape(tokens * top_k, -1))
        routed = routed.reshape(tokens, top_k, -1)
        slots = self._touch("slots", np.arange(top_k))
        shared = self._touch("shared", results[:, top_k])
        weights = self._touch("weights", weights)
        return self._body.combine(states, weights[:, slots], routed[:, slots], shared, layer=layer)

    def _commit(self, states: Array, mine: list[Sequence]) -> None:
        """The step happened: tokens out, sequences move on or end."""
        self.steps += 1
        if not mine:
            return
        sampled = self._body.sample(states).tolist()
        seals = self._body.seals(states).tolist()
        out: list[tuple[int, int, int, int, int, int | None]] = []
        for sequence, token, seal in zip(mine, sampled, seals, strict=True):
            if self._active.get(sequence.key) is not sequence:
                continue  # cancelled meanwhile
            sequence.length += 1
            sequence.kv_tokens += 1
            sequence.token = token
            index = sequence.produced
            sequence.produced += 1
            receipt = None
            if sequence.produced == sequence.total:
                receipt = self._body.receipt(seal, [sequence.share])
                del self._active[sequence.key]
            out.append((sequence.request, sequence.attempt, index, token, seal, receipt))
        self.tokens += len(out)
        if out:
            self._post.send(Plane.VPC, self._vpc, self._gateway, messages.Tokens(tuple(out)))

    def statistics(self) -> dict[str, Any]:
        """Counters and samples for the report."""
        return {"steps": self.steps, "tokens": self.tokens} | self._exchange.statistics()


def _deployment(job: Job, machine: Machine) -> tuple[int, int]:
    """Ranks with the shared expert, and redundant ones: 32 each in the group of 320, else none."""
    ranks = len(machine.roles.decode) * machine.dies_per_node
    extra = ranks - job.model.routed_experts
    return (extra // 2, extra - extra // 2) if extra > 0 else (0, 0)


def _vpc_port_of_gateway(context: Context) -> int:
    gateway = context.machine.roles.gateway
    assert gateway is not None
    return context.machine.vpc_port(gateway)
