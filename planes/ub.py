"""The UB plane: one-sided reads, writes and atomics, flags, and messages into mailboxes (design 2.3).

Owns the operations: their frames, completions, errors, and the order of flags. A target serves without
its program. Does not own ports and link retry (``cmnet.fabric``), the bytes (``planes.memory``), chunks
(``planes.bulk``) nor flags' values (``planes.flags``).

Order. UB does not restore the order of writes that rules delay. A flag is never visible before what its
source wrote to the same target before it: it enters the port after the last of those has (a bulk write
enters chunk by chunk, an engine starts late), and the fabric lets it arrive after all that left before.

Errors. A frame that the link gave up on (3 tries of 1 us) ends its operation with LinkError: its write
is not visible, at all, also one of many chunks; flags that were posted after it are withdrawn, so they
do not become visible either. Once the error was raised, later flags pass. A *posted* operation reports
nothing: after it has failed, flags to that target are withdrawn until ``forgive``. A corrupt frame is
what the link's checksum sees: one more try, as a lost one. Copies are refused by the link layer.
An operation whose completion does not come ends with PeerDeadError, indefinite.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable
from typing import Any

from cmnet.errors import LinkError, MemoryRangeError, OperationError, PeerDeadError
from cmnet.launch.agent import Context
from cmnet.messages import Arrival, Payload, Route
from cmnet.topology.machine import Engine, Operation, Plane
from cmnet.units import PS_PER_S, format_ps
from cmnet.wire.frames import FLAG_COPY
from planes.bulk import CHUNK, Assemblies, Flow, pieces
from planes.flags import Accept, Flags
from planes.memory import Memory

WRITE, MESSAGE, FLAG, READ, ATOMIC, BULK, DATA, DONE, ABORT = range(16, 25)
"""Kinds of frames. The UB plane's range is 16 to 31."""

_WRITE = struct.Struct("<QIQ")
"""operation (0: nobody waits), region, offset."""
_MESSAGE = struct.Struct("<QI")
"""operation (0: nobody waits), mailbox; the program's body follows."""
_FLAG = struct.Struct("<Qq")
"""flag, value."""
_READ = struct.Struct("<QIQQQ")
"""operation, region, offset, charged bytes, rate (0: the path's)."""
_ATOMIC = struct.Struct("<QIQq")
"""operation, region, offset, amount."""
_NUMBER = struct.Struct("<Q")
_DONE = struct.Struct("<QB")
"""operation, status."""
_WORD = struct.Struct("<q")

OK, RANGE, LINK = range(3)
"""Status of a completion."""

FLAG_BYTES = 8
"""A flag is a write of one word."""

COMPLETION_TIMEOUT_PS = PS_PER_S
"""Without progress for so long after its last frame started, an operation counts its peer as dead.
Assumed (0.1 to 10 s): far above any queue at an ingress (1 s is 135 GB), far below a person's patience;
the paper does not publish one."""


class Message:
    """A message as its mailbox gets it."""

    __slots__ = ("body", "charged_bytes", "payload", "source", "target")

    def __init__(
        self, source: int, target: int, body: bytes, payload: Payload, charged_bytes: int
    ) -> None:
        self.source = source
        self.target = target
        self.body = body
        self.payload = payload
        self.charged_bytes = charged_bytes


class _Channel:
    """What one device sends to another: the order of flags after writes."""

    __slots__ = ("forgiven", "forgiven_until", "held", "open", "reads", "route")

    def __init__(self, route: Route, reads: Route) -> None:
        self.route = route
        self.reads = reads
        self.open: dict[int, None] = {}
        """Writes, by number, that are not wholly in the port yet."""
        self.held: deque[tuple[int, bytes, int]] = deque()
        """Flags (number, body, fence) that wait for those before them."""
        self.forgiven = 0
        self.forgiven_until = 0


