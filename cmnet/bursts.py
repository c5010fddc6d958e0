"""Bursts and bundles: many messages of one device to many others, at the cost of few (design 2.1).

Owns what happens to a *burst* (an ordered list of messages that leave one egress port back to back)
at its egress and at its targets. Every message has its own start, finish, verdict and arrival, to the
picosecond those of the same messages sent one by one; what is shared is the event, the frame and the
handler's call. A burst leaves in *slices* of at most ``bundle_slice_ps`` of egress time, the grain at
which rules and death act on it. All messages of a slice for one process are a *bundle*: one frame, one
event there, at the instant when the last of them is delivered.

The instant that a bundle's sender reports is the last of its last bytes: nothing happens at the
receiver before it. Other arrivals at the same ports settle earlier, and find the bundle's messages
there, since a frame is read before its receiver runs the next window.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from cmnet.errors import FrameError
from cmnet.messages import (
    SEQUENCE_MAX,
    Arrival,
    EgressPort,
    Part,
    PartCopy,
    Payload,
    Row,
    Started,
    flip_a_bit,
)
from cmnet.topology.machine import Operation, Plane
from cmnet.wire import frames

if TYPE_CHECKING:
    from cmnet.fabric import Fabric

Item = tuple[int, int, Payload]
"""(target device, charged bytes, data)"""

ROW = struct.Struct("<qqQQIIQ")
"""A ``Row`` on the wire."""

COPY = SEQUENCE_MAX + 1
"""Set in the sequence of a row that doubles the one before it: it takes its time at the ingress and
carries no data, since the link layer refuses it."""

SLICE_MESSAGES_MAX = 8192
SLICE_DATA_BYTES_MAX = 1 << 27
"""Messages of few charged bytes: a slice must also fit a frame's limits."""


class Bundle:
    """What a handler gets: messages of one source that arrived here, in the order in which they left."""

    __slots__ = ("head", "items", "source", "window")

    def __init__(
        self, source: int, head: bytes, items: list[tuple[int, Payload, int]], window: int
    ) -> None:
        self.source = source
        self.head = head
        self.items = items
        """(target device, data, delivered_ps)"""
        self.window = window


Handler = Callable[[Arrival], None] | Callable[[Bundle], None]
"""Of a kind: its messages are sent one by one, or in bursts."""


class Burst:
    """A burst, or what is left of it, in an egress port."""

    __slots__ = (
        "charged_bytes",
        "head",
        "index",
        "intact",
        "items",
        "kind",
        "lost",
        "operation",
        "plane",
        "source",
        "started",
    )

    def __init__(
        self,
        *,
        source: int,
        plane: Plane,
        operation: Operation,
        kind: int,
        head: bytes,
        items: Sequence[Item],
        lost: Callable[[list[int]], None] | None,
        started: Started | None,
    ) -> None:
        self.source = source
        self.plane = plane
        self.operation = operation
        self.kind = kind
        self.head = head
        self.items = items
        self.lost = lost
        self.started = started
        self.index = 0
        """The first message that has not left."""
        self.charged_bytes = sum([item[1] for item in items])
        self.intact = True


class _Share:
    """The messages of a slice for one process."""

    __slots__ = ("data", "rows")

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.data: list[Payload] = []


class _ArrivingBundle:
    """A bundle on its way to this process."""

    __slots__ = ("at_ps", "head", "kind", "parts", "settled", "source", "window")

    def __init__(self, kind: int, source: int, window: int, head: bytes) -> None:
        self.kind = kind
        self.source = source
        self.window = window
        self.head = head
        self.parts: list[Part] = []
        self.settled = False
        self.at_ps = 0


# --- egress ---------------------------------------------------------------------------------------


def start_slice(fabric: Fabric, port: EgressPort, burst: Burst) -> bool:
    """The burst's turn at its port: one slice leaves. False: more is left, and waits its next turn."""
    now_ps = fabric.loop.now_ps
    shares: dict[int | None, _Share] = {}
    first = burst.index
    if fabric.rules.idle(now_ps):
        _leave(fabric, port, burst, shares)
    else:
        _leave_judged(fabric, port, burst, shares)
    burst.charged_bytes -= sum([item[1] for item in burst.items[first : burst.index]])
    for peer, share in shares.items():
        _emit(fabric, burst, peer, share)
    if burst.index < len(burst.items):
        return False
    if burst.started is not None:
        burst.started(burst.intact)
    return True


