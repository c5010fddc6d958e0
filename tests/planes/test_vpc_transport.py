"""What asyncio promises of a transport: callbacks, flow control, closing, protocols of both kinds."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from cmnet.launch.agent import Context
from planes.vpc import Vpc
from planes.vpc_transport import BYTES_HIGH, VpcTransport
from tests.planes.vpc_machine import MS, S, run


class Recorder(asyncio.Protocol):
    """Records every callback in order; ``keep`` is what eof_received returns."""

    def __init__(self, *, keep: bool = False) -> None:
        self.calls: list[Any] = []
        self.keep = keep
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.calls.append("made")

    def data_received(self, data: bytes) -> None:
        assert type(data) is bytes
        self.calls.append(data)

    def eof_received(self) -> bool:
        self.calls.append("eof")
        return self.keep

    def connection_lost(self, error: Exception | None) -> None:
        self.calls.append(("lost", error))

    def pause_writing(self) -> None:
        self.calls.append("pause")

    def resume_writing(self) -> None:
        self.calls.append("resume")


class Scene:
    """A client and a server protocol on one stream; ``act`` is the client's part."""

    def __init__(self, folder: Path, near: Any = None, far: Any = None) -> None:
        self.folder = folder
        self.near = near or Recorder()
        self.far = far or Recorder()
        self.context: Context
        self.transport: VpcTransport
        self.reports: list[dict[str, Any]] = []

    async def wait(self, ps: int = 1 * MS) -> None:
        await self.context.loop.sleep_ps(ps)

    def play(self, act: Any) -> None:
        async def server(_: Context, vpc: Vpc) -> None:
            await vpc.create_server(lambda: self.far, 80)

        async def client(context: Context, vpc: Vpc) -> None:
            self.context = context
            context.loop.set_exception_handler(lambda _, report: self.reports.append(report))
            self.transport, _ = await vpc.create_connection(lambda: self.near, "node01", 80)
            await self.wait()
            await act(self)

        run(self.folder, client, server)


def test_callbacks_come_in_asyncios_order(tmp_path: Path) -> None:
    """Made, data, end, lost; a protocol that keeps nothing open is closed by the end."""
    scene = Scene(tmp_path)

    async def act(scene: Scene) -> None:
        scene.transport.write(b"one")
        scene.transport.write_eof()
        await scene.wait(S)

    scene.play(act)
    assert scene.far.calls == ["made", b"one", "eof", ("lost", None)]
    assert scene.near.calls == ["made", "eof", ("lost", None)]


def test_a_protocol_may_keep_its_half_open_after_the_end(tmp_path: Path) -> None:
    """eof_received says True: it writes on, and the other side reads on."""
    scene = Scene(tmp_path, far=Recorder(keep=True))

    async def act(scene: Scene) -> None:
        scene.transport.write_eof()
        await scene.wait()
        assert scene.far.calls == ["made", "eof"]
        scene.far.transport.write(b"still here")
        await scene.wait()
        scene.far.transport.close()
        await scene.wait()

    scene.play(act)
    assert scene.near.calls == ["made", b"still here", "eof", ("lost", None)]
    assert scene.far.calls == ["made", "eof", ("lost", None)]


