"""The UB plane: one-sided reads, writes and atomics, flags, and messages into mailboxes (design 2.3).

Owns what a program calls, and the operations at their initiator. Does not own ports and link retry
(``cmnet.fabric``), the serving of operations (``planes.ub_target``), the bytes (``planes.memory``),
chunks (``planes.bulk``) nor flags' values (``planes.flags``).

Order. UB does not restore the order of writes that rules delay. A flag is never visible before what its
source wrote to the same target before it: it enters the port after the last of those has (a bulk write
enters chunk by chunk, an engine starts late), and the fabric lets it arrive after all that left before.

Errors. A frame that the link gave up on (3 tries of 1 us) ends its operation with LinkError: its write
is not visible at all, also one of many chunks; flags that were posted by then are withdrawn, so they do
not become visible either. Once the error was raised, later flags pass. A *posted* operation reports
nothing: after it has failed, flags to that target are withdrawn until ``forgive``. A corrupt frame is
seen by the link's checksum: one more try, as for a lost one. Copies are refused by the link layer. An
operation whose completion does not come ends with PeerDeadError, indefinite.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cmnet.launch.agent import Context
from cmnet.messages import Arrival, Payload
from cmnet.topology.machine import Engine, Plane
from cmnet.wire.frames import FLAG_COPY
from planes import ub_frames
from planes.bulk import CHUNK, Assemblies, Flow, pieces
from planes.flags import Accept, Flags
from planes.memory import Memory
from planes.ub_frames import Message as Message
from planes.ub_order import COMPLETION_TIMEOUT_PS, UbPair, Waited
from planes.ub_target import Handler, Target


class Ub:
    """The UB plane of one process. Make one before anything is sent to the process."""

    def __init__(self, context: Context, memory: Memory | None = None) -> None:
        self.memory = Memory() if memory is None else memory
        self.flags = Flags(context.loop.create_future)
        self._fabric = context.fabric
        self._loop = context.loop
        machine = context.machine
        self._engines = machine.engines
        self._aiv = machine.engines["aiv"]
        self._aiv_is_plain = not self._aiv.start_ps and self._aiv.rate_num == self._aiv.rate_den
        self._chunk_bytes = machine.chunk_bytes[Plane.UB]
        self._devices_count = len(machine.devices)
        self._pairs: dict[int, UbPair] = {}
        self._waited: dict[int, Waited] = {}
        self._assemblies = Assemblies()
        self._number = context.incarnation << 40
        self._copies = 0
        self._target = Target(
            self._fabric,
            memory=self.memory,
            flags=self.flags,
            pair=self._pair,
            next_number=self._next_number,
        )
        self._bind()

    def _bind(self) -> None:
        target = self._target
        for kind, handler in (
            (ub_frames.WRITE, target.write_arrived),
            (ub_frames.MESSAGE, target.message_arrived),
            (ub_frames.FLAG, target.flag_arrived),
            (ub_frames.READ, target.read_arrived),
            (ub_frames.ATOMIC, target.atomic_arrived),
            (ub_frames.BULK, self._chunk_arrived),
            (ub_frames.DATA, self._data_arrived),
            (ub_frames.DONE, self._done_arrived),
            (ub_frames.ABORT, self._abort_arrived),
        ):
            self._fabric.bind(kind, self._once(handler))
        self._fabric.on_forgotten(self._peer_forgotten)

    def _once(self, handler: Callable[[Arrival], None]) -> Callable[[Arrival], None]:
        def handle(arrival: Arrival) -> None:
            if arrival.flags & FLAG_COPY:
                self._copies += 1
            else:
                handler(arrival)

        return handle

    # --- one-sided operations ---------------------------------------------------------------------

    async def write(
        self,
        *,
        source: int,
        target: int,
        region: int,
        offset: int = 0,
        data: Payload = b"",
        charged_bytes: int | None = None,
        engine: str = "aiv",
    ) -> None:
        """Write into a region and wait until it is known to be visible there.

        ``charged_bytes`` None charges what is carried. Raises LinkError, MemoryRangeError (both
        definite), PeerDeadError (indefinite).
        """
        waited = self._open(source, target, "write")
        head = ub_frames.WRITE_HEAD.pack(waited.number, region, offset)
        charged_bytes = len(data) if charged_bytes is None else charged_bytes
        mover = self._engines[engine]
        self._put(waited.pair, ub_frames.WRITE, head, data, charged_bytes, mover, waited)
        await self._end(waited)

    def post_write(
        self,
        *,
        source: int,
        target: int,
        region: int,
        offset: int = 0,
        data: Payload = b"",
        charged_bytes: int | None = None,
        engine: str = "aiv",
    ) -> None:
        """Write and never hear of it. Who posts more than one collective awaits ``room``."""
        pair = self._pair(source, target)
        head = ub_frames.WRITE_HEAD.pack(0, region, offset)
        charged_bytes = len(data) if charged_bytes is None else charged_bytes
        self._put(pair, ub_frames.WRITE, head, data, charged_bytes, self._engines[engine], None)

    async def read(
        self,
        *,
        source: int,
        target: int,
        region: int,
        offset: int = 0,
        charged_bytes: int,
        engine: str = "aiv",
    ) -> bytes:
        """Read from the target's region into the source; returns what the range carries, as it is
        when the request is there. Raises as ``write``."""
        waited = self._open(source, target, "read")
        mover = self._engines[engine]
        rate_bps = ub_frames.engine_rate_bps(mover, waited.pair.reads)
        head = ub_frames.READ_HEAD.pack(waited.number, region, offset, charged_bytes, rate_bps)
        return await self._ask(waited, ub_frames.READ, head, mover)

    async def atomic_add(
        self, *, source: int, target: int, region: int, offset: int, amount: int
    ) -> int:
        """Add to the word (8 bytes, signed, all carried) at the offset, once, in order of delivery;
        returns what it was. Costs a read of a word. A LinkError here may be indefinite."""
        waited = self._open(source, target, "atomic_add")
        head = ub_frames.ATOMIC_HEAD.pack(waited.number, region, offset, amount)
        data = await self._ask(waited, ub_frames.ATOMIC, head, self._aiv)
        old: int = ub_frames.WORD.unpack(data)[0]
        return old

    # --- flags ------------------------------------------------------------------------------------

    def post_flag(self, source: int, target: int, flag: int, value: int) -> None:
        """Set a flag of the target: visible after all that was written there before."""
        pair = self._pair(source, target)
        number = self._next_number()
        pair.flag(number, ub_frames.FLAG_HEAD.pack(flag, value))

    async def wait_flag(self, device: int, flag: int, value: int | Accept) -> int:
        """Poll a flag of an own device until it is at least ``value`` (or is accepted)."""
        if callable(value):
            return await self.flags.wait(device, flag, value)
        return await self.flags.wait(device, flag, lambda seen: seen >= value)

    def forgive(self, source: int, target: int) -> int:
        """Failed posts to the target that nobody was told of; from now on flags pass again."""
        return self._pair(source, target).forgive()

    # --- messages ---------------------------------------------------------------------------------

    def on_message(self, device: int, mailbox: int, handler: Handler) -> None:
        """Messages to this mailbox of an own device go to ``handler`` when wholly delivered."""
        assert (device, mailbox) not in self._target.mailboxes, (device, mailbox)
        self._target.mailboxes[device, mailbox] = handler

    def post(
        self,
        source: int,
        target: int,
        mailbox: int,
        body: bytes = b"",
        payload: Payload = b"",
        charged_bytes: int | None = None,
    ) -> None:
        """Write a message into a mailbox and never hear of it. Messages of more than a chunk may be
        overtaken by later ones."""
        self._put(
            self._pair(source, target),
            ub_frames.MESSAGE,
            ub_frames.MESSAGE_HEAD.pack(0, mailbox) + body,
            payload,
            len(body) + len(payload) if charged_bytes is None else charged_bytes,
            self._aiv,
            None,
        )

    async def send(
        self,
        source: int,
        target: int,
        mailbox: int,
        body: bytes = b"",
        payload: Payload = b"",
        charged_bytes: int | None = None,
    ) -> None:
        """Write a message into a mailbox and wait until it is known to be there. Raises as ``write``;
        MemoryRangeError where the target has no such mailbox."""
        waited = self._open(source, target, "message")
        self._put(
            waited.pair,
            ub_frames.MESSAGE,
            ub_frames.MESSAGE_HEAD.pack(waited.number, mailbox) + body,
            payload,
            len(body) + len(payload) if charged_bytes is None else charged_bytes,
            self._aiv,
            waited,
        )
        await self._end(waited)

    async def room(self, source: int, target: int, charged_bytes: int) -> None:
        """Wait, in virtual time and first come first served, until the source's port takes more."""
        await self._fabric.room(self._pair(source, target).writes, charged_bytes)

    def statistics(self) -> dict[str, int]:
        """Counters, JSON-able: what was refused, copies that the link layer refused, what waits."""
        return {
            "refused": self._target.refused,
            "copies_refused": self._copies,
            "operations_waiting": len(self._waited),
            "bulk_incoming": len(self._assemblies),
        }

    # --- sending ----------------------------------------------------------------------------------

    def _next_number(self) -> int:
        self._number += 1
        return self._number

    def _pair(self, source: int, target: int) -> UbPair:
        key = source * self._devices_count + target
        pair = self._pairs.get(key)
        if pair is None:
            pair = self._pairs[key] = UbPair(self._fabric, source, target)
        return pair

    def _open(self, source: int, target: int, what: str) -> Waited:
        pair = self._pair(source, target)
        waited = Waited(self._fabric, self._next_number(), pair, what)
        self._waited[waited.number] = waited
        return waited

    async def _end(self, waited: Waited) -> bytes:
        try:
            return await waited.future
        finally:
            del self._waited[waited.number]
            waited.close()

    def _put(
        self,
        pair: UbPair,
        kind: int,
        head: bytes,
        data: Payload,
        charged_bytes: int,
        engine: Engine,
        waited: Waited | None,
    ) -> None:
        """One frame at once, or what takes longer to be in the port: a flow, an engine's start."""
        if charged_bytes <= self._chunk_bytes and engine is self._aiv and self._aiv_is_plain:
            self._fabric.send(
                pair.writes,
                kind,
                charged_bytes=charged_bytes,
                body=head,
                payload=data,
                started=None if waited is None else waited.started,
            )
            return
        flow = self._flow(pair, bytes((kind,)) + head, data, charged_bytes, engine, waited)
        self._after(engine.start_ps, flow.begin)

    def _flow(
        self,
        pair: UbPair,
        head: bytes,
        data: Payload,
        charged_bytes: int,
        engine: Engine,
        waited: Waited | None,
    ) -> Flow:
        number = self._next_number()

        def ended(sent: bool) -> None:
            if not sent:
                self._abort(pair, number)
            if waited is not None:
                waited.started(sent)

        pair.opened(number)
        return Flow(
            self._fabric,
            pair.writes,
            ub_frames.BULK,
            number=number,
            head=head,
            piece=pieces(data, charged_bytes=charged_bytes, chunk_bytes=self._chunk_bytes),
            charged_bytes=charged_bytes,
            rate_bps=ub_frames.engine_rate_bps(engine, pair.writes),
            queued=lambda: pair.closed(number),
            ended=ended,
        )

    def _abort(self, pair: UbPair, flow: int) -> None:
        """Tell the target to forget the chunks that it has; once, when they surely are all there."""
        route = pair.writes
        body = ub_frames.NUMBER.pack(flow)

        def tell() -> None:
            delay_ps = route.path.propagation_ps
            self._fabric.signal(route, ub_frames.ABORT, delay_ps=delay_ps, body=body)

        self._loop.call_at_ps(self._loop.now_ps + COMPLETION_TIMEOUT_PS, tell)

    async def _ask(self, waited: Waited, kind: int, head: bytes, engine: Engine) -> bytes:
        """A request of no charged bytes; its answer is data."""
        self._after(engine.start_ps, self._request, waited, kind, head)
        return await self._end(waited)

    def _request(self, waited: Waited, kind: int, head: bytes) -> None:
        route = waited.pair.reads
        self._fabric.send(route, kind, charged_bytes=0, body=head, started=waited.started)

    def _after(self, delay_ps: int, call: Callable[..., Any], *args: Any) -> None:
        if delay_ps:
            self._loop.call_at_ps(self._loop.now_ps + delay_ps, call, *args)
        else:
            call(*args)

    # --- arriving ---------------------------------------------------------------------------------

    def _chunk_arrived(self, arrival: Arrival) -> None:
        body = arrival.body
        kind = body[CHUNK.size]
        if kind == ub_frames.DATA:
            waited = self._waited.get(ub_frames.NUMBER.unpack_from(body, CHUNK.size + 1)[0])
            if waited is not None:
                waited.progress_ps = self._loop.now_ps
        whole = self._assemblies.add(arrival)
        if whole is None:
            return
        head, data = whole.head[1:], whole.payload()
        if kind == ub_frames.DATA:
            self._data_is_here(head, data)
        elif kind == ub_frames.WRITE:
            self._target.store(arrival.source, arrival.target, head, data, whole.charged_bytes)
        else:
            self._target.hand_over(arrival.source, arrival.target, head, data, whole.charged_bytes)

    def _peer_forgotten(self, devices: set[int], coming: list[Arrival]) -> None:
        bulk = (one for one in coming if one.kind == ub_frames.BULK)
        self._assemblies.forget(devices, (one for one in bulk if not one.flags & FLAG_COPY))

    def _abort_arrived(self, arrival: Arrival) -> None:
        self._assemblies.drop(arrival.source, ub_frames.NUMBER.unpack(arrival.body)[0])

    def _data_arrived(self, arrival: Arrival) -> None:
        self._data_is_here(arrival.body, bytes(arrival.payload))

    def _data_is_here(self, head: bytes, data: bytes) -> None:
        waited = self._waited.get(ub_frames.NUMBER.unpack(head)[0])
        if waited is not None:
            self._after(waited.pair.reads.path.completion_ps, waited.succeed, data)

    def _done_arrived(self, arrival: Arrival) -> None:
        number, status = ub_frames.DONE_HEAD.unpack(arrival.body)
        waited = self._waited.get(number)
        if waited is not None:
            waited.completed(status)