def _leave(
    fabric: Fabric, port: EgressPort, burst: Burst, shares: dict[int | None, _Share]
) -> None:
    """No rule is in force: every message of the slice passes."""
    items, source, plane, operation = burst.items, burst.source, burst.plane, burst.operation
    server, route_of = port.server, fabric.route
    start_ps = fabric.loop.now_ps
    end_ps = start_ps + fabric.machine.bundle_slice_ps
    index, stop = burst.index, _stop(burst)
    sequence = fabric.last_sequence(source) + 1 - index
    while index < stop:
        target, charged_bytes, data = items[index]
        route = route_of(plane, operation, source, target)
        path = route.path
        rate_bps, propagation_ps = path.rate_bps, path.propagation_ps
        last_ps = server.serve(start_ps, charged_bytes, rate_bps) + propagation_ps
        first_ps = start_ps + propagation_ps
        if first_ps > route.first_ps:
            route.first_ps = first_ps
        share = shares.get(route.peer)
        if share is None:
            share = shares[route.peer] = _Share()
        share.data.append(data)
        share.rows.append(
            (first_ps, last_ps, charged_bytes, rate_bps, target, len(data), sequence + index)
        )
        index += 1
        start_ps = server.free_ps
        if start_ps >= end_ps:
            break
    fabric.sequences[source] = sequence + index - 1
    burst.index = index


