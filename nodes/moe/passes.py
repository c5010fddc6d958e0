"""From one pass to the next: nodes tell each other that they are done, and re-place experts on the way.

Owns the messages between nodes at the end of a pass and the wait for them, and counts loads in pass 0.
Does not own what they lead to (``rebalancing``) nor the weights (``weights``). A message is sent once, over
UB, from a node's first die to every other's; one that does not come ends the pass with an error that names
the node. No time is charged for counting loads and for planning: xDeepServe does both beside the steps
(arXiv 2508.02520, section 4.5).
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np

from cmnet.errors import PeerDeadError
from cmnet.launch.agent import Context
from cmnet.units import format_ps
from nodes.model.body import I64
from nodes.moe import moving, rebalancing
from nodes.moe.job import MoeJob
from nodes.moe.layer import Touch
from nodes.moe.placement import Placement
from nodes.moe.rebalancing import Pass, PassDone, Rebalancing
from nodes.moe.weights import Weights
from planes.ub import Message, Ub

MAILBOX = 2
"""Of the first die of each node."""

TIMEOUTS = 3
"""Waits of a rank that a node may be behind: two for its last combine, and one more."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(PassDone).decode


class Passes:
    """One node's end. ``now`` is what is in force."""

    def __init__(
        self, context: Context, job: MoeJob, placements: tuple[Placement, ...], touch: Touch
    ) -> None:
        """``placements``: the first one of each layer."""
        self._context, self._loop, self._node = context, context.loop, context.process
        of_rank = tuple(context.machine.devices[device].process for device in job.devices)
        self._homes: dict[int, int] = {}
        """First die of each node that has ranks, by process."""
        for device, node in zip(job.devices, of_rank, strict=True):
            self._homes.setdefault(node, device)
        self._ub = Ub(context)
        self._ub.on_message(self._homes[self._node], MAILBOX, self._arrived)
        self._weights = Weights(
            context,
            self._ub,
            job,
            first=of_rank.index(self._node),
            ranks=of_rank.count(self._node),
            placements=placements,
            touch=touch,
        )
        self._rebalancing = Rebalancing(placements, groups=job.model.groups, nodes=of_rank)
        self._loads: I64 = np.zeros((len(placements), placements[0].experts), dtype=np.int64)
        self._came: dict[int, dict[int, PassDone]] = {}
        """Of each pass, by node."""
        self._timeout_ps = TIMEOUTS * job.timeout_ps
        self._waiter: asyncio.Future[None] | None = None
        self._number = 0
        self._stages: list[str] = []

    @property
    def now(self) -> Pass:
        """What is in force in this pass."""
        return self._rebalancing.now

    def begin(self) -> None:
        """A pass begins at this node."""
        again = self._stages[-1:] == [self.now.stage]
        self._stages.append(self.now.stage)
        self._weights.begin(self.now, again=again)

    def count(self, layer: int, experts: I64) -> None:
        """Tokens of this node chose these experts [n, top_k]."""
        if not self._number:
            self._loads[layer] += np.bincount(experts.ravel(), minlength=self._loads.shape[1])

    async def end(self, *, failed: str) -> bool:
        """All ranks of this node have finished the pass; returns when those of all nodes have, and
        whether there is another. ``failed``: why experts had better not move, if anything. Raises
        PeerDeadError that names the nodes of which nothing came."""
        done = PassDone(
            number=self._number,
            node=self._node,
            loads=b"" if self._number else rebalancing.packed(self._loads),
            ready=self._weights.ready,
            failed=self._weights.failed or failed,
        )
        self._take(done)
        for node, home in self._homes.items():
            if node != self._node:
                self._ub.post(self._homes[self._node], home, MAILBOX, _encode(done))
        await self._all()
        came = self._came.pop(self._number)
        self._number += 1
        return self._rebalancing.go_on([came[node] for node in self._homes])

    def _arrived(self, message: Message) -> None:
        self._take(_decode(message.body))

    def _take(self, done: PassDone) -> None:
        self._came.setdefault(done.number, {})[done.node] = done
        if self._waiter is not None and not self._waiter.done() and not self._missing():
            self._waiter.set_result(None)

    def _missing(self) -> list[int]:
        return [node for node in self._homes if node not in self._came.get(self._number, {})]

    async def _all(self) -> None:
        if not self._missing():
            return
        self._waiter = self._loop.create_future()
        timer = self._loop.call_at_ps(self._loop.now_ps + self._timeout_ps, self._gave_up)
        try:
            await self._waiter
        finally:
            timer.cancel()
            self._waiter = None

    def _gave_up(self) -> None:
        assert self._waiter is not None
        names = [self._context.machine.processes[node].name for node in self._missing()]
        what = f"{', '.join(names)} did not end pass {self._number} ({self.now.stage})"
        text = f"{what} within {format_ps(self._timeout_ps)}"
        self._waiter.set_exception(PeerDeadError(text, definite=False))

    def statistics(self) -> dict[str, Any]:
        """For the report: what this node fetched, and what all have planned alike."""
        course, weights = self._rebalancing.course, self._weights
        return {
            "stages": self._stages,
            "moves": 0 if course is None else course.moves,
            "ways": [] if course is None else rebalancing.described(course),
            "gave_up": self._rebalancing.gave_up,
            "fetched": weights.fetched,
            "fetched_bytes": moving.EXPERT_BYTES * weights.fetched,
            "fetch_ps": weights.fetch_ps,
        }
