"""The store's server: one per node, on its CPUs, backed by the node's disk.

Owns the engine's writer thread and the index of what is durable *now* in virtual time. A put is known
from the instant at which its modelled write ends; whether the host's disk was faster can change
nothing. What the disk refuses to keep, or gives back damaged, is not held: a store may forget. Does
not own placement: clients know the owner.
"""

from __future__ import annotations

import concurrent.futures

from cmnet.errors import OperationError
from cmnet.launch.agent import Context
from nodes.ems import device, record
from nodes.ems.engine import Durability, Engine
from nodes.post import Post, Reply
from nodes.serving.messages import Found, Get, Lookup, Put, Value

NAMESPACE = 1


class StoreServer:
    """Answers look-ups, gets and puts of one node."""

    def __init__(self, context: Context, post: Post) -> None:
        self._context = context
        self._loop = context.loop
        # a host that loses power is no fault of the emulated machine: kill -9 loses nothing
        self._engine = Engine(
            context.disk / "ems", node_id=context.name, durability=Durability.PROCESS
        )
        if context.undo_window is not None:
            self._engine.undo_after(context.undo_window - 1)
        self._durable = set(self._engine.keys())
        self._writing: set[bytes] = set()
        self._writer = concurrent.futures.ThreadPoolExecutor(1, "ems-writer")
        self._write_ids = context.incarnation << 40
        self.counts = {"lookups": 0, "hits": 0, "gets": 0, "puts": 0, "corrupt": 0, "refused": 0}
        post.serve(Lookup, self._look_up)
        post.serve(Get, self._get)
        post.on(Put, self._put)

    def _look_up(self, message: Lookup, _: bytes, reply: Reply) -> None:
        held = tuple(key in self._durable for key in message.keys)
        self.counts["lookups"] += len(held)
        self.counts["hits"] += sum(held)
        reply(Found(held), b"", 0)

    def _get(self, message: Get, _: bytes, reply: Reply) -> None:
        self.counts["gets"] += 1
        found = self._read(message.key)
        if found is None:
            reply(Value(held=False), b"", 0)
            return
        charged_bytes = found.header.charged_bytes
        at_ps = self._loop.now_ps + device.get_duration_ps(charged_bytes)
        self._loop.call_at_ps(at_ps, reply, Value(held=True), found.payload, charged_bytes)

    def _read(self, key: bytes) -> record.Record | None:
        if key not in self._durable:
            return None
        try:
            return record.join(key, self._engine.get)
        except OperationError:
            self.counts["corrupt"] += 1
            self._durable.discard(key)
            return None

    def _put(self, message: Put, payload: bytes, _: int) -> None:
        key = message.key
        if key in self._durable or key in self._writing:
            return  # keys name their content
        self.counts["puts"] += 1
        self._writing.add(key)
        self._write_ids += 1
        header = record.Header(
            namespace_id=NAMESPACE,
            epoch=1,
            write_id=self._write_ids,
            raw_bytes=len(payload),
            charged_bytes=message.charged_bytes,
        )
        items = list(record.split(key, header, payload))
        self._context.spawn(self._write(key, items, message.charged_bytes), "put")

    async def _write(
        self, key: bytes, items: list[tuple[bytes, bytes]], charged_bytes: int
    ) -> None:
        try:
            await self._loop.hold(
                self._put_many,
                items,
                self._context.window,
                duration_ps=device.put_duration_ps(charged_bytes),
                executor=self._writer,
                on_disk=True,
            )
            self._durable.add(key)
        except OperationError:
            self.counts["refused"] += 1
        finally:
            self._writing.discard(key)

    def _put_many(self, items: list[tuple[bytes, bytes]], window: int) -> None:
        self._engine.put_many(items, grant=window)
