"""The links of one process: ports, rules and mesh put together (design 2.1).

Owns the egress queues and ingress lines of this process's devices, and what is in flight to them. Does
not own what a message means (planes bind handlers by kind) nor sockets (the mesh). A frame leaves when
its egress starts: until then it waits here, and rules, rate changes and death act on it.

Ingress is lazy: an arrival's event is its uncontended delivery; when that comes, all arrivals whose
first byte is in are settled in order of (first byte, source, sequence), and one that turns out later
is asked again at its true delivery.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import msgspec

from cmnet.errors import CausalityError, FrameError
from cmnet.link.reach import FrameFacts
from cmnet.link.rules import Outcome, Rules
from cmnet.messages import (
    Arrival,
    EgressPort,
    IngressPort,
    Outgoing,
    Payload,
    PlaneStatistics,
    Route,
    Started,
)
from cmnet.record.digest import Digest
from cmnet.topology.machine import Machine, Operation, Plane
from cmnet.units import format_ps
from cmnet.vtime.loop import VirtualLoop
from cmnet.wire import frames

Carry = Callable[[int, int, bytes, bytes, Payload], None]
"""(peer process, plane, packed header, body, payload): the mesh's ``write``."""

INCARNATION_SHIFT = 40
"""Sequences of incarnation i begin at i << 40: those of a restarted source never repeat."""


