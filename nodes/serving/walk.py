"""One decode step's way through the layers, at one node: attention, experts, drafts.

Owns the order and the times of what this node's sources do in a step. Two streams: attention (16 of 24
AIC), and gate, dispatch, experts and combine (8 of 24; arXiv 2506.12708, 3.3). With micro-batches, while one
of the two is in the second stream the other one is in the first; without, one after the other has all
cores. Within the second stream exchanges follow each other, on all ranks in one order, so the two
micro-batches need no buffers of their own: whoever begins one has a flag of every rank's combine before
it. Does not own messages (``nodes.moe``), sequences, nor when a step begins or is given up (``decode``).

With drafts a step verifies [token, draft], then takes the tokens that it keeps through the MTP layer, one
more exchange. That layer's draft is right as often as the run's setting says (``nodes.model.drafts``);
what the main model would say is computed here for that, in no virtual time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import numpy as np

from cmnet.vtime.loop import VirtualLoop
from nodes.model import drafts
from nodes.model.body import I64, Array, Body
from nodes.moe import layout
from nodes.moe.exchange import Exchange
from nodes.moe.layer import Key, Touch
from nodes.moe.layout import Tokens
from nodes.moe.operators import Operators
from nodes.moe.sending import Leg
from nodes.serving.cost import DecodeCost, Load
from nodes.serving.decoding import Decoding
from nodes.serving.sequences import Sequence, Turn, split
from nodes.serving.timeline import Stage, Timeline

ATTENTION, MOE = 0, 1
"""Streams."""

View = tuple[Array, int, int]
"""KV rows of a sequence in a layer, how many are used, the place of the first."""


class _Visit:
    """A micro-batch at its experts: when the combine of each local rank returned."""

    def __init__(self, ranks: list[int], done: asyncio.Future[None]) -> None:
        self._left = set(ranks)
        self.last_ps = 0
        self.done = done

    def returned(self, done_ps: dict[int, int]) -> None:
        """Some ranks have all their results."""
        self._left.difference_update(done_ps)
        self.last_ps = max(self.last_ps, *done_ps.values())
        if not self._left and not self.done.done():
            self.done.set_result(None)


class Part:
    """One micro-batch of a step."""

    def __init__(self, number: int, ranks: list[int], sequences: list[Sequence]) -> None:
        self.number = number
        self.ranks = ranks
        """All of this node that take part, with sequences or without."""
        self.sequences = sequences
        self.turns: list[Turn] = []

    def ranks_of(self, counts: list[int]) -> I64:
        """The rank of each token, given those of each sequence."""
        of_sequence = np.array([sequence.rank for sequence in self.sequences], dtype=np.int64)
        return of_sequence.repeat(counts)


class Walk:
    """The steps of one node, one at a time."""

    def __init__(
        self,
        loop: VirtualLoop,
        exchange: Exchange,
        body: Body,
        *,
        cost: DecodeCost,
        operators: Operators,
        decoding: Decoding,
        touch: Touch,
    ) -> None:
        self._loop, self._exchange, self._body, self._touch = loop, exchange, body, touch
        self._model, self._cost, self._operators = body.settings, cost, operators
        self._decoding = decoding
        self._carried = self._model.carried_layers
        self._exchanges = self._carried + decoding.drafts
        """Of a micro-batch in a step: its carried layers, and the MTP layer."""
        self._streams = (asyncio.Lock(), asyncio.Lock())
        self._visits: dict[Key, _Visit] = {}
        self._step = (0, 0)
        self._load = Load(sequences=0, queries=1, kv_tokens=0)
        self._before: Key | None = None
        """The exchange before, in the second stream."""
        self.timeline = Timeline()
        exchange.on_combined = self._combined

    def layer_of(self, key: Key) -> int:
        """The model's layer of an exchange."""
        return key[2] % self._exchanges

    async def run(
        self,
        step: tuple[int, int],
        load: Load,
        *,
        ranks: list[int],
        sequences: list[Sequence],
    ) -> list[tuple[Sequence, Turn]]:
        """A step, named (epoch, number), of these sequences of these local ranks. ``load``: of the busiest
        die of the group, which all wait for."""
        decoding = self._decoding
        self._step, self._load, self._before = step, load, None
        self._streams = (asyncio.Lock(), asyncio.Lock())  # a step that was given up held the others
        self._visits = {}
        self.timeline.begin(self._loop.now_ps)
        await self._loop.sleep_ps(self._cost.launches_ps(load.queries, graphs=decoding.graphs))
        parts = [
            Part(number, ranks, held)
            for number, held in enumerate(split(sequences, ranks, parts=decoding.parts))
        ]
        if len(parts) == 1:
            await self._pass(parts[0])
        else:
            await _together([self._pass(part) for part in parts])
        await self._loop.sleep_ps(self._cost.step_overhead_ps(load))
        self.timeline.end(self._loop.now_ps)
        return [pair for part in parts for pair in zip(part.sequences, part.turns, strict=True)]

    # --- one micro-batch --------------------------------------------------------------------------

    async def _pass(self, part: Part) -> None:
        """All layers of a micro-batch; leaves its turns."""
        states = await self._main(part)
        sampled, seals = self._body.sample(states).tolist(), self._body.seals(states).tolist()
        at = 0
        for sequence in part.sequences:
            end = at + len(sequence.fed)
            part.turns.append(sequence.turn(sampled[at:end], seals[at:end]))
            at = end
        if self._decoding.drafts:
            await self._draft(part, states)

    async def _main(self, part: Part) -> Array:
        """States of all tokens that are fed, after the last layer."""
        fed = [sequence.fed for sequence in part.sequences]
        counts = [len(tokens) for tokens in fed]
        ranks = part.ranks_of(counts)
        places = [s.length + i for s, count in zip(part.sequences, counts) for i in range(count)]
        states = self._body.start_tokens(
            np.array([token for tokens in fed for token in tokens], dtype=np.int64),
            places=self._touch("places", np.array(places, dtype=np.int64)),
        )
        for layer in range(self._carried):
            views = [(sequence.rows[layer], sequence.length, 0) for sequence in part.sequences]
            states = await self._attention(part, states, layer, views, counts)
            async with self._streams[MOE]:
                states = await self._moe(part, states, layer, ranks)
                if part.number == 0:
                    await self._uncarried(layer)
        return states

    async def _uncarried(self, layer: int) -> None:
        """Layers that are not carried, of both micro-batches. The pipeline stands still as it is, both
        streams held, and goes on where it was."""
        skipped = self._model.moe_layers - self._carried
        share = skipped * (layer + 1) // self._carried - skipped * layer // self._carried
        layer_ps = self._cost.layer_ps(self._load, microbatch=self._decoding.microbatch)
        async with self._streams[ATTENTION]:
            await self._loop.sleep_ps(share * layer_ps)

    async def _attention(
        self, part: Part, states: Array, layer: int, views: list[View], counts: list[int]
    ) -> Array:
        """The first stream: states after attention."""
        microbatch = self._decoding.microbatch
        load = self._load.halved() if microbatch == "on" else self._load
        async with self._streams[ATTENTION]:
            began_ps = self._loop.now_ps
            states = self._attend(states, layer, views, counts)
            await self._loop.sleep_ps(self._cost.attention_ps(load, microbatch=microbatch))
            self._stage(ATTENTION, part, layer, began_ps)
        return states

    def _attend(self, states: Array, layer: int, views: list[View], counts: list[int]) -> Array:
        """Each token reads the rows in use, those of tokens before it in this step, and its own."""
        if not len(states):
            return states
        body, index, sums = self._body, 0, []
        own = body.kv_rows(states, layer=layer)
        for (rows, length, first_place), count in zip(views, counts, strict=True):
            rows[length : length + count] = own[index : index + count]
            for end in range(length + 1, length + count + 1):
                one = states[index : index + 1]
                sums.append(body.read(one, rows[:end], layer=layer, first_place=first_place))
                index += 1
        return body.attend(states, np.concatenate(sums), layer=layer)

    async def _moe(self, part: Part, states: Array, layer: int, ranks: I64) -> Array:
        """The second stream: the tokens' visit to their experts."""
        loop, key = self._loop, (*self._step, layer + part.number * self._exchanges)
        gate = self._body.gate(states, layer=layer)
        numbers = layout.running_index(ranks)
        vectors = self._body.dispatch(states)
        tokens = Tokens(ranks=ranks, numbers=numbers, experts=gate.experts, vectors=vectors)
        began_ps = loop.now_ps
        await loop.sleep_ps(self._operators.dispatch_start_ps)
        visit = self._visits[key] = _Visit(part.ranks, loop.create_future())
        legs = dict.fromkeys(part.ranks, Leg(began_ps, loop.now_ps))
        await self._exchange.dispatch(key, tokens, legs)
        await visit.done
        read_ps = visit.last_ps + self._operators.sum_ps(int(numbers.max(initial=-1)) + 1)
        await loop.sleep_until_ps(max(read_ps, loop.now_ps))
        results, filled = self._exchange.results(key, tokens.ranks, tokens.numbers)
        assert filled.all(), "a combine is over when all results are here"
        self._exchange.results_read(key, dict.fromkeys(part.ranks, read_ps))
        if self._before is not None:
            self._exchange.end(self._before)
        self._before = key
        self._stage(MOE, part, layer, began_ps)
        return self._combine(states, gate.weights, results, layer)

    def _combined(self, key: Key, done_ps: dict[int, int]) -> None:
        if key in self._visits:
            self._visits[key].returned(done_ps)

    def _combine(self, states: Array, weights: Array, results: Array, layer: int) -> Array:
        tokens, top_k = len(states), self._model.top_k
        if not tokens:
            return states
        routed = self._touch("results", results[:, :top_k].reshape(tokens * top_k, -1))
        routed = routed.reshape(tokens, top_k, -1)
        slots = self._touch("slots", np.arange(top_k))
        shared = self._touch("shared", results[:, top_k])
        weights = self._touch("weights", weights)
        return self._body.combine(states, weights[:, slots], routed[:, slots], shared, layer=layer)

    def _stage(self, stream: int, part: Part, layer: int, began_ps: int) -> None:
        stage = Stage(stream, part.number, layer, began_ps, self._loop.now_ps)
        self.timeline.stages.append(stage)

    # --- drafts -----------------------------------------------------------------------------------

    async def _draft(self, part: Part, states: Array) -> None:
        """The MTP layer over the tokens that were kept, and the next proposals."""
        layer, counts = self._carried, [len(turn.tokens) for turn in part.turns]
        fed = np.cumsum([0, *[len(sequence.fed) for sequence in part.sequences]])
        kept = [begin + i for begin, count in zip(fed.tolist(), counts) for i in range(count)]
        tokens = [token for turn in part.turns for token in turn.tokens]
        fresh = self._touch("fresh", np.array(tokens, dtype=np.int64))
        begun = self._body.mtp_start(states[np.array(kept, dtype=np.int64)], fresh)
        views = [(s.mtp_rows, s.length - s.prompt, s.prompt) for s in part.sequences]
        after = await self._attention(part, begun, layer, views, counts)
        async with self._streams[MOE]:
            after = await self._moe(part, after, layer, part.ranks_of(counts))
        ends = np.cumsum(counts).tolist()
        for sequence, turn, end in zip(part.sequences, part.turns, ends, strict=True):
            ours = after[end - len(turn.tokens) : end]
            turn.fold = self._body.fold_prompt(ours, first_place=sequence.produced - 1)
        self._propose(part, self._body.sample(after[np.array(ends, dtype=np.int64) - 1]))

    def _propose(self, part: Part, sampled: I64) -> None:
        """Proposals for the sequences that go on, right or not as their coins say."""
        pairs = zip(part.sequences, part.turns, sampled.tolist(), strict=True)
        on = [each for each in pairs if each[0].produced + len(each[1].tokens) < each[0].total]
        ends = [sequence.length + len(turn.tokens) for sequence, turn, _ in on]
        ahead = drafts.tokens_ahead(
            self._body,
            np.array([turn.tokens[-1] for _, turn, _ in on], dtype=np.int64),
            places=np.array(ends, dtype=np.int64),
            rows=[list(sequence.rows[:, :end]) for (sequence, _, _), end in zip(on, ends)],
        )
        for (sequence, turn, draft), true in zip(on, ahead.tokens.tolist(), strict=True):
            right = drafts.coin(
                self._decoding.seed,
                request=sequence.request,
                index=sequence.produced + len(turn.tokens),
                accept=self._decoding.chance,
            )
            turn.draft = drafts.propose(draft, true=true, right=right)


async def _together(work: list[Coroutine[Any, Any, None]]) -> None:
    """All of it; the first error ends the rest and is raised itself."""
    try:
        async with asyncio.TaskGroup() as group:
            for number, each in enumerate(work):
                group.create_task(each, name=f"micro-batch {number}")
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
