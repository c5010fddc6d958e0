"""The leader of the decode group: one step after the other, all ranks together.

Owns which sequences are in the step and when the next one begins. Runs on the first living decode
node. Does not own sequences (``decode``) nor who lives (the gateway): a step that fails is done again
after a pause; when nodes have died, the gateway's next epoch ends this leader and begins another; when
nobody has and steps keep failing, the sequences end with the reason. Steps and their ends may be lost:
a node's answer is what confirms that it knows of a sequence.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable

import msgspec

from cmnet.vtime.loop import VirtualLoop
from nodes.serving import messages
from nodes.serving.settings import ServingSettings

Sequence = tuple[int, int]
"""(request, attempt)"""
Send = Callable[[int, msgspec.Struct], None]
"""(node, message)"""


class Leader:
    """Steps of one epoch. ``send`` reaches the control device of a node, ``assure`` for certain."""

    def __init__(
        self,
        loop: VirtualLoop,
        epoch: messages.Epoch,
        *,
        send: Send,
        assure: Send,
        node_of_rank: Callable[[int], int],
        settings: ServingSettings,
    ) -> None:
        self._loop = loop
        self._epoch = epoch
        self._send = send
        self._assure = assure
        self._node_of_rank = node_of_rank
        self._sequences_max = settings.decode_sequences_max.amount
        self._timeout_ps = 2 * settings.step_timeout.amount
        self._tries = settings.step_tries.amount
        self._pause_ps = settings.step_pause.amount
        self.number = 0
        """Of the step in progress, from 1."""
        self._hellos: set[int] = set()
        self._joined: dict[Sequence, tuple[int, int]] = {}
        """Waiting: sequence -> (rank, KV tokens)."""
        self._active: dict[Sequence, tuple[int, int]] = {}
        self._unconfirmed: dict[Sequence, None] = {}
        """Active ones of whose admission their node has not said that it knows."""
        self._due: set[int] = set()
        self._error = ""
        self._failures = 0
        self._changed = asyncio.Event()

    def hello(self, message: messages.Hello) -> None:
        """A node is here, with sequences that wait to go on."""
        self._hellos.add(message.node)
        for request, attempt, rank, kv_tokens in message.sequences:
            self._join((request, attempt), rank, kv_tokens)
        self._changed.set()

    def joined(self, message: messages.Joined) -> None:
        """A sequence wants to join; said twice changes nothing."""
        self._join((message.request, message.attempt), message.rank, message.kv_tokens)
        self._changed.set()

    def _join(self, sequence: Sequence, rank: int, kv_tokens: int) -> None:
        if sequence not in self._active:
            self._joined[sequence] = (rank, kv_tokens)

    def done(self, message: messages.StepDone) -> None:
        """A node is through with the step."""
        if message.number != self.number:
            return
        kv_tokens = {(request, attempt): kv for request, attempt, kv in message.active}
        for sequence, (rank, _) in list(self._active.items()):
            if self._node_of_rank(rank) == message.node:
                self._unconfirmed.pop(sequence, None)
                if sequence in kv_tokens:
                    self._active[sequence] = (rank, kv_tokens[sequence])
                else:
                    del self._active[sequence]
        self._error = self._error or message.error
        self._due.discard(message.node)
        self._changed.set()

    async def run(self) -> None:
        """Steps for ever; cancelled when the epoch ends."""
        await self._until(lambda: self._hellos >= set(self._epoch.nodes))
        while True:
            await self._until(lambda: bool(self._joined or self._active))
            self._admit()
            await self._step()
            await self._judge()

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._changed.clear()
            await self._changed.wait()

    def _admit(self) -> None:
        """Whoever waits and has a place on its rank, first come first served."""
        counts = collections.Counter(rank for rank, _ in self._active.values())
        for sequence, (rank, kv_tokens) in list(self._joined.items()):
            if counts[rank] < self._sequences_max:
                counts[rank] += 1
                self._active[sequence] = (rank, kv_tokens)
                self._unconfirmed[sequence] = None
                del self._joined[sequence]

    async def _step(self) -> None:
        """Begin the next step and wait for its end, or for as long as one may take."""
        sequences: dict[int, int] = {}
        kv_tokens: dict[int, int] = {}
        for rank, kv in self._active.values():
            sequences[rank] = sequences.get(rank, 0) + 1
            kv_tokens[rank] = kv_tokens.get(rank, 0) + kv
        self.number += 1
        self._error = ""
        self._due = {self._node_of_rank(rank) for rank in sequences}
        step = messages.Step(
            epoch=self._epoch.number,
            number=self.number,
            admitted=tuple(self._unconfirmed),
            sources=tuple(sorted(sequences.items())),
            kv_tokens=max(kv_tokens.values()),
        )
        for node in self._epoch.nodes:
            self._send(node, step)
        timer = self._loop.call_at_ps(self._loop.now_ps + self._timeout_ps, self._late)
        try:
            await self._until(lambda: not self._due)
        finally:
            timer.cancel()

    def _late(self) -> None:
        nodes = ", ".join(map(str, sorted(self._due)[:8]))
        self._error = self._error or f"no end of the step from nodes {nodes}"
        self._due.clear()
        self._changed.set()

    async def _judge(self) -> None:
        """The step is over: go on, try again after a pause, or give up."""
        if not self._error:
            self._failures = 0
            return
        self._failures += 1
        if self._failures == self._tries:
            self._give_up()
        await self._loop.sleep_ps(self._pause_ps)

    def _give_up(self) -> None:
        """Nobody died, yet steps fail: a link is broken. The requests end with the reason."""
        self._failures = 0
        self._active.clear()
        self._unconfirmed.clear()
        for node in self._epoch.nodes:
            self._assure(node, messages.GiveUp(self._epoch.number, self.number, self._error))