class _Operation:
    """One operation that somebody waits for."""

    __slots__ = ("channel", "failure", "future", "number", "progress_ps", "timer", "ub", "what")

    def __init__(self, ub: Ub, number: int, channel: _Channel, what: str) -> None:
        self.ub = ub
        self.number = number
        self.channel = channel
        self.what = what
        self.failure = 0
        self.progress_ps = 0
        self.timer: asyncio.TimerHandle | None = None
        self.future: asyncio.Future[bytes] = ub.loop.create_future()

    def started(self, sent: bool) -> None:
        """Its last frame left, or one was dropped."""
        loop = self.ub.loop
        if sent:
            self.progress_ps = loop.now_ps
            self._look_again()
        else:
            self.failure = self.channel.route.failures
            self.timer = loop.call_at_ps(loop.now_ps + self.ub.give_up_ps, self._link_failed)

    def _look_again(self) -> None:
        at_ps = self.progress_ps + COMPLETION_TIMEOUT_PS
        if at_ps > self.ub.loop.now_ps:
            self.timer = self.ub.loop.call_at_ps(at_ps, self._look_again)
        else:
            silent = format_ps(COMPLETION_TIMEOUT_PS)
            self.fail(PeerDeadError(f"{self._name()}: no completion in {silent}", definite=False))

    def _link_failed(self) -> None:
        channel = self.channel
        if self.failure > channel.forgiven_until:
            channel.forgiven += 1
        self.fail(LinkError(f"{self._name()}: the link gave up", definite=True))

    def completed(self, status: int) -> None:
        """The target's answer, when it is not data."""
        if status == OK:
            self.succeed(b"")
        elif status == RANGE:
            what = f"{self._name()}: outside of what the target has registered"
            self.fail(MemoryRangeError(what, definite=True))
        else:
            what = f"{self._name()}: the link gave up the answer"
            self.fail(LinkError(what, definite=self.what == "read"))

    def succeed(self, data: bytes) -> None:
        if not self.future.done():
            self.future.set_result(data)

    def fail(self, error: OperationError) -> None:
        if not self.future.done():
            self.future.set_exception(error)

    def _name(self) -> str:
        devices, route = self.ub.fabric.machine.devices, self.channel.route
        return f"{self.what} from {devices[route.source].name} to {devices[route.target].name}"


