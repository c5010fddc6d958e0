"""The process that forks all others (design 4, "Processes of a run").

Owns listeners until they are handed to a child, and the children's parentage: it lives as long as the
run, has imported everything, has no loop and no thread, and so can fork a restarted node at any time.
Told what to do over one SEQPACKET socket; its end is the run's end.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import socket
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import msgspec

from cmnet.launch import agent, deathsig
from cmnet.link import effects
from cmnet.topology.machine import Machine
from cmnet.wire import mesh

PACKET_BYTES_MAX = 1 << 22


CONTROL_BUFFER_BYTES = 1 << 22
"""Room for all that can wait while a node runs: the conductor never blocks."""
TEMPORARY_CHARACTERS_MAX = 80
"""The path of a Unix socket has at most 107 bytes."""


def make_socket_folder() -> str:
    """A private folder with a short name."""
    parent = tempfile.gettempdir()
    fits = len(parent) <= TEMPORARY_CHARACTERS_MAX
    return tempfile.mkdtemp(prefix="cmnet-", dir=parent if fits else "/tmp")


def control_pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a control connection: the conductor's and the process's."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, CONTROL_BUFFER_BYTES)
    return ours, theirs


class Zygote:
    """The supervisor's handle: asks, and waits for the answer."""

    def __init__(self, machine: Machine, program: agent.Program, socket_folder: str) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PACKET_BYTES_MAX)
        supervisor = os.getpid()
        inherited = _open_descriptors()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            del inherited[theirs.fileno()]
            _live(machine, program, socket_folder, theirs, supervisor, inherited)
        theirs.close()
        self._socket = ours
        self._order_file = _order_file(socket_folder)

    def listen(self, processes: list[int], incarnation: int) -> list[mesh.Address]:
        """Bind the listeners of processes that are forked next."""
        self._send({"what": "listen", "processes": processes, "incarnation": incarnation})
        return msgspec.json.decode(self._receive(), type=list[mesh.Address])

    def fork(
        self, assignments: list[agent.Assignment], controls: list[socket.socket]
    ) -> dict[int, int]:
        """Fork processes; each gets its end of a control socket. Returns pid by process index."""
        shared = msgspec.to_builtins(assignments[0], enc_hook=effects.enc_hook)
        shared["token"] = assignments[0].token.hex()
        shared["processes"] = [assignment.process for assignment in assignments]
        self._order_file.write_bytes(msgspec.json.encode(shared))
        fds = [control.fileno() for control in controls]
        socket.send_fds(self._socket, [msgspec.json.encode({"what": "fork"})], fds)
        pids: list[int] = msgspec.json.decode(self._receive())
        return dict(zip(shared["processes"], pids, strict=True))

    def _send(self, message: dict[str, Any]) -> None:
        self._socket.send(msgspec.json.encode(message))

    def _receive(self) -> bytes:
        data = self._socket.recv(PACKET_BYTES_MAX)
        if not data:
            raise ChildProcessError("the zygote ended")
        return data

    def ended(self) -> bool:
        """It ended by itself; its children see that later than we do."""
        try:
            return not self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            return True

    def close(self) -> None:
        """End the zygote and all its children; returns when it is gone."""
        self._socket.close()
        os.waitpid(self.pid, 0)


def _order_file(socket_folder: str) -> Path:
    """Where a fork order's content is: a workload in the settings may be larger than any packet."""
    return Path(socket_folder) / "order.json"


def _live(
    machine: Machine,
    program: agent.Program,
    socket_folder: str,
    orders: socket.socket,
    supervisor: int,
    inherited: dict[int, str],
) -> None:
    """The zygote's life; never returns."""
    status = 1
    deathsig.give_back_memory()
    gc.freeze()  # what an earlier run left would close, when collected, descriptors that are ours now
    try:
        deathsig.leave_terminal()
        signal.signal(signal.SIGUSR2, lambda *_: _leave(socket_folder, 0))
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        deathsig.die_with_parent(supervisor, signal.SIGUSR2)
        _close(inherited)
        _obey(machine, program, socket_folder, orders)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        _leave(socket_folder, status)


def _leave(socket_folder: str, status: int) -> None:
    """The zygote's end. When the supervisor is killed it comes twice, by its socket and by a signal in
    the middle of this: nothing is raised, lest what called for the fork goes on in this process."""
    shutil.rmtree(socket_folder, ignore_errors=True)
    os._exit(status)


def _open_descriptors() -> dict[int, str]:
    """What this process has open beside its standard streams: descriptor to what it is."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return {fd: target for fd, target in found.items() if fd > 2}


def _close(inherited: dict[int, str]) -> None:
    """Close what the supervisor had open. What libuv's fork handler opened in its place stays:
    libuv closes it by number in every further child, whatever that number is by then."""
    for fd, target in _open_descriptors().items():
        if inherited.get(fd) == target:
            os.close(fd)


def _obey(
    machine: Machine, program: agent.Program, socket_folder: str, orders: socket.socket
) -> None:
    listeners: dict[int, tuple[socket.socket, socket.socket]] = {}
    while True:
        data, fds, _, _ = socket.recv_fds(orders, PACKET_BYTES_MAX, 250)
        if not data:
            return
        order = msgspec.json.decode(data)
        if order["what"] == "listen":
            addresses = []
            for process in order["processes"]:
                path = f"{socket_folder}/{process}.{order['incarnation']}"
                unix, tcp, address = mesh.listen(path, order["incarnation"])
                listeners[process] = (unix, tcp)
                addresses.append(address)
            orders.send(msgspec.json.encode(addresses))
        else:
            order = msgspec.json.decode(_order_file(socket_folder).read_bytes())
            orders.send(
                msgspec.json.encode(_fork_all(machine, program, orders, order, listeners, fds))
            )
            for pair in listeners.values():
                for listener in pair:
                    listener.close()
            listeners.clear()
            for fd in fds:
                os.close(fd)


def _fork_all(
    machine: Machine,
    program: agent.Program,
    orders: socket.socket,
    order: dict[str, Any],
    listeners: dict[int, tuple[socket.socket, socket.socket]],
    fds: list[int],
) -> list[int]:
    pids = []
    zygote = os.getpid()
    order["token"] = bytes.fromhex(order["token"])
    for process, fd in zip(order["processes"], fds, strict=True):
        pid = os.fork()
        if pid == 0:
            orders.close()
            for other in fds:
                if other != fd:
                    os.close(other)
            for other, pair in listeners.items():
                if other != process:
                    for listener in pair:
                        listener.close()
            mine = order | {"process": process}
            _become(machine, program, mine, fd, listeners[process], zygote)
        pids.append(pid)
    return pids


def _become(
    machine: Machine,
    program: agent.Program,
    order: dict[str, Any],
    fd: int,
    listeners: tuple[socket.socket, socket.socket],
    zygote: int,
) -> None:
    """A child's life; never returns."""
    control_socket = socket.socket(fileno=fd)
    try:
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        deathsig.die_with_parent(zygote)
        order.pop("processes")
        assignment = msgspec.convert(order, agent.Assignment, dec_hook=effects.dec_hook)
        name = machine.processes[assignment.process].name
        agent.prepare_process(assignment.run_folder, f"{name}.{assignment.incarnation}")
        agent.Agent(
            machine=machine,
            assignment=assignment,
            control_socket=control_socket,
            listeners=listeners,
            program=program,
        ).run()
        os._exit(0)
    except BaseException as error:
        with contextlib.suppress(OSError):  # the conductor is gone: nobody to tell
            control_socket.send(agent.encode_failure(error, at_ps=order["start_ps"], waits=[]))
        os._exit(1)
