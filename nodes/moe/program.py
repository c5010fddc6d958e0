"""The program of a ``moe`` run: on each node, its ranks pass their tokens through layer after layer.

Owns a rank's way from one layer to the next, and what is written down of it. A rank goes on as soon as
its own combine has returned; nobody waits for a barrier. A rank that gives up waiting goes on without
those that are missing: tokens that needed them are lost and named, all others are right. Does not own
messages (``exchange``), experts (``experts``) nor the check of tokens (``verify``).
"""

from __future__ import annotations

import collections
import itertools
from typing import Any, NamedTuple

import numpy as np

from cmnet.errors import PeerDeadError
from cmnet.launch.agent import Context, Program
from cmnet.topology.machine import Machine
from nodes.model import bodies
from nodes.model.body import I64, U64, Array, Body
from nodes.moe import placement, result
from nodes.moe.arrivals import Bools
from nodes.moe.due import Due
from nodes.moe.exchange import Exchange
from nodes.moe.experts import Experts, Served
from nodes.moe.job import DISTINCT_ROWS, FIRST_SEED, PERIOD_PS, MoeJob
from nodes.moe.layer import KINDS, Group, Key, Phase, Touch, ignore
from nodes.moe.layout import Tokens
from nodes.moe.operators import Operators
from nodes.moe.passes import Passes
from nodes.moe.placement import Placement
from nodes.moe.rebalancing import StageName
from nodes.moe.result import RankLayer
from nodes.moe.sending import Leg
from nodes.moe.table import table
from nodes.serving.cost import DecodeCost


def untouched(_: str, items: Any) -> Any:
    """What a run does to data on its way: nothing. Tests put a fault here."""
    return items


def make_program(
    machine: Machine, job: MoeJob, touch: Touch = untouched, *, shared_buffer: bool = False
) -> Program:
    """The program of a run; made before the fork, so that nodes share what it holds."""
    body = bodies.make(job.body, job.model, skew=job.skew)
    first = placement.initial(
        experts=job.model.routed_experts,
        ep_size=job.ep_size,
        redundant=job.redundant,
        shared_ranks=job.shared_ranks,
    )
    table(first, first.experts)  # both are kept
    ranked = {machine.devices[device].process for device in job.devices}

    async def program(context: Context) -> None:
        if context.process not in ranked:
            return
        if context.incarnation:  # its tokens are gone; what others still send it is not for it
            for kind in KINDS.values():
                context.fabric.bind(kind, ignore)
            return
        await MoeNode(context, job, body, first, touch, shared_buffer=shared_buffer).run()

    return program


class Ready(NamedTuple):
    """A rank that has finished a layer (or has not begun, before layer 0)."""

    step: int
    layer: int
    """The layer that it has finished; -1: none."""
    rank: int
    read_ps: int
    """When its combine returned."""
    begins_ps: int
    """When its next dispatch begins."""
    writes_ps: int = 0
    """When that begins to write."""


class _Rank:
    """One rank's tokens."""

    __slots__ = ("began_ps", "index", "sent", "states", "weights")

    def __init__(self, states: Array) -> None:
        self.states = states
        self.index: I64 = np.arange(len(states))
        """Of those tokens that are still there."""
        self.weights: U64 = np.empty((0, 0), dtype=np.uint64)
        self.sent: I64 = np.empty(0, dtype=np.int64)
        self.began_ps = 0


