"""A run without sockets or processes: the real horizon, gates and agendas, and a wire that plays tricks.

What nodes do is drawn from one stream (``behaviour``); in which order control messages and frames come
in, nodes run and processes die is drawn from another (``interleaving``). Nothing that a run results in
may depend on the second.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from cmnet import entropy
from cmnet.units import NEVER_PS
from cmnet.vtime.agenda import Agenda, Event
from cmnet.vtime.horizon import Death, Grant, Horizon, Send
from cmnet.vtime.window import WindowGate

LOOKAHEAD_PS = 10
Log = tuple[tuple[int, ...], ...]


class Frame(NamedTuple):
    source: int
    incarnation: int
    window: int
    sequence: int
    first_ps: int
    last_ps: int
    lives: int
    silence_ps: int = 0


class Fault(NamedTuple):
    at_ps: int
    kind: str
    process: int


class Timer(NamedTuple):
    lives: int
    silence_ps: int


class Crash(NamedTuple):
    window: int
    process: int


class Entry(NamedTuple):
    window: int
    process: int


def is_cancelled(event: Event) -> bool:
    return isinstance(event[5], Timer) and event[5].lives < 0


class Node:
    """One process: an agenda whose events make timers and frames."""

    def __init__(self, run: Run, process: int, incarnation: int, start_ps: int) -> None:
        self.run_of = run
        self.process = process
        self.incarnation = incarnation
        self.draws = entropy.stream(run.behaviour, f"{process}.{incarnation}")
        self.agenda = Agenda()
        self.gate = WindowGate()
        self.granted = False
        self.ran_to_ps = start_ps
        self.now_ps = start_ps
        self.sequence = incarnation << 20
        self.log: list[tuple[int, ...]] = []
        self.sends: dict[int, list[int]] = {}  # frames, earliest event, earliest reaction
        self.peers = list(run.incarnations)
        self.dead: dict[tuple[int, int], int] = {}
        for _ in range(1 + self.draws.below(3)):
            self.timer(start_ps + self.draws.below(40), 6, 0)

    def timer(self, at_ps: int, lives: int, silence_ps: int) -> None:
        self.agenda.add_timer(at_ps, self.happen, Timer(lives, silence_ps), silence_ps)

    def silence_ps(self) -> int:
        return self.draws.below(2) * self.draws.below(50)

    def next_at_ps(self) -> int:
        """As the loop has it: what was cancelled goes when it is the first."""
        while self.agenda.heap and is_cancelled(self.agenda.heap[0]):
            self.agenda.drop_head()
        return self.agenda.next_at_ps()

    def happen(self, item: Frame | Timer) -> None:
        """What is made of an event with silence leaves after it; a timer within it inherits the rest."""
        lives, silence_ps = item.lives, item.silence_ps
        told = item._replace(window=0) if isinstance(item, Frame) else item
        self.log.append((self.now_ps, *told))
        for _ in range((0, 1, 1, 2)[self.draws.below(4)] if lives else 0):
            if self.draws.below(3) == 0:
                after_ps = self.draws.below(60)
                left_ps = max(silence_ps - after_ps, self.silence_ps())
                self.timer(self.now_ps + after_ps, lives - 1, left_ps)
                self.timer(self.now_ps + self.draws.below(60), -1, 0)  # cancelled at once
            else:
                self.send(lives - 1, self.now_ps + silence_ps)

    def send(self, lives: int, leaves_ps: int) -> None:
        peer = self.draws.below(len(self.peers))
        first_ps = leaves_ps + LOOKAHEAD_PS + self.draws.below(3) * self.draws.below(20)
        last_ps = first_ps + self.draws.below(2) * self.draws.below(50)
        self.sequence += 1
        window = self.gate.window
        frame = Frame(
            self.process,
            self.incarnation,
            window,
            self.sequence,
            first_ps,
            last_ps,
            lives,
            self.silence_ps(),
        )
        if peer == self.process:
            self.accept(frame)
            return
        count = self.sends.setdefault(peer, [0, NEVER_PS, NEVER_PS])
        count[0] += 1
        count[1] = min(count[1], last_ps)
        count[2] = min(count[2], last_ps + frame.silence_ps)
        self.run_of.carry(self, peer, frame)

    def accept(self, frame: Frame) -> None:
        self.agenda.add_delivery(
            frame.last_ps, frame.source, frame.sequence, self.happen, frame, frame.silence_ps
        )

    def read(self, frame: Frame) -> None:
        """A frame came off the wire."""
        if frame.window >= self.dead.get((frame.source, frame.incarnation), 1 << 60):
            return
        assert frame.first_ps >= self.ran_to_ps, "causality"
        self.accept(frame)
        self.gate.frame_read(frame.source, frame.window)

    def obey(self, message: Any) -> None:
        """A control message came."""
        match message:
            case Grant():
                assert not self.granted
                self.granted = True
                self.gate.granted(message.window, message.horizon_ps, message.frames_expected)
            case Death(process, _, window):
                self.dead[process, self.peers[process]] = window
                self.peers[process] = -1
                self.gate.forget(process, window)
                self.agenda.discard(
                    lambda e: (
                        isinstance(e[5], Frame) and e[5].source == process and e[5].window >= window
                    )
                )
            case ("up", process, incarnation):
                self.peers[process] = incarnation
            case Frame():  # from the door
                self.accept(message)
                self.gate.frame_read(message.source, message.window)

    def may_run(self) -> bool:
        return self.granted and self.gate.open()

    def run(self) -> tuple[int, int, int, list[Send], int]:
        """One window; returns the report: window, next event, reaction, sends, events so far."""
        horizon_ps = self.gate.horizon_ps
        while self.next_at_ps() < horizon_ps:
            instant: deque[Event] = deque()
            self.agenda.take_instant(instant)
            for event in instant:
                if is_cancelled(event):
                    continue
                assert event[0] >= self.now_ps
                self.now_ps = event[0]
                event[4](event[5])
        self.ran_to_ps = horizon_ps
        self.granted = False
        sends: list[Send] = [(peer, n, at, then) for peer, (n, at, then) in self.sends.items()]
        self.sends = {}
        agenda = self.agenda
        return (
            self.gate.window,
            self.next_at_ps(),
            agenda.reaction_ps(is_cancelled),
            sends,
            len(self.log),
        )


class Result(NamedTuple):
    logs: dict[tuple[int, int], Log]
    """(process, incarnation) -> its events, as far as reported."""
    windows: int
    grants: int
    deaths: list[Death]


class Run:
    """Runs to the end with ``result()``."""

    def __init__(
        self,
        *,
        processes: int,
        behaviour: int,
        interleaving: int,
        faults: tuple[Fault, ...] = (),
        crashes: tuple[Crash, ...] = (),
        entries: tuple[Entry, ...] = (),
    ) -> None:
        self.behaviour = behaviour
        self.picks = entropy.stream(interleaving, "interleaving")
        self.incarnations = [0] * processes
        self.horizon = Horizon(processes, LOOKAHEAD_PS)
        self.faults = deque(sorted(faults, key=lambda fault: fault.at_ps))
        self.crashes = deque(crashes)
        self.entries = deque(entries)
        self.wires: dict[tuple[int, int, int, int], deque[Frame]] = {}
        self.orders: list[deque[Any]] = [deque() for _ in range(processes)]
        self.answers: list[deque[Any]] = [deque() for _ in range(processes)]
        self.reported: list[tuple[int, int, int]] = [(0, 0, 0)] * processes
        """Per process: window, events by then, events before."""
        self.logs: dict[tuple[int, int], Log] = {}
        self.deaths: list[Death] = []
        self.at_stop = False
        self.over = False
        self.nodes: list[Node | None] = [Node(self, process, 0, 0) for process in range(processes)]
        for node in self.nodes:
            assert node is not None
            self.horizon.join(node.process, node.agenda.next_at_ps())
        for fault in self.faults:
            self.horizon.stop_at(fault.at_ps)

    def carry(self, node: Node, peer: int, frame: Frame) -> None:
        """A frame to a peer that is known to be dead is lost; so is one on a dead peer's wire."""
        if node.peers[peer] >= 0:
            key = (node.process, node.incarnation, peer, node.peers[peer])
            self.wires.setdefault(key, deque()).append(frame)

    def result(self) -> Result:
        self.advance()
        while not self.over:
            actions = self.actions()
            assert actions, "nobody can do anything"
            actions[self.picks.below(len(actions))]()
        for process, node in enumerate(self.nodes):
            if node is not None:
                self.bury_log(process, node)
        return Result(self.logs, self.horizon.window, self.horizon.grants_count, self.deaths)

    def actions(self) -> list[Any]:
        """All that could happen next."""
        found: list[Any] = []
        for process, node in enumerate(self.nodes):
            if self.answers[process]:
                found.append(lambda p=process: self.hear(p, self.answers[p].popleft()))
            if node is not None:
                if self.orders[process]:
                    found.append(lambda n=node, p=process: n.obey(self.orders[p].popleft()))
                elif node.may_run():
                    found.append(lambda n=node, p=process: self.answers[p].append(n.run()))
        for (_, _, peer, incarnation), wire in self.wires.items():
            target = self.nodes[peer]
            if wire and target is not None and target.incarnation == incarnation:
                found.append(lambda t=target, w=wire: t.read(w.popleft()))
        if self.crashes and self.horizon.window >= self.crashes[0].window:
            found.append(self.crash)
        if self.entries and self.horizon.window == self.entries[0].window:
            found.append(self.enter)
        return found

    def crash(self) -> None:
        process = self.crashes.popleft().process
        node = self.nodes[process]
        if node is not None:
            self.bury_log(process, node)
            self.nodes[process] = None
            self.answers[process].append("end")

    def bury_log(self, process: int, node: Node) -> None:
        self.logs[process, node.incarnation] = tuple(node.log)

    def enter(self) -> None:
        """Something from outside, at whatever moment within its window."""
        entry = self.entries.popleft()
        at_ps = self.horizon.enter(entry.process)
        door = len(self.nodes)
        frame = Frame(door, 0, self.horizon.window, len(self.entries), at_ps, at_ps, 5)
        if entry.process in self.horizon.alive():
            self.orders[entry.process].append(frame)

    # --- the conductor ----------------------------------------------------------------------------

    def hear(self, process: int, answer: Any) -> None:
        if answer == "end":
            self.died(process)
            return
        window, next_at_ps, reaction_ps, sends, events = answer
        self.reported[process] = (window, events, self.reported[process][1])
        self.horizon.report(process, window, next_at_ps, reaction_ps, sends)
        if self.horizon.closed:
            self.advance()

    def died(self, process: int, *, at_ps: int | None = None) -> None:
        was_open = not self.horizon.closed
        death = self.horizon.died(process)
        self.deaths.append(death if at_ps is None else Death(process, at_ps, death.window))
        window, events, before = self.reported[process]
        events = before if window >= death.window else events
        key = (process, self.incarnations[process])
        self.logs[key] = self.logs[key][:events]
        self.orders[process].clear()
        self.tell_all(death)
        if was_open and self.horizon.closed:
            self.advance()

    def tell_all(self, message: Any) -> None:
        for process in self.horizon.alive():
            self.orders[process].append(message)

    def advance(self) -> None:
        """After the last report of a window."""
        while self.entries and self.entries[0].window == self.horizon.window:
            self.enter()
        if self.at_stop:
            self.at_stop = False
            self.carry_out(self.horizon.take_stop())
        grants = self.horizon.decide()
        self.over = not grants
        self.at_stop = bool(grants) and grants[0].barrier
        for grant in grants:
            self.orders[grant.process].append(grant)

    def carry_out(self, at_ps: int) -> None:
        """A fault of the plan, everything being at rest at its instant."""
        fault = self.faults.popleft()
        process, node = fault.process, self.nodes[fault.process]
        assert fault.at_ps == at_ps
        if fault.kind == "kill" and process in self.horizon.alive():
            if node is not None:  # else it has just crashed and nobody knows
                self.bury_log(process, node)
            self.nodes[process] = None
            self.answers[process].clear()
            self.died(process, at_ps=at_ps)
        elif fault.kind == "restart" and process not in self.horizon.alive():
            self.restart(process, at_ps)

    def restart(self, process: int, at_ps: int) -> None:
        if any(death.process == process and death.at_ps == at_ps for death in self.deaths[-1:]):
            return  # as the supervisor has it: a crash at this instant is after the plan's faults
        self.incarnations[process] += 1
        incarnation = self.incarnations[process]
        self.reported[process] = (0, 0, 0)
        node = self.nodes[process] = Node(self, process, incarnation, at_ps)
        self.tell_all(("up", process, incarnation))
        self.horizon.join(process, node.agenda.next_at_ps())
