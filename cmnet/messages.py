"""Messages on their way and the ports that they wait in: the records of the fabric.

Owns their shape and the settling of an ingress that no burst reaches; what happens to them is in
``cmnet.fabric``, ``cmnet.bursts`` and ``cmnet.burst_arrivals``.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from cmnet.link.port import Server
from cmnet.link.reach import FrameFacts
from cmnet.topology.machine import Path
from cmnet.units import NEVER_PS
from cmnet.wire.frames import FLAG_QUIET

if TYPE_CHECKING:
    from cmnet.burst_arrivals import BurstArrivals

Payload = bytes | bytearray | memoryview


class Arrival:
    """A message on its way to a device of this process, or delivered to it."""

    __slots__ = (
        "body",
        "charged_bytes",
        "delivered_ps",
        "first_ps",
        "flags",
        "kind",
        "last_ps",
        "payload",
        "plane",
        "port",
        "rate_bps",
        "sequence",
        "source",
        "target",
        "window",
    )

    port: IngressPort
    """Where it settles; a signal only passes by."""

    def __init__(self, header: tuple[int, ...], body: bytes, payload: Payload) -> None:
        (
            _,
            _,
            _,
            self.kind,
            self.plane,
            self.flags,
            self.window,
            self.source,
            self.target,
            self.sequence,
            self.first_ps,
            self.last_ps,
            self.charged_bytes,
            self.rate_bps,
        ) = header
        self.body = body
        self.payload = payload
        self.delivered_ps = -1


class EgressPort:
    """What waits to leave one device on one plane."""

    __slots__ = (
        "armed",
        "pause_ps",
        "port_id",
        "queue",
        "queue_bytes_max",
        "server",
        "waiters",
        "waiting_bytes",
    )

    def __init__(self, port_id: int, queue_bytes_max: int) -> None:
        self.port_id = port_id
        self.queue_bytes_max = queue_bytes_max
        self.armed = False
        self.pause_ps = -1
        """What is left of a burst, alone here, goes on at this instant unless something comes."""
        self.server = Server()
        self.queue: deque[Any] = deque()
        """``Outgoing`` or ``Leg``, first come first served."""
        self.waiting_bytes = 0
        self.waiters: deque[tuple[int, asyncio.Future[None]]] = deque()

    def fits(self, charged_bytes: int) -> bool:
        """So many bytes more may wait here; anything may wait alone."""
        waiting_bytes = self.waiting_bytes
        return waiting_bytes == 0 or waiting_bytes + charged_bytes <= self.queue_bytes_max

    def wake(self) -> None:
        """Wake who waits for room, first come first served, as many as fit together."""
        waiting_bytes = self.waiting_bytes
        while self.waiters:
            charged_bytes, future = self.waiters[0]
            if waiting_bytes and waiting_bytes + charged_bytes > self.queue_bytes_max:
                return
            self.waiters.popleft()
            if not future.done():
                waiting_bytes += charged_bytes
                future.set_result(None)


class IngressPort:
    """What is arriving at one device on one plane, unsettled: a heap by (first byte, source, sequence)
    of single messages, and on UB the process's arriving bursts, of which ``place`` is this port's."""

    __slots__ = ("arrivals", "bursts", "bursts_ps", "in_table", "place", "quiet", "server")

    def __init__(self, bursts: BurstArrivals | None = None, place: int = 0) -> None:
        self.server = Server()
        self.arrivals: list[tuple[int, int, int, Arrival]] = []
        self.bursts = bursts
        self.bursts_ps = NEVER_PS
        """The next unsettled first byte of a burst's message here, as far as they are in order."""
        self.place = place
        self.in_table = False
        """The server's state is with the bursts."""
        self.quiet: deque[Arrival] = deque()
        """Settled, and to be handed over with the next message that is not quiet."""

    def add(self, arrival: Arrival) -> None:
        """Something is on its way to this port."""
        heapq.heappush(self.arrivals, (arrival.first_ps, arrival.source, arrival.sequence, arrival))

    def settle(self, now_ps: int) -> None:
        """Fix the delivery of all whose first byte is in; none of those can still be unknown."""
        if self.bursts is not None:
            if self.bursts.due(self, now_ps):
                self.bursts.settle([self], now_ps)
                return
            if self.in_table:
                self.bursts.leave_table(self)
        arrivals, receive, pop = self.arrivals, self.server.receive, heapq.heappop
        while arrivals and arrivals[0][0] <= now_ps:
            arrival = pop(arrivals)[3]
            arrival.delivered_ps = receive(
                arrival.first_ps, arrival.last_ps, arrival.charged_bytes, arrival.rate_bps
            )
            if arrival.flags & FLAG_QUIET:
                self.quiet.append(arrival)

    def take(self, now_ps: int) -> list[Arrival]:
        """Single messages whose first byte is in, in order; the caller settles them."""
        arrivals, taken, pop = self.arrivals, [], heapq.heappop
        while arrivals and arrivals[0][0] <= now_ps:
            taken.append(pop(arrivals)[3])
        return taken

    def settled(self, arrival: Arrival, delivered_ps: int) -> None:
        """Its delivery is known."""
        arrival.delivered_ps = delivered_ps
        if arrival.flags & FLAG_QUIET:
            self.quiet.append(arrival)

    def quiet_ones(self) -> list[Arrival]:
        """What is here and no event: settled or not, and not handed over."""
        unsettled = [entry[3] for entry in self.arrivals]
        return [*self.quiet, *[one for one in unsettled if one.flags & FLAG_QUIET]]

    def discard(self, unwanted: Callable[[Arrival], bool]) -> None:
        """Forget every arrival that matches."""
        kept = [entry for entry in self.arrivals if not unwanted(entry[3])]
        if len(kept) < len(self.arrivals):
            self.arrivals[:] = kept
            heapq.heapify(self.arrivals)


