"""The inside of one process of a run: grants in, events run, one report out (design 1.3).

Owns the control socket and the order of things around a window: read the frames that the grant names,
run all events before the horizon, let the kernel take all that was written, report. Does not own what
runs: that is a *program*, a coroutine function given a ``Context``.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import os
import signal
import socket
import traceback
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec

from cmnet import entropy
from cmnet.errors import FrameError, NodeFailedError, SpinError
from cmnet.fabric import INCARNATION_SHIFT, Fabric
from cmnet.launch import deathsig, stacks
from cmnet.link.rules import Rule, make_rules
from cmnet.record.digest import Digest
from cmnet.topology.machine import Machine
from cmnet.units import NEVER_PS
from cmnet.vtime.loop import VirtualLoop
from cmnet.vtime.window import WindowGate
from cmnet.wire import control
from cmnet.wire.mesh import Address, Mesh

Program = Callable[["Context"], Awaitable[None]]

TEXT_BYTES_MAX = 16_000
"""Of an error or a stack in a control message, as JSON."""
LINE_BYTES_MAX = 800
"""Of a line on what a task waits for: two texts and ``stacks.LINES_MAX`` of these fit a packet."""


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """What a process of a run is told at its start."""

    process: int
    incarnation: int
    start_ps: int
    seed: int
    token: bytes
    addresses: list[Address | None]
    socket_buffer_bytes: int
    run_folder: str
    journal: bool
    rules: list[Rule]
    settings: dict[str, Any]
    deaths_ps: list[int] = []
    """[processes] what each sends ends there (``cmnet.bursts``), NEVER_PS: nobody knows; empty: nobody does
    of any."""
    undo_window: int | None = None
    """After a death that nobody planned: commits of this window or later never happened."""


class Context:
    """What a program sees of the run: its clock, its links, its name, its disk."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.loop = agent.loop
        self.fabric = agent.fabric
        self.machine = agent.machine
        self.settings = agent.assignment.settings
        self.process = agent.assignment.process
        self.name = agent.machine.processes[self.process].name
        self.incarnation = agent.assignment.incarnation
        self.undo_window = agent.assignment.undo_window
        self.disk = Path(agent.assignment.run_folder) / "disk" / self.name
        self.run_folder = Path(agent.assignment.run_folder)
        self.on_statistics: Callable[[], dict[str, Any]] = dict
        self._tasks: set[asyncio.Task[None]] = set()

    def stream(self, name: str) -> entropy.Stream:
        """The random stream of this process, incarnation and name."""
        seed = self._agent.assignment.seed
        return entropy.stream(seed, f"{self.name}.{self.incarnation}.{name}")

    @property
    def window(self) -> int:
        """The number of the grant that is running: disk commits carry it (design 1.8)."""
        return self.fabric.window

    def mark(self, text: str) -> None:
        """The application achieved something: folded into the digest, feeds the stall watchdog."""
        self._agent.marked_at_ps = self.loop.now_ps
        self.fabric.digest.mark(self.loop.now_ps, text)

    def outstanding(self, change: int) -> None:
        """Work taken on (+) or done (-); a run that stops with work outstanding is a deadlock."""
        self._agent.outstanding += change

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """A task that outlives its maker; if it raises, the process fails at once."""
        task = self.loop.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._spawned_done)
        return task

    def _spawned_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._agent.fail(error)

    def finish(self) -> None:
        """The run's purpose is reached now."""
        if self._agent.finished_at_ps == NEVER_PS:
            self._agent.finished_at_ps = self.loop.now_ps


