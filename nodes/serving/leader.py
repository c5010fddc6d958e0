"""The leader of the decode group: one step after the other, all ranks together.

Owns which sequences are in the step and when the next one begins. Runs on the first living decode
node. Does not own sequences (``decode``) nor who lives (the gateway): a step whose nodes fail is done
again; when nodes have died, the gateway's next epoch ends this leader and begins another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from cmnet.vtime.loop import VirtualLoop
from nodes.serving import messages

Sequence = tuple[int, int]
"""(request, attempt)"""

FAILURES_MAX = 3
"""Failed steps in a row after which sequences end with an error (assumed)."""


class Leader:
    """Steps of one epoch. ``send`` reaches the control device of a node."""

    def __init__(
        self,
        loop: VirtualLoop,
        epoch: messages.Epoch,
        send: Callable[[int, msgspec.Struct], None],
        *,
        first_number: int,
        node_of_rank: Callable[[int], int],
        sequences_max: int,
        timeout_ps: int,
    ) -> None:
        self._loop = loop
        self._epoch = epoch
        self._send = send
        self.number = first_number
        self._node_of_rank = node_of_rank
        self._sequences_max = sequences_max
        self._timeout_ps = timeout_ps
        self._hellos: set[int] = set()
        self._joined: dict[Sequence, tuple[int, int]] = {}
        """Waiting: sequence -> (rank, KV tokens)."""
        self._active: dict[Sequence, tuple[int, int]] = {}
        self._due: set[int] = set()
        self._error = ""
        self._failures = 0
        self._changed = asyncio.Event()

    def hello(self, message: messages.Hello) -> None:
        """A node is here, with sequences that wait to go on."""
        self._hellos.add(message.node)
        for request, attempt, rank, kv_tokens in message.sequences:
            self._joined[request, attempt] = (rank, kv_tokens)
        self._changed.set()

    def joined(self, message: messages.Joined) -> None:
        """A sequence wants to join."""
        self._joined[message.request, message.attempt] = (message.rank, message.kv_tokens)
        self._changed.set()

    def done(self, message: messages.StepDone) -> None:
        """A node is through with the step."""
        if message.number != self.number:
            return
        for sequence, (rank, _) in list(self._active.items()):
            if self._node_of_rank(rank) == message.node and sequence not in message.active:
                del self._active[sequence]
        self._error = self._error or message.error
        self._due.discard(message.node)
        self._changed.set()

    async def run(self) -> None:
        """Steps for ever; cancelled when the epoch ends."""
        await self._until(lambda: self._hellos >= set(self._epoch.nodes))
        while True:
            await self._until(lambda: bool(self._joined or self._active))
            await self._step(self._admit())

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._changed.clear()
            await self._changed.wait()

    def _admit(self) -> tuple[Sequence, ...]:
        counts: dict[int, int] = {}
        for rank, _ in self._active.values():
            counts[rank] = counts.get(rank, 0) + 1
        admitted = []
        for sequence, (rank, kv_tokens) in list(self._joined.items()):
            if counts.get(rank, 0) < self._sequences_max:
                counts[rank] = counts.get(rank, 0) + 1
                admitted.append(sequence)
                self._active[sequence] = (rank, kv_tokens)
                del self._joined[sequence]
        return tuple(admitted)

    async def _step(self, admitted: tuple[Sequence, ...]) -> None:
        tokens: dict[int, int] = {}
        kv_tokens: dict[int, int] = {}
        for rank, kv in self._active.values():
            tokens[rank] = tokens.get(rank, 0) + 1
            kv_tokens[rank] = kv_tokens.get(rank, 0) + kv
        self.number += 1
        self._error = ""
        step = messages.Step(
            epoch=self._epoch.number,
            number=self.number,
            admitted=admitted,
            sources=tuple(sorted(tokens.items())),
            kv_tokens=max(kv_tokens.values()),
        )
        self._due = {self._node_of_rank(rank) for rank in tokens}
        for node in self._epoch.nodes:
            self._send(node, step)
        timer = self._loop.call_at_ps(self._loop.now_ps + self._timeout_ps, self._late, self.number)
        try:
            await self._until(lambda: not self._due)
        finally:
            timer.cancel()
        if self._error:
            self._failures += 1
            if self._failures == FAILURES_MAX:
                self._give_up()
            return
        self._failures = 0
        for sequence, (rank, kv) in self._active.items():
            self._active[sequence] = (rank, kv + 1)

    def _late(self, number: int) -> None:
        if number == self.number and self._due:
            nodes = ", ".join(map(str, sorted(self._due)[:8]))
            self._error = self._error or f"no end of the step from nodes {nodes}"
            self._due.clear()
            self._changed.set()

    def _give_up(self) -> None:
        """Nobody died, yet steps fail: a link is broken. The requests end with the reason."""
        self._failures = 0
        self._active.clear()
        for node in self._epoch.nodes:
            self._send(node, messages.GiveUp(self._epoch.number, self._error))