class Route:
    """Everything fixed about messages of one kind of operation between two devices."""

    __slots__ = (
        "egress",
        "facts",
        "failures",
        "first_ps",
        "path",
        "peer",
        "plane",
        "source",
        "target",
    )

    def __init__(
        self, *, facts: FrameFacts, path: Path, egress: EgressPort, peer: int | None
    ) -> None:
        self.facts = facts
        self.path = path
        self.plane = facts.plane
        self.source = facts.source
        self.target = facts.target
        self.egress = egress
        self.peer = peer
        """The process of the target; None if it is this one."""
        self.first_ps = 0
        """The latest first byte of all that left."""
        self.failures = 0
        """Messages sent one by one that a rule dropped at their egress."""


NO_FENCE = 1 << 62
ORDERED = NO_FENCE - 1
"""A fence that orders and never withdraws."""

Started = Callable[[bool], None]
"""Called when a message's egress has started; False if a rule dropped it there."""


class Outgoing:
    """One message that waits in an egress port."""

    __slots__ = (
        "body",
        "charged_bytes",
        "fence",
        "kind",
        "payload",
        "quiet",
        "rate_bps",
        "route",
        "started",
    )

    def __init__(
        self,
        route: Route,
        kind: int,
        body: bytes,
        payload: Payload,
        charged_bytes: int,
        rate_bps: int,
        started: Started | None,
        fence: int,
        quiet: bool,  # made in one place, by position for speed
    ) -> None:
        self.route = route
        self.kind = kind
        self.body = body
        self.payload = payload
        self.charged_bytes = charged_bytes
        self.rate_bps = rate_bps
        self.started = started
        self.fence = fence
        self.quiet = quiet


class Repeat(NamedTuple):
    """How the data of a burst's messages is carried: its first bytes once, then a part again and again,
    then another. Charged bytes set the time; so much is carried only to be checked (design 2.2)."""

    lead_bytes: int
    body_bytes: int
    copies: int
    tail_bytes: int
    tail_copies: int

    @property
    def data_bytes(self) -> int:
        """Of a message, each part once."""
        return self.lead_bytes + self.body_bytes + self.tail_bytes

    @property
    def carried_bytes(self) -> int:
        """Of a message on a socket."""
        body_bytes = self.body_bytes * self.copies
        return self.lead_bytes + body_bytes + self.tail_bytes * self.tail_copies


class PlaneStatistics:
    """Counters of one plane of one process: what it sent."""

    __slots__ = (
        "bundles",
        "carried_bytes",
        "charged_bytes",
        "dropped",
        "frames",
        "frames_in_node",
    )

    def __init__(self) -> None:
        self.frames = self.frames_in_node = self.dropped = 0
        self.bundles = 0
        """Frames on sockets that carry messages of bursts; ``frames`` counts the messages."""
        self.charged_bytes = self.carried_bytes = 0

    def as_dict(self) -> dict[str, int]:
        """Name to count, JSON-able."""
        return {name: getattr(self, name) for name in self.__slots__}


def flip_a_bit(payload: Payload) -> Payload:
    """What a rule of kind corrupt makes of what a frame carries."""
    if not payload:
        return payload
    flipped = bytearray(payload)
    flipped[len(flipped) // 2] ^= 1
    return flipped