class MoeNode:
    """The ranks of one node."""

    def __init__(
        self,
        context: Context,
        job: MoeJob,
        body: Body,
        first: Placement,
        touch: Touch,
        *,
        shared_buffer: bool,
    ) -> None:
        self._context, self._loop, self._job, self._body = context, context.loop, job, body
        self._touch = touch
        unfused = job.algo == "unfused"
        self._operators = Operators(
            ep_size=job.ep_size,
            model=job.model,
            engine_start_ps=context.machine.engines[job.engine].start_ps,
            unfused=unfused,
        )
        self._exchange = Exchange(
            context,
            body,
            job.scale,
            devices=job.devices,
            operators=self._operators,
            timeout_ps=job.timeout_ps,
            engine=job.engine,
            shared_buffer=shared_buffer,
            layers=job.model.carried_layers
            - int(job.eplb),  # after the last come messages about loads
        )
        self._exchange.on_combined = self._combined
        self._exchange.on_late = self._late
        self._experts = Experts(
            context.loop,
            self._exchange,
            body,
            self._operators,
            expert_ps=DecodeCost(dies=job.ep_size, model=job.model).expert_ps,
            layer_of=lambda key: key[2],
            touch=touch,
        )
        self._experts.on_served = self._served_one
        if job.isolated:
            self._experts.hold_ps = lambda key, at_ps: max(at_ps, self._period_ps(key, 1))
        self._due: Due[Ready] = Due(context.loop)
        self._local = range(self._exchange.first, self._exchange.first + self._exchange.ranks)
        self._ranks: dict[int, _Rank] = {}
        self._served: dict[tuple[Key, int], Served] = {}
        self._errors: dict[tuple[Key, int], list[str]] = {}
        self._missing: frozenset[int] = frozenset()
        """Ranks that did not answer in time."""
        self._first = (first,) * job.model.carried_layers
        self._passes = Passes(context, job, self._first, touch) if job.eplb else None
        self._lines = result.path(context.run_folder, context.name)
        context.on_statistics = self._statistics

    def _statistics(self) -> dict[str, Any]:
        known = {"layers": self._due.statistics(), "combines": self._experts.statistics()}
        found: dict[str, Any] = {
            "memory_peak_bytes": result.memory_peak_bytes(),
            "known_late": known,
        }
        return found if self._passes is None else found | {"eplb": self._passes.statistics()}

    async def run(self) -> None:
        """All passes of this node's ranks."""
        self._context.outstanding(1)
        self._context.spawn(self._experts.run(), "experts")
        for step in itertools.count():
            await self._step(step)
            if not await self._goes_on(step):
                break
        self._context.outstanding(-1)

    async def _goes_on(self, step: int) -> bool:
        """Whether there is another pass, when all nodes have done this one; or we stop here."""
        if self._passes is None:
            return step + 1 < self._job.steps
        try:
            return await self._passes.end(failed=self._missing_text())
        except PeerDeadError as error:
            self._stop(step + 1, str(error))
            return False

    def _missing_text(self) -> str:
        if not self._missing:
            return ""
        return f"{self._context.name} misses ranks {_few(sorted(self._missing))}"

    def _placements(self) -> tuple[Placement, ...]:
        """In force in this pass."""
        return self._first if self._passes is None else self._passes.now.placements

    def _stage(self) -> StageName:
        return "" if self._passes is None else self._passes.now.stage

    async def _step(self, step: int) -> None:
        everyone = np.arange(self._job.ep_size)
        group = Group(
            sources=everyone,
            experts=everyone,
            placements=self._placements(),
            batch=self._job.batch,
        )
        self._exchange.begin(0, step, group)
        if self._missing:
            self._exchange.exclude(self._missing)
        if self._passes is not None:
            self._passes.begin()
        self._ranks = dict(zip(self._local, self._start(), strict=True))
        now_ps, start_ps = self._loop.now_ps, self._operators.dispatch_start_ps
        lot = [(now_ps + start_ps, Ready(step, -1, rank, now_ps, now_ps)) for rank in self._local]
        self._due.add_all(lot, start_ps)
        left = len(self._local)
        while left:
            lot = await self._due.take()
            for key in sorted({(ready.step, ready.layer) for _, ready in lot}):
                of_key = [
                    ready._replace(writes_ps=at_ps)
                    for at_ps, ready in lot
                    if (ready.step, ready.layer) == key
                ]
                left -= await self._go_on(of_key)

    def _start(self) -> list[_Rank]:
        """Local ranks with their tokens: contents in turn, each token at a place of its own."""
        batch, counts = self._job.batch, self._job.counts
        first = self._local[0] * batch
        index = np.arange(first, first + len(self._local) * batch)
        seeds = np.uint64(FIRST_SEED) + (index % DISTINCT_ROWS).astype(np.uint64)
        states = self._body.start_prompt(seeds, first_place=first)
        begins = range(0, len(states), batch)
        return [
            _Rank(states[begin : begin + counts[rank]])
            for rank, begin in zip(self._local, begins, strict=True)
        ]

    async def _go_on(self, lot: list[Ready]) -> int:
        """These ranks finish one layer and begin the next; returns how many have done all."""
        step, layer = lot[0].step, lot[0].layer
        if layer >= 0:
            self._finish((0, step, layer), lot)
        if layer + 1 == self._job.model.carried_layers:
            return len(lot)
        await self._dispatch((0, step, layer + 1), lot)
        return 0

    # --- dispatch ---------------------------------------------------------------------------------

    async def _dispatch(self, key: Key, lot: list[Ready]) -> None:
        body, layer = self._body, key[2]
        ranks = [self._ranks[ready.rank] for ready in lot]
        states = np.concatenate([rank.states for rank in ranks])
        counts = [len(rank.states) for rank in ranks]
        of_rank = np.repeat([ready.rank for ready in lot], counts)
        gate = body.gate(states, layer=layer)
        if self._passes is not None:
            self._passes.count(layer, gate.experts)
        tokens = Tokens(
            ranks=of_rank,
            numbers=np.concatenate([rank.index for rank in ranks]),
            experts=gate.experts,
            vectors=body.dispatch(states),
        )
        legs = {}
        edges = list(itertools.accumulate(counts, initial=0))
        for ready, rank, begin, end in zip(lot, ranks, edges[:-1], edges[1:], strict=True):
            rank.weights = gate.weights[begin:end]
            rank.began_ps = ready.begins_ps
            legs[ready.rank] = Leg(ready.begins_ps, ready.writes_ps)
        sent = await self._exchange.dispatch(key, self._reachable(key, tokens, legs), legs)
        for ready, row in zip(lot, sent, strict=True):
            self._ranks[ready.rank].sent = row

    def _reachable(self, key: Key, tokens: Tokens, legs: dict[int, Leg]) -> Tokens:
        """Those tokens none of whose experts is gone; the others are lost."""
        if not self._missing:
            return tokens
        held = self._placements()[key[2]]
        gone = [
            expert
            for expert in range(held.experts)
            if self._missing.issuperset(held.replicas(expert))
        ]
        lost: Bools = np.logical_or.reduce(np.isin(tokens.experts, gone), axis=1)
        for rank in legs:
            count = int(lost[tokens.ranks == rank].sum())
            if count:
                experts = np.intersect1d(tokens.experts[tokens.ranks == rank], gone).tolist()
                self._say(key, rank, f"{count} tokens for experts {_few(experts)} of missing ranks")
        return tokens.chosen(np.flatnonzero(~lost))

    # --- combine ----------------------------------------------------------------------------------

    def _combined(self, key: Key, done_ps: dict[int, int]) -> None:
        last = key[2] + 1 == self._job.model.carried_layers
        start_ps = 0 if last else self._operators.dispatch_start_ps
        lot = []
        for rank, at_ps in done_ps.items():
            read_ps = at_ps + self._operators.sum_ps(len(self._ranks[rank].states))
            begins_ps = read_ps
            if self._job.isolated and not last:
                begins_ps = max(read_ps, self._period_ps((*key[:2], key[2] + 1), 0))
            ready = Ready(key[1], key[2], rank, read_ps, begins_ps)
            lot.append((begins_ps + start_ps, ready))
        all_known = not last and bool(self._exchange.arrivals(key, "combine").done.all())
        self._due.add_all(lot, start_ps, at_once=all_known)

    def _period_ps(self, key: Key, operator: int) -> int:
        """When an isolated operator begins: 0 the dispatch, 1 the combine."""
        layers = key[1] * self._job.model.carried_layers + key[2]
        return (2 * layers + operator) * PERIOD_PS

    def _finish(self, key: Key, lot: list[Ready]) -> None:
        """Weighted sums of the results, for all tokens whose results are all here."""
        ranks = [self._ranks[ready.rank] for ready in lot]
        counts = [len(rank.index) for rank in ranks]
        numbers = np.concatenate([rank.index for rank in ranks])
        of_rank = np.repeat([ready.rank for ready in lot], counts)
        results, filled = self._exchange.results(key, of_rank, numbers)
        self._exchange.results_read(key, {ready.rank: ready.read_ps for ready in lot})
        whole = np.flatnonzero(filled.all(axis=1))
        states = self._combine(ranks, results, whole, key[2])
        seals = self._body.seals(states).astype("<u8")
        edges = np.searchsorted(whole, np.cumsum([0, *counts]))
        lines = []
        for ready, rank, begin, end in zip(lot, ranks, edges[:-1], edges[1:], strict=True):
            if end - begin < len(rank.index):
                self._say_lost(key, ready.rank, len(rank.index) - (end - begin))
            rank.index, rank.states = numbers[whole[begin:end]], states[begin:end]
            lines.append(self._line(key, ready, seals[begin:end].tobytes()))
        self._write(lines)
        if self._exchange.arrivals(key, "combine").done.all():
            self._exchange.end((0, key[1], key[2] - 1))

    def _combine(self, ranks: list[_Rank], results: U64, whole: I64, layer: int) -> Array:
        """States of the tokens ``whole`` [n], of those of all these ranks, after the layer."""
        top_k, words = self._job.model.top_k, self._body.result_words
        states = np.concatenate([rank.states for rank in ranks])
        weights = np.concatenate([rank.weights for rank in ranks])
        if len(whole) < len(results):
            states, weights, results = states[whole], weights[whole], results[whole]
        routed = self._touch("results", results[:, :top_k].reshape(len(results) * top_k, words))
        slots = self._touch("slots", np.arange(top_k))
        routed = routed.reshape(len(results), top_k, words)
        if len(slots) != top_k or (slots != np.arange(top_k)).any():
            routed, weights = routed[:, slots], weights[:, slots]
        shared = self._touch("shared", results[:, top_k])
        weights = self._touch("weights", weights)
        return self._body.combine(states, weights, routed, shared, layer=layer)

    # --- who is late ------------------------------------------------------------------------------

    def _late(self, key: Key, phase: Phase, found: dict[int, list[int]]) -> None:
        """Go on without those that were missing, and do not wait for them again."""
        for rank, missing in found.items():
            what = "results" if phase == "combine" else "tokens"
            self._say(key, rank, f"no {what} or flags of ranks {_few(missing)}")
        new = self._silent(found)
        self._exchange.accept(key, phase)
        if new:
            self._missing |= new
            self._exchange.exclude(self._missing)

    def _silent(self, found: dict[int, list[int]]) -> frozenset[int]:
        """Those that most ranks of this node miss: a rank that hears nobody is itself the one."""
        times = collections.Counter(rank for missing in found.values() for rank in missing)
        silent = frozenset(rank for rank, count in times.items() if 2 * count > len(self._local))
        if len(silent | self._missing) == self._job.ep_size:
            silent = silent.difference(self._local)  # this node is the one
        return silent - self._missing

    def _say_lost(self, key: Key, rank: int, tokens: int) -> None:
        """Also when nobody waited in vain: an expert's rank that did not get all of this rank's rows gives
        no results for any of them."""
        arrivals = self._exchange.arrivals(key, "combine")
        ranks = arrivals.fewer_than(rank - self._exchange.first, self._ranks[rank].sent)
        if ranks:
            self._say(key, rank, f"{tokens} tokens without all results of ranks {_few(ranks)}")

    def _say(self, key: Key, rank: int, text: str) -> None:
        self._errors.setdefault((key, rank), []).append(text)

    # --- what is written down ---------------------------------------------------------------------

    def _write(self, lines: list[RankLayer]) -> None:
        with self._lines.open("ab") as file:  # whole lines, for who reads it while the run goes on
            file.write(b"".join(result.encode(line) + b"\n" for line in lines))

    def _stop(self, step: int, error: str) -> None:
        """What these ranks would have done in the next pass is lost, and so is all after it."""
        self._write(
            [
                RankLayer(
                    step=step,
                    layer=layer,
                    rank=rank,
                    tokens=self._job.counts[rank],
                    stage="stopped",
                    error=error,
                )
                for layer in range(self._job.model.carried_layers)
                for rank in self._local
            ]
        )

    def _served_one(self, served: Served) -> None:
        self._served[served.key, served.rank] = served

    def _line(self, key: Key, ready: Ready, seals: bytes) -> RankLayer:
        rank, local = self._ranks[ready.rank], ready.rank - self._exchange.first
        served = self._served.pop((key, ready.rank), None)
        flags = {
            phase: self._exchange.arrivals(key, phase).flags_ps[local].astype("<i8", copy=False)
            for phase in ("dispatch", "combine")
        }
        return RankLayer(
            step=key[1],
            layer=key[2],
            rank=ready.rank,
            tokens=self._job.counts[ready.rank],
            index=rank.index.astype("<i4").tobytes(),
            seals=seals,
            began_ps=rank.began_ps,
            dispatched_ps=-1 if served is None else served.dispatched_ps,
            rows=0 if served is None else served.rows,
            combine_began_ps=-1 if served is None else served.combine_began_ps,
            combined_ps=ready.read_ps,
            dispatch_flags_ps=flags["dispatch"].tobytes(),
            combine_flags_ps=flags["combine"].tobytes(),
            sent_rows=rank.sent.astype("<i4").tobytes(),
            stage=self._stage(),
            error="; ".join(self._errors.pop((key, ready.rank), [])),
        )


def _few(ranks: list[int]) -> str:
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return ", ".join(map(str, ranks[:8])) + more
