"""Real sockets: every frame comes out as it went in, whatever the kernel splits or refuses."""

from __future__ import annotations

import contextlib
import errno
import gc
import select
import socket
import tempfile
from collections.abc import Callable, Iterator

import pytest

from cmnet import entropy
from cmnet.errors import FrameError, RunError
from cmnet.wire import frames
from cmnet.wire.mesh import STRANGERS_MAX, Address, Mesh, listen

TOKEN = bytes(range(16))
Got = tuple[int, int, bytes, bytes]
"""(peer, sequence, body, payload)"""


class Poller:
    """The part of a loop that the mesh uses, turned by hand."""

    def __init__(self) -> None:
        self.readers: dict[int, Callable[[], object]] = {}
        self.writers: dict[int, Callable[[], object]] = {}

    def native_reader(self, fd: int, callback: Callable[..., object], *args: object) -> None:
        self.readers[fd] = lambda: callback(*args)

    def native_reader_gone(self, fd: int) -> None:
        del self.readers[fd]

    def native_writer(self, fd: int, callback: Callable[..., object], *args: object) -> None:
        self.writers[fd] = lambda: callback(*args)

    def native_writer_gone(self, fd: int) -> None:
        del self.writers[fd]

    def turn(self) -> None:
        readable, writable, _ = select.select(list(self.readers), list(self.writers), [], 0)
        for fd in readable:
            self.readers[fd]()
        for fd in writable:
            if fd in self.writers:
                self.writers[fd]()


class End:
    """One process's mesh and what it got."""

    def __init__(self, world: World, process: int, incarnation: int) -> None:
        self.world = world
        self.got: list[Got] = []
        self.broken: list[Exception] = []
        self.flushes = 0
        self.unix, self.tcp, self.address = listen(
            f"{world.folder}/{process}.{incarnation}", incarnation
        )
        self.mesh = Mesh(
            loop=world.poller,
            process=process,
            incarnation=incarnation,
            token=TOKEN,
            addresses=list(world.addresses),
            socket_buffer_bytes=world.buffer_bytes,
            on_frame=self.frame_came,
            on_broken=self.broken.append,
        )
        self.mesh.on_flushed = self.flushed
        self.mesh.serve(self.unix, self.tcp)
        self.mesh.watch()

    def frame_came(
        self, peer: int, header: tuple[int, ...], body: bytes, payload: bytes | memoryview
    ) -> None:
        assert (header[0], header[1]) == (len(body), len(payload))
        self.got.append((peer, header[9], body, bytes(payload)))

    def flushed(self) -> None:
        self.flushes += 1

    def send(self, peer: int, plane: int, sequence: int, body: bytes, payload: bytes) -> None:
        self.mesh.write(peer, plane, head(sequence, len(body), len(payload)), body, payload)

    def close(self) -> None:
        self.mesh.close()
        self.unix.close()
        self.tcp.close()


class World:
    """Two processes (more on request) in one."""

    def __init__(self, folder: str, buffer_bytes: int) -> None:
        self.folder = folder
        self.buffer_bytes = buffer_bytes
        self.poller = Poller()
        self.addresses: list[Address | None] = [None, None, None]
        self.ends: list[End] = []

    def end(self, process: int, incarnation: int = 0) -> End:
        end = End(self, process, incarnation)
        for other in self.ends:
            other.mesh.peer_up(process, end.address)
        self.addresses[process] = end.address
        self.ends.append(end)
        return end

    def turn_until(self, condition: Callable[[], bool]) -> None:
        for _ in range(200_000):
            if condition():
                return
            self.poller.turn()
        raise AssertionError("it never happened")

    def settle(self, turns: int = 20) -> None:
        for _ in range(turns):
            self.poller.turn()


def head(sequence: int, body_bytes: int, payload_bytes: int, magic: int = frames.MAGIC) -> bytes:
    return frames.HEADER.pack(
        body_bytes, payload_bytes, magic, 1, 0, 0, 1, 0, 0, sequence, 0, 0, 0, 1
    )


