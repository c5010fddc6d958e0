"""The store's client in a prefill instance: where keys live, leading blocks, puts.

Owns no data. The owner of a key is known from the view; a server that does not answer in time counts
as a miss. Only leading blocks count: the first that is missing ends the prefix.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from cmnet.errors import PeerDeadError
from cmnet.launch.agent import Context
from cmnet.topology.machine import Plane
from nodes.ems.placement import View, slot_of
from nodes.post import Post
from nodes.serving.messages import Found, Get, Lookup, Put, Value

GETS_AT_ONCE = 16
"""Blocks that one prompt loads at a time: enough to keep a die's port busy (assumed)."""


class StoreClient:
    """Looks up, loads and stores blocks by key."""

    def __init__(self, context: Context, post: Post, view: View, *, timeout_ps: int) -> None:
        machine = context.machine
        self._loop = context.loop
        self._post = post
        self._view = view
        self._timeout_ps = timeout_ps
        self._die = machine.dies(context.process)[0]
        self._nodes = {process.name: process.index for process in machine.processes}
        self._machine = machine

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
        limit = asyncio.Semaphore(GETS_AT_ONCE)
        async with asyncio.TaskGroup() as group:
            loads = [group.create_task(self._get(key, limit)) for key in keys[:leading]]
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

    async def _get(self, key: bytes, limit: asyncio.Semaphore) -> bytes | None:
        async with limit:
            try:
                answer, payload = await self._post.call(
                    Plane.UB, self._die, self._device(key), Get(key), timeout_ps=self._timeout_ps
                )
            except PeerDeadError:
                return None
        assert isinstance(answer, Value)
        return payload if answer.held else None

    def put(self, key: bytes, value: bytes, charged_bytes: int) -> None:
        """Store a block; nobody waits for it."""
        message = Put(key, charged_bytes)
        self._post.send(
            Plane.UB,
            self._die,
            self._device(key),
            message,
            payload=value,
            charged_bytes=charged_bytes,
        )