class Ub:
    """The UB plane of one process. Make one before anything is sent to the process."""

    def __init__(self, context: Context, memory: Memory | None = None) -> None:
        self.fabric = context.fabric
        self.loop = context.loop
        self.memory = Memory() if memory is None else memory
        self.flags = Flags(self.loop.create_future)
        machine = context.machine
        self.give_up_ps = machine.ub_retry.tries * machine.ub_retry.delay_ps
        self._engines = machine.engines
        self._aiv = machine.engines["aiv"]
        self._aiv_is_plain = not self._aiv.start_ps and self._aiv.rate_num == self._aiv.rate_den
        self._chunk_bytes = machine.chunk_bytes[Plane.UB]
        self._devices_count = len(machine.devices)
        self._channels: dict[int, _Channel] = {}
        self._operations: dict[int, _Operation] = {}
        self._mailboxes: dict[tuple[int, int], Callable[[Message], None]] = {}
        self._assemblies = Assemblies()
        self._number = context.incarnation << 40
        self._refused = self._copies = 0
        self._bind()

    def _bind(self) -> None:
        once = self._once
        self.fabric.bind(WRITE, once(self._write_arrived))
        self.fabric.bind(MESSAGE, once(self._message_arrived))
        self.fabric.bind(FLAG, once(self._flag_arrived))
        self.fabric.bind(READ, once(self._read_arrived))
        self.fabric.bind(ATOMIC, once(self._atomic_arrived))
        self.fabric.bind(BULK, once(self._chunk_arrived))
        self.fabric.bind(DATA, once(self._data_arrived))
        self.fabric.bind(DONE, self._done_arrived)
        self.fabric.bind(ABORT, self._abort_arrived)

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
        operation = self._open(source, target, "write")
        head = _WRITE.pack(operation.number, region, offset)
        await self._put_and_wait(operation, WRITE, head, data, charged_bytes, engine)

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
        head = _WRITE.pack(0, region, offset)
        channel = self._channel(source, target)
        self._put(channel, WRITE, head, data, charged_bytes, self._engines[engine], None)

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
        operation = self._open(source, target, "read")
        mover = self._engines[engine]
        rate_bps = _rate_bps(mover, operation.channel.reads)
        head = _READ.pack(operation.number, region, offset, charged_bytes, rate_bps)
        return await self._ask(operation, READ, head, mover)

    async def atomic_add(
        self, *, source: int, target: int, region: int, offset: int, amount: int
    ) -> int:
        """Add to the word (8 bytes, signed, all carried) at the offset, once, in order of delivery;
        returns what it was. Costs a read of a word. A LinkError here may be indefinite."""
        operation = self._open(source, target, "atomic_add")
        head = _ATOMIC.pack(operation.number, region, offset, amount)
        old: int = _WORD.unpack(await self._ask(operation, ATOMIC, head, self._aiv))[0]
        return old

    # --- flags ------------------------------------------------------------------------------------

    def post_flag(self, source: int, target: int, flag: int, value: int) -> None:
        """Set a flag of the target: visible after all that was written there before."""
        channel = self._channel(source, target)
        body = _FLAG.pack(flag, value)
        if channel.open or not self._aiv_is_plain:
            self._number += 1
            channel.held.append((self._number, body, channel.forgiven))
            self._after(self._aiv.start_ps, self._release, channel)
        else:
            self.fabric.send(
                channel.route, FLAG, charged_bytes=FLAG_BYTES, body=body, fence=channel.forgiven
            )

    async def wait_flag(self, device: int, flag: int, value: int | Accept) -> int:
        """Poll a flag of an own device until it is at least ``value`` (or is accepted)."""
        if callable(value):
            return await self.flags.wait(device, flag, value)
        return await self.flags.wait(device, flag, lambda seen: seen >= value)

    def forgive(self, source: int, target: int) -> int:
        """Failed posts to the target that nobody was told of; from now on flags pass again."""
        channel = self._channel(source, target)
        unknown = channel.route.failures - channel.forgiven
        channel.forgiven = channel.forgiven_until = channel.route.failures
        return unknown

    # --- messages ---------------------------------------------------------------------------------

    def on_message(self, device: int, mailbox: int, handler: Callable[[Message], None]) -> None:
        """Messages to this mailbox of an own device go to ``handler`` when wholly delivered."""
        assert (device, mailbox) not in self._mailboxes, (device, mailbox)
        self._mailboxes[device, mailbox] = handler

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
            self._channel(source, target),
            MESSAGE,
            _MESSAGE.pack(0, mailbox) + body,
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
        operation = self._open(source, target, "message")
        head = _MESSAGE.pack(operation.number, mailbox) + body
        charged_bytes = len(body) + len(payload) if charged_bytes is None else charged_bytes
        await self._put_and_wait(operation, MESSAGE, head, payload, charged_bytes, "aiv")

    async def room(self, source: int, target: int, charged_bytes: int) -> None:
        """Wait, in virtual time and first come first served, until the source's port takes more."""
        await self.fabric.room(self._channel(source, target).route, charged_bytes)

    # --- at the initiator -------------------------------------------------------------------------

    def _channel(self, source: int, target: int) -> _Channel:
        key = source * self._devices_count + target
        channel = self._channels.get(key)
        if channel is None:
            channel = self._channels[key] = _Channel(
                self.fabric.route(Plane.UB, Operation.WRITE, source, target),
                self.fabric.route(Plane.UB, Operation.READ, source, target),
            )
        return channel

    def _open(self, source: int, target: int, what: str) -> _Operation:
        channel = self._channel(source, target)
        self._number += 1
        operation = _Operation(self, self._number, channel, what)
        self._operations[operation.number] = operation
        return operation

    async def _finish(self, operation: _Operation) -> bytes:
        try:
            return await operation.future
        finally:
            del self._operations[operation.number]
            if operation.timer is not None:
                operation.timer.cancel()

    async def _put_and_wait(
        self,
        operation: _Operation,
        kind: int,
        head: bytes,
        data: Payload,
        charged_bytes: int | None,
        engine: str,
    ) -> None:
        mover = self._engines[engine]
        self._put(operation.channel, kind, head, data, charged_bytes, mover, operation)
        await self._finish(operation)

    def _put(
        self,
        channel: _Channel,
        kind: int,
        head: bytes,
        data: Payload,
        charged_bytes: int | None,
        engine: Engine,
        operation: _Operation | None,
    ) -> None:
        """One frame at once, or what takes longer to be in the port: a flow, an engine's start."""
        if charged_bytes is None:
            charged_bytes = len(data)
        if charged_bytes <= self._chunk_bytes and (engine is self._aiv and self._aiv_is_plain):
            self.fabric.send(
                channel.route,
                kind,
                charged_bytes=charged_bytes,
                body=head,
                payload=data,
                started=None if operation is None else operation.started,
            )
            return
        self._number += 1
        channel.open[self._number] = None
        flow = self._flow(channel, kind, head, data, charged_bytes, engine, operation)
        self._after(engine.start_ps, flow.begin)

    def _flow(
        self,
        channel: _Channel,
        kind: int,
        head: bytes,
        data: Payload,
        charged_bytes: int,
        engine: Engine,
        operation: _Operation | None,
    ) -> Flow:
        number = self._number

        def queued() -> None:
            del channel.open[number]
            self._release(channel)

        def ended(sent: bool) -> None:
            if not sent:
                self._abort(channel.route, number)
            if operation is not None:
                operation.started(sent)

        return Flow(
            self.fabric,
            channel.route,
            BULK,
            number=number,
            head=bytes((kind,)) + head,
            piece=pieces(data, charged_bytes=charged_bytes, chunk_bytes=self._chunk_bytes),
            charged_bytes=charged_bytes,
            rate_bps=_rate_bps(engine, channel.route),
            queued=queued,
            ended=ended,
        )

    def _abort(self, route: Route, flow: int) -> None:
        delay_ps = max(self.give_up_ps, route.path.propagation_ps)
        self.fabric.signal(route, ABORT, delay_ps=delay_ps, body=_NUMBER.pack(flow))

    def _release(self, channel: _Channel) -> None:
        held, open_ = channel.held, channel.open
        while held and not (open_ and next(iter(open_)) < held[0][0]):
            _, body, fence = held.popleft()
            self.fabric.send(channel.route, FLAG, charged_bytes=FLAG_BYTES, body=body, fence=fence)

    async def _ask(self, operation: _Operation, kind: int, head: bytes, engine: Engine) -> bytes:
        """A request of no charged bytes; its answer is data."""
        self._after(engine.start_ps, self._request, operation, kind, head)
        return await self._finish(operation)

    def _request(self, operation: _Operation, kind: int, head: bytes) -> None:
        self.fabric.send(
            operation.channel.reads, kind, charged_bytes=0, body=head, started=operation.started
        )

    def _after(self, delay_ps: int, call: Callable[..., Any], *args: Any) -> None:
        if delay_ps:
            self.loop.call_at_ps(self.loop.now_ps + delay_ps, call, *args)
        else:
            call(*args)

    # --- at the target ----------------------------------------------------------------------------

    def _write_arrived(self, arrival: Arrival) -> None:
        self._store(
            arrival.source, arrival.target, arrival.body, arrival.payload, arrival.charged_bytes
        )

    def _store(
        self, source: int, target: int, head: bytes, data: Payload, charged_bytes: int
    ) -> None:
        operation, number, offset = _WRITE.unpack(head)
        status = OK
        try:
            self.memory.region(target, number).write(offset, charged_bytes, data)
        except MemoryRangeError:
            status = RANGE
        self._complete(source, target, operation, status)

    def _message_arrived(self, arrival: Arrival) -> None:
        self._hand_over(
            arrival.source, arrival.target, arrival.body, arrival.payload, arrival.charged_bytes
        )

    def _hand_over(
        self, source: int, target: int, head: bytes, payload: Payload, charged_bytes: int
    ) -> None:
        operation, mailbox = _MESSAGE.unpack_from(head)
        handler = self._mailboxes.get((target, mailbox))
        if handler is not None:
            handler(Message(source, target, head[_MESSAGE.size :], payload, charged_bytes))
        self._complete(source, target, operation, RANGE if handler is None else OK)

    def _complete(self, source: int, target: int, operation: int, status: int) -> None:
        if status != OK:
            self._refused += 1
        if operation:
            route = self._channel(target, source).route
            self._signal_done(route, operation, status, route.path.completion_ps)

    def _signal_done(self, route: Route, operation: int, status: int, delay_ps: int) -> None:
        self.fabric.signal(route, DONE, delay_ps=delay_ps, body=_DONE.pack(operation, status))

    def _flag_arrived(self, arrival: Arrival) -> None:
        flag, value = _FLAG.unpack(arrival.body)
        self.flags.set(arrival.target, flag, value)

    def _read_arrived(self, arrival: Arrival) -> None:
        operation, number, offset, charged_bytes, rate_bps = _READ.unpack(arrival.body)
        try:
            data = self.memory.region(arrival.target, number).read(offset, charged_bytes)
        except MemoryRangeError:
            self._complete(arrival.source, arrival.target, operation, RANGE)
            return
        self._serve(arrival, operation, data, charged_bytes, rate_bps)

    def _atomic_arrived(self, arrival: Arrival) -> None:
        operation, number, offset, amount = _ATOMIC.unpack(arrival.body)
        try:
            region = self.memory.region(arrival.target, number)
            old = region.read(offset, _WORD.size)
            if len(old) != _WORD.size:
                raise MemoryRangeError("a word that is not wholly carried", definite=True)
        except MemoryRangeError:
            self._complete(arrival.source, arrival.target, operation, RANGE)
            return
        total = (_WORD.unpack(old)[0] + amount + 2**63) % 2**64 - 2**63
        region.write(offset, _WORD.size, _WORD.pack(total))
        self._serve(arrival, operation, old, _WORD.size, 0)

    def _serve(
        self, asked: Arrival, operation: int, data: bytes, charged_bytes: int, rate_bps: int
    ) -> None:
        """Send the data of a read back, without the target's program."""
        channel = self._channel(asked.target, asked.source)
        body = _NUMBER.pack(operation)

        def ended(sent: bool) -> None:
            if not sent:
                delay_ps = max(self.give_up_ps, channel.route.path.completion_ps)
                self._signal_done(channel.route, operation, LINK, delay_ps)

        if charged_bytes <= self._chunk_bytes:
            self.fabric.send(
                channel.reads,
                DATA,
                charged_bytes=charged_bytes,
                body=body,
                payload=data,
                rate_bps=rate_bps,
                started=ended,
            )
            return
        self._number += 1
        Flow(
            self.fabric,
            channel.reads,
            BULK,
            number=self._number,
            head=bytes((DATA,)) + body,
            piece=pieces(data, charged_bytes=charged_bytes, chunk_bytes=self._chunk_bytes),
            charged_bytes=charged_bytes,
            rate_bps=rate_bps,
            ended=ended,
        ).begin()

    def _chunk_arrived(self, arrival: Arrival) -> None:
        body = arrival.body
        kind = body[CHUNK.size]
        if kind == DATA:
            operation = self._operations.get(_NUMBER.unpack_from(body, CHUNK.size + 1)[0])
            if operation is not None:
                operation.progress_ps = self.loop.now_ps
        whole = self._assemblies.add(arrival)
        if whole is None:
            return
        head, data = whole.head[1:], whole.payload()
        if kind == DATA:
            self._data_is_here(head, data)
        elif kind == WRITE:
            self._store(arrival.source, arrival.target, head, data, whole.charged_bytes)
        else:
            self._hand_over(arrival.source, arrival.target, head, data, whole.charged_bytes)

    def _abort_arrived(self, arrival: Arrival) -> None:
        self._assemblies.drop(arrival.source, _NUMBER.unpack(arrival.body)[0])

    # --- answers ----------------------------------------------------------------------------------

    def _data_arrived(self, arrival: Arrival) -> None:
        self._data_is_here(arrival.body, bytes(arrival.payload))

    def _data_is_here(self, body: bytes, data: bytes) -> None:
        operation = self._operations.get(_NUMBER.unpack(body)[0])
        if operation is not None:
            self._after(operation.channel.reads.path.completion_ps, operation.succeed, data)

    def _done_arrived(self, arrival: Arrival) -> None:
        number, status = _DONE.unpack(arrival.body)
        operation = self._operations.get(number)
        if operation is not None:
            operation.completed(status)

    def statistics(self) -> dict[str, int]:
        """Counters, JSON-able: what was refused, copies that the link layer refused, what waits."""
        return {
            "refused": self._refused,
            "copies_refused": self._copies,
            "operations_waiting": len(self._operations),
            "bulk_incoming": len(self._assemblies),
        }


def _rate_bps(engine: Engine, route: Route) -> int:
    """What this engine makes of the path's rate; 0 means the path's own."""
    if engine.rate_num == engine.rate_den:
        return 0
    return engine.rate_bps(route.path.rate_bps)
