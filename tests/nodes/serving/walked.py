"""Decode steps of the mini machine's group without leader, gateway or prefill. Test code only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from cmnet.launch.agent import Context
from cmnet.testing import LocalMachine
from cmnet.units import PS_PER_S
from nodes.model import bodies
from nodes.moe import placement
from nodes.moe.exchange import Exchange
from nodes.moe.experts import Experts
from nodes.moe.layer import Group
from nodes.moe.operators import Operators
from nodes.serving import messages
from nodes.serving.cost import DecodeCost, Load
from nodes.serving.decoding import Decoding
from nodes.serving.sequences import Sequence, Turn
from nodes.serving.walk import Walk
from tests.nodes.serving import local

MACHINE = local.mini()
DECODE = MACHINE.roles.decode
DIES = MACHINE.dies_per_node
RANKS = len(DECODE) * DIES


class Walked(msgspec.Struct):
    """What one node did."""

    steps_ps: list[int]
    statistics: dict[str, Any]
    turns: list[list[tuple[Sequence, Turn]]]


def walk(
    decoding: Decoding,
    folder: Path,
    *,
    sequences: int,
    kv_tokens: int,
    steps: int = 1,
    counts: dict[int, int] | None = None,
) -> dict[int, Walked]:
    """Steps of so many sequences a rank (``counts``: of some ranks another number)."""
    job = local.job_of(MACHINE, [], decoding=decoding)
    body = bodies.make(job.body, job.model)
    found: dict[int, Walked] = {}

    async def program(context: Context) -> None:
        if context.process not in DECODE:
            return
        first = DECODE.index(context.process) * DIES
        ranks = list(range(first, first + DIES))
        node = _Node(context, body, job, batch=sequences * decoding.queries)
        held = [
            _sequence(body, rank, number, kv_tokens)
            for rank in ranks
            for number in range((counts or {}).get(rank, sequences))
        ]
        load = Load(sequences=sequences, queries=decoding.queries, kv_tokens=sequences * kv_tokens)
        turns, began_ps, steps_ps = [], 0, []
        for number in range(steps):
            node.begin(number + 1)
            began_ps = context.loop.now_ps
            turns.append(await node.walk.run((1, number + 1), load, ranks=ranks, sequences=held))
            steps_ps.append(context.loop.now_ps - began_ps)
            for sequence, turn in turns[-1]:
                sequence.commit(turn)
            await context.loop.sleep_until_ps((number + 1) * PS_PER_S)
        found[context.process] = Walked(steps_ps, node.walk.timeline.statistics(), turns)
        if len(found) == len(DECODE):
            context.finish()

    LocalMachine(MACHINE, folder=folder, seed=1).run(program)
    return found


class _Node:
    """Both sides of the exchange at a node, and its walk."""

    def __init__(self, context: Context, body: Any, job: Any, *, batch: int) -> None:
        cost = DecodeCost(dies=320, model=job.model)  # one expert a die, also where it is carried
        operators = Operators(ep_size=RANKS, model=job.model)
        self._exchange = Exchange(
            context,
            body,
            job.scale,
            devices=tuple(die for node in DECODE for die in MACHINE.dies(node)),
            operators=operators,
            timeout_ps=PS_PER_S,
        )
        self.walk = Walk(
            context.loop,
            self._exchange,
            body,
            cost=cost,
            operators=operators,
            decoding=job.decoding,
            touch=_untouched,
        )
        experts = Experts(
            context.loop,
            self._exchange,
            body,
            operators,
            expert_ps=lambda *, rows, experts: cost.expert_ps(
                rows=rows, experts=min(experts, 1), microbatch=job.decoding.microbatch
            ),
            layer_of=self.walk.layer_of,
            touch=_untouched,
        )
        context.spawn(experts.run(), "experts")
        everybody = np.arange(RANKS)
        placed = placement.initial(
            experts=job.model.routed_experts, ep_size=RANKS, redundant=0, shared_ranks=0
        )
        self._group = Group(sources=everybody, experts=everybody, placements=(placed,), batch=batch)

    def begin(self, number: int) -> None:
        """A step."""
        self._exchange.begin(1, number, self._group)


def _sequence(body: Any, rank: int, number: int, kv_tokens: int) -> Sequence:
    request = 1000 * rank + number
    count = kv_tokens // body.settings.tokens_per_carried
    seeds = np.arange(count, dtype=np.uint64) + np.uint64(request)
    none = body.rows_from_bytes(b"").reshape(body.settings.carried_layers, 0)
    rows = body.prefill(seeds, cached_rows=none).rows
    message = messages.Rows(request, 0, rank, kv_tokens, 50, request % 97, count, 0)
    return Sequence(message, rows)


def _untouched(_: str, items: Any) -> Any:
    return items
