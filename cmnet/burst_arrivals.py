"""Bursts at their targets: many messages settled at once (design 2.1).

Owns what bursts have on their way to this process's UB ports, rows of frames, until it is handed over.
Does not own the single messages of those ports (``messages.IngressPort``), with which rows are settled
in one order, nor the compiled arithmetic (``link.port_kernels``).

Messages are quiet; a frame of flags is an event, at the instant when the first byte of its last flag is
in. Then, if somebody wants it, all rows of any burst with a first byte up to now are settled at every
port: exactly, since whatever could come before them is known. All that is settled and was not handed
over is handed over, as a ``Bundle`` for each head, messages before flags. A delivery may so lie ahead of
now, by the time that the last flags take, and is final.

Rows are in memory as the frames brought them, joined to one table when some are to be settled; there
each port has its rows in order and a cursor.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from cmnet import burst_frames
from cmnet.burst_frames import COLUMNS, SEQUENCE_MAX
from cmnet.errors import CorruptError, FrameError
from cmnet.messages import Arrival, IngressPort, Payload, Repeat
from cmnet.topology.machine import Plane
from cmnet.units import NEVER_PS

if TYPE_CHECKING:
    from cmnet.fabric import Fabric

I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]


class Bundle(NamedTuple):
    """What a handler gets: n messages, or flags, that share ``head``: all that is settled and was not
    handed over before, at this event or at those that nobody wanted. Their order is fixed and means nothing.

    A handler acts on a message not before its ``delivered_ps``, which may lie after now. It may also lie
    before now: the event is the first byte of the last flag of a sender's frame. Who acts on the last
    of several checks that the latest does not.
    """

    head: bytes
    flags: bool
    sources: I64
    """[n] devices"""
    targets: I64
    """[n] devices of this process"""
    delivered_ps: I64
    """[n] final"""
    charged_bytes: I64
    """[n]"""
    data: U8
    """[n, width] the handler's own"""


Silence = Callable[[bytes], int]
"""How long after the event of a frame of flags with this head nothing leaves its process because of it
(``vtime.agenda``), in ps: what the operator that waits for them takes at least. The same in all processes."""
Wanted = Callable[[bytes, I64, I64], bool]
"""(head, sources [n], targets [n]) of a frame of flags whose event has come: whether to hand over now. Who
waits for the flags of many hands over with the last of them only; delivery is the same."""
Handler = Callable[[Arrival], None] | Callable[[Bundle], None]
"""Of a kind: its messages are sent one by one, or in bursts."""


_NOT_YET = np.empty(0, np.int64)
_NO_STATES = np.empty(0, np.uint8)


class Arriving:
    """A frame's messages on their way here, or its flags."""

    __slots__ = (
        "at_ps",
        "copies",
        "data",
        "delivered_ps",
        "flags",
        "head",
        "kind",
        "sequence",
        "source",
        "states",
        "table",
        "window",
    )

    def __init__(
        self, kind: int, flags: bool, head: bytes, window: int, table: I64, data: U8
    ) -> None:
        self.kind = kind
        self.flags = flags
        self.head = head
        self.window = window
        self.source, _, sequence = table[0, 4:].tolist()
        self.sequence = sequence & SEQUENCE_MAX
        """Of the first row, as ``source`` is."""
        self.at_ps = NEVER_PS
        """The event, if these are flags."""
        self.copies = False
        """Some of these flags are copies."""
        self.table = table
        """[n, 7]"""
        self.data = data
        """[n, width]"""
        self.delivered_ps, self.states = _NOT_YET, _NO_STATES
        """[n], once they are in the table of all"""

    def bundle_of(self) -> tuple[bool, int, bytes, int]:
        """What the rows of a bundle have in common."""
        return self.flags, self.kind, self.head, self.data.shape[1]

    def order(self) -> tuple[bool, int, bytes, int, int, int]:
        """One order, whatever was read first."""
        return (*self.bundle_of(), self.source, self.sequence)


