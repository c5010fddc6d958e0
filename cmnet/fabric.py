"""The links of one process: ports, rules and mesh put together (design 2.1).

Owns the egress queues and ingress lines of this process's devices, and what is in flight to them. Does
not own what a message means (planes bind handlers by kind) nor sockets (the mesh). A frame leaves when
its egress starts: until then it waits here, and rules, rate changes and death act on it.

Ingress is lazy: an arrival's event is its uncontended delivery; when that comes, all arrivals whose
first byte is in are settled in order of (first byte, source, sequence), and one that turns out later
is asked again at its true delivery.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from cmnet import burst_arrivals, burst_paths, bursts, deaths
from cmnet.errors import CausalityError, FrameError
from cmnet.link.reach import FrameFacts
from cmnet.link.rules import PASS, Outcome, Rules
from cmnet.messages import (
    NO_FENCE,
    Arrival,
    EgressPort,
    IngressPort,
    Outgoing,
    Payload,
    PlaneStatistics,
    Route,
    Started,
    flip_a_bit,
)
from cmnet.record.digest import Digest
from cmnet.topology.machine import Machine, Operation, Plane
from cmnet.units import NEVER_PS, format_ps
from cmnet.vtime.horizon import Send
from cmnet.vtime.loop import VirtualLoop
from cmnet.wire import frames
from cmnet.wire.pool import Pool

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
        self.window = self.until_ps = 0
        """The window in progress and its end, if a conductor grants them."""
        self.ran_to_ps = 0
        self.dies_at_ps = NEVER_PS
        """No slice of a burst reaches beyond."""
        self.sends: dict[int, tuple[int, int, int]] = {}
        self.statistics_of = [PlaneStatistics() for _ in Plane]
        self.carry = carry
        self._handlers: dict[int, Callable[[Any], None]] = {}
        self._forgotten: list[deaths.Forgotten] = []
        self._egress: dict[int, EgressPort] = {}
        self._ingress: dict[int, IngressPort] = {}
        self._routes: dict[tuple[int, int, int, int], Route] = {}
        self._sequence_base = incarnation << INCARNATION_SHIFT
        self.sequences: dict[int, int] = {}
        self._process_of = [device.process for device in machine.devices]
        self._devices_count = len(machine.devices)
        self.last_port_id = _PLANES_COUNT * self._devices_count - 1
        self._ours = {d.device_id for d in machine.devices if d.process == process}
        self.late_ps = 0
        """What leaves from then on overtakes nothing that rules delayed."""
        self.buffers = Pool()
        self.paths = burst_paths.Paths(self)
        self.arriving = burst_arrivals.BurstArrivals(self)

    # --- what planes use --------------------------------------------------------------------------

    def bind(self, kind: int, handler: burst_arrivals.Handler) -> None:
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
            egress=self.egress_port(plane, source),
            peer=None if peer == ours else peer,
        )

    def egress_port(self, plane: Plane, device: int) -> EgressPort:
        """The egress of one of our devices."""
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
        fence: int = NO_FENCE,
        quiet: bool = False,
    ) -> None:
        """Queue a message at its egress. Starting is an event: on an idle port at this instant, after
        what else is due now, so that flows posted at one instant share the port from the first chunk.

        ``rate_bps`` 0 means the path's. Whoever may send more than one collective awaits ``room``;
        whoever waits for ``started`` (a flow with its one chunk in the port) need not and counts
        nothing there. A message with a ``fence`` arrives after all that left before it on its route,
        whatever rules delay, and is withdrawn if more than ``fence`` of those were dropped (but for a
        burst's, whose ``lost`` tells at once). A ``quiet`` one (a chunk in the midst of a bulk message)
        is no event at its target: it is handed over, with its own delivery, just before the next
        message there that is not quiet.
        """
        rate_bps = rate_bps or route.path.rate_bps
        message = Outgoing(
            route, kind, body, payload, charged_bytes, rate_bps, started, fence, quiet
        )
        port = route.egress
        port.queue.append(message)
        if started is None:
            port.waiting_bytes += charged_bytes
        if not port.armed:
            self.arm(port)

    def send_burst(
        self,
        *,
        kind: int,
        head: bytes,
        messages: bursts.Messages,
        flags: bursts.Messages,
        lost: bursts.Lost | None = None,
        rate_share: tuple[int, int] = (1, 1),
    ) -> None:
        """Queue UB writes of our devices: of each source its messages, back to back in their order,
        then its flags. Their targets' processes get ``Bundle``s with ``head`` when a frame of flags
        comes that its handler wants (``BurstArrivals.wanted``; without, any). ``lost`` is told the
        indices of messages that rules dropped, slice by slice at their start; a flag behind one of
        them on its route is withheld. ``rate_share``: what the engine reaches of the path's rate;
        its start is the caller's, in ``ready_ps``. The arrays are now the fabric's. Who may send
        more than one collective at a time awaits ``room`` of each source's port first."""
        bursts.send(bursts.Burst(self, kind, head, messages, flags, lost, rate_share))

    def signal(self, route: Route, kind: int, *, delay_ps: int, body: bytes = b"") -> None:
        """A message of no bytes that passes no port: known at the target ``delay_ps`` from now.

        For completions, whose cost is part of the measured latency. Rules can drop it; a corrupt one
        is lost as well (its frame has a checksum), and a copy of one is nothing.
        """
        assert delay_ps >= route.path.propagation_ps, "a signal is not faster than its path"
        now_ps = self.loop.now_ps
        outcome = PASS if self.rules.idle(now_ps) else self.judge(route, now_ps)
        if outcome.drop or outcome.corrupt:
            self.dropped(route, kind)
            return
        at_ps = now_ps + delay_ps + outcome.delay_ps
        self._emit(route, kind, frames.FLAG_SIGNAL, (at_ps, at_ps), body, b"", 0, 1)

    async def room(self, route: Route, charged_bytes: int) -> None:
        """Wait, in virtual time and first come first served, until the egress accepts so many bytes."""
        port = route.egress
        if port.waiters or not port.fits(charged_bytes):
            future = self.loop.create_future()
            port.waiters.append((charged_bytes, future))
            try:
                await future
            except asyncio.CancelledError:
                if not future.cancelled():  # it was its turn: the next one's then
                    port.wake()
                raise

    # --- egress -----------------------------------------------------------------------------------

    def arm(self, port: EgressPort) -> None:
        """Come back when the port is free."""
        port.armed = True
        free_ps, now_ps = port.server.free_ps, self.loop.now_ps
        at_ps = free_ps if free_ps > now_ps else now_ps
        self.loop.agenda.add_port(at_ps, port.port_id, self._start_next, port)

    def _start_next(self, port: EgressPort) -> None:
        queue = port.queue
        while True:
            message = queue.popleft()
            if message.started is None:
                port.waiting_bytes -= message.charged_bytes
            if type(message) is Outgoing:
                self._start(port, message)
            elif not bursts.take_turn(self, port, message):
                queue.append(message)
                port.waiting_bytes += message.charged_bytes
            if port.waiters:
                port.wake()
            if not queue:
                port.armed = False
                return
            if type(queue[0]) is bursts.Leg and bursts.pause(self, port):
                return
            if not self.loop.advance(port.server.free_ps):
                self.arm(port)
                return

    def go_on(self, port: EgressPort) -> None:
        """The end of a ``bursts.pause``, unless something came."""
        if not port.armed and port.pause_ps == self.loop.now_ps:
            port.armed, port.pause_ps = True, -1
            self._start_next(port)

    def _start(self, port: EgressPort, message: Outgoing) -> None:
        route, kind = message.route, message.kind
        charged_bytes, rate_bps = message.charged_bytes, message.rate_bps
        if route.failures > message.fence:
            self.dropped(route, kind)
            if message.started is not None:
                message.started(False)
            return
        now_ps = self.loop.now_ps
        outcome = PASS if self.rules.idle(now_ps) else self.judge(route, now_ps)
        if outcome.rate_num != outcome.rate_den:
            rate_bps = max(rate_bps * outcome.rate_num // outcome.rate_den, 1)
        finish_ps = port.server.serve(now_ps, charged_bytes, rate_bps)
        if outcome.drop:
            route.failures += 1
            self.dropped(route, kind)
        else:
            delay_ps = route.path.propagation_ps + outcome.delay_ps
            first_ps = now_ps + delay_ps
            if outcome.delay_ps and first_ps > self.late_ps:
                self.late_ps = first_ps
            if first_ps > route.first_ps:
                route.first_ps = first_ps
            elif message.fence != NO_FENCE:
                first_ps = route.first_ps
                delay_ps = first_ps - now_ps
            times_ps = (first_ps, finish_ps + delay_ps)
            payload, flags = message.payload, frames.FLAG_QUIET if message.quiet else 0
            if outcome.corrupt:
                payload, flags = flip_a_bit(payload), flags | frames.FLAG_CORRUPT
            for _ in range(outcome.copies):
                self._emit(
                    route, kind, flags, times_ps, message.body, payload, charged_bytes, rate_bps
                )
                flags |= frames.FLAG_COPY
        if message.started is not None:
            message.started(not outcome.drop)

    def judge(self, route: Route, start_ps: int) -> Outcome:
        """What rules make of a message that starts then."""
        outcome = self.rules.judge(route.facts, start_ps)
        if route.plane == Plane.UB and (outcome.drop or outcome.corrupt):
            return self._retry(route, start_ps, outcome)
        return outcome

    def _retry(self, route: Route, start_ps: int, outcome: Outcome) -> Outcome:
        """UB's link retry counts as delay between egress and ingress (design 2.3). The link sees by
        its checksum that a frame is corrupt, so that is one more try as well."""
        spent_ps = 0
        for _ in range(self.machine.ub_retry.tries - 1):
            spent_ps += self.machine.ub_retry.delay_ps
            outcome = self.rules.judge(route.facts, start_ps)
            if not (outcome.drop or outcome.corrupt):
                return msgspec.structs.replace(outcome, delay_ps=outcome.delay_ps + spent_ps)
        return msgspec.structs.replace(outcome, drop=True)

    def dropped(self, route: Route, kind: int) -> None:
        self.statistics_of[route.plane].dropped += 1
        self.digest.drop(
            self.loop.now_ps, route.source, route.target, self.next_sequence(route.source), kind
        )

    def last_sequence(self, source: int) -> int:
        """The number of the last message of one of our devices."""
        return self.sequences.get(source, self._sequence_base)

    def next_sequence(self, source: int) -> int:
        """A number for a message of one of our devices."""
        sequence = self.sequences.get(source, self._sequence_base) + 1
        self.sequences[source] = sequence
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
        source, plane, peer = route.source, route.plane, route.peer
        body_bytes, payload_bytes = len(body), len(payload)
        sequence = self.sequences.get(source, self._sequence_base) + 1
        self.sequences[source] = sequence
        first_ps, last_ps = times_ps
        header = (
            body_bytes,
            payload_bytes,
            frames.MAGIC,
            kind,
            plane,
            flags,
            self.window,
            source,
            route.target,
            sequence,
            first_ps,
            last_ps,
            charged_bytes,
            rate_bps,
        )
        statistics = self.statistics_of[plane]
        statistics.frames += 1
        statistics.charged_bytes += charged_bytes
        statistics.carried_bytes += body_bytes + payload_bytes
        if peer is None:
            statistics.frames_in_node += 1
            self._accept(Arrival(header, body, payload))
            return
        at_ps = NEVER_PS if flags & frames.FLAG_QUIET else last_ps
        self.count_send(peer, first_ps, at_ps, at_ps)
        self.carry(peer, plane, frames.HEADER.pack(*header), body, payload)

    def count_send(self, peer: int, first_ps: int, at_ps: int, reaction_ps: int) -> None:
        """A frame leaves for another process: nothing comes of it before ``at_ps``, nothing leaves because
        of it before ``reaction_ps``. Raises CausalityError if ``first_ps``, its first byte, is within the
        window: a promised silence was broken."""
        if first_ps < self.until_ps:
            raise CausalityError(
                f"a frame would arrive within its window, at {format_ps(first_ps)}"
            )
        count, next_ps, least_ps = self.sends.get(peer, _NO_SENDS)
        self.sends[peer] = (count + 1, min(next_ps, at_ps), min(least_ps, reaction_ps))

    def take_sends(self) -> list[Send]:
        """What left for other processes since the last call."""
        sends = [(peer, *counts) for peer, counts in self.sends.items()]
        self.sends = {}
        return sends

    # --- ingress ----------------------------------------------------------------------------------

    def receive(self, header: tuple[int, ...], body: bytes, payload: Payload) -> None:
        """A frame of another process was read. Raises FrameError or CausalityError."""
        source, target, first_ps = header[7], header[8], header[10]
        if target not in self._ours:
            raise FrameError(f"a frame for device {target}, which is not here")
        if source >= self._devices_count or header[4] >= _PLANES_COUNT:
            raise FrameError(f"a frame of device {source} on plane {header[4]}, which is nowhere")
        if first_ps < self.ran_to_ps:
            raise CausalityError(
                f"a frame of {self.machine.devices[source].name} would arrive at "
                f"{format_ps(first_ps)}, but its receiver ran to {format_ps(self.ran_to_ps)}"
            )
        if header[5] & frames.FLAG_BUNDLE:
            self.arriving.receive(header, body, payload)
        else:
            self._accept(Arrival(header, body, payload))

    def ingress_port(self, plane: int, device: int) -> IngressPort:
        """The ingress of one of our devices."""
        key = plane * self._devices_count + device
        port = self._ingress.get(key)
        if port is None:
            shared = plane == Plane.UB
            place = device - self.arriving.first_device
            port = IngressPort(self.arriving, place) if shared else IngressPort()
            self._ingress[key] = port
        return port

    def _accept(self, arrival: Arrival) -> None:
        at_ps = arrival.last_ps
        arrival.port = self.ingress_port(arrival.plane, arrival.target)
        if arrival.flags & frames.FLAG_SIGNAL:
            arrival.delivered_ps = at_ps
        else:
            arrival.port.add(arrival)
            if arrival.flags & frames.FLAG_QUIET:
                return
        self.loop.agenda.add_delivery(
            at_ps, arrival.source, arrival.sequence, self._deliver, arrival
        )

    def _deliver(self, arrival: Arrival) -> None:
        now_ps = self.loop.now_ps
        if arrival.delivered_ps < 0:
            arrival.port.settle(now_ps)
        if arrival.delivered_ps > now_ps:
            self.loop.agenda.add_delivery(
                arrival.delivered_ps, arrival.source, arrival.sequence, self._deliver, arrival
            )
            return
        port = arrival.port
        if arrival.flags & frames.FLAG_SIGNAL:
            port.settle(now_ps)
        if port.quiet:
            self.hand_over_quiet(port)
        self._hand_over(arrival)

    def hand_over_quiet(self, port: IngressPort) -> None:
        """What was delivered there without being an event, before what is one."""
        while port.quiet and port.quiet[0].delivered_ps <= self.loop.now_ps:
            self._hand_over(port.quiet.popleft())

    def _hand_over(self, arrival: Arrival) -> None:
        self.digest.delivery(
            arrival.delivered_ps,
            arrival.source,
            arrival.target,
            arrival.sequence,
            arrival.kind,
            arrival.charged_bytes,
        )
        handler = self._handlers.get(arrival.kind) or self.handler(arrival.kind)
        handler(arrival)

    def handler(self, kind: int) -> Callable[[Any], None]:
        """Who takes messages of this kind. Raises FrameError."""
        handler = self._handlers.get(kind)
        if handler is None:
            raise FrameError(f"nobody here knows messages of kind {kind}")
        return handler

    def forget(self, peer: int, window: int) -> None:
        """A peer died: its frames of this window and later never happened (design 1.8). Who asked
        with ``on_forgotten`` is told which of its single messages still come."""
        devices = {one.device_id for one in self.machine.devices if one.process == peer}
        coming = deaths.forget(
            self.loop.agenda,
            self._ingress.values(),
            self.arriving,
            devices=devices,
            window=window,
            deliver=self._deliver,
            deliver_flags=self.arriving.flags_came,
        )
        for tell in self._forgotten:
            tell(devices, coming)

    def on_forgotten(self, tell: deaths.Forgotten) -> None:
        """Call this when a peer has died."""
        self._forgotten.append(tell)

    def statistics(self) -> dict[str, dict[str, int]]:
        """Counters by plane name."""
        return {plane.name: self.statistics_of[plane].as_dict() for plane in Plane}


_PLANES_COUNT = len(Plane)
_NO_SENDS = (0, NEVER_PS, NEVER_PS)
