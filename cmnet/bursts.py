"""Bursts: many messages of one process's devices, at the cost of few (design 2.1).

Owns what happens to a *burst* at its egress: arrays of messages on the UB plane, of which those of one
source, its *leg*, leave that device's port back to back. Every message has its own start, finish,
verdict and arrival, to the picosecond those of the same messages sent one by one; what is shared is the
event, the frame and the handler's call. Does not own the arrivals (``burst_arrivals``) nor the compiled
arithmetic (``link.port_kernels``, which a program imports before it forks).

A leg leaves in *slices*: at an event it serves all that starts before the slice's end, which may lie
ahead, since a receiver must know of a message before its first byte. Slices end at multiples of
``bundle_slice_ps``, half of it from their event at least, so one and a half at most: the grain at which
sudden deaths, rules that are new and other messages of the port act on a leg. (Rules that are known
judge each message at its start, and before a planned death the slice ends.) Alone at its port a leg
goes on at such a multiple; so the legs of all bursts with idle ports, in whatever process, have their
later slices at the same instants, in one window. What the legs of a burst have for one process goes in
one frame, written when all ports of the instant had their turn. After the messages of a leg come its
*flags*. They are what receivers wait for: a message is no event at its target, a frame of flags is one,
when the first byte of its last flag is in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from cmnet import burst_frames
from cmnet.burst_frames import SEQUENCE_MAX
from cmnet.link.rules import Outcome
from cmnet.messages import EgressPort, Route
from cmnet.topology.machine import Operation, Plane

if TYPE_CHECKING:
    from cmnet.fabric import Fabric

I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]

Piece = tuple[I64, int]
"""Rows that left, [n, 9] as ``port_kernels`` numbers columns, and how many of the n."""

Lost = Callable[[I64], None]
"""Told the indices of messages that rules dropped."""

COPY = -SEQUENCE_MAX - 1
"""In the sequence of a row that doubles another (the top bit): it takes its time at the ingress and is
handed to nobody, since the link layer refuses it."""


class Messages(NamedTuple):
    """Messages of this process's devices, or flags of theirs, n of them."""

    sources: I64
    """[n] devices of this process; messages of one source are neighbours, in the order in which they
    leave."""
    targets: I64
    """[n] devices; the source itself only for a flag of no charged bytes (asserted), which is in when
    its turn comes, behind what its source has sent to others."""
    charged_bytes: I64
    """[n]"""
    ready_ps: I64
    """[n] no message starts before; non-decreasing within a source; one that has passed is now."""
    data: U8
    """[n, width] what is carried."""


def nothing(width: int = 0) -> Messages:
    """No messages."""
    none = np.empty(0, np.int64)
    return Messages(none, none, none, none, np.empty((0, width), np.uint8))


class Leg:
    """What one source of a burst has not sent yet: rows ``begin`` to ``end``, in its egress port."""

    __slots__ = ("begin", "burst", "charged_bytes", "end", "paths", "source")

    started = None
    """As ``Outgoing.started`` that nobody asked for: the port counts its bytes until its turn."""

    def __init__(
        self, burst: Burst, source: int, begin: int, end: int, charged_bytes: int, paths: I64
    ) -> None:
        self.burst = burst
        self.source = source
        self.begin = begin
        self.end = end
        self.paths = paths
        """[3, devices]: rate (bit/s), propagation (ps) and process, by target."""
        self.charged_bytes = charged_bytes

    def next_start_ps(self, port: EgressPort, now_ps: int) -> int:
        """When its next message could start."""
        return max(port.server.free_ps, int(self.burst.ready_ps[self.begin]), now_ps)


