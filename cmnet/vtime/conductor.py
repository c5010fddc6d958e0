"""The conductor: grants windows over the control sockets (design 1.3).

Owns the sockets to the processes and the state of each as last reported. What it decides is in
``Horizon``; what happens at a stop, a death or the end is the supervisor's, called through ``Watcher``.
Its loop runs only grants, deaths and the door.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, Protocol

from cmnet.record.digest import Digest
from cmnet.units import NEVER_PS
from cmnet.vtime.horizon import Death, Horizon
from cmnet.wire import control


class Watcher(Protocol):
    """What the supervisor does when the conductor cannot simply go on. None may block."""

    def stopped(self, at_ps: int) -> None:
        """A barrier is reached; ``go`` continues."""

    def nothing_left(self) -> None:
        """No event anywhere, ever."""

    def died(self, death: Death) -> None:
        """A process ended by itself; the window goes on without it."""

    def said(self, process: int, message: dict[str, Any]) -> None:
        """A rare message came."""

    def unread(self, process: int) -> None:
        """A process leaves so much unread that it can be told nothing more."""


class State:
    """What a process last reported."""

    __slots__ = ("before", "digest", "finished_at_ps", "marked_at_ps", "outstanding", "window")

    def __init__(self) -> None:
        self.digest = Digest().value()
        self.window = 0
        self.outstanding = 0
        self.marked_at_ps = 0
        self.finished_at_ps = NEVER_PS
        self.before = (self.digest, 0, NEVER_PS)

    def undo(self) -> None:
        """The last report did not happen."""
        self.digest, self.marked_at_ps, self.finished_at_ps = self.before


class Conductor:
    """Grants until told to pause."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, horizon: Horizon, watcher: Watcher, processes: int
    ) -> None:
        self.horizon = horizon
        self.states = [State() for _ in range(processes)]
        self.outstanding = 0
        """Of all processes together."""
        self.paused = True
        self.on_window: Callable[[], None] | None = None
        self._loop = loop
        self._watcher = watcher
        self._sockets: dict[int, socket.socket] = {}
        self._at_stop = False

    def attach(self, process: int, sock: socket.socket) -> None:
        """A process's control socket; it speaks from now on."""
        sock.setblocking(False)
        self._sockets[process] = sock
        self.states[process] = State()
        self._loop.add_reader(sock.fileno(), self._readable, process, sock)

    def detach(self, process: int) -> None:
        """Forget a process."""
        sock = self._sockets.pop(process, None)
        if sock is not None:
            self._loop.remove_reader(sock.fileno())
            sock.close()

    def tell(self, process: int, what: str, /, **fields: Any) -> None:
        """Send a rare message; one to a process that is just dying is lost."""
        self._send(process, control.encode_rare(what, **fields))

    def tell_all(self, what: str, /, **fields: Any) -> None:
        """Send a rare message to every process that lives."""
        packet = control.encode_rare(what, **fields)
        for process in list(self._sockets):
            self._send(process, packet)

    def _send(self, process: int, packet: bytes) -> None:
        sock = self._sockets.get(process)
        if sock is not None:
            try:
                sock.send(packet)
            except (BrokenPipeError, ConnectionResetError):
                pass  # its end is read next
            except BlockingIOError:
                self._watcher.unread(process)

    def go(self) -> None:
        """Grant windows until the next stop."""
        self.paused = False
        self._advance()

    def pause(self) -> None:
        """Open no window after the one in progress."""
        self.paused = True

    def _advance(self) -> None:
        horizon = self.horizon
        if self.on_window is not None:
            self.on_window()
        if self._at_stop:
            self._at_stop = False
            self.paused = True
            self._watcher.stopped(horizon.take_stop())
            return
        if self.paused:
            return
        grants = horizon.decide()
        if not grants:
            self.paused = True
            if horizon.stops_left:  # a barrier of nobody; called later, for many may follow
                self._loop.call_soon(lambda: self._watcher.stopped(horizon.take_stop()))
            else:
                self._watcher.nothing_left()
            return
        self._at_stop = grants[0].barrier
        for grant in grants:
            self._send(grant.process, control.encode_grant(grant))

    def drop_work(self, process: int) -> None:
        """A process is dead, and what it had taken on with it."""
        self.outstanding -= self.states[process].outstanding
        self.states[process].outstanding = 0

    def _readable(self, process: int, sock: socket.socket) -> None:
        try:
            data = sock.recv(control.PACKET_BYTES_MAX)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""
        if not data:
            self._died(process)
        elif data[0] == control.REPORT:
            self._reported(process, data)
        else:
            self._said(process, control.decode_rare(data))

    def _said(self, process: int, message: dict[str, Any]) -> None:
        if message["what"] == "blocked":
            self.tell(message["by"], "read")
        else:
            self._watcher.said(process, message)

    def _reported(self, process: int, data: bytes) -> None:
        report = control.decode_report(data)
        state = self.states[process]
        state.before = (state.digest, state.marked_at_ps, state.finished_at_ps)
        state.digest = report.digest
        state.window = report.window
        self.outstanding += report.outstanding - state.outstanding
        state.outstanding = report.outstanding
        state.marked_at_ps = report.marked_at_ps
        state.finished_at_ps = report.finished_at_ps
        horizon = self.horizon
        horizon.report(process, report.window, report.next_at_ps, report.reaction_ps, report.sends)
        if horizon.closed:
            self._advance()

    def _died(self, process: int) -> None:
        self.detach(process)
        was_open = not self.horizon.closed
        death = self.horizon.died(process)
        state = self.states[process]
        if state.window >= death.window:
            state.undo()
        self.drop_work(process)
        self._watcher.died(death)
        if was_open and self.horizon.closed:
            self._advance()