class Fabric:
    """All ports of one process. ``carry`` takes frames for other processes; ``receive`` those of theirs."""

    def __init__(
        self,
        *,
        loop: VirtualLoop,
        machine: Machine,
        process: int,
        incarnation: int,
        digest: Digest,
        rules: Rules,
        carry: Carry,
    ) -> None:
        self.loop = loop
        self.machine = machine
        self.process = process
        self.digest = digest
        self.rules = rules
        self.window = 0
        self.ran_to_ps = 0
        self.sends: dict[int, list[int]] = {}
        self.statistics_of = [PlaneStatistics() for _ in Plane]
        self._carry = carry
        self._handlers: dict[int, Callable[[Arrival], None]] = {}
        self._egress: dict[int, EgressPort] = {}
        self._ingress: dict[int, IngressPort] = {}
        self._routes: dict[tuple[int, int, int, int], Route] = {}
        self._sequence_base = incarnation << INCARNATION_SHIFT
        self._sequences: dict[int, int] = {}
        self._process_of = [device.process for device in machine.devices]
        self._link_tries = {Plane.UB: machine.ub_retry.tries}
        self._devices_count = len(machine.devices)

    # --- what planes use --------------------------------------------------------------------------

    def bind(self, kind: int, handler: Callable[[Arrival], None]) -> None:
        """Messages of this kind go to ``handler`` at their delivery. A kind is bound once."""
        assert kind not in self._handlers and 0 < kind < 256, kind
        self._handlers[kind] = handler

    def route(self, plane: Plane, operation: Operation, source: int, target: int) -> Route:
        """The route between two devices, the source being ours. Raises InputError where none is."""
        key = (plane, operation, source, target)
        route = self._routes.get(key)
        if route is None:
            route = self._routes[key] = self._make_route(plane, operation, source, target)
        return route

    def _make_route(self, plane: Plane, operation: Operation, source: int, target: int) -> Route:
        path = self.machine.path(plane=plane, operation=operation, source=source, target=target)
        ours, peer = self._process_of[source], self._process_of[target]
        assert ours == self.process, "a process sends from its own devices"
        facts = FrameFacts(
            plane=plane,
            source=source,
            target=target,
            source_process=ours,
            target_process=peer,
            crosses_nodes=path.crosses_nodes,
            uses_subplanes=plane == Plane.UB and not path.in_package,
        )
        return Route(
            facts=facts,
            path=path,
            egress=self._egress_port(plane, source),
            peer=None if peer == ours else peer,
        )

    def _egress_port(self, plane: Plane, device: int) -> EgressPort:
        port_id = plane * self._devices_count + device
        port = self._egress.get(port_id)
        if port is None:
            port = EgressPort(port_id, self.machine.queue_bytes_max[plane])
            self._egress[port_id] = port
        return port

    def send(
        self,
        route: Route,
        kind: int,
        *,
        charged_bytes: int,
        body: bytes = b"",
        payload: Payload = b"",
        rate_bps: int = 0,
        started: Started | None = None,
    ) -> None:
        """Queue a message at its egress; an idle port starts it at once.

        ``rate_bps`` 0 means the path's. Whoever may send more than one collective awaits ``room``.
        """
        rate_bps = rate_bps or route.path.rate_bps
        message = Outgoing(route, kind, body, payload, charged_bytes, rate_bps, started)
        port = route.egress
        if port.queue or port.server.free_ps > self.loop.now_ps:
            if not port.queue:
                self._arm(port)
            port.queue.append(message)
            port.waiting_bytes += charged_bytes
        else:
            self._start(port, message)

    def signal(self, route: Route, kind: int, *, delay_ps: int, body: bytes = b"") -> None:
        """A message of no bytes that passes no port: known at the target ``delay_ps`` from now.

        For completions, whose cost is part of the measured latency. Rules can drop it.
        """
        assert delay_ps >= route.path.propagation_ps, "a signal is not faster than its path"
        outcome = self._judge(route)
        if outcome.drop:
            self._dropped(route, kind)
            return
        at_ps = self.loop.now_ps + delay_ps + outcome.delay_ps
        self._emit(route, kind, frames.FLAG_SIGNAL, (at_ps, at_ps), body, b"", 0, 1)

    async def room(self, route: Route, charged_bytes: int) -> None:
        """Wait, in virtual time and first come first served, until the egress accepts so many bytes."""
        port = route.egress
        if port.waiters or not _fits(port, charged_bytes):
            future = self.loop.create_future()
            port.waiters.append((charged_bytes, future))
            await future

    # --- egress -----------------------------------------------------------------------------------

    def _arm(self, port: EgressPort) -> None:
        self.loop.agenda.add_port(port.server.free_ps, port.port_id, self._start_next, port)

    def _start_next(self, port: EgressPort) -> None:
        message = port.queue.popleft()
        port.waiting_bytes -= message.charged_bytes
        self._start(port, message)
        if port.queue:
            self._arm(port)
        while port.waiters and _fits(port, port.waiters[0][0]):
            _, future = port.waiters.popleft()
            if not future.done():
                future.set_result(None)

    def _start(self, port: EgressPort, message: Outgoing) -> None:
        route = message.route
        rate_bps = message.rate_bps
        outcome = self._judge(route)
        if outcome.rate_num != outcome.rate_den:
            rate_bps = max(rate_bps * outcome.rate_num // outcome.rate_den, 1)
        now_ps = self.loop.now_ps
        finish_ps = port.server.serve(now_ps, message.charged_bytes, rate_bps)
        if outcome.drop:
            self._dropped(route, message.kind)
        else:
            delay_ps = route.path.propagation_ps + outcome.delay_ps
            times_ps = (now_ps + delay_ps, finish_ps + delay_ps)
            payload, flags = message.payload, 0
            if outcome.corrupt:
                payload, flags = _flip_a_bit(payload), frames.FLAG_CORRUPT
            for _ in range(outcome.copies):
                self._emit(
                    route,
                    message.kind,
                    flags,
                    times_ps,
                    message.body,
                    payload,
                    message.charged_bytes,
                    rate_bps,
                )
        if message.started is not None:
            message.started(not outcome.drop)

    def _judge(self, route: Route) -> Outcome:
        now_ps = self.loop.now_ps
        if self.rules.idle(now_ps):
            return _PASS
        outcome = self.rules.judge(route.facts, now_ps)
        tries = self._link_tries.get(route.plane, 1)
        if outcome.drop and tries > 1:
            return self._retry(route, outcome, tries)
        return outcome

    def _retry(self, route: Route, outcome: Outcome, tries: int) -> Outcome:
        """UB's link retry counts as delay between egress and ingress (design 2.3)."""
        spent_ps = 0
        for _ in range(tries - 1):
            spent_ps += self.machine.ub_retry.delay_ps
            outcome = self.rules.judge(route.facts, self.loop.now_ps)
            if not outcome.drop:
                return msgspec.structs.replace(outcome, delay_ps=outcome.delay_ps + spent_ps)
        return outcome

    def _dropped(self, route: Route, kind: int) -> None:
        self.statistics_of[route.plane].dropped += 1
        self.digest.drop(
            self.loop.now_ps, route.source, route.target, self._next_sequence(route.source), kind
        )

    def _next_sequence(self, source: int) -> int:
        sequence = self._sequences.get(source, self._sequence_base) + 1
        self._sequences[source] = sequence
        return sequence

    def _emit(
        self,
        route: Route,
        kind: int,
        flags: int,
        times_ps: tuple[int, int],
        body: bytes,
        payload: Payload,
        charged_bytes: int,
        rate_bps: int,
    ) -> None:
        source, plane = route.source, route.plane
        sequence = self._next_sequence(source)
        header = (
            len(body),
            len(payload),
            frames.MAGIC,
            kind,
            plane,
            flags,
            self.window,
            source,
            route.target,
            sequence,
            *times_ps,
            charged_bytes,
            rate_bps,
        )
        statistics = self.statistics_of[plane]
        statistics.frames += 1
        statistics.charged_bytes += charged_bytes
        statistics.carried_bytes += len(body) + len(payload)
        peer = route.peer
        if peer is None:
            statistics.frames_in_node += 1
            self._accept(Arrival(header, body, payload))
            return
        sends = self.sends.get(peer)
        if sends is None:
            self.sends[peer] = [1, times_ps[1]]
        else:
            sends[0] += 1
            if times_ps[1] < sends[1]:
                sends[1] = times_ps[1]
        self._carry(peer, plane, frames.HEADER.pack(*header), body, payload)

    def take_sends(self) -> list[tuple[int, int, int]]:
        """What left for other processes since the last call: (peer, frames, earliest delivery)."""
        sends = [(peer, *counts) for peer, counts in self.sends.items()]
        self.sends = {}
        return sends  # type: ignore[return-value]  # mypy does not see that counts are two

    # --- ingress ----------------------------------------------------------------------------------

    def receive(self, header: tuple[int, ...], body: bytes, payload: Payload) -> None:
        """A frame of another process was read. Raises FrameError or CausalityError."""
        arrival = Arrival(header, body, payload)
        if not 0 <= arrival.target < self._devices_count or (
            self._process_of[arrival.target] != self.process
        ):
            raise FrameError(f"a frame for device {arrival.target}, which is not here")
        if arrival.first_ps < self.ran_to_ps:
            raise CausalityError(
                f"a frame of {self.machine.devices[arrival.source].name} would arrive at "
                f"{format_ps(arrival.first_ps)}, but its receiver ran to {format_ps(self.ran_to_ps)}"
            )
        self._accept(arrival)

    def _accept(self, arrival: Arrival) -> None:
        at_ps = arrival.last_ps
        if arrival.flags & frames.FLAG_SIGNAL:
            arrival.delivered_ps = at_ps
        else:
            key = arrival.plane * self._devices_count + arrival.target
            port = self._ingress.get(key)
            if port is None:
                port = self._ingress[key] = IngressPort()
            heapq.heappush(port.arrivals, arrival)
        self.loop.agenda.add_delivery(
            at_ps, arrival.source, arrival.sequence, self._deliver, arrival
        )

    def _deliver(self, arrival: Arrival) -> None:
        now_ps = self.loop.now_ps
        if arrival.delivered_ps < 0:
            _settle(self._ingress[arrival.plane * self._devices_count + arrival.target], now_ps)
        if arrival.delivered_ps > now_ps:
            self.loop.agenda.add_delivery(
                arrival.delivered_ps, arrival.source, arrival.sequence, self._deliver, arrival
            )
            return
        self.digest.delivery(
            now_ps,
            arrival.source,
            arrival.target,
            arrival.sequence,
            arrival.kind,
            arrival.charged_bytes,
        )
        handler = self._handlers.get(arrival.kind)
        if handler is None:
            raise FrameError(f"nobody here knows messages of kind {arrival.kind}")
        handler(arrival)

    def forget(self, peer: int, window: int) -> None:
        """A peer died: its frames of this window and later never happened (design 1.8)."""
        for port in self._ingress.values():
            kept = [a for a in port.arrivals if not self._is_of(a, peer, window)]
            if len(kept) < len(port.arrivals):
                port.arrivals[:] = kept
                heapq.heapify(port.arrivals)
        self.loop.agenda.discard(
            lambda event: isinstance(event[5], Arrival) and self._is_of(event[5], peer, window)
        )

    def _is_of(self, arrival: Arrival, peer: int, window: int) -> bool:
        return arrival.window >= window and self._process_of[arrival.source] == peer

    def statistics(self) -> dict[str, dict[str, int]]:
        """Counters by plane name."""
        return {plane.name: self.statistics_of[plane].as_dict() for plane in Plane}


_PASS = Outcome()


def _fits(port: EgressPort, charged_bytes: int) -> bool:
    waiting_bytes = port.waiting_bytes
    return waiting_bytes == 0 or waiting_bytes + charged_bytes <= port.queue_bytes_max


def _flip_a_bit(payload: Payload) -> Payload:
    if not payload:
        return payload
    flipped = bytearray(payload)
    flipped[len(flipped) // 2] ^= 1
    return flipped


def _settle(port: IngressPort, now_ps: int) -> None:
    arrivals, server = port.arrivals, port.server
    while arrivals and arrivals[0].first_ps <= now_ps:
        arrival = heapq.heappop(arrivals)
        arrival.delivered_ps = server.receive(
            arrival.first_ps, arrival.last_ps, arrival.charged_bytes, arrival.rate_bps
        )
