"""One process of a run, driven packet by packet: it reports whenever nothing keeps it any more."""

from __future__ import annotations

import asyncio
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cmnet.launch import agent, stacks
from cmnet.launch.agent import Agent, Assignment, Context
from cmnet.vtime.horizon import Grant
from cmnet.wire import control, frames, mesh
from tests.rig import machine

TOKEN = bytes(16)
LARGE_BYTES = 1 << 24
"""More than a socket's buffers of 4 KiB take."""


class Lone:
    """Process 0 of the smallest machine; the test is the conductor and process 1."""

    def __init__(self, folder: Path, program: agent.Program) -> None:
        for inside in ("disk", "journal", "statistics", "stacks"):
            (folder / inside).mkdir()
        self.folder = folder
        self._sockets_folder = tempfile.TemporaryDirectory(dir="/tmp")
        prefix = self._sockets_folder.name
        unix, tcp, self.address = mesh.listen(f"{prefix}/0.0", 0)
        self.peer_unix, self.peer_tcp, peer_address = mesh.listen(f"{prefix}/1.0", 0)
        self.conductor, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.conductor.setblocking(False)
        self._sockets = [unix, tcp, self.peer_unix, self.peer_tcp, self.conductor, theirs]
        count = len(machine("mini").processes)
        self.agent = Agent(
            machine=machine("mini"),
            assignment=Assignment(
                process=0,
                incarnation=0,
                start_ps=0,
                seed=0,
                token=TOKEN,
                addresses=[self.address, peer_address] + [None] * (count - 2),
                socket_buffer_bytes=4096,
                run_folder=str(folder),
                journal=True,
                rules=[],
                settings={},
            ),
            control_socket=theirs,
            listeners=(unix, tcp),
            program=program,
        )
        asyncio.set_event_loop(self.agent.loop)
        self._task = self.agent.loop.create_task(self.agent._main())

    def tell(self, packet: bytes) -> None:
        self.conductor.send(packet)
        self.agent._obey()

    def grant(self, window: int, horizon_ps: int, frames_expected: int = 0) -> None:
        self.tell(control.encode_grant(Grant(0, window, horizon_ps, frames_expected, False)))

    def peer_down(self, process: int, window: int) -> None:
        self.tell(control.encode_rare("peer_down", process=process, incarnation=0, window=window))

    def said(self) -> list[bytes]:
        """All packets that wait for the conductor."""
        packets = []
        while True:
            try:
                packets.append(self.conductor.recv(control.PACKET_BYTES_MAX * 2))
            except BlockingIOError:
                return packets

    def reported(self) -> list[int]:
        """The windows reported since last asked."""
        packets = [packet for packet in self.said() if packet[0] == control.REPORT]
        return [control.decode_report(packet).window for packet in packets]

    def journal(self) -> str:
        return (self.folder / "journal" / "node00.0.txt").read_text()

    def close(self) -> None:
        self._task.cancel()
        self.agent.mesh.close()
        self.agent.loop.run_until(10**11)
        asyncio.set_event_loop(None)
        self.agent.loop.close()
        self.agent._journal.close()
        for sock in self._sockets:
            sock.close()
        self._sockets_folder.cleanup()


Start = Callable[[agent.Program], Lone]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Lone] = []

    def start(program: agent.Program) -> Lone:
        started.append(Lone(tmp_path, program))
        return started[-1]

    yield start
    for lone in started:
        lone.close()


def a_frame(window: int, *, payload_bytes: int = 0) -> bytes:
    """Of process 1 for process 0, for an instant far away."""
    devices = machine("mini").devices
    source = next(device.device_id for device in devices if device.process == 1)
    target = next(device.device_id for device in devices if device.process == 0)
    at_ps = 10**12
    return frames.HEADER.pack(
        0, payload_bytes, frames.MAGIC, 200, 0, 0, window, source, target, 1, at_ps, at_ps, 1, 1
    )


async def idle(context: Context) -> None:
    """Does nothing."""


def test_a_frame_that_is_read_because_of_a_death_opens_the_window_that_waits_for_it(
    start: Start,
) -> None:
    """The death of a third process makes it read all; nobody else would wake it."""
    lone = start(idle)
    lone.grant(1, 1000)
    assert lone.reported() == [1]
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(lone.address.unix_path)
        peer.sendall(frames.hello(plane=0, process=1, incarnation=0, token=TOKEN))
        lone.grant(2, 2000, frames_expected=1)
        assert lone.reported() == [], "the frame is on its way"
        peer.sendall(a_frame(1))
        lone.peer_down(2, window=2)
        assert lone.reported() == [2]


def test_a_window_that_waits_for_a_full_kernel_ends_with_the_death_of_the_peer(
    start: Start,
) -> None:
    """What was kept for it is dropped, so that nothing becomes writable any more."""

    async def program(context: Context) -> None:
        await context.loop.sleep_ps(10)
        payload = bytes(LARGE_BYTES)
        lone.agent.mesh.write(1, 0, a_frame(1, payload_bytes=LARGE_BYTES), b"", payload)

    lone = start(program)
    lone.grant(1, 1000)
    assert [control.decode_rare(packet)["what"] for packet in lone.said()] == ["blocked"]
    lone.peer_unix.close()
    lone.peer_down(1, window=1)
    assert lone.reported() == [1]


def test_the_journal_has_the_lines_of_reported_windows_and_no_others(start: Start) -> None:
    """A process that is killed loses none of them; what it had not reported never happened."""
    done = threading.Event()

    async def program(context: Context) -> None:
        context.mark("first")
        await context.loop.sleep_ps(1500)
        context.mark("second")
        context.loop.hold(done.wait, duration_ps=100)

    lone = start(program)
    lone.grant(1, 1000)
    assert (lone.reported(), lone.journal()) == ([1], "0 mark first\n")
    lone.grant(2, 2000)
    assert (lone.reported(), lone.journal()) == ([], "0 mark first\n")
    done.set()
    while not lone.agent.loop.threads_done():
        pass
    lone.agent._proceed()
    assert (lone.reported(), lone.journal()) == ([2], "0 mark first\n1500 mark second\n")


@pytest.mark.parametrize("character", ["x", "\0", '"', "\u00e9", "\U0001f600", "\udce9"])
def test_what_a_process_says_at_its_end_fits_a_packet(character: str) -> None:
    """A control character is one character of text and six bytes of JSON."""
    error = ValueError(character * 100_000 + "end")
    waits = [character * 10_000] * 100
    packet = agent.encode_failure(error, at_ps=3, waits=waits)
    assert len(packet) <= control.PACKET_BYTES_MAX
    message = control.decode_rare(packet)
    assert message["error"].endswith("end") and message["stack"].endswith("end\n")
    assert len(message["waits"]) == stacks.LINES_MAX
