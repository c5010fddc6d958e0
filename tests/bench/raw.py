"""The other side of the ratios: plain uvloop protocols, all-to-all over Unix sockets, no emulator.

Owns processes that do nothing but write and count bytes: one connection per pair of processes, one
write per message, start excluded.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, cast

import uvloop

from cmnet.launch import deathsig


class _Counter(asyncio.Protocol):
    """Counts what comes; tells of every round that is in."""

    def __init__(self, node: _Node) -> None:
        self.node = node

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        buffer_bytes = self.node.buffer_bytes
        if buffer_bytes:
            sock = transport.get_extra_info("socket")
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                sock.setsockopt(socket.SOL_SOCKET, option, buffer_bytes)
        self.node.transports.append(cast(asyncio.WriteTransport, transport))
        if len(self.node.transports) == self.node.count - 1:
            self.node.connected.set()

    def data_received(self, data: bytes) -> None:
        node = self.node
        node.bytes_read += len(data)
        while node.bytes_read >= node.bytes_due:
            node.next_round()


class _Node:
    """One process."""

    def __init__(
        self, *, index: int, count: int, rounds: int, message_bytes: int, buffer_bytes: int
    ) -> None:
        self.index, self.count = index, count
        self.rounds = rounds
        self.message = bytes(message_bytes)
        self.buffer_bytes = buffer_bytes
        self.transports: list[asyncio.WriteTransport] = []
        self.bytes_read = 0
        self.bytes_due = message_bytes * (count - 1)
        self.done = asyncio.Event()
        self.connected = asyncio.Event()

    def next_round(self) -> None:
        self.bytes_due += len(self.message) * (self.count - 1)
        self.rounds -= 1
        if self.rounds > 0:
            self.send()
        else:
            self.done.set()

    def send(self) -> None:
        for transport in self.transports:
            transport.write(self.message)

    async def run(self, folder: Path, steps: Steps) -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_unix_server(
            lambda: _Counter(self), str(folder / str(self.index))
        )
        steps.reached()
        for peer in range(self.index):
            await loop.create_unix_connection(lambda: _Counter(self), str(folder / str(peer)))
        await self.connected.wait()
        steps.reached()
        self.send()
        await self.done.wait()
        steps.reached()
        server.close()


class Steps:
    """Barriers between forked processes and their parent: listening, connected, done."""

    COUNT = 3

    def __init__(self, count: int) -> None:
        self.count = count
        self._passed = 0
        self._up = os.pipe()
        self._down = [os.pipe() for _ in range(self.COUNT)]  # one each: nobody takes another's byte

    def reached(self) -> None:
        """In a child: say so, and wait until all are here."""
        os.write(self._up[1], b".")
        os.read(self._down[self._passed][0], 1)
        self._passed += 1

    def wait(self) -> None:
        """In the parent: until all are here."""
        got = 0
        while got < self.count:
            got += len(os.read(self._up[0], self.count))

    def let_go(self) -> None:
        os.write(self._down[self._passed][1], b"." * self.count)
        self._passed += 1

    def close(self) -> None:
        for fds in (self._up, *self._down):
            for fd in fds:
                os.close(fd)


class Spent(NamedTuple):
    """Wall seconds of the rounds, and CPU seconds of all processes from fork to end."""

    wall_s: float
    cpu_s: float


def all_to_all(*, count: int, rounds: int, message_bytes: int, buffer_bytes: int = 0) -> Spent:
    """So many rounds in which each process writes to each other one."""

    def live(index: int, folder: Path, steps: Steps) -> None:
        node = _Node(
            index=index,
            count=count,
            rounds=rounds,
            message_bytes=message_bytes,
            buffer_bytes=buffer_bytes,
        )
        with contextlib.closing(uvloop.new_event_loop()) as loop:
            loop.run_until_complete(node.run(folder, steps))

    return forked(count, live)


def forked(count: int, live: Callable[[int, Path, Steps], None]) -> Spent:
    """The wall time is that between the second barrier (all connected) and the third (all done)."""
    steps = Steps(count)
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        pids = [_fork(functools.partial(live, index, Path(name), steps)) for index in range(count)]
        for _ in range(2):
            steps.wait()
            begin = time.perf_counter()
            steps.let_go()
        steps.wait()
        wall_s = time.perf_counter() - begin
        steps.let_go()
        used = [os.wait4(pid, 0)[2] for pid in pids]
    steps.close()
    return Spent(wall_s, sum(each.ru_utime + each.ru_stime for each in used))


def _fork(live: Callable[[], None]) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            deathsig.die_with_parent(parent)
            live()
            status = 0
        finally:
            os._exit(status)
    return pid
