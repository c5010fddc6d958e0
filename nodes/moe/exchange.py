"""Dispatch and combine between the ranks of a group, at one node, over UB (FusedDispatch, FusedCombine).

Owns the messages of each layer at both ends: which slot each is written to, the flags behind them, what
has come to each local rank and when it is complete, and that no slot is overwritten unread. Does not own
time of computation, what a rank does when it is complete (callbacks), nor who takes part.

A source writes its tokens in (token, k) order, then one flag to *every* expert rank; an expert rank
writes results to the slot (token, k) of the source, then one flag to *every* source. A rank is complete
when all flags are here and all rows that they count. Nobody waits for a barrier: that a rank has the
combine flags of all says that all have read their dispatch (see ``detector``).

Rows and flags are known here somewhat before they are delivered (``cmnet.bursts``): every callback gets
the instant at which a rank is complete, and nothing may be done for it before that.

The unfused flow exchanges counts first (flags only), waits for them, and then sends tokens in BF16.
"""

from __future__ import annotations

import functools
import struct
from typing import Any

import numpy as np

from cmnet.burst_arrivals import Bundle
from cmnet.errors import CorruptError
from cmnet.launch.agent import Context
from nodes.model import tiles
from nodes.model.body import I64, U64, Body
from nodes.moe import buffers, detector, due, layout, placement, sending
from nodes.moe import layer as records
from nodes.moe.arrivals import Arrivals, Bools
from nodes.moe.layer import KINDS, Complete, Group, Key, Late, Layer, Lost, Phase, Samples, Wrong
from nodes.moe.layout import U8, Outgoing, ResultRows, TokenRows, Tokens
from nodes.moe.operators import Operators
from nodes.moe.sending import Leg, Writes
from nodes.moe.table import Table, check_held, table
from nodes.moe.writer import Writer

FLAG_BYTES = 32
"""Charged for one count and flag: xDeepServe's metadata field (arXiv 2508.02520, section 3.2). A flag of a
dispatch has one for each expert of its target."""

_HEAD = struct.Struct("<IIH")
"""epoch, step, layer"""