def _leave_judged(
    fabric: Fabric, port: EgressPort, burst: Burst, shares: dict[int | None, _Share]
) -> None:
    """Rules are in force: each message has its verdict, at the slice's start. What they drop is no
    failure of its route, on which fences look: ``lost`` tells the program at once."""
    server = port.server
    start_ps = fabric.loop.now_ps
    end_ps = start_ps + fabric.machine.bundle_slice_ps
    lost: list[int] = []
    for index in range(burst.index, _stop(burst)):
        target, charged_bytes, data = burst.items[index]
        route = fabric.route(burst.plane, burst.operation, burst.source, target)
        outcome = fabric.judge(route)
        rate_bps = route.path.rate_bps
        if outcome.rate_num != outcome.rate_den:
            rate_bps = max(rate_bps * outcome.rate_num // outcome.rate_den, 1)
        delay_ps = route.path.propagation_ps + outcome.delay_ps
        first_ps = start_ps + delay_ps
        last_ps = server.serve(start_ps, charged_bytes, rate_bps) + delay_ps
        if outcome.drop:
            fabric.dropped(route, burst.kind)
            lost.append(index)
        else:
            route.first_ps = max(route.first_ps, first_ps)
            share = shares.setdefault(route.peer, _Share())
            data = flip_a_bit(data) if outcome.corrupt else data
            copy = 0
            for _ in range(outcome.copies):
                sequence = fabric.next_sequence(burst.source) | copy
                share.data.append(data)
                share.rows.append(
                    (first_ps, last_ps, charged_bytes, rate_bps, target, len(data), sequence)
                )
                copy, data = COPY, b""
        burst.index = index + 1
        start_ps = server.free_ps
        if start_ps >= end_ps:
            break
    if lost:
        burst.intact = False
        if burst.lost is not None:
            burst.lost(lost)


def _stop(burst: Burst) -> int:
    """The end of the longest slice that a frame can carry."""
    stop = min(len(burst.items), burst.index + SLICE_MESSAGES_MAX)
    data_bytes = 0
    for index in range(burst.index, stop):
        data_bytes += len(burst.items[index][2])
        if data_bytes > SLICE_DATA_BYTES_MAX:
            return max(index, burst.index + 1)
    return stop


def _emit(fabric: Fabric, burst: Burst, peer: int | None, share: _Share) -> None:
    rows, window = share.rows, fabric.window
    statistics = fabric.statistics_of[burst.plane]
    charged_bytes = sum([row[2] for row in rows])
    data_bytes = sum([row[5] for row in rows])
    statistics.frames += len(rows)
    statistics.charged_bytes += charged_bytes
    statistics.carried_bytes += len(burst.head) + len(rows) * ROW.size + data_bytes
    if peer is None:
        statistics.frames_in_node += len(rows)
        arriving = _ArrivingBundle(burst.kind, burst.source, window, burst.head)
        _accept(fabric, burst.plane, arriving, rows, share.data)
        return
    pack = ROW.pack
    body = b"".join([burst.head, *[pack(*row) for row in rows]])
    last_ps = max([row[1] for row in rows])
    header = frames.HEADER.pack(
        len(body),
        data_bytes,
        frames.MAGIC,
        burst.kind,
        burst.plane,
        frames.FLAG_BUNDLE,
        window,
        burst.source,
        rows[0][4],
        rows[0][6],
        min([row[0] for row in rows]),
        last_ps,
        charged_bytes,
        len(rows),
    )
    fabric.count_send(peer, last_ps)
    fabric.carry(peer, burst.plane, header, body, b"".join(share.data))


# --- ingress --------------------------------------------------------------------------------------


def receive(fabric: Fabric, header: tuple[int, ...], body: bytes, payload: Payload) -> None:
    """A bundle of another process was read. Raises FrameError."""
    kind, plane, window, source, count = header[3], header[4], header[6], header[7], header[13]
    rows_bytes = count * ROW.size
    if not count or rows_bytes > len(body):
        raise FrameError(f"a bundle of {count} messages in {len(body)} bytes")
    head_bytes = len(body) - rows_bytes
    rows: list[Row] = list(ROW.iter_unpack(memoryview(body)[head_bytes:]))
    view = payload if isinstance(payload, bytes) else memoryview(payload)
    data: list[Payload] = []
    at = 0
    for row in rows:
        if not fabric.is_here(row[4]):
            raise FrameError(f"a message for device {row[4]}, which is not here")
        end = at + row[5]
        data.append(view[at:end])
        at = end
    if at != len(payload) or not 0 <= source < len(fabric.machine.devices):
        raise FrameError(f"a bundle of {at} data bytes carries {len(payload)}")
    arriving = _ArrivingBundle(kind, source, window, body[:head_bytes])
    _accept(fabric, plane, arriving, rows, data)


def _accept(
    fabric: Fabric,
    plane: int,
    arriving: _ArrivingBundle,
    rows: list[Row],
    data: Iterable[Payload],
) -> None:
    source, window, parts = arriving.source, arriving.window, arriving.parts
    port_of = fabric.ingress_port
    for row, datum in zip(rows, data):
        port = port_of(plane, row[4])
        part = (Part if row[6] < COPY else PartCopy)(row, source, window, datum, port)
        parts.append(part)
        port.add(part)
    arriving.at_ps = max([row[1] for row in rows])
    _ask(fabric, arriving)


def _ask(fabric: Fabric, arriving: _ArrivingBundle) -> None:
    """Come back when the bundle is in, or may be: its own event, under its first message's number."""
    sequence = arriving.parts[0].sequence
    fabric.loop.agenda.add_delivery(
        arriving.at_ps, arriving.source, sequence, fabric.deliver_bundle, arriving
    )


def deliver(fabric: Fabric, arriving: _ArrivingBundle) -> None:
    """The bundle's event: settle its ports; if all its messages are in, hand it over."""
    parts = arriving.parts
    if not arriving.settled:
        arriving.settled = True
        now_ps = fabric.loop.now_ps
        for part in parts:
            if part.delivered_ps < 0:
                part.port.settle(now_ps)
        arriving.at_ps = max([part.delivered_ps for part in parts if not part.flags])
        if arriving.at_ps > now_ps:
            _ask(fabric, arriving)
            return
    for part in parts:
        if part.port.quiet:
            fabric.hand_over_quiet(part.port)
    kind, source = arriving.kind, arriving.source
    fabric.digest.deliveries(
        source,
        kind,
        sorted([(p.delivered_ps, p.sequence, p.target, p.charged_bytes) for p in parts]),
    )
    items = [(part.target, part.data, part.delivered_ps) for part in parts if not part.flags]
    fabric.handler(kind)(Bundle(source, arriving.head, items, arriving.window))
