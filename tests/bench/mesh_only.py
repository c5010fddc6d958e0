"""Our mesh alone, without conductor, ports and virtual time: what the sockets and frames cost.

Owns the same rounds as ``raw``: a process writes to each other one when it has read a whole round.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import uvloop

from cmnet.wire import frames
from cmnet.wire.mesh import Address, Mesh, listen
from tests.bench import raw

TOKEN = bytes(16)


class Native(uvloop.Loop):
    """A plain loop with the names that the mesh calls."""

    def native_reader(self, fd: int, callback: Callable[..., object], *args: object) -> None:
        self.add_reader(fd, callback, *args)

    def native_reader_gone(self, fd: int) -> None:
        self.remove_reader(fd)

    def native_writer(self, fd: int, callback: Callable[..., object], *args: object) -> None:
        self.add_writer(fd, callback, *args)

    def native_writer_gone(self, fd: int) -> None:
        self.remove_writer(fd)


class _Node:
    """One process."""

    def __init__(self, *, index: int, count: int, rounds: int, message_bytes: int) -> None:
        self.index, self.count = index, count
        self.rounds = rounds
        self.payload = bytes(message_bytes)
        self.seen = 0
        self.mesh: Mesh
        self.loop = Native()

    def frame_read(self, peer: int, header: tuple[int, ...], body: bytes, payload: object) -> None:
        self.seen += 1
        if self.seen % (self.count - 1) == 0:
            self.rounds -= 1
            if self.rounds > 0:
                self.send()
            else:
                self.loop.stop()

    def send(self) -> None:
        pack, payload, mesh = frames.HEADER.pack, self.payload, self.mesh
        for peer in (*range(self.index + 1, self.count), *range(self.index)):
            head = pack(
                0,
                len(payload),
                frames.MAGIC,
                1,
                0,
                0,
                1,
                self.index,
                peer,
                1,
                0,
                0,
                len(payload),
                1,
            )
            mesh.write(peer, 0, head, b"", payload)

    def run(self, folder: Path, steps: raw.Steps, buffer_bytes: int) -> None:
        unix, tcp, _ = listen(str(folder / str(self.index)), 0)
        self.mesh = Mesh(
            loop=self.loop,
            process=self.index,
            incarnation=0,
            token=TOKEN,
            addresses=[Address(0, str(folder / str(peer)), 0) for peer in range(self.count)],
            socket_buffer_bytes=buffer_bytes,
            on_frame=self.frame_read,
            on_broken=_broken,
        )
        self.mesh.serve(unix, tcp)
        steps.reached()
        for peer in range(self.count):
            if peer != self.index:
                self.mesh.connect(peer, 0)
        steps.reached()
        self.mesh.on_read = self._flush
        self.mesh.watch()
        self.send()
        self.mesh.flush()
        self.loop.run_forever()
        steps.reached()
        self.mesh.close()

    def _flush(self) -> None:
        self.mesh.flush()


def _broken(error: Exception) -> None:
    raise error


def all_to_all(*, count: int, rounds: int, message_bytes: int, buffer_bytes: int) -> raw.Spent:
    """So many rounds in which each process writes a frame to each other one."""

    def live(index: int, folder: Path, steps: raw.Steps) -> None:
        node = _Node(index=index, count=count, rounds=rounds, message_bytes=message_bytes)
        with contextlib.closing(node.loop):
            node.run(folder, steps, buffer_bytes)

    return raw.forked(count, live)