class Burst:
    """Messages and flags as one table of rows, by source: first its messages, then its flags. Made when
    it is known, which may be before it is sent; see ``Fabric.send_burst``."""

    __slots__ = (
        "charged_bytes",
        "delays",
        "edges",
        "fabric",
        "flags",
        "head",
        "index",
        "judged",
        "kind",
        "lost",
        "pieces",
        "rate_share",
        "ready_ps",
        "sources",
        "tables",
        "targets",
        "withheld",
    )

    def __init__(
        self,
        fabric: Fabric,
        kind: int,
        head: bytes,
        messages: Messages,
        flags: Messages,
        lost: Lost | None,
        rate_share: tuple[int, int],  # called in few places, by position
    ) -> None:
        self.fabric = fabric
        self.kind = kind
        self.head = head
        self.lost = lost
        self.rate_share = rate_share
        self.tables = (messages, flags)
        sources = np.concatenate([messages.sources, flags.sources])
        order = np.argsort(sources, kind="stable")
        counts = len(messages.sources), len(flags.sources)
        self.flags = np.repeat(np.array([0, 1]), counts)[order]
        """[rows] 1 for a flag."""
        self.index = np.concatenate([np.arange(count) for count in counts])[order]
        """[rows] the place in ``messages`` or ``flags``."""
        self.targets = _both(messages.targets, flags.targets)[order]
        self.charged_bytes = _both(messages.charged_bytes, flags.charged_bytes)[order]
        self.ready_ps = _both(messages.ready_ps, flags.ready_ps)[order]
        sources = sources[order]
        own = self.targets == sources
        assert self.flags[own].all() and not self.charged_bytes[own].any(), "not a flag to itself"
        self.judged = False
        """Rules acted on it: they may have delayed or dropped what its flags must not overtake."""
        self.withheld: set[tuple[int, int]] = set()
        """(source, target) of messages that were dropped."""
        self.pieces: list[Piece] = []
        """What left at this instant."""
        self.delays: dict[int, int] = {0: 0}
        """Of the flags among them: a number for each delay by rules."""
        self.edges = [*_edges(sources), len(sources)]
        """Where each source's rows begin, and the end."""
        self.sources = sources[self.edges[:-1]]
        """[legs]"""

    def legs(self) -> list[Leg]:
        """What each source has to send."""
        if not len(self.sources):
            return []
        edges, paths = self.edges, self.fabric.paths
        charged = np.add.reduceat(self.charged_bytes, edges[:-1]).tolist()
        return [
            Leg(self, source, begin, end, charged_bytes, paths.of(source, self.rate_share))
            for source, begin, end, charged_bytes in zip(
                self.sources.tolist(), edges, edges[1:], charged
            )
        ]


def _both(ours: I64, theirs: I64) -> I64:
    return np.concatenate([ours, theirs]).astype(np.int64, copy=False)


def _edges(values: npt.NDArray[np.integer]) -> list[int]:
    """Where each run of equal values begins."""
    if not len(values):
        return []
    return [0, *(np.flatnonzero(values[1:] != values[:-1]) + 1).tolist()]


# --- egress ---------------------------------------------------------------------------------------


def send(burst: Burst) -> None:
    """Into its sources' ports; or on its way, if all of it leaves within a slice from now and nothing
    else is at those ports: the same messages at the same instants, in one go for all legs."""
    fabric = burst.fabric
    if _leaves_at_once(fabric, burst):
        return
    for leg in burst.legs():
        port = fabric.egress_port(Plane.UB, leg.source)
        port.queue.append(leg)
        port.waiting_bytes += leg.charged_bytes
        if not port.armed:
            fabric.arm(port)


