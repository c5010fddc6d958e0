"""Frames wait in the kernel until somebody reads (``Mesh.read``, ``watch``)."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Callable, Iterator

import pytest

from cmnet.wire import frames
from cmnet.wire.mesh import Address, Mesh, listen

TOKEN = bytes(16)


class NoLoop:
    """Notes what the mesh asks for."""

    def __init__(self) -> None:
        self.readers: dict[int, Callable[..., object]] = {}
        self.writers: set[int] = set()

    def native_reader(self, fd: int, callback: Callable[..., object], *args: object) -> None:
        self.readers[fd] = callback

    def native_reader_gone(self, fd: int) -> None:
        del self.readers[fd]

    def native_writer(self, fd: int, callback: Callable[..., object], *args: object) -> None:
        self.writers.add(fd)

    def native_writer_gone(self, fd: int) -> None:
        self.writers.discard(fd)


def _broken(error: Exception) -> None:
    raise error


class Pair:
    """A mesh that writes and one that reads."""

    def __init__(self, folder: str, buffer_bytes: int) -> None:
        self.loop = NoLoop()
        self.got: list[bytes] = []
        self.blocked: list[int] = []
        self.listeners: list[socket.socket] = []
        self.addresses: list[Address | None] = []
        for process in range(2):
            unix, tcp, address = listen(f"{folder}/{process}", 0)
            self.listeners += [unix, tcp]
            self.addresses.append(address)
        self.writer, self.reader = self.mesh(0, buffer_bytes), self.mesh(1, buffer_bytes)
        self.reader.serve(*self.listeners[2:])
        self.writer.on_blocked = self.blocked.append

    def mesh(self, process: int, buffer_bytes: int) -> Mesh:
        return Mesh(
            loop=self.loop,
            process=process,
            incarnation=0,
            token=TOKEN,
            addresses=list(self.addresses),
            socket_buffer_bytes=buffer_bytes,
            on_frame=lambda peer, header, body, payload: self.got.append(bytes(payload)),
            on_broken=_broken,
        )

    def write(self, payload: bytes) -> bool:
        head = frames.HEADER.pack(
            0, len(payload), frames.MAGIC, 1, 0, 0, 1, 0, 0, 1, 0, 0, len(payload), 1
        )
        self.writer.write(1, 0, head, b"", payload)
        return self.writer.flush()

    def close(self) -> None:
        self.writer.close()
        self.reader.close()
        for listener in self.listeners:
            listener.close()


@pytest.fixture(params=[1 << 12, 1 << 22])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        made = Pair(folder, request.param)
        yield made
        made.close()


def test_nothing_is_read_before_somebody_reads(pair: Pair) -> None:
    """A process without a grant is not woken by its peers' frames."""
    assert pair.write(b"one") and pair.write(b"two")
    assert not pair.loop.readers and not pair.got
    while pair.reader.read():
        pass
    assert pair.got == [b"one", b"two"]


def test_watching_is_one_reader_however_many_connections(pair: Pair) -> None:
    """To watch twice is to watch; to stop when nobody watches is nothing."""
    pair.reader.watch()
    pair.reader.watch()
    assert len(pair.loop.readers) == 1
    pair.reader.unwatch()
    pair.reader.unwatch()
    assert not pair.loop.readers


def test_a_full_kernel_names_the_peer_once_and_all_comes_when_it_reads(pair: Pair) -> None:
    """The sender is how a reader without a grant learns that it holds somebody up."""
    payload = bytes(range(256)) * (1 << 16)
    assert not pair.write(payload)
    assert pair.blocked == [1] and len(pair.loop.writers) == 1
    while not pair.got:
        pair.reader.read()
        pair.writer._write(pair.writer._outgoing[4])
    assert pair.got == [payload] and pair.blocked == [1]
    assert pair.writer.flushed() and not pair.loop.writers


def test_large_and_small_frames_keep_their_order(pair: Pair) -> None:
    """After a large one little is read at first; what follows it is not lost in between."""
    sent = [
        bytes([n]) * size for n, size in enumerate([10, 70_000, 0, 3, 70_000, 70_000, 5, 40_000])
    ]
    for payload in sent:
        pair.write(payload)
    while len(pair.got) < len(sent):
        pair.reader.read()
        if 4 in pair.writer._outgoing:
            pair.writer._write(pair.writer._outgoing[4])
    assert pair.got == sent