class BurstArrivals:
    """All rows on their way to one process."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        ours = [d.device_id for d in fabric.machine.devices if d.process == fabric.process]
        self.first_device, self._devices = ours[0], len(ours)
        self._ports: list[IngressPort] = []
        self._fresh: list[Arriving] = []
        """Not yet in the table."""
        self._fresh_ps = NEVER_PS
        self._servers = np.zeros((self._devices, 8), np.int64)
        """The ingresses of those ports that are ``in_table``, as kernels take them."""
        self._waiting = 0
        """Rows that are settled and not handed over."""
        self.wanted: dict[int, Wanted] = {}
        """By kind; without, every frame of flags is wanted."""
        self.silences: dict[int, Silence] = {}
        """By kind; without, something may leave at once."""
        self.repeats: dict[int, Repeat] = {}
        """How the data of messages of a kind is carried, the same in all processes; once, if not said."""
        self._found = np.empty(4, np.int64)
        """What ``look`` found."""
        self._forget_all()

    def silence_ps(self, kind: int, head: bytes) -> int:
        """After flags of this kind and head."""
        silence = self.silences.get(kind)
        return 0 if silence is None else silence(head)

    def repeat_of(self, kind: int, width: int) -> Repeat:
        """How data of this width is carried."""
        repeat = self.repeats.get(kind)
        if repeat is None:
            return Repeat(width, 0, 0, 0, 0)
        assert width in (0, repeat.data_bytes), (width, repeat)
        return repeat

    def once(self, kind: int, table: I64, data: U8) -> tuple[I64, U8]:
        """Rows, and data as it was before it was repeated. Raises FrameError at data that is not as wide
        as what this kind carries, CorruptError if a copy differs in a byte. Where data was made anew the
        rows are too: they were a view of the frame, which would be kept with all its copies."""
        repeat = self.repeats.get(kind)
        if repeat is None:
            return table, data
        from cmnet.link.copy_kernels import first_copies

        if data.shape[1] != repeat.carried_bytes:
            raise FrameError(f"messages of {data.shape[1]} bytes, not {repeat.carried_bytes}")
        if repeat.carried_bytes == repeat.data_bytes:
            return table, data
        first = np.empty((len(data), repeat.data_bytes), np.uint8)
        wrong = first_copies(data, np.array(repeat, np.int64), first)
        if wrong >= 0:
            devices = self._fabric.machine.devices
            names = [devices[device].name for device in table[wrong, 4:6].tolist()]
            text = f"a copy in a message of {names[0]} to {names[1]} differs from the first"
            raise CorruptError(text, definite=True)
        return table.copy(), first

    def _forget_all(self) -> None:
        self._frames: list[Arriving] = []
        """In the table, in their order; the arrays below join theirs."""
        self._left = np.zeros(0, np.int64)
        """[frames] rows that were not handed over."""
        self._edges = np.zeros(1, np.int64)
        """[frames + 1] first rows."""
        self._table = np.empty((0, COLUMNS), np.int64)
        self._delivered_ps = np.empty(0, np.int64)
        self._states = np.empty(0, np.uint8)
        self._order = np.empty(0, np.int64)
        """Unsettled rows by (port, first byte, source, sequence)."""
        self._cursors = np.zeros(self._devices, np.int64)
        self._ends = np.zeros(self._devices, np.int64)

    def _all_ports(self) -> list[IngressPort]:
        if not self._ports:
            self._ports = [
                self._fabric.ingress_port(Plane.UB, self.first_device + place)
                for place in range(self._devices)
            ]
        return self._ports

    # --- frames -----------------------------------------------------------------------------------

    def receive(self, header: tuple[int, ...], body: bytes, payload: Payload) -> None:
        """A frame was read, or written to ourselves. Raises FrameError at one that no process of ours
        writes, CorruptError at data whose copies differ (``once``)."""
        from cmnet.link import port_kernels as ports

        kind, window, fabric = header[3], header[6], self._fabric
        messages, table, data, flag_data = burst_frames.read(header, payload)
        wrong = ports.look(
            table,
            messages,
            fabric.ran_to_ps,
            self.first_device,
            self._devices,
            len(fabric.machine.devices),
            self._found,
        )
        if wrong >= 0:
            raise FrameError(f"a bundle with a message that nobody sends: {table[wrong]}")
        first_ps, first_flag_ps, at_ps, copies = self._found.tolist()
        self._fresh_ps = min(self._fresh_ps, first_ps, first_flag_ps)
        anew = False
        if messages:
            rows, first = self.once(kind, table[:messages], data)
            anew = first is not data  # then the frame is not kept with all its copies
            self._fresh.append(Arriving(kind, False, body, window, rows, first))
        if messages < len(table):
            rows = table[messages:]
            if anew:
                rows, flag_data = rows.copy(), flag_data.copy()
            flags = Arriving(kind, True, body, window, rows, flag_data)
            flags.at_ps, flags.copies = at_ps, copies > 0
            self._fresh.append(flags)
            silence_ps = max(header[11] - at_ps, 0)  # as its sender counts it
            fabric.loop.agenda.add_delivery(
                at_ps, flags.source, flags.sequence, self.flags_came, flags, silence_ps
            )

    def discard(self, unwanted: Callable[[Arriving], bool]) -> None:
        """Forget all rows of frames that match and are not settled."""
        from cmnet.link import port_kernels as ports

        self._fresh = [one for one in self._fresh if not unwanted(one)]
        if any(unwanted(one) for one in self._frames):
            for one in self._frames:
                if unwanted(one):
                    one.states[one.states == ports.UNSETTLED] = ports.HANDED
            self._join()

    # --- settling ---------------------------------------------------------------------------------

    def due(self, port: IngressPort, now_ps: int) -> bool:
        """Rows at this port have their first byte in and are not settled."""
        if self._fresh_ps <= now_ps:
            self._join()
        return port.bursts_ps <= now_ps

    def _join(self) -> None:
        """Make one table of what came and what is left of the one before."""
        from cmnet.link import port_kernels as ports

        kept = [one for one in self._frames if one.states.min() != ports.HANDED]
        for one in self._fresh:
            one.delivered_ps = np.empty(len(one.table), np.int64)
            one.states = np.zeros(len(one.table), np.uint8)
        joined = self._frames = sorted([*kept, *self._fresh], key=Arriving.order)
        self._fresh, self._fresh_ps = [], NEVER_PS
        if not joined:
            self._forget_all()
            for port in self._ports:
                port.bursts_ps = NEVER_PS
            return
        self._table = np.concatenate([one.table for one in joined])
        self._delivered_ps = np.concatenate([one.delivered_ps for one in joined])
        self._states = np.concatenate([one.states for one in joined])
        self._edges = np.cumsum([0, *[len(one.states) for one in joined]])
        handed = np.add.reduceat(self._states == ports.HANDED, self._edges[:-1], dtype=np.int64)
        self._left = np.diff(self._edges) - handed
        for one, begin, end in zip(joined, self._edges.tolist(), self._edges[1:].tolist()):
            one.delivered_ps = self._delivered_ps[begin:end]
            one.states = self._states[begin:end]
        begins = np.empty(self._devices + 1, np.int64)
        self._order = ports.settling_order(self._table, self._states, self.first_device, begins)
        if begins[0] < 0:
            begins[0] = 0
            columns = self._table[self._order].T
            numbers = columns[ports.SEQUENCE] & SEQUENCE_MAX
            keys = [numbers, *columns[[ports.SOURCE, ports.FIRST, ports.TARGET]]]
            self._order = self._order[np.lexsort(keys)]
        self._cursors, self._ends = begins[:-1].copy(), begins[1:].copy()
        first_ps, order = self._table[:, ports.FIRST], self._order
        for port, cursor, end in zip(self._all_ports(), begins.tolist(), begins[1:].tolist()):
            port.bursts_ps = int(first_ps[order[cursor]]) if cursor < end else NEVER_PS

    def settle(self, ports: list[IngressPort], now_ps: int) -> None:
        """Fix the delivery of all whose first byte is in, at ports that are ``due``; rows and single
        messages in one order."""
        from cmnet.link import port_kernels

        for port in ports:
            if not port.in_table:
                port.in_table = True
                self._servers[port.place, :4] = port.server.state
        singles = _NO_SINGLES
        taken = [port.take(now_ps) for port in ports]
        if any(taken):
            singles = _Singles(taken)
        begins = singles.begins if singles.all else np.zeros(len(ports) + 1, np.int64)
        next_ps = np.empty(len(ports), np.int64)
        self._waiting += port_kernels.settle(
            now_ps,
            np.array([port.place for port in ports]),
            self._order,
            self._cursors,
            self._ends,
            self._table,
            self._delivered_ps,
            self._states,
            self._servers,
            singles.table,
            begins,
            singles.delivered_ps,
            next_ps,
        )
        for port, first_ps in zip(ports, next_ps.tolist()):
            port.bursts_ps = first_ps
        for port, arrival, delivered_ps in singles.settled(ports):
            port.settled(arrival, delivered_ps)

    def leave_table(self, port: IngressPort) -> None:
        """Its server is to be used alone again."""
        port.in_table = False
        port.server.state = tuple(self._servers[port.place, :4].tolist())

    # --- handing over -----------------------------------------------------------------------------

    def flags_came(self, frame: Arriving) -> None:
        """The event of a frame of flags."""
        wanted = self.wanted.get(frame.kind)
        if wanted is not None:
            from cmnet.link import port_kernels as ports

            rows = frame.table
            if frame.copies:  # which are handed to nobody
                rows = rows[rows[:, ports.SEQUENCE] >= 0]
            if not wanted(frame.head, rows[:, ports.SOURCE], rows[:, ports.TARGET]):
                return
        self.deliver()

    def deliver(self) -> None:
        """Settle everything with its first byte in, hand over everything settled."""
        fabric, now_ps = self._fabric, self._fabric.loop.now_ps
        if self._fresh_ps <= now_ps:
            self._join()
        ports = [port for port in self._all_ports() if port.bursts_ps <= now_ps]
        if ports:
            self.settle(ports, now_ps)
        for port in self._ports:
            if port.quiet:
                fabric.hand_over_quiet(port)
        if self._waiting:
            for kind, bundle in self._take_settled():
                fabric.handler(kind)(bundle)

    def _take_settled(self) -> list[tuple[int, Bundle]]:
        """A bundle for each head and width of what is settled, in order."""
        from cmnet.link import port_kernels as ports

        taken = np.empty(len(self._edges), np.int64)
        rows = ports.take_settled(self._states, self._edges, self._left, taken, self._waiting)
        self._waiting = 0
        edges = taken.tolist()
        numbers = [n for n in range(len(self._frames)) if edges[n] < edges[n + 1]]
        same = itertools.groupby(numbers, key=lambda number: self._frames[number].bundle_of())
        bundles = [(kind, self._bundle(rows, edges, list(some))) for (_, kind, *_), some in same]
        if not self._left.any():
            self._forget_all()
        return bundles

    def _bundle(self, rows: I64, edges: list[int], numbers: list[int]) -> Bundle:
        """Of the rows of these frames, between which no other was settled."""
        from cmnet.link import port_kernels as ports

        one = self._frames[numbers[0]]
        begin, end = edges[numbers[0]], edges[numbers[-1] + 1]
        chosen = rows[begin:end]
        columns = np.empty((5, len(chosen)), np.int64)
        copies = ports.gather(chosen, self._table, self._delivered_ps, columns)
        sources, targets, delivered_ps, charged_bytes, sequences = columns
        self._fabric.digest.deliveries(
            one.kind,
            at_ps=delivered_ps,
            sources=sources,
            targets=targets,
            sequences=sequences,
            charged_bytes=charged_bytes,
        )
        data = self._data_of(chosen, edges, numbers)
        bundle = Bundle(one.head, one.flags, sources, targets, delivered_ps, charged_bytes, data)
        if copies:
            once = self._table[chosen, ports.SEQUENCE] >= 0
            bundle = Bundle(one.head, one.flags, *[column[once] for column in bundle[2:]])
        return bundle

    def _data_of(self, chosen: I64, edges: list[int], numbers: list[int]) -> U8:
        data = np.empty((len(chosen), self._frames[numbers[0]].data.shape[1]), np.uint8)
        at = 0
        for number in numbers:
            ours, count = self._frames[number].data, edges[number + 1] - edges[number]
            if count == len(ours):
                data[at : at + count] = ours
            elif data.shape[1]:
                rows = chosen[at : at + count] - self._edges[number]
                np.take(ours, rows, axis=0, out=data[at : at + count], mode="clip")
            at += count
        return data


class _Singles:
    """Single messages that are settled together with rows."""

    def __init__(self, of_ports: list[list[Arrival]]) -> None:
        self.all = [arrival for some in of_ports for arrival in some]
        self.begins = np.cumsum([0, *[len(some) for some in of_ports]])
        """[ports + 1] each port's first."""
        rows = [
            (a.first_ps, a.last_ps, a.charged_bytes, a.rate_bps, a.source, a.target, a.sequence)
            for a in self.all
        ]
        self.table = np.array(rows, np.int64).reshape(len(rows), COLUMNS)
        self.delivered_ps = np.empty(len(rows), np.int64)

    def settled(self, ports: list[IngressPort]) -> Iterator[tuple[IngressPort, Arrival, int]]:
        """Each with its port and delivery, in order."""
        begins, delivered_ps = self.begins.tolist(), self.delivered_ps.tolist()
        for port, begin, end in zip(ports, begins, begins[1:]):
            for at in range(begin, end):
                yield port, self.all[at], delivered_ps[at]


_NO_SINGLES = _Singles([])