class Agent:
    """Runs one program under grants. ``control_socket`` is SEQPACKET to the conductor."""

    def __init__(
        self,
        *,
        machine: Machine,
        assignment: Assignment,
        control_socket: socket.socket,
        listeners: tuple[socket.socket, ...],
        program: Program,
    ) -> None:
        self.machine = machine
        self.assignment = assignment
        self.loop = VirtualLoop(start_ps=assignment.start_ps)
        self.loop.resume = self._proceed
        self.marked_at_ps = assignment.start_ps
        self.finished_at_ps = NEVER_PS
        self.outstanding = 0
        self._control = control_socket
        self._packet = bytearray(control.PACKET_BYTES_MAX)
        self._gate = WindowGate()
        self._granted = False
        self._ran = False
        self._barrier = False
        self.failed = False
        self._dead: dict[tuple[int, int], int] = {}
        """(process, incarnation) -> the window from which on its frames never happened."""
        self._program = program
        self._journal = self._open_journal()
        self._journal_lines: list[str] = []
        """Of the window in progress: it has not happened before its report."""
        digest = Digest(None if self._journal is None else self._journal_lines.append)
        self.mesh = Mesh(
            loop=self.loop,
            process=assignment.process,
            incarnation=assignment.incarnation,
            token=assignment.token,
            addresses=list(assignment.addresses),
            socket_buffer_bytes=assignment.socket_buffer_bytes,
            on_frame=self._frame_read,
            on_broken=self.fail,
        )
        self.mesh.on_flushed = self.mesh.on_read = self._proceed
        self.mesh.on_blocked = self._blocked
        self.fabric = Fabric(
            loop=self.loop,
            machine=machine,
            process=assignment.process,
            incarnation=assignment.incarnation,
            digest=digest,
            rules=make_rules(
                machine,
                seed=assignment.seed,
                process=assignment.process,
                rules=assignment.rules,
            ),
            carry=self.mesh.write,
        )
        self.fabric.buffers = self.mesh.buffers
        self.fabric.ran_to_ps = assignment.start_ps
        if assignment.deaths_ps:
            self.fabric.dies_at_ps = assignment.deaths_ps[assignment.process]
        self.context = Context(self)
        self.mesh.serve(*listeners)

    def _open_journal(self) -> Any:
        if not self.assignment.journal:
            return None
        name = self.machine.processes[self.assignment.process].name
        folder = Path(self.assignment.run_folder) / "journal"
        return (folder / f"{name}.{self.assignment.incarnation}.txt").open("w", buffering=1 << 16)

    # --- the whole life ---------------------------------------------------------------------------

    def run(self) -> None:
        """From ready to the end of the run: the process is killed, or ends with its conductor."""
        asyncio.set_event_loop(self.loop)
        self.loop.set_exception_handler(self._callback_failed)
        self.loop.native_reader(self._control.fileno(), self._control_readable)
        os.set_blocking(self._control.fileno(), True)
        for peer, address in enumerate(self.assignment.addresses):
            if peer != self.assignment.process and address is not None:
                self.mesh.connect(peer, 0)
        self.mesh.read()
        self._main_task = self.loop.create_task(self._main(), name="program")
        gc.collect()
        gc.freeze()
        gc.disable()
        self._send(control.encode_rare("ready", next_at_ps=self.loop.next_at_ps()))
        self.loop.run_forever()

    async def _main(self) -> None:
        try:
            await self._program(self.context)
        except Exception as error:
            self.fail(error)

    def _callback_failed(self, _: object, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.fail(error if error is not None else NodeFailedError(context["message"]))

    # --- control ----------------------------------------------------------------------------------

    def _send(self, packet: bytes) -> None:
        try:
            self._control.send(packet)
        except OSError:
            os._exit(1)  # the conductor is gone, and with it the run

    def _control_readable(self) -> None:
        """Obey, and stay in ``recv`` as long as nobody but the conductor can have anything for this
        process: the way round the loop costs as much as a small window."""
        self._obey()
        while not (self._granted or self.failed or self.mesh.watched):
            self._obey()

    def _obey(self) -> None:
        packet = self._packet
        try:
            count = self._control.recv_into(packet)
        except BlockingIOError:
            return
        except OSError:
            count = 0
        if not count:
            os._exit(1)
        if packet[0] == control.GRANT:
            window, horizon_ps, frames_expected, self._barrier = control.decode_grant(packet)
            self.mesh.unwatch()  # whoever was blocked by us has reported since
            self._gate.granted(window, horizon_ps, frames_expected)
            self._granted, self._ran = True, False
            self._proceed()
        else:
            self._handle_rare(control.decode_rare(bytes(packet[:count])))

    def _handle_rare(self, message: dict[str, Any]) -> None:
        match message["what"]:
            case "peer_down":
                peer, window = message["process"], message["window"]
                self._dead[peer, message["incarnation"]] = window
                while self.mesh.read():
                    pass  # what it sent before it died, greetings too: a new incarnation ends those
                self.mesh.peer_down(peer)
                self._gate.forget(peer, window)
                self.fabric.forget(peer, window)
                self._proceed()  # nobody else says that a frame was read or a writer is gone
            case "peer_up":
                self.mesh.peer_up(message["process"], msgspec.convert(message["address"], Address))
            case "read":
                self.mesh.watch()
            case "statistics":
                self._write_statistics()
                self._send(control.encode_rare("statistics"))
            case "why":
                waits = _short_lines(stacks.waits(self.loop))
                self._send(control.encode_rare("because", waits=waits))
            case other:
                raise FrameError(f"a control message of no known kind: {other!r}")

    def _write_statistics(self) -> None:
        statistics = {
            "process": self.context.name,
            "planes": self.fabric.statistics(),
            "callbacks": self.loop.callbacks_run,
            "frames_lost": self.mesh.frames_lost,
            "program": self.context.on_statistics(),
        }
        folder = self.context.run_folder / "statistics"
        (folder / f"{self.context.name}.json").write_bytes(msgspec.json.encode(statistics))

    # --- windows ----------------------------------------------------------------------------------

    def _frame_read(
        self, peer: int, header: tuple[int, ...], body: bytes, payload: bytes | memoryview
    ) -> None:
        window = header[6]
        if self._dead:
            dead_window = self._dead.get((peer, header[9] >> INCARNATION_SHIFT))
            if dead_window is not None and window >= dead_window:
                return
        self.fabric.receive(header, body, payload)
        self._gate.frame_read(peer, window)

    def _read_expected(self) -> bool:
        """Read the frames that the grant names; False if some are still on their way (over TCP)."""
        while not self._gate.open():
            if not self.mesh.read():
                self.mesh.watch()
                return False
        return True

    def _blocked(self, peer: int) -> None:
        """The kernel holds all that it can for a peer, which reads only when it has a grant."""
        self._send(control.encode_rare("blocked", by=peer))

    def _proceed(self) -> None:
        """Go on with the pending grant as far as possible."""
        if self.failed or not self._granted:
            return
        if not self._ran:
            if not self._read_expected():
                return
            if not self._run_window():
                return
        threads_done = self.loop.threads_done if self._barrier else self.loop.disk_done
        if self.mesh.flushed() and threads_done():
            self._granted = False
            self._report()

    def _run_window(self) -> bool:
        """All events before the horizon. False: a thread must end first, or this node has failed."""
        self.fabric.window, horizon_ps = self._gate.window, self._gate.horizon_ps
        self.fabric.until_ps = horizon_ps
        try:
            done = self.loop.run_until(horizon_ps)
        except BaseException as error:
            self.fail(error)
            return False
        if done and not self.failed:
            self._ran = True
            self.fabric.ran_to_ps = horizon_ps
        self.mesh.flush()
        return self._ran

    def _write_journal(self) -> None:
        """Before the report, lest a kill right after it takes lines of a window that counts."""
        if self._journal_lines:
            self._journal.write("".join(self._journal_lines))
            self._journal.flush()
            self._journal_lines.clear()

    def _report(self) -> None:
        self._write_journal()
        report = control.Report(
            self._gate.window,
            self.loop.next_at_ps(),
            self.loop.reaction_ps(),
            self.finished_at_ps,
            self.marked_at_ps,
            self.outstanding,
            self.fabric.digest.value(),
            self.fabric.take_sends(),
        )
        self._send(control.encode_report(report))

    def fail(self, error: BaseException) -> None:
        """This process cannot go on: the run ends with this error."""
        if self.failed:
            return
        self.failed = True
        waits = stacks.spinning(self.loop.due()) if isinstance(error, SpinError) else []
        self._send(encode_failure(error, at_ps=self.loop.now_ps, waits=waits))


def encode_failure(error: BaseException, *, at_ps: int, waits: list[str]) -> bytes:
    """The message with which a process says that it cannot go on; it fits a packet."""
    return control.encode_rare(
        "failed",
        code=getattr(error, "code", "BUG"),
        error=_short(f"{type(error).__name__}: {error}", TEXT_BYTES_MAX),
        at_ps=at_ps,
        stack=_short("".join(traceback.format_exception(error)), TEXT_BYTES_MAX),
        waits=_short_lines(waits),
    )


def _short(text: str, bytes_max: int) -> str:
    """The last part of a text, encodable, and as JSON no longer than told."""
    text = text[-bytes_max:].encode(errors="replace").decode()
    while (excess := len(msgspec.json.encode(text)) - 2 - bytes_max) > 0:
        text = text[max(excess // 6, 1) :]  # a control character is 6 bytes of JSON
    return text


def _short_lines(lines: list[str]) -> list[str]:
    return [_short(line, LINE_BYTES_MAX) for line in lines[: stacks.LINES_MAX]]


def prepare_process(run_folder: str, name: str) -> None:
    """What every process of a run does first: its name, its own signals, its stacks on SIGUSR1."""
    deathsig.call_me(name)
    deathsig.leave_terminal()
    stacks = (Path(run_folder) / "stacks" / f"{name}.txt").open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