def _leaves_at_once(fabric: Fabric, burst: Burst) -> bool:
    from cmnet.link import port_kernels as kernels

    now_ps, sources = fabric.loop.now_ps, burst.sources.tolist()
    if not sources or now_ps < fabric.late_ps or not fabric.rules.idle(now_ps):
        return False
    ports = [fabric.egress_port(Plane.UB, source) for source in sources]
    if any(port.armed or port.queue for port in ports):
        return False
    lasts = [fabric.last_sequence(source) for source in sources]
    states = np.array([[*port.server.state, 0, 0, 0, 0] for port in ports])
    rows = np.empty((burst.edges[-1], 9), np.int64)
    if not kernels.serve_legs(
        fabric.arriving.first_device,
        burst.sources,
        np.array(burst.edges),
        np.array(lasts),
        fabric.paths.of_all(burst.rate_share),
        burst.targets,
        burst.charged_bytes,
        burst.ready_ps,
        burst.flags,
        now_ps,
        _slice_end_ps(fabric),
        states,
        rows,
    ):
        return False
    counts = np.diff(burst.edges).tolist()
    for source, port, last, count, state in zip(
        sources, ports, lasts, counts, states[:, :4].tolist()
    ):
        port.server.state = tuple(state)
        fabric.sequences[source] = last + count
    burst.pieces.append((rows, len(rows)))
    flush(burst)
    return True


def take_turn(fabric: Fabric, port: EgressPort, leg: Leg) -> bool:
    """The leg's turn at its port: one slice leaves. False: more is left. ``charged_bytes`` is what is
    left then."""
    burst, now_ps, begin = leg.burst, fabric.loop.now_ps, leg.begin
    if not burst.judged and fabric.rules.idle(now_ps) and now_ps >= fabric.late_ps:
        piece = _leave(fabric, port, leg)
    else:
        piece = _leave_judged(fabric, port, leg)
    if leg.begin == leg.end:
        leg.charged_bytes = 0
    else:
        leg.charged_bytes -= int(burst.charged_bytes[begin : leg.begin].sum())
    if piece[1]:
        if not burst.pieces:
            fabric.loop.agenda.add_port(now_ps, fabric.last_port_id + 1, flush, burst)
        burst.pieces.append(piece)
    return leg.begin == leg.end


def pause(fabric: Fabric, port: EgressPort) -> bool:
    """If only legs wait at a port and none can start before the next multiple of a slice, it goes on at
    the last one that is not after the next message's start, and never if this process will be dead
    then. What comes meanwhile need not wait. False: it goes on as soon as it is free."""
    now_ps, slice_ps = fabric.loop.now_ps, fabric.machine.bundle_slice_ps
    legs: list[Leg] = [one for one in port.queue if type(one) is Leg]
    if len(legs) < len(port.queue):
        return False
    start_ps = min([leg.next_start_ps(port, now_ps) for leg in legs])
    turn_ps = now_ps if len(legs) == 1 else max(now_ps, port.server.free_ps)
    if start_ps >= fabric.dies_at_ps:
        port.armed = False
        return True
    pause_ps = start_ps // slice_ps * slice_ps
    if pause_ps <= turn_ps:
        return False
    port.armed, port.pause_ps = False, pause_ps
    fabric.loop.agenda.add_port(pause_ps, port.port_id, fabric.go_on, port)
    return True


