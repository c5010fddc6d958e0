"""Brings a run's processes up, watches them, does what the plan says, takes all down (design 4).

Owns the run folder, the zygote, the conductor and the end of the run. Does not own what the processes
do, nor the report: it returns a ``RunResult``. Everything that a run started ends with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import select
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from cmnet import errors
from cmnet.launch import agent
from cmnet.launch import run as runs
from cmnet.launch.closing import Closing
from cmnet.launch.run import DeathRecord as DeathRecord
from cmnet.launch.run import NodeFault as NodeFault
from cmnet.launch.run import RunResult as RunResult
from cmnet.launch.run import Settings as Settings
from cmnet.launch.run import make_run_folder as make_run_folder
from cmnet.launch.zygote import Zygote, control_pair, make_socket_folder
from cmnet.record import digest
from cmnet.record.log import Log
from cmnet.topology.machine import Machine
from cmnet.units import NEVER_PS, format_ps
from cmnet.vtime.conductor import Conductor
from cmnet.vtime.horizon import Death, Horizon
from cmnet.vtime.stall import STALL_PS, Stall
from cmnet.wire.mesh import Address

READY_TIMEOUT_S = 60.0
WHY_TIMEOUT_S = 5.0
"""For the answers to "what do you wait for"; who spins does not answer."""
GONE_TIMEOUT_S = 5.0
"""For the kernel to end a process that was killed; it takes milliseconds."""


class Supervisor:
    """One run. ``run`` blocks until it has ended and everything is taken down."""

    def __init__(
        self,
        *,
        machine: Machine,
        program: agent.Program,
        settings: Settings,
        folder: Path,
        progress: Callable[[Supervisor], None] | None = None,
    ) -> None:
        self.machine = machine
        self.settings = settings
        self.folder = folder
        self.result = RunResult(folder=str(folder))
        self.processes_count = len(machine.processes)
        self.result.socket_buffer_bytes = runs.granted_buffer_bytes(settings.socket_buffer_bytes)
        self._log = Log(folder)
        self._progress = progress
        self._started = time.perf_counter()
        self._first_grant = 0.0
        self._socket_folder = make_socket_folder()
        self._zygote = Zygote(machine, program, self._socket_folder)
        self._token = secrets.token_bytes(16)
        self._addresses: list[Address | None] = [None] * self.processes_count
        self._incarnations = [0] * self.processes_count
        self._pidfds: dict[int, int] = {}
        self.pids: dict[int, int] = {}
        self._ended_digests: list[list[bytes]] = [[] for _ in range(self.processes_count)]
        self._unplanned_windows: dict[int, int] = {}
        self._ready: set[int] = set()
        self._awaited: set[int] = set()
        self._closing = Closing(self._ask_statistics, lambda: self._loop.stop())
        self._failures: dict[int, dict[str, Any]] = {}
        self._why_due: set[int] = set()
        self._because: dict[int, list[str]] = {}
        self._died_at_ps: dict[int, int] = {}
        """When a process last died by itself."""
        self._bug: BaseException | None = None
        self._faults = sorted(settings.node_faults, key=lambda fault: fault.at_ps)
        self._end_ps = NEVER_PS
        self._ending = False
        self._running = False
        self._window_seen = (0, 0.0)
        self._stall = Stall()
        self._on_ready: Callable[[], None] = lambda: None

    # --- the whole run ----------------------------------------------------------------------------

    def run(self) -> RunResult:
        """Up, run, down."""
        loop = uvloop.new_event_loop()
        loop.set_exception_handler(self._callback_failed)
        try:
            self._set_up(loop)
            loop.run_forever()
        finally:
            self._take_down(loop)
        if self._bug is not None:
            raise self._bug
        return self.result

    def _callback_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._bug = context.get("exception") or RuntimeError(context["message"])
        loop.stop()

    def _set_up(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.horizon = Horizon(self.processes_count, self.machine.lookahead.lookahead_ps)
        self.conductor = Conductor(loop, self.horizon, self, self.processes_count)
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(signum, self.interrupt)
        self._watch()
        self._on_ready = self._begin
        everyone = list(range(self.processes_count))
        loop.call_soon(lambda: self._start(everyone, start_ps=0))  # signals count from here on

    def _start(self, processes: list[int], *, start_ps: int) -> bool:
        """False if they cannot be started: the run ends."""
        try:
            self._spawn(processes, start_ps=start_ps)
        except OSError as error:
            names = ", ".join(self.machine.processes[process].name for process in processes[:8])
            self._fail(f"{names} cannot be started: {error}", code=errors.LaunchError.code)
            return False
        return True

    def _spawn(self, processes: list[int], *, start_ps: int) -> None:
        incarnation = self._incarnations[processes[0]]
        for process, address in zip(
            processes, self._zygote.listen(processes, incarnation), strict=True
        ):
            self._addresses[process] = address
        pairs = {
            process: control_pair()
            for process in runs.in_start_order(self.settings.start_order, processes)
        }
        assignments = [self._assignment(process, start_ps) for process in pairs]
        self._awaited = set(processes)
        pids = self._zygote.fork(assignments, [theirs for _, theirs in pairs.values()])
        for process, (ours, theirs) in pairs.items():
            theirs.close()
            self.pids[process] = pids[process]
            with contextlib.suppress(ProcessLookupError):  # dead already: its control socket ends
                self._pidfds[process] = os.pidfd_open(pids[process])
            self.conductor.attach(process, ours)
        self._write_pids()
        self._ready_deadline = time.monotonic() + READY_TIMEOUT_S

    def _write_pids(self) -> None:
        """``pids.json``: node name to process id, of those that live; for whoever breaks things."""
        names = {self.machine.processes[p].name: pid for p, pid in sorted(self.pids.items())}
        (self.folder / "pids.json").write_bytes(msgspec.json.encode(names))

    def _assignment(self, process: int, start_ps: int) -> agent.Assignment:
        return agent.Assignment(
            process=process,
            incarnation=self._incarnations[process],
            start_ps=start_ps,
            seed=self.settings.seed,
            token=self._token,
            addresses=self._addresses,
            socket_buffer_bytes=self.settings.socket_buffer_bytes,
            run_folder=str(self.folder),
            journal=self.settings.journal,
            rules=self.settings.rules,
            settings=self.settings.program,
            deaths_ps=runs.known_deaths_ps(self._faults, self.processes_count),
            undo_window=self._unplanned_windows.get(process),
        )

    def _take_down(self, loop: asyncio.AbstractEventLoop) -> None:
        for process in range(self.processes_count):
            self.conductor.detach(process)
        self._zygote.close()
        for process in list(self._pidfds):
            self._wait_until_gone(process)
        self._log.event("ended", at_ps=self.result.virtual_ps, error=self.result.error)
        self._log.close()
        loop.close()
        shutil.rmtree(self._socket_folder, ignore_errors=True)

    # --- beginning and end ------------------------------------------------------------------------

    def said(self, process: int, message: dict[str, Any]) -> None:
        """A rare message of a process."""
        match message["what"]:
            case "ready":
                self.horizon.join(process, message["next_at_ps"])
                self._no_longer_awaited(process)
            case "failed":
                self._failures.setdefault(process, message)
                if len(self._failures) == 1:
                    self._failed_at = time.monotonic()
                    self.conductor.pause()
                    self._choose_failure()
            case "statistics":
                self._closing.answered(process)
            case "because":
                self._because[process] = message["waits"]
                self._no_longer_asked(process)

    def unread(self, process: int) -> None:
        """A process does not read what it is told: not even rare messages fit any more."""
        name = self.machine.processes[process].name
        self._fail(f"{name} does not read what it is told", code=errors.SilentNodeError.code)

    def _choose_failure(self) -> None:
        """Of all that fail in this window the first in virtual time is told, in every run the same:
        so the others' answers are waited for, if they do answer."""
        running = set(self.horizon.running()) - self._failures.keys()
        if running and time.monotonic() < self._failed_at + WHY_TIMEOUT_S:
            self._loop.call_later(0.01, self._choose_failure)
            return
        process, message = min(self._failures.items(), key=lambda item: (item[1]["at_ps"], item[0]))
        name, waits = self.machine.processes[process].name, "\n".join(message["waits"])
        self._fail(
            f"{name} failed at {format_ps(message['at_ps'])}: {message['error']}",
            code=message["code"],
            detail=f"{message['stack']}\n{waits}",
        )

    def _no_longer_awaited(self, process: int) -> None:
        self._awaited.discard(process)
        if not self._awaited:
            self._on_ready()

    def _begin(self) -> None:
        self.result.launch_s = time.perf_counter() - self._started
        for fault in self._faults:
            self.horizon.stop_at(fault.at_ps)
        self._running = True
        self._log.event("began", at_ps=0, processes=self.processes_count)
        self._first_grant = time.perf_counter()
        self.conductor.on_window = self._window_closed
        self.conductor.go()

    def _go_on(self) -> None:
        if not (self._ending or self._failures or self.result.error):
            self.conductor.go()

    def _window_closed(self) -> None:
        if self.result.interrupted:
            self._end()
        elif self._end_ps == NEVER_PS:
            finished = min(state.finished_at_ps for state in self.conductor.states)
            if finished < NEVER_PS:
                # no window reaches beyond this, so the end is the same however windows fell
                self._end_ps = finished + self.horizon.lookahead_ps
                self.horizon.stop_at(max(self._end_ps, self.horizon.horizon_ps))
            elif self._stalled() and not (self._failures or self.result.error):
                self.conductor.pause()
                code = errors.StallError.code
                self._ask_why(f"nothing was achieved for {format_ps(STALL_PS)}", code)

    def stopped(self, at_ps: int) -> None:
        """A barrier: the plan's faults of this instant, or the end."""
        if self._ending or self._failures or self.result.error:
            return
        if at_ps == self._end_ps:
            self._end()
            return
        fault = self._faults.pop(0)
        assert fault.at_ps == at_ps
        if fault.kind == "kill":
            self._kill(fault.process, at_ps)
        elif self._may_restart(fault.process, at_ps):
            self._restart(fault.process, at_ps)
            return
        self._go_on()

    def _may_restart(self, process: int, at_ps: int) -> bool:
        """Not if it lives. Nor if it died by itself at this very instant: that death counts as after
        the plan's faults of the instant, as it does when it replays."""
        return process not in self.horizon.alive() and self._died_at_ps.get(process, -1) != at_ps

    def nothing_left(self) -> None:
        """No event anywhere: the end, or a deadlock if work is outstanding."""
        outstanding = self.conductor.outstanding
        if outstanding:
            error = f"{outstanding} pieces of work are outstanding and nothing will happen"
            self._ask_why(error, errors.DeadlockError.code)
        else:
            self._end()

    def _end(self) -> None:
        if self._ending:
            return
        self._ending = True
        self._running = False
        self.conductor.pause()
        result = self.result
        result.wall_s = time.perf_counter() - self._first_grant if self._first_grant else 0.0
        result.windows, result.grants = self.horizon.window, self.horizon.grants_count
        result.virtual_ps = (
            self._end_ps - self.horizon.lookahead_ps
            if self._end_ps < NEVER_PS and not result.error
            else self.horizon.horizon_ps
        )
        result.not_reached = self._faults
        result.digest = self._digest()
        self._ready_deadline = time.monotonic() + READY_TIMEOUT_S
        self._closing.begin(self.horizon.alive(), at_once=bool(result.error))

    def _ask_statistics(self, process: int) -> None:
        self.conductor.tell(process, "statistics")

    def _digest(self) -> str:
        alive = set(self.horizon.alive())
        entries = []
        for process, info in enumerate(self.machine.processes):
            digests = list(self._ended_digests[process])
            if process in alive:
                digests.append(self.conductor.states[process].digest)
            entries += [(f"{info.name}.{n}", value) for n, value in enumerate(digests)]
        for death in sorted(self.result.deaths, key=lambda death: (death.at_ps, death.process)):
            if death.at_ps < self._end_ps:
                entries.append((f"death of {death.name}", death.at_ps.to_bytes(8, "little")))
        return digest.fold(self.settings.seed, entries)

    def interrupt(self) -> None:
        """Ctrl-C: end after the window in progress, with a report of what was done; the second time,
        and before or after the run proper, at once."""
        at_once = self.result.interrupted or not self._running
        self.result.interrupted = True
        if at_once:
            self._loop.stop()
        elif self.horizon.closed:
            self._end()

    # --- death ------------------------------------------------------------------------------------

    def _kill(self, process: int, at_ps: int) -> None:
        if process not in self.horizon.alive():
            return
        signal.pidfd_send_signal(self._pidfds[process], signal.SIGKILL)
        self.conductor.detach(process)
        self._bury(self.horizon.died(process), at_ps, planned=True)

    def died(self, death: Death) -> None:
        """A process ended by itself: a node is a death of the record, anything else ends the run."""
        process, name = death.process, self.machine.processes[death.process].name
        if self._zygote.ended():
            error = "the process that forks all others ended by itself"
            self._fail(error, code=errors.LaunchError.code)
            return
        if process not in self._awaited and self.conductor.states[process].window:
            self._unplanned_windows[process] = death.window
        self._died_at_ps[process] = death.at_ps
        self._bury(death, death.at_ps, planned=False)
        if self._ending:
            self._closing.answered(process)
        elif not self._running:
            self._fail(f"{name} ended before it was ready", code=errors.LaunchError.code)
        elif not self.machine.processes[process].is_node:
            self._fail(f"{name} ended by itself", code=errors.NodeFailedError.code)
        elif process in self._awaited:
            self._no_longer_awaited(process)
        elif self._why_due:
            self._no_longer_asked(process)

    def _bury(self, death: Death, at_ps: int, *, planned: bool) -> None:
        process = death.process
        if planned:
            self._unplanned_windows.pop(process, None)
        self._wait_until_gone(process)
        name = self.machine.processes[process].name
        self._log.event("node_died", at_ps=at_ps, node=name, planned=planned)
        self._addresses[process] = None
        self.conductor.drop_work(process)
        self._ended_digests[process].append(self.conductor.states[process].digest)
        self.result.deaths.append(
            DeathRecord(process=process, name=name, at_ps=at_ps, planned=planned)
        )
        self.conductor.tell_all(
            "peer_down",
            process=process,
            incarnation=self._incarnations[process],
            window=death.window,
        )

    def _wait_until_gone(self, process: int) -> None:
        """Its disk has no other user then. It is dying; if not, it is killed."""
        fd = self._pidfds.pop(process, None)
        if fd is None:
            return
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        if not poll.poll(1000 * GONE_TIMEOUT_S):
            signal.pidfd_send_signal(fd, signal.SIGKILL)
            poll.poll(1000 * GONE_TIMEOUT_S)
        os.close(fd)

    def _restart(self, process: int, at_ps: int) -> None:
        self._incarnations[process] += 1
        self._on_ready = self._go_on
        if not self._start([process], start_ps=at_ps):
            return
        name = self.machine.processes[process].name
        self._log.event("node_restarted", at_ps=at_ps, node=name)
        address = msgspec.to_builtins(self._addresses[process])
        for peer in self.horizon.alive():
            self.conductor.tell(peer, "peer_up", process=process, address=address)

    # --- watchdogs --------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Once a wall second: who is silent, who stalls, what to show."""
        self._loop.call_later(1.0, self._watch)
        now = time.monotonic()
        if self._progress is not None:
            self._progress(self)
        if self._why_due and now > self._ready_deadline:
            self._explained()
        elif (self._awaited or self._closing.asked) and now > self._ready_deadline:
            late = sorted(self._awaited or self._closing.asked)
            self._late(late, "did not become ready" if self._awaited else "did not answer")
        elif self._running:
            window, since = self._window_seen
            if window != self.horizon.window or self.horizon.closed:
                self._window_seen = (self.horizon.window, now)
            elif now - since > self.settings.silent_timeout_s:
                self._late(sorted(self.horizon.running()), "is silent")

    def _late(self, processes: list[int], what: str) -> None:
        for process in processes:
            if process in self._pidfds:
                signal.pidfd_send_signal(self._pidfds[process], signal.SIGUSR1)
        names = ", ".join(self.machine.processes[process].name for process in processes[:8])
        time.sleep(0.2)  # for the stacks to be written
        code = errors.SilentNodeError.code
        self._fail(f"{names} {what}", code=code, detail=self._stacks(processes[:3]))

    def _stacks(self, processes: list[int]) -> str:
        texts = []
        for process in processes:
            name = f"{self.machine.processes[process].name}.{self._incarnations[process]}"
            path = self.folder / "stacks" / f"{name}.txt"
            texts.append(f"{name}:\n{path.read_text() if path.exists() else ''}")
        return "\n".join(texts)

    def _stalled(self) -> bool:
        return self._stall.due(
            self.horizon.horizon_ps,
            outstanding=self.conductor.outstanding,
            marked_ps=lambda: max(state.marked_at_ps for state in self.conductor.states),
        )

    def _ask_why(self, error: str, code: str) -> None:
        self.result.error, self.result.error_code = error, code
        self._because = {}
        self._why_due = set(self.horizon.alive())
        self._ready_deadline = time.monotonic() + WHY_TIMEOUT_S
        self.conductor.tell_all("why")

    def _no_longer_asked(self, process: int) -> None:
        self._why_due.discard(process)
        if not self._why_due:
            self._explained()

    def _explained(self) -> None:
        self._why_due = set()
        lines = []
        for process, waits in sorted(self._because.items()):
            lines += [f"{self.machine.processes[process].name}: {wait}" for wait in waits]
        self.result.detail = "\n".join(lines)
        self._end()

    def _fail(self, error: str, *, code: str, detail: str = "") -> None:
        """The run ends now, with the first error; nobody is asked anything more."""
        result = self.result
        if not result.error:
            result.error, result.error_code, result.detail = error, code, detail
        self.conductor.pause()
        if self._running:
            self._running = False
            result.wall_s = time.perf_counter() - self._first_grant
            result.windows, result.grants = self.horizon.window, self.horizon.grants_count
            result.virtual_ps = self.horizon.horizon_ps
        self._loop.stop()
