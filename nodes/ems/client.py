"""The store's client in a prefill instance: where keys live, leading blocks, puts.

Owns no data. The owner of a key is known from the view; a server that does not answer in time counts
as a miss. Only leading blocks count: the first that is missing ends the prefix. So many gets and so many
puts are on their way at a time; the others wait in virtual time, first come first served.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from cmnet.errors import OperationError, PeerDeadError
from cmnet.launch.agent import Context
from cmnet.topology.machine import Plane
from nodes.ems.placement import View, slot_of
from nodes.post import Post
from nodes.serving.messages import Found, Get, Lookup, Put, Value

GETS_AT_ONCE = 16
"""Blocks that an instance loads at a time: enough to keep a die's port busy (assumed)."""
PUTS_AT_ONCE = 16
"""Blocks that it stores at a time: likewise (assumed)."""
PUTS_WAITING_MAX = 256
"""The blocks of the longest prompt. Who has more on their way awaits ``room``."""


class StoreClient:
    """Looks up, loads and stores blocks by key."""

    def __init__(self, context: Context, post: Post, view: View, *, timeout_ps: int) -> None:
        machine = context.machine
        self._context = context
        self._post = post
        self._view = view
        self._timeout_ps = timeout_ps
        self._die = machine.dies(context.process)[0]
        self._nodes = {process.name: process.index for process in machine.processes}
        self._machine = machine
        self._gets = asyncio.Semaphore(GETS_AT_ONCE)
        self._puts = asyncio.Semaphore(PUTS_AT_ONCE)
        self._puts_open = 0
        self._put_over = asyncio.Event()
        self.puts_lost = 0

    def _device(self, key: bytes) -> int:
        node = self._nodes[self._view.owner(key)]
        cpus = self._machine.cpus(node)
        return cpus[slot_of(key) % len(cpus)]

    async def load_prefix(self, keys: Sequence[bytes]) -> list[bytes]:
        """Values of the leading keys that the store holds."""
        if not keys:
            return []
        held = await self._look_up(keys)
        leading = 0
        while leading < len(keys) and held.get(keys[leading], False):
            leading += 1
        async with asyncio.TaskGroup() as group:
            loads = [group.create_task(self._get(key)) for key in keys[:leading]]
        values = []
        for load in loads:
            value = load.result()
            if value is None:
                break
            values.append(value)
        return values

    async def _look_up(self, keys: Sequence[bytes]) -> dict[bytes, bool]:
        by_device: dict[int, list[bytes]] = {}
        for key in keys:
            by_device.setdefault(self._device(key), []).append(key)
        held: dict[bytes, bool] = {}
        async with asyncio.TaskGroup() as group:
            for device, some in by_device.items():
                group.create_task(self._look_up_at(device, some, held))
        return held

    async def _look_up_at(self, device: int, keys: list[bytes], held: dict[bytes, bool]) -> None:
        try:
            answer, _ = await self._post.call(
                Plane.UB, self._die, device, Lookup(tuple(keys)), timeout_ps=self._timeout_ps
            )
        except PeerDeadError:
            return
        assert isinstance(answer, Found)
        held.update(zip(keys, answer.held, strict=True))

    async def _get(self, key: bytes) -> bytes | None:
        async with self._gets:
            try:
                answer, payload = await self._post.call(
                    Plane.UB, self._die, self._device(key), Get(key), timeout_ps=self._timeout_ps
                )
            except PeerDeadError:
                return None
        assert isinstance(answer, Value)
        return payload if answer.held else None

    def put(self, key: bytes, value: bytes, charged_bytes: int) -> None:
        """Store a block in the background; one that does not arrive is counted, a store may forget."""
        self._puts_open += 1
        self._context.spawn(self._put(key, value, charged_bytes), "put to the store")

    async def _put(self, key: bytes, value: bytes, charged_bytes: int) -> None:
        try:
            async with self._puts:
                await self._post.complete(
                    Plane.UB,
                    self._die,
                    self._device(key),
                    Put(key, charged_bytes),
                    payload=value,
                    charged_bytes=charged_bytes,
                )
        except OperationError:
            self.puts_lost += 1
        finally:
            self._puts_open -= 1
            self._put_over.set()

    async def room(self) -> None:
        """Wait until no more than ``PUTS_WAITING_MAX`` puts are on their way or wait for it."""
        while self._puts_open > PUTS_WAITING_MAX:
            self._put_over.clear()
            await self._put_over.wait()