class Exchange:
    """One node's end of all exchanges."""

    def __init__(
        self,
        context: Context,
        body: Body,
        scale: tiles.Scale,
        *,
        devices: tuple[int, ...],
        operators: Operators,
        timeout_ps: int,
        engine: str = "aiv",
        shared_buffer: bool = False,
        layers: int = 0,
    ) -> None:
        """``devices``: of each rank. ``timeout_ps``: a rank gives up on its dispatch after it, on its
        combine after twice that. ``shared_buffer``: for tests of the detector only. ``layers``: after
        the combine of each of so many a rank at most dispatches again."""
        self._context, self._loop = context, context.loop
        self._body = body
        self._model = body.settings
        self._devices: I64 = np.array(devices, dtype=np.int64)
        machine = context.machine
        ours = [machine.devices[device].process == context.process for device in devices]
        self.first = ours.index(True)
        """The first local rank; local ranks are neighbours."""
        self.ranks = sum(ours)
        """Local ranks."""
        self.slots = body.settings.top_k + 1
        """Messages of a token: to its routed experts and to the shared one."""
        self._rank_of: I64 = np.full(len(machine.devices), -1, dtype=np.int64)
        self._rank_of[self._devices] = np.arange(len(devices))
        self._local_of = self._rank_of - self.first
        self._operators, self._timeout_ps = operators, timeout_ps
        self._writer = Writer(context, self._devices, engine=engine)
        self._shared_buffer = shared_buffer
        self._layers_count = layers
        self._group: Group | None = None
        self._begun: Group | None = None  # a rank that is gone for us may be there for others
        self._sources: Bools = np.zeros(0, dtype=np.bool_)
        """[ep_size] of the group; not written to: arrivals share it."""
        self._experts = self._sources
        self._buffers: dict[str, Any] = {}
        self._shape = (0, 0)
        """Slots of one source at a rank's dispatch buffer, slots of a rank's combine buffer."""
        self._step = (0, 0)
        self._expected_ps = 0
        """Since when it is known who takes part: nobody is complete before."""
        self._layers: dict[Key, Layer] = {}
        self._ended: set[Key] = set()
        self._samples = Samples()
        self.on_dispatched: Complete = records.ignore
        self.on_combined: Complete = records.ignore
        self.on_late: Late = records.ignore
        self.on_lost: Lost = records.ignore
        self.on_wrong: Wrong = records.end_run
        repeats = context.fabric.arriving.repeats
        repeats[KINDS["dispatch"]] = layout.repeat(scale.vector, lead_words=layout.TOKEN_WORDS)
        repeats[KINDS["combine"]] = layout.repeat(scale.result, lead_words=layout.RESULT_WORDS)
        for phase, kind in KINDS.items():
            context.fabric.bind(kind, functools.partial(self._came, phase))
            context.fabric.arriving.wanted[kind] = functools.partial(self._announced, phase)
            context.fabric.arriving.silences[kind] = functools.partial(self._silence_ps, phase)

    def _silence_ps(self, phase: Phase, head: bytes) -> int:
        """After flags: an operator starts before it writes (``due``)."""
        if phase == "dispatch":
            return due.silence_ps(self._operators.combine_start_ps)
        if phase == "combine" and _HEAD.unpack(head)[2] < self._layers_count:
            return due.silence_ps(self._operators.dispatch_start_ps)
        return 0

    # --- steps ------------------------------------------------------------------------------------

    def begin(self, epoch: int, step: int, group: Group) -> None:
        """A step begins here: those before it are over, wherever they were."""
        self._step, self._begun = (epoch, step), group
        self._set_group(group)
        over = [key for key in self._layers if key[:2] < self._step]
        given_up = any(self._layers[key].given_up() for key in over)
        for key in over:
            self.end(key)
        self._ended = {key for key in self._ended if key[:2] >= self._step}
        self._make_buffers(group, anew=given_up)
        for key, layer in self._layers.items():  # what came before the step began here
            if key[:2] == self._step and "dispatch" in layer.arrivals:
                for rows in layer.arrivals["dispatch"].rows:
                    self._check_rows(key, rows)
        self._expect_anew()

    def _set_group(self, group: Group) -> None:
        self._group = group
        self._sources, self._experts = np.zeros((2, len(self._devices)), dtype=np.bool_)
        self._sources[group.sources] = True
        self._experts[group.experts] = True

    def end(self, key: Key) -> None:
        """Nothing more is wanted of this layer; what still comes for it is ignored."""
        layer = self._layers.pop(key, None)
        self._ended.add(key)
        if layer is not None:
            for timer in layer.timers.values():
                timer.cancel()

    def _make_buffers(self, group: Group, *, anew: bool) -> None:
        """Anew when the group is another, or a step was given up half-way."""
        experts = self._model.routed_experts
        most = max(int(table(each, experts).written.max()) for each in group.placements)
        most_tokens = buffers.max_tokens(group.batch, most, self._model)
        shape = (most_tokens, group.batch * self.slots)
        if shape == self._shape and not anew:
            return
        self._shape = shape
        self._buffers = detector.make(
            ranks=self.ranks,
            sources=len(self._devices),
            dispatch_slots=shape[0],
            combine_slots=shape[1],
            shared=self._shared_buffer,
            model=self._model,
        )

    def _open(self, key: Key) -> Layer | None:
        """None: of a layer or step that is over."""
        layer = self._layers.get(key)
        if layer is None and key[:2] >= self._step and key not in self._ended:
            experts = self._model.shared_expert + 1
            layer = self._layers[key] = Layer(ranks=self.ranks, experts=experts)
        return layer

    def _arrivals(self, key: Key, layer: Layer, phase: Phase) -> Arrivals:
        arrivals = layer.arrivals.get(phase)
        if arrivals is None:
            arrivals = Arrivals(ranks=self.ranks, ep_size=len(self._devices))
            layer.arrivals[phase] = arrivals
            if key[:2] == self._step:
                self._expect(phase, arrivals)
            self._watch(key, layer, phase)
        return arrivals

    def _watch(self, key: Key, layer: Layer, phase: Phase) -> None:
        if phase in layer.timers:
            layer.timers[phase].cancel()
        tries = 2 if phase == "combine" else 1
        at_ps = self._loop.now_ps + tries * self._timeout_ps
        layer.timers[phase] = self._loop.call_at_ps(at_ps, self._late, key, layer, phase)

    def _expect(self, phase: Phase, arrivals: Arrivals) -> None:
        arrivals.expected = self._experts if phase == "combine" else self._sources
        if phase != "combine":  # of a combine, those that dispatched
            arrivals.wanted |= self._experts[self.first : self.first + self.ranks]

    def _check(self, key: Key, layer: Layer, phase: Phase) -> None:
        """Say which ranks have become complete."""
        arrivals = layer.arrivals[phase]
        ranks = arrivals.newly_complete()
        if not ranks:
            return
        if not (arrivals.wanted > arrivals.done).any():
            layer.timers[phase].cancel()
            self._samples.add(phase, arrivals)
        done_ps = np.maximum(arrivals.last_ps.take(ranks), self._expected_ps).tolist()
        self._tell(key, layer, phase, dict(zip(ranks, done_ps)))

    def statistics(self) -> dict[str, Any]:
        """For the report."""
        return self._samples.statistics()

    def _tell(self, key: Key, layer: Layer, phase: Phase, local: dict[int, int]) -> None:
        done_ps = {self.first + rank: at_ps for rank, at_ps in local.items()}
        if phase == "dispatch":
            self.on_dispatched(key, done_ps)
        elif phase == "combine":
            self.on_combined(key, done_ps)
        else:
            self._send_counted(key, layer, done_ps)

    def exclude(self, dead: frozenset[int]) -> None:
        """From here on these ranks are not waited for nor written to. Experts that only they had are given
        to living ranks (``placement.without``), so that every expert has a rank; those have no weights
        of them, so the caller dispatches no token to such an expert."""
        group = self._group
        assert group is not None
        self._set_group(group.without(dead))
        self._expect_anew()

    def _expect_anew(self) -> None:
        self._expected_ps = self._loop.now_ps
        layers = [(key, layer) for key, layer in self._layers.items() if key[:2] == self._step]
        for _, layer in layers:
            for phase, arrivals in layer.arrivals.items():
                self._expect(phase, arrivals)
        self._context.fabric.arriving.deliver()
        for key, layer in layers:
            for phase in list(layer.arrivals):
                self._check(key, layer, phase)

    # --- late -------------------------------------------------------------------------------------

    def _late(self, key: Key, layer: Layer, phase: Phase) -> None:
        self._context.fabric.arriving.deliver()
        arrivals = layer.arrivals[phase]
        if arrivals.expected is None:  # others have begun a step that has not begun here
            self._watch(key, layer, phase)
            return
        missing = arrivals.missing()
        waiting = np.flatnonzero(arrivals.wanted & ~arrivals.done).tolist()
        found = {self.first + rank: np.flatnonzero(missing[rank]).tolist() for rank in waiting}
        self.on_late(key, phase, found)

    def accept(self, key: Key, phase: Phase) -> None:
        """Go on with what is here, for all local ranks that are late: rows of sources that did not all
        come are not taken."""
        layer = self._layers[key]
        arrivals = layer.arrivals[phase]
        if phase == "dispatch":
            gone = layer.refuse_rows(first=self.first, vector_words=self._body.vector_words)
            at_ps = np.full(len(gone.slots), self._loop.now_ps)
            self._buffers["dispatch"].take(gone.targets - self.first, gone.slots, at_ps)
        ranks = np.flatnonzero(arrivals.wanted & ~arrivals.done).tolist()
        arrivals.done[ranks] = True
        self._tell(key, layer, phase, dict.fromkeys(ranks, self._loop.now_ps))

    def is_open(self, key: Key) -> bool:
        """Somebody here still wants something of this layer."""
        return key in self._layers

    def all_dispatched(self, key: Key) -> bool:
        """No local rank with experts waits for tokens any more."""
        arrivals = self._layers[key].arrivals["dispatch"]
        return bool(arrivals.done[arrivals.wanted].all())

    def arrivals(self, key: Key, phase: Phase) -> Arrivals:
        """What came to local ranks (0 is ``first``), for the record."""
        return self._layers[key].arrivals[phase]

    # --- source side ------------------------------------------------------------------------------

    async def dispatch(self, key: Key, tokens: Tokens, legs: dict[int, Leg]) -> I64:
        """Write the tokens of local ranks (``legs``: all of those that take part now, with tokens or
        without) to their experts, then a flag to every expert rank. Returns, per leg, the rows sent to
        each rank [legs, ep_size]."""
        layer, group = self._open(key), self._group
        assert layer is not None and group is not None, "a step that is over"
        held = table(group.placement(key[2]), self._model.routed_experts)
        self._arrivals(key, layer, "combine").wanted[[rank - self.first for rank in legs]] = True
        self._watch(key, layer, "combine")
        words = self._body.result_words
        layer.await_results(batch=group.batch, slots=self.slots, words=words)
        layer.unread.update(legs)
        rows = self._outgoing(key, tokens, group, held)
        flags = sending.dispatch_flags(rows, legs, group.experts, held, flag_bytes=FLAG_BYTES)
        if self._operators.unfused:
            for rank in legs:
                layer.unsent[rank] = tokens.chosen(np.flatnonzero(tokens.ranks == rank))
            await self._burst(key, "count", legs, sending.nothing(), flags)
        else:
            await self._write_tokens(key, tokens, rows, legs, flags)
        return sending.rows_sent(rows, legs, ep_size=len(self._devices))

    def _outgoing(self, key: Key, tokens: Tokens, group: Group, held: Table) -> Outgoing:
        index = tokens.ranks * group.batch + tokens.numbers
        routed = placement.targets(group.placement(key[2]), tokens.experts, index)
        return sending.token_rows(
            tokens,
            routed,
            held,
            shared_expert=self._model.shared_expert,
            max_tokens=self._shape[0],
        )

    async def _write_tokens(
        self, key: Key, tokens: Tokens, rows: Outgoing, legs: dict[int, Leg], flags: Writes
    ) -> None:
        model, most = self._model, int(rows.tokens.max(initial=0)) + 1
        mine, ready_ps, writes = sending.token_writes(
            tokens,
            rows,
            legs,
            stages_ps=self._operators.tokens_ready_ps(most),
            charged_bytes=model.combine_bytes if self._operators.unfused else model.dispatch_bytes,
        )
        if len(ready_ps):
            self._take_tokens(key, mine, ready_ps)
        await self._burst(key, "dispatch", legs, writes, flags)

    def _send_counted(self, key: Key, layer: Layer, done_ps: dict[int, int]) -> None:
        """Unfused: the counts of all are here, so these ranks' tokens go out."""
        group = self._group
        ranks = [rank for rank in done_ps if rank in layer.unsent]
        if not ranks or group is None:
            return
        now_ps, launch_ps = self._loop.now_ps, self._operators.launch_ps
        tokens = layout.all_tokens([layer.unsent.pop(rank) for rank in ranks])
        began_ps = layer.arrivals["count"].began_ps
        legs = {
            rank: Leg(int(began_ps[rank]), max(done_ps[rank] + launch_ps, now_ps)) for rank in ranks
        }
        held = table(group.placement(key[2]), self._model.routed_experts)
        rows = self._outgoing(key, tokens, group, held)
        flags = sending.dispatch_flags(rows, legs, group.experts, held, flag_bytes=FLAG_BYTES)
        self._context.spawn(self._write_tokens(key, tokens, rows, legs, flags), f"tokens of {key}")

    def results(self, key: Key, ranks: I64, numbers: I64) -> tuple[U64, Bools]:
        """Results [n, slots, words] of tokens [n] of local ranks, and which are here [n, slots]."""
        return self._layers[key].results_of(ranks - self.first, numbers)

    def results_read(self, key: Key, read_ps: dict[int, int]) -> None:
        """These ranks have read their results at these instants."""
        layer = self._layers[key]
        layer.unread.difference_update(read_ps)
        filled = layer.filled
        local = np.array(list(read_ps), dtype=np.int64) - self.first
        which, slots = np.nonzero(filled[local].reshape(len(local), -1))
        at_ps = np.array(list(read_ps.values()), dtype=np.int64)
        self._buffers["combine"].take(local.take(which), slots, at_ps.take(which))

    # --- expert side ------------------------------------------------------------------------------

    def counts(self, key: Key) -> list[tuple[int, int]]:
        """[local ranks] rows that have come, and the experts that they are for."""
        return self._layers[key].counts()

    def rows(self, key: Key, read_ps: dict[int, int]) -> TokenRows:
        """Rows for the experts of these local ranks, each read at its instant, by rank, expert, source
        and slot: the contiguous tensors that the experts get."""
        at_ps = np.full(self.ranks, -1, dtype=np.int64)
        at_ps[[rank - self.first for rank in read_ps]] = list(read_ps.values())
        words = self._body.vector_words
        rows = self._layers[key].take_rows(at_ps, first=self.first, vector_words=words)
        away = np.flatnonzero(rows.sources != rows.targets)
        local = rows.targets.take(away) - self.first
        self._buffers["dispatch"].take(local, rows.slots.take(away), at_ps.take(local))
        return rows

    async def combine(self, key: Key, rows: TokenRows, results: U64, legs: dict[int, Leg]) -> None:
        """Write the results [n, words] of rows back to their sources, then a flag to every source.
        ``legs``: the local ranks whose experts are done, with rows or without."""
        group = self._group
        if group is None or self._open(key) is None:
            return  # of a step that was given up meanwhile
        flags = sending.combine_flags(
            rows, legs, group.sources, ep_size=len(self._devices), flag_bytes=FLAG_BYTES
        )
        mine, ready_ps, writes = sending.result_writes(
            rows,
            results,
            legs,
            stages_ps=self._operators.results_ready_ps,
            charged_bytes=self._model.combine_bytes,
        )
        if len(ready_ps):
            self._take_results(key, mine, ready_ps)
        await self._burst(key, "combine", legs, writes, flags)

    # --- links ------------------------------------------------------------------------------------

    async def _burst(
        self, key: Key, phase: Phase, legs: dict[int, Leg], writes: Writes, flags: Writes
    ) -> None:
        """Write, and set flags behind, a rank's own among them: it is not done before it has written."""

        def lost(indices: I64) -> None:
            self.on_lost(key, phase, np.unique(writes.targets[indices]).tolist())

        ranks = list(legs) if len(flags.targets) else []
        burst = self._writer.make(KINDS[phase], _HEAD.pack(*key), writes, flags, lost)
        first_ps = min([leg.first_ps for leg in legs.values()])
        if first_ps > self._loop.now_ps:  # until then the ports are others'
            await self._loop.sleep_until_ps(first_ps)
            if self._open(key) is None:
                return  # of a step that was given up meanwhile
        await self._writer.send(ranks, burst)

    def _announced(self, phase: Phase, head: bytes, _: I64, targets: I64) -> bool:
        """Flags come: whether a rank may now be complete. Until then nothing needs handling."""
        key = _HEAD.unpack(head)
        layer = self._open(key)
        if layer is None:
            return False
        return self._arrivals(key, layer, phase).announce(self._local_of.take(targets))

    def _came(self, phase: Phase, bundle: Bundle) -> None:
        key = _HEAD.unpack(bundle.head)
        targets, sources = self._rank_of.take(bundle.targets), self._rank_of.take(bundle.sources)
        at_ps, data = bundle.delivered_ps, bundle.data
        if not bundle.flags:
            records.check_ends(phase, sources, targets, first=self.first, ranks=self.ranks)
        try:
            if bundle.flags:
                self._take_flags(key, phase, targets, sources, at_ps, data)
            elif phase == "dispatch":
                self._take_tokens(key, layout.unpack_tokens(targets, sources, data), at_ps)
            else:
                self._take_results(key, layout.unpack_results(targets, sources, data), at_ps)
        except CorruptError as error:
            if self.on_wrong is records.end_run:
                raise
            told_ps = self._loop.now_ps + due.silence_ps(self._operators.starts_ps_max)
            self._loop.call_at_ps(told_ps, self.on_wrong, key, error)

    def _take_tokens(self, key: Key, rows: TokenRows, at_ps: I64) -> None:
        layer = self._open(key)
        if layer is None:
            return
        arrivals = self._arrivals(key, layer, "dispatch")
        rows, at_ps = arrivals.in_time(rows, at_ps, first=self.first)
        if not len(at_ps):
            return
        local = rows.targets - self.first
        if key[:2] == self._step and rows.sources[0] != rows.targets[0]:
            self._check_rows(key, rows)  # a rank's rows to itself come by themselves
            self._buffers["dispatch"].write(local, rows.slots, at_ps)
        layer.count_rows(local, rows.experts)
        arrivals.add_rows(local, rows.sources, at_ps, rows)
        self._check(key, layer, "dispatch")

    def _check_rows(self, key: Key, rows: TokenRows) -> None:
        assert self._begun is not None
        experts = self._model.routed_experts
        check_held(table(self._begun.placement(key[2]), experts), rows, shared_expert=experts)

    def _take_results(self, key: Key, rows: ResultRows, at_ps: I64) -> None:
        layer = self._open(key)
        if layer is None or not layer.filled.size:
            return  # of a step that was given up
        arrivals = self._arrivals(key, layer, "combine")
        rows, at_ps = arrivals.in_time(rows, at_ps, first=self.first)
        if not len(at_ps):
            return
        local = rows.targets - self.first
        slots = rows.tokens * self.slots + rows.k
        if rows.sources[0] != rows.targets[0]:
            self._buffers["combine"].write(local, slots, at_ps)
        layer.put_results(local, slots, rows.results)
        arrivals.add_rows(local, rows.sources, at_ps, None)
        self._check(key, layer, "combine")

    def _take_flags(
        self, key: Key, phase: Phase, targets: I64, sources: I64, at_ps: I64, data: U8
    ) -> None:
        layer = self._open(key)
        if layer is None or not len(sources):
            return
        began_ps, counts = layout.unpack_flags(data)
        total = counts.sum(axis=1) if phase != "count" else np.zeros(len(counts), dtype=np.int64)
        self._arrivals(key, layer, phase).add_flags(
            targets - self.first, sources, at_ps=at_ps, counts=total, began_ps=began_ps
        )
        self._check(key, layer, phase)