@pytest.fixture(params=[4 << 20], ids=lambda size: f"{size}B")
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        made = World(folder, request.param)
        yield made
        for end in made.ends:
            end.close()
    gc.collect()


def connected(world: World) -> tuple[End, End]:
    """Two ends; the first knows the second's address."""
    receiver = world.end(1)
    return world.end(0), receiver


SIZES = [0, 1, 63, 64, 65, 32 << 10, (32 << 10) + 1, 300_000, 5_000_000]


@pytest.mark.parametrize("world", [4 << 10, 64 << 10, 4 << 20], indirect=True, ids="{}B".format)
@pytest.mark.parametrize("plane", [0, 1])
def test_frames_of_any_size_come_in_order_with_any_socket_buffer(world: World, plane: int) -> None:
    """Both directions at once: writing never blocks, reading never waits for writing."""
    if world.buffer_bytes < 1 << 20:
        sizes = SIZES[:-1]
    else:
        sizes = SIZES
    ends = connected(world)
    ends[1].mesh.peer_up(0, ends[0].address)
    draws = entropy.stream(1, "sizes")
    sent: list[list[tuple[int, bytes, bytes]]] = [[], []]
    for sequence in range(60):
        for side in (0, 1):
            size = sizes[draws.below(len(sizes))] if sequence % 3 == 0 else draws.below(300)
            body = bytes(draws.below(200))
            payload = draws.u64().to_bytes(8, "little") * (size // 8) + bytes(size % 8)
            sent[side].append((sequence, body, payload))
            ends[side].send(1 - side, plane, sequence, body, payload)
    for end in ends:
        end.mesh.flush()
    world.turn_until(lambda: all(len(end.got) == 60 for end in ends))
    for side in (0, 1):
        assert [entry[1:] for entry in ends[1 - side].got] == sent[side]
        assert ends[side].mesh.flushed() and not ends[side].broken


def test_a_report_waits_until_the_kernel_has_all() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        world = World(folder, 4 << 10)
        sender, receiver = connected(world)
        receiver.mesh.unwatch()
        blocked: list[int] = []
        sender.mesh.on_blocked = blocked.append
        sender.send(1, 0, 1, b"", bytes(1 << 20))
        assert not sender.mesh.flush() and not sender.mesh.flushed()
        assert blocked == [1]
        world.settle()
        assert sender.flushes == 0
        receiver.mesh.watch()
        world.turn_until(lambda: sender.flushes == 1)
        world.turn_until(lambda: len(receiver.got) == 1)
        for end in world.ends:
            end.close()


@pytest.mark.parametrize("piece", [1, 7, 63, 64, 4096])
def test_frames_in_pieces_of_any_size(world: World, piece: int) -> None:
    """As raw bytes into the listener: greeting, small and large frames, cut every ``piece`` bytes."""
    receiver = world.end(1)
    parts = [frames.hello(plane=0, process=2, incarnation=0, token=TOKEN)]
    expected: list[Got] = []
    for sequence, size in enumerate([0, 5, 100, 40_000 if piece > 7 else 1000, 33_000, 3]):
        body, payload = bytes([sequence] * (size % 60)), bytes([sequence]) * size
        parts += [head(sequence, len(body), len(payload)), body, payload]
        expected.append((2, sequence, body, payload))
    data = b"".join(parts)
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(receiver.address.unix_path)
        for at in range(0, len(data), piece):
            raw.sendall(data[at : at + piece])
            world.poller.turn()
        world.turn_until(lambda: len(receiver.got) == len(expected))
    assert receiver.got == expected and not receiver.broken


def raw_bytes(world: World, receiver: End, data: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(receiver.address.unix_path)
        raw.sendall(data)
        world.settle()


HELLO = frames.hello(plane=0, process=2, incarnation=0, token=TOKEN)


@pytest.mark.parametrize(
    "hello",
    [
        frames.hello(plane=0, process=2, incarnation=0, token=bytes(16)),
        frames.hello(plane=0, process=3, incarnation=0, token=TOKEN),
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
    ids=["wrong token", "no such process", "not ours"],
)
def test_a_stranger_is_hung_up_on_and_harms_nobody(world: World, hello: bytes) -> None:
    sender, receiver = connected(world)
    raw_bytes(world, receiver, hello + head(1, 0, 0))
    sender.send(1, 0, 7, b"b", b"p")
    sender.mesh.flush()
    world.turn_until(lambda: len(receiver.got) == 1)
    assert receiver.got == [(0, 7, b"b", b"p")] and receiver.broken == []


def test_an_older_incarnation_is_refused(world: World) -> None:
    receiver = world.end(1)
    receiver.mesh.peer_up(2, Address(3, "/nowhere", 1))
    raw_bytes(world, receiver, HELLO + head(1, 0, 0))
    newer = frames.hello(plane=0, process=2, incarnation=3, token=TOKEN)
    raw_bytes(world, receiver, newer + head(2, 0, 0))
    assert [sequence for _, sequence, _, _ in receiver.got] == [2]


@pytest.mark.parametrize(
    "header",
    [head(1, 2**32 - 1, 0), head(1, 0, 2**32 - 1), head(1, 0, 0, magic=0)],
    ids=["body", "payload", "magic"],
)
def test_a_header_that_is_none_is_a_clean_error_before_allocation(
    world: World, header: bytes
) -> None:
    receiver = world.end(1)
    raw_bytes(world, receiver, HELLO + header)
    assert [type(error) for error in receiver.broken] == [FrameError]


@pytest.mark.parametrize("seed", range(40))
def test_random_bytes_end_the_connection_and_nothing_else(world: World, seed: int) -> None:
    """Behind a right greeting: a clean FrameError, or a wait for the rest."""
    receiver = world.end(1)
    draws = entropy.stream(seed, "bytes")
    data = b"".join(draws.u64().to_bytes(8, "little") for _ in range(draws.below(200)))
    raw_bytes(world, receiver, (HELLO if seed % 2 else b"") + data)
    assert all(isinstance(error, FrameError) for error in receiver.broken)
    assert receiver.got == []


def test_a_peer_that_is_gone_loses_its_frames_and_counts_as_having_accepted(world: World) -> None:
    sender, receiver = connected(world)
    sender.send(1, 0, 1, b"", bytes(100))
    sender.mesh.flush()
    world.turn_until(lambda: len(receiver.got) == 1)
    receiver.close()
    world.ends.remove(receiver)
    for sequence in range(3):
        sender.send(1, 0, sequence, b"", bytes(10_000_000))
        sender.mesh.flush()
    world.settle()
    assert sender.mesh.flushed() and sender.mesh.frames_lost > 0
    sender.mesh.peer_down(1)
    sender.send(1, 0, 9, b"", b"")
    assert sender.mesh.flush()


def test_a_peer_that_dies_while_the_kernel_is_full_unblocks_its_senders(world: World) -> None:
    sender, receiver = connected(world)
    receiver.mesh.unwatch()
    sender.send(1, 0, 1, b"", bytes(50_000_000))
    assert not sender.mesh.flush()
    receiver.close()
    world.ends.remove(receiver)
    world.turn_until(lambda: sender.flushes == 1)
    assert sender.mesh.flushed()


def test_what_the_kernel_accepted_of_a_dead_sender_is_still_read(world: World) -> None:
    """Connections carry frames one way, so the dead has no unread input that would cost the rest."""
    sender, receiver = connected(world)
    receiver.mesh.unwatch()
    for plane in (0, 1):
        for sequence in range(50):
            sender.send(1, plane, sequence, b"", bytes(1000))
    sender.mesh.flush()
    sender.close()
    world.ends.remove(sender)
    receiver.mesh.watch()
    world.turn_until(lambda: len(receiver.got) == 100)


def test_a_peer_that_is_back_is_connected_to_anew(world: World) -> None:
    sender, receiver = connected(world)
    sender.send(1, 0, 1, b"", b"")
    sender.mesh.flush()
    world.turn_until(lambda: len(receiver.got) == 1)
    receiver.close()
    world.ends.remove(receiver)
    sender.mesh.peer_down(1)
    back = world.end(1, incarnation=1)
    sender.send(1, 0, 2, b"", b"")
    sender.send(1, 2, 3, b"", b"")
    sender.mesh.flush()
    world.turn_until(lambda: len(back.got) == 2)
    assert sorted(sequence for _, sequence, _, _ in back.got) == [2, 3]


def test_a_peer_that_dies_while_it_is_greeted_loses_the_frame(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between our connect and our greeting: no error of ours."""
    sender, receiver = connected(world)
    hello = frames.hello

    def dying(**fields: int | bytes) -> bytes:
        receiver.unix.close()
        return hello(**fields)  # type: ignore[arg-type]  # a stand-in

    monkeypatch.setattr(frames, "hello", dying)
    sender.send(1, 0, 1, b"", b"")
    assert (sender.mesh.frames_lost, sender.mesh.flushed()) == (1, True)


def test_connections_that_never_greet_are_limited(world: World) -> None:
    """The oldest go; who has greeted stays, though its greeting was not read when they came."""
    sender, receiver = connected(world)
    receiver.mesh.unwatch()
    sender.send(1, 0, 7, b"", b"")
    sender.mesh.flush()
    with contextlib.ExitStack() as open_until_the_end:
        for _ in range(3 * STRANGERS_MAX):
            raw = open_until_the_end.enter_context(socket.socket(socket.AF_UNIX))
            raw.connect(receiver.address.unix_path)
        receiver.mesh.watch()
        world.turn_until(lambda: len(receiver.got) == 1)
        world.settle()
        assert len(receiver.mesh._incoming) <= STRANGERS_MAX + 3 * len(world.addresses) + 1
        sender.send(1, 1, 8, b"", b"")
        sender.mesh.flush()
        world.turn_until(lambda: len(receiver.got) == 2)
    assert receiver.broken == []


class FullListener:
    """No descriptor is free as long as ``mesh`` has connections that have not greeted."""

    def __init__(self, mesh: Mesh, listener: socket.socket, *, always: bool = False) -> None:
        self.mesh, self.listener, self.always = mesh, listener, always

    def accept(self) -> tuple[socket.socket, object]:
        if self.always or self.mesh._ungreeted:
            raise OSError(errno.EMFILE, "Too many open files")
        return self.listener.accept()

    def fileno(self) -> int:
        return self.listener.fileno()


def test_without_free_descriptors_strangers_are_hung_up_on(world: World) -> None:
    """Then there is room for a peer; if there is none even so, the process fails and says why."""
    sender, receiver = connected(world)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(receiver.address.unix_path)
        world.settle()
        receiver.mesh.unwatch()
        sender.send(1, 0, 7, b"", b"")
        sender.mesh.flush()
        full = FullListener(receiver.mesh, receiver.unix)
        receiver.mesh._accept(full)  # type: ignore[arg-type]  # a stand-in
        receiver.mesh.watch()
        world.turn_until(lambda: len(receiver.got) == 1)
        assert receiver.broken == []
        full.always = True
        receiver.mesh._accept(full)  # type: ignore[arg-type]  # a stand-in
        assert receiver.broken == [], "nobody waits"
        sender.send(1, 1, 8, b"", b"")
        full.listener = receiver.tcp
        receiver.mesh._accept(full)  # type: ignore[arg-type]  # a stand-in
        assert [type(error) for error in receiver.broken] == [RunError]