def test_a_writer_is_paused_above_the_high_mark_and_resumed_at_the_low_one(tmp_path: Path) -> None:
    """The port holds one chunk, the buffer the rest; the marks are asyncio's."""
    scene = Scene(tmp_path)

    async def act(scene: Scene) -> None:
        transport = scene.transport
        assert transport.get_write_buffer_limits() == (BYTES_HIGH // 4, BYTES_HIGH)
        transport.write(bytes(1 << 16))
        transport.write(bytes(BYTES_HIGH))
        assert scene.near.calls == ["made"]
        transport.write(b"x")
        assert scene.near.calls == ["made", "pause"]
        assert transport.get_write_buffer_size() == BYTES_HIGH + 1
        await scene.wait()
        assert scene.near.calls == ["made", "pause", "resume"]
        assert transport.get_write_buffer_size() == 0

    scene.play(act)


def test_marks_can_be_set_and_wrong_ones_are_refused(tmp_path: Path) -> None:
    """asyncio's rules: low is a quarter of high, high four times low, both if given."""
    scene = Scene(tmp_path)

    async def act(scene: Scene) -> None:
        transport = scene.transport
        for given, limits in [
            ({"high": 400}, (100, 400)),
            ({"low": 100}, (100, 400)),
            ({"high": 0}, (0, 0)),
            ({"high": 9, "low": 9}, (9, 9)),
            ({}, (BYTES_HIGH // 4, BYTES_HIGH)),
        ]:
            transport.set_write_buffer_limits(**given)
            assert transport.get_write_buffer_limits() == limits
        with pytest.raises(ValueError, match="high"):
            transport.set_write_buffer_limits(high=1, low=2)

    scene.play(act)


def test_a_paused_reader_gets_nothing_and_everything_after(tmp_path: Path) -> None:
    """Also the end waits its turn."""
    scene = Scene(tmp_path)

    async def act(scene: Scene) -> None:
        scene.far.transport.pause_reading()
        assert not scene.far.transport.is_reading()
        scene.transport.write(b"one")
        scene.transport.write_eof()
        await scene.wait()
        assert scene.far.calls == ["made"]
        scene.far.transport.resume_reading()
        assert scene.far.transport.is_reading()
        assert scene.far.calls == ["made"], "resuming itself calls nothing"
        await scene.wait()
        assert scene.far.calls[:3] == ["made", b"one", "eof"]

    scene.play(act)


def test_pausing_inside_data_received_stops_the_next_piece(tmp_path: Path) -> None:
    """Several pieces may be due at one instant: the pause holds between them."""

    class PausesEach(Recorder):
        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self.transport.pause_reading()

    scene = Scene(tmp_path, far=PausesEach())

    async def act(scene: Scene) -> None:
        scene.far.transport.pause_reading()
        for piece in (b"a", b"b", b"c"):
            scene.transport.write(piece)
            await scene.wait()
        for seen in (1, 2, 3):
            scene.far.transport.resume_reading()
            await scene.wait()
            assert len(scene.far.calls) == 1 + seen

    scene.play(act)
    assert scene.far.calls[:4] == ["made", b"a", b"b", b"c"]


def test_a_buffered_protocol_fills_its_own_buffer(tmp_path: Path) -> None:
    """In pieces as large as it gives."""

    class Buffered(asyncio.BufferedProtocol):
        def __init__(self) -> None:
            self.buffer = bytearray(7)
            self.got = b""

        def get_buffer(self, sizehint: int) -> bytearray:
            return self.buffer

        def buffer_updated(self, nbytes: int) -> None:
            self.got += self.buffer[:nbytes]

    far = Buffered()
    scene = Scene(tmp_path, far=far)

    async def act(scene: Scene) -> None:
        scene.transport.write(bytes(range(100)))
        await scene.wait()

    scene.play(act)
    assert far.got == bytes(range(100))


def test_a_protocol_that_raises_loses_its_connection(tmp_path: Path) -> None:
    """asyncio's way: reported to the loop, aborted, connection_lost with the error."""

    class Broken(Recorder):
        def data_received(self, data: bytes) -> None:
            raise ZeroDivisionError("mine")

    scene = Scene(tmp_path, far=Broken())

    async def act(scene: Scene) -> None:
        scene.transport.write(b"x")
        await scene.wait()

    scene.play(act)
    assert isinstance(scene.far.calls[-1][1], ZeroDivisionError)
    assert isinstance(scene.near.calls[-1][1], ConnectionResetError)
    assert [type(report["exception"]) for report in scene.reports] == [ZeroDivisionError]


def test_a_protocol_can_hand_over_to_another(tmp_path: Path) -> None:
    """set_protocol: as an upgrade does."""
    scene = Scene(tmp_path)
    second = Recorder()

    async def act(scene: Scene) -> None:
        scene.transport.write(b"one")
        await scene.wait()
        scene.far.transport.set_protocol(second)
        assert scene.far.transport.get_protocol() is second
        scene.transport.write(b"two")
        await scene.wait()

    scene.play(act)
    assert scene.far.calls == ["made", b"one"]
    assert second.calls[0] == b"two"


def test_writing_takes_what_is_like_bytes_and_keeps_a_copy(tmp_path: Path) -> None:
    """A bytearray may change after the call; text is refused."""
    scene = Scene(tmp_path)

    async def act(scene: Scene) -> None:
        scene.transport.pause_reading()
        buffer = bytearray(b"abc")
        scene.transport.write(b"in the port ")
        scene.transport.write(buffer)
        buffer[:] = b"xyz"
        scene.transport.write(memoryview(b" def"))
        scene.transport.writelines([b" g", bytearray(b"hi")])
        scene.transport.write(b"")
        with pytest.raises(TypeError, match="str"):
            scene.transport.write("text")  # type: ignore[arg-type]  # wrong on purpose
        await scene.wait()

    scene.play(act)
    assert b"".join(scene.far.calls[1:3]) == b"in the port abc def ghi"


def test_after_close_nothing_is_read_or_written(tmp_path: Path) -> None:
    """Calls are harmless; connection_lost comes once, by a callback of its own."""
    scene = Scene(tmp_path)

    async def act(scene: Scene) -> None:
        transport = scene.transport
        transport.close()
        assert transport.is_closing()
        assert scene.near.calls == ["made"]
        transport.close()
        transport.write(b"ignored")
        transport.write_eof()
        transport.pause_reading()
        transport.resume_reading()
        await scene.wait()
        transport.abort()
        await scene.wait()

    scene.play(act)
    assert scene.near.calls == ["made", ("lost", None)]
    assert scene.far.calls == ["made", "eof", ("lost", None)]


def test_connection_lost_waits_for_the_write_buffer(tmp_path: Path) -> None:
    """Closing flushes first; what is written after close is not sent."""
    scene = Scene(tmp_path)

    async def act(scene: Scene) -> None:
        scene.transport.write(bytes(200_000))
        scene.transport.close()
        scene.transport.write(b"ignored")
        await scene.wait(1)
        assert scene.near.calls == ["made", "pause"]
        await scene.wait()
        assert scene.near.calls == ["made", "pause", "resume", ("lost", None)]
        assert sum(len(call) for call in scene.far.calls if type(call) is bytes) == 200_000

    scene.play(act)


def test_the_end_alone_waits_for_a_paused_reader(tmp_path: Path) -> None:
    """No bytes before it: it is held back all the same."""
    scene = Scene(tmp_path)

    async def act(scene: Scene) -> None:
        scene.far.transport.pause_reading()
        scene.transport.write_eof()
        await scene.wait()
        assert scene.far.calls == ["made"]

    scene.play(act)


def test_both_ends_are_named(tmp_path: Path) -> None:
    """peername of one is sockname of the other; the socket is a fake that says the same."""
    scene = Scene(tmp_path)

    async def act(scene: Scene) -> None:
        near, far = scene.transport, scene.far.transport
        assert near.get_extra_info("peername") == ("10.0.0.2", 80)
        assert near.get_extra_info("sockname") == far.get_extra_info("peername")
        assert far.get_extra_info("socket").getpeername() == near.get_extra_info("sockname")
        assert near.get_extra_info("sslcontext") is None
        assert near.get_extra_info("nothing", "default") == "default"
        assert "open" in repr(near)

    scene.play(act)


def test_counters_of_one_stream(tmp_path: Path) -> None:
    """What this end sent and received, without ends counted as bytes."""
    scene = Scene(tmp_path)

    async def act(scene: Scene) -> None:
        scene.transport.write(bytes(100_000))
        scene.far.transport.write(b"abc")
        scene.transport.write_eof()
        await scene.wait(S)
        counted = scene.transport.statistics()
        assert (counted.bytes_sent, counted.bytes_received) == (100_000, 3)
        assert (counted.chunks_sent, counted.chunks_resent, counted.timeouts) == (2, 0, 0)

    scene.play(act)