def _slice_end_ps(fabric: Fabric) -> int:
    """Of one that leaves now."""
    slice_ps = fabric.machine.bundle_slice_ps
    end_ps = (fabric.loop.now_ps + slice_ps + slice_ps // 2) // slice_ps * slice_ps
    return min(end_ps, fabric.dies_at_ps)


def _leave(fabric: Fabric, port: EgressPort, leg: Leg) -> Piece:
    """No rule is in force: every message of the slice passes."""
    from cmnet.link import port_kernels as ports

    burst, begin, server = leg.burst, leg.begin, port.server
    now_ps = fabric.loop.now_ps
    rows = np.empty((leg.end - begin, 9), np.int64)
    state = np.array([[*server.state, 0, 0, 0, 0]])
    stop: int = ports.serve_leg(
        leg.source,
        leg.paths,
        burst.targets,
        burst.charged_bytes,
        burst.ready_ps,
        burst.flags,
        begin,
        leg.end,
        now_ps,
        _slice_end_ps(fabric),
        state,
        rows,
    )
    if stop < 0:
        target = int(burst.targets[~stop])
        fabric.route(Plane.UB, Operation.WRITE, leg.source, target)  # raises where there is no path
        raise AssertionError(f"a message of {burst.charged_bytes[~stop]} bytes to device {target}")
    server.state = tuple(state[0, :4].tolist())
    leg.begin = stop
    count = stop - begin
    rows[:count, ports.SOURCE] = leg.source
    last = fabric.last_sequence(leg.source)
    fabric.sequences[leg.source] = last + count
    rows[:count, ports.SEQUENCE] = np.arange(last + 1, last + 1 + count)
    return rows, count


def _leave_judged(fabric: Fabric, port: EgressPort, leg: Leg) -> Piece:
    """Rules are in force, now or later: each message has its verdict, at its start. What they drop is no
    failure of its route, on which fences look: ``lost`` tells the program at the slice's start, and the
    flag behind it is withheld."""
    burst, source = leg.burst, leg.source
    burst.judged = True
    now_ps, end_ps = fabric.loop.now_ps, _slice_end_ps(fabric)
    rows: list[tuple[int, ...]] = []
    lost: list[int] = []
    processes = len(fabric.machine.processes)
    while leg.begin < leg.end:
        row, start_ps = leg.begin, leg.next_start_ps(port, now_ps)
        if start_ps >= end_ps:
            break
        leg.begin += 1
        target, is_flag = int(burst.targets[row]), int(burst.flags[row])
        if target == source:
            own = (start_ps, start_ps, 0, 1, source, source, fabric.next_sequence(source), row)
            rows.append((*own, 2 * fabric.process + 1))
            continue
        route = fabric.route(Plane.UB, Operation.WRITE, source, target)
        if is_flag and (source, target) in burst.withheld:
            fabric.dropped(route, burst.kind)
            continue
        outcome = fabric.judge(route, start_ps)
        rate_bps = _rate_bps(route, outcome, burst.rate_share)
        charged_bytes = int(burst.charged_bytes[row])
        finish_ps = port.server.serve(start_ps, charged_bytes, rate_bps)
        if outcome.drop:
            fabric.dropped(route, burst.kind)
            if not is_flag:
                lost.append(int(burst.index[row]))
                burst.withheld.add((source, target))
            continue
        delay_ps = _delay_ps(fabric, route, outcome, start_ps, is_flag=bool(is_flag))
        first_ps, last_ps = start_ps + delay_ps, finish_ps + delay_ps
        late_ps = delay_ps - route.path.propagation_ps if is_flag else 0
        group = burst.delays.setdefault(late_ps, len(burst.delays)) * processes
        group = (group + int(leg.paths[2, target])) * 2 + is_flag
        copy = 0
        for _ in range(outcome.copies):
            sequence = fabric.next_sequence(source) + copy
            rows.append(
                (first_ps, last_ps, charged_bytes, rate_bps, source, target, sequence, row, group)
            )
            copy = COPY
    if lost and burst.lost is not None:
        burst.lost(np.array(lost))
    return np.array(rows, np.int64).reshape(len(rows), 9), len(rows)


def _rate_bps(route: Route, outcome: Outcome, rate_share: tuple[int, int]) -> int:
    rate_bps = route.path.rate_bps * rate_share[0] // rate_share[1]
    if outcome.rate_num != outcome.rate_den:
        rate_bps = max(rate_bps * outcome.rate_num // outcome.rate_den, 1)
    return rate_bps


def _delay_ps(
    fabric: Fabric, route: Route, outcome: Outcome, start_ps: int, *, is_flag: bool
) -> int:
    """From start to first byte. A flag is not visible before what left before it on its route."""
    delay_ps = route.path.propagation_ps + outcome.delay_ps
    if start_ps + delay_ps > route.first_ps:
        route.first_ps = start_ps + delay_ps
        fabric.late_ps = max(fabric.late_ps, route.first_ps)
    elif is_flag:
        delay_ps = route.first_ps - start_ps
    return delay_ps


def flush(burst: Burst) -> None:
    """All ports had their turn at this instant: write what left."""
    pieces, burst.pieces = burst.pieces, []
    burst_frames.write(burst, pieces)
    burst.delays = {0: 0}
