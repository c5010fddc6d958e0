"""Messages on their way and the ports that they wait in: the records of the fabric.

Owns their shape only; what happens to them is in ``cmnet.fabric``.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from cmnet.link.port import Server
from cmnet.link.reach import FrameFacts
from cmnet.topology.machine import Path

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
        "rate_bps",
        "sequence",
        "source",
        "target",
        "window",
    )

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

    def __lt__(self, other: Arrival) -> bool:
        return (self.first_ps, self.source, self.sequence) < (
            other.first_ps,
            other.source,
            other.sequence,
        )


class EgressPort:
    """What waits to leave one device on one plane."""

    __slots__ = ("port_id", "queue", "queue_bytes_max", "server", "waiters", "waiting_bytes")

    def __init__(self, port_id: int, queue_bytes_max: int) -> None:
        self.port_id = port_id
        self.queue_bytes_max = queue_bytes_max
        self.server = Server()
        self.queue: deque[Outgoing] = deque()
        self.waiting_bytes = 0
        self.waiters: deque[tuple[int, asyncio.Future[None]]] = deque()


class IngressPort:
    """What is arriving at one device on one plane, unsettled."""

    __slots__ = ("arrivals", "server")

    def __init__(self) -> None:
        self.server = Server()
        self.arrivals: list[Arrival] = []


class Route:
    """Everything fixed about messages of one kind of operation between two devices."""

    __slots__ = ("egress", "facts", "path", "peer", "plane", "source", "target")

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


Started = Callable[[bool], None]
"""Called when a message's egress has started; False if a rule dropped it there."""


class Outgoing:
    """One message that waits in an egress port."""

    __slots__ = ("body", "charged_bytes", "kind", "payload", "rate_bps", "route", "started")

    def __init__(
        self,
        route: Route,
        kind: int,
        body: bytes,
        payload: Payload,
        charged_bytes: int,
        rate_bps: int,
        started: Started | None,
    ) -> None:
        self.route = route
        self.kind = kind
        self.body = body
        self.payload = payload
        self.charged_bytes = charged_bytes
        self.rate_bps = rate_bps
        self.started = started


class PlaneStatistics:
    """Counters of one plane of one process: what it sent."""

    __slots__ = ("carried_bytes", "charged_bytes", "dropped", "frames", "frames_in_node")

    def __init__(self) -> None:
        self.frames = self.frames_in_node = self.dropped = 0
        self.charged_bytes = self.carried_bytes = 0

    def as_dict(self) -> dict[str, int]:
        """Name to count, JSON-able."""
        return {name: getattr(self, name) for name in self.__slots__}
