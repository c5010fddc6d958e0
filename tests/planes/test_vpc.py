"""The VPC plane on a whole small machine: instants by the formula, faults, names, counters."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from cmnet.launch.agent import Context
from cmnet.link import effects
from cmnet.link.reach import Where
from cmnet.link.rules import Rule
from cmnet.topology.machine import Plane
from cmnet.units import NEVER_PS
from planes.vpc import LOOPBACK_PS, Vpc
from planes.vpc_halves import ACK, DATA, PROBE, RST, SYN_ACK, Message
from tests import closed_form
from tests.planes.vpc_machine import (
    MS,
    PROPAGATION_PS,
    RATE_BPS,
    START_PS,
    US,
    Part,
    S,
    chunk_bytes,
    machine,
    run,
)

pytestmark = pytest.mark.filterwarnings("ignore:unclosed <StreamWriter:ResourceWarning")
"""The machine's end closes what a test leaves open."""

RTT_PS = 2 * PROPAGATION_PS


class Counter(asyncio.Protocol):
    """Notes each instant at which bytes arrived and how many there were by then."""

    def __init__(self, context: Context, log: list[Any]) -> None:
        self.context = context
        self.log = log
        self.count = 0

    def data_received(self, data: bytes) -> None:
        self.count += len(data)
        self.log.append((self.context.loop.now_ps, self.count))

    def connection_lost(self, error: Exception | None) -> None:
        self.log.append((self.context.loop.now_ps, error))


def arrived(log: list[Any]) -> list[Any]:
    """A log without the ends of streams."""
    return [entry for entry in log if type(entry[1]) is int]


def counting(log: list[Any]) -> Part:
    """A server whose every stream counts into the log."""

    async def server(context: Context, vpc: Vpc) -> None:
        await vpc.create_server(lambda: Counter(context, log), 80)

    return server


async def echoing(_: Context, vpc: Vpc) -> None:
    """A server that sends back what it gets, then its own end."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.close()

    await vpc.start_server(serve, 80)


def rule(effect: effects.Effect, *, start_ps: int = 0, until_ps: int = NEVER_PS) -> Rule:
    where = Where(plane=Plane.VPC)
    return Rule(
        rule_id="r", owner="t", effect=effect, where=where, start_ps=start_ps, until_ps=until_ps
    )


def delivery_ps(size: int) -> int:
    return closed_form.vpc_delivery_ps(size, propagation_ps=PROPAGATION_PS, rate_bps=RATE_BPS)


# --- time -----------------------------------------------------------------------------------------


def test_the_first_byte_of_an_answer_takes_two_round_trips_exactly(tmp_path: Path) -> None:
    """One for the handshake, one for request and answer, plus the serialization of both."""
    times: list[int] = []

    async def client(context: Context, vpc: Vpc) -> None:
        reader, writer = await vpc.open_connection("node01", 80)
        times.append(context.loop.now_ps - START_PS)
        writer.write(b"q" * 100)
        await reader.readexactly(100)
        times.append(context.loop.now_ps - START_PS)

    run(tmp_path, client, echoing)
    assert times == [RTT_PS, RTT_PS + 2 * delivery_ps(100)]


@pytest.mark.parametrize("size", [1, 1000, 1 << 16, (1 << 16) + 1, 4 << 20, 16 << 20])
def test_bytes_on_an_open_stream_arrive_by_the_formula(tmp_path: Path, size: int) -> None:
    """Also above the window of 4 MiB: the round trip holds 1 MB, so the window never stops it."""
    log: list[Any] = []

    async def client(context: Context, vpc: Vpc) -> None:
        _, writer = await vpc.open_connection("node01", 80)
        writer.write(bytes(size))
        await writer.drain()
        await context.loop.sleep_ps(S)
        assert vpc.statistics().streams.window_limited_ps == 0

    run(tmp_path, client, counting(log))
    assert arrived(log)[-1] == (START_PS + RTT_PS + delivery_ps(size), size)


def test_flows_share_a_port_chunk_by_chunk(tmp_path: Path) -> None:
    """Each stream keeps one chunk in the port, so equal flows posted together end in their order."""
    logs: list[list[Any]] = [[], [], []]
    size = 300_000

    async def server(context: Context, vpc: Vpc) -> None:
        for flow in range(3):
            log = logs[flow]
            await vpc.create_server(lambda log=log: Counter(context, log), 80 + flow)  # type: ignore[misc]  # a lambda has no types

    async def client(context: Context, vpc: Vpc) -> None:
        writers = [(await vpc.open_connection("node01", 80 + flow))[1] for flow in range(3)]
        for writer in writers:
            writer.write(bytes(size))
        await context.loop.sleep_ps(S)

    run(tmp_path, client, server)
    formula = closed_form.deliveries_ps(
        3, size, chunk_bytes=1 << 16, rate_bps=RATE_BPS, propagation_ps=PROPAGATION_PS
    )
    posted_ps = START_PS + 3 * RTT_PS
    assert [arrived(log)[-1] for log in logs] == [(posted_ps + at_ps, size) for at_ps in formula]


def test_a_window_below_the_round_trip_limits_a_stream_and_says_so(tmp_path: Path) -> None:
    """64 KiB per round trip of 10 ms are 52 Mbit/s on a link of 400 Gbit/s: seen in the counters."""
    on = machine(tmp_path, propagation="5 ms", window="64 KiB", chunk="64 KiB")
    log: list[Any] = []
    limited: list[int] = []

    async def client(context: Context, vpc: Vpc) -> None:
        _, writer = await vpc.open_connection("node01", 80)
        writer.write(bytes(10 << 16))
        await context.loop.sleep_ps(S)
        limited.append(vpc.statistics().streams.window_limited_ps)

    run(tmp_path, client, counting(log), on=on)
    one_ps = closed_form.serialization_ps(1 << 16, RATE_BPS)
    turn_ps = one_ps + 10 * MS
    assert arrived(log)[-1] == (START_PS + 10 * MS + 9 * turn_ps + one_ps + 5 * MS, 10 << 16)
    assert limited == [9 * 10 * MS + 9 * one_ps]


def test_a_side_with_a_charge_factor_charges_that_much_more(tmp_path: Path) -> None:
    """64 carried bytes that stand for 64 MiB take the time of 64 MiB; the answer is charged as it is."""
    times: list[int] = []
    factor = 1 << 20

    async def client(context: Context, vpc: Vpc) -> None:
        reader, writer = await vpc.open_connection("node01", 80, charge_factor=factor)
        posted_ps = context.loop.now_ps
        writer.write(bytes(4))
        await reader.readexactly(4)
        times.append(context.loop.now_ps - posted_ps)

    run(tmp_path, client, echoing)
    propagation_ps, rate_bps = PROPAGATION_PS, RATE_BPS
    there_ps = closed_form.serialization_ps(4 * factor, rate_bps) + propagation_ps
    last_byte_back_ps = closed_form.serialization_ps(1, rate_bps) + propagation_ps
    assert times == [there_ps + last_byte_back_ps]


@pytest.mark.parametrize("origin_s", [20_000_000, 1_700_000_000])
def test_the_same_picoseconds_come_out_at_any_origin_of_the_clock(
    tmp_path: Path, origin_s: int
) -> None:
    """Sleeps and timeouts that do not fire; at 1.7e9 s a float clock's grain is 238 ns."""

    def measured(origin_ps: int) -> tuple[str, list[int]]:
        times: list[int] = []

        async def client(context: Context, vpc: Vpc) -> None:
            for pause in (0.1, 1e-7, 0.333, 3.0):
                async with asyncio.timeout(0.5):
                    reader, writer = await asyncio.open_connection("node01", 80)
                    writer.write(b"x" * 333_333)
                    await reader.readexactly(333_333)
                    writer.close()
                    await writer.wait_closed()
                await asyncio.sleep(pause)
                times.append(context.loop.now_ps)

        async def server(context: Context, vpc: Vpc) -> None:
            async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                await asyncio.sleep(0.01)
                writer.write(await reader.readexactly(333_333))
                await asyncio.wait_for(reader.read(), 10.0)
                writer.close()

            await asyncio.start_server(serve, "node01", 80)

        return run(tmp_path, client, server, origin_ps=origin_ps), times

    assert measured(0) == measured(origin_s * S)


def test_a_timeout_that_is_far_never_fires_when_the_answer_is_near(tmp_path: Path) -> None:
    """trio-websocket#94: bytes on their way are events, so the clock never jumps over them."""

    async def client(context: Context, vpc: Vpc) -> None:
        reader, writer = await vpc.open_connection("node01", 80)
        for _ in range(300):
            async with asyncio.timeout(1.0):
                writer.write(b"ping")
                await reader.readexactly(4)

    run(tmp_path, client, echoing)


def test_an_idle_stream_costs_no_event(tmp_path: Path) -> None:
    """After the last acknowledgement nothing more is due than before the stream was."""
    counts: list[int] = []

    async def client(context: Context, vpc: Vpc) -> None:
        counts.append(len(context.loop.agenda.heap))
        reader, writer = await vpc.open_connection("node01", 80)
        for _ in range(3):
            writer.write(b"ping")
            await reader.readexactly(4)
        await context.loop.sleep_ps(50 * MS)
        assert context.loop.next_at_ps() - context.loop.now_ps > S
        await context.loop.sleep_ps(S)
        counts.append(len(context.loop.agenda.heap))

    run(tmp_path, client, echoing)
    assert counts[0] == counts[1]


# --- backpressure ---------------------------------------------------------------------------------


def test_a_reader_that_pauses_stops_its_writer_in_virtual_time(tmp_path: Path) -> None:
    """What the server's reader and the window hold, and the write buffer; then nothing for 5 s."""
    written: list[int] = []
    got: list[int] = []

    async def client(context: Context, vpc: Vpc) -> None:
        _, writer = await vpc.open_connection("node01", 80)
        sent = 0
        while sent < 8 << 20:
            writer.write(bytes(1 << 16))
            await writer.drain()
            sent += 1 << 16
            if context.loop.now_ps < START_PS + S:
                written[:] = [sent]
        writer.close()
        await context.loop.sleep_ps(10 * S)

    async def server(context: Context, vpc: Vpc) -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await context.loop.sleep_ps(5 * S)
            got.append(len(await reader.read(-1)))
            writer.close()

        await vpc.start_server(serve, 80)

    run(tmp_path, client, server)
    in_reader = 3 << 16  # a StreamReader of 64 KiB pauses above twice that
    in_write_buffer = 1 << 16  # at the high mark drain() still returns
    assert written == [(4 << 20) + in_reader + in_write_buffer]
    assert got == [8 << 20]


# --- faults ---------------------------------------------------------------------------------------


def test_bytes_written_into_a_partition_arrive_after_it_by_the_schedule(tmp_path: Path) -> None:
    """Lost at 0 and 200 ms, through at 600 ms: not a picosecond else."""
    log: list[Any] = []
    down = rule(effects.Partition(), start_ps=2 * MS, until_ps=500 * MS)

    async def client(context: Context, vpc: Vpc) -> None:
        _, writer = await vpc.open_connection("node01", 80)
        await context.loop.sleep_until_ps(3 * MS)
        writer.write(b"late")
        await context.loop.sleep_ps(5 * S)
        assert vpc.statistics().streams.chunks_resent == 2

    run(tmp_path, client, counting(log), rules=(down,))
    assert arrived(log) == [(3 * MS + 600 * MS + delivery_ps(4), 4)]


def test_a_peer_that_is_gone_resets_the_writer_after_all_tries(tmp_path: Path) -> None:
    """A killed process says no goodbye: 12.6 s after the first try the writer gets the error."""
    times: list[int] = []
    down = rule(effects.Partition(), start_ps=2 * MS)

    async def client(context: Context, vpc: Vpc) -> None:
        reader, writer = await vpc.open_connection("node01", 80)
        await context.loop.sleep_until_ps(3 * MS)
        writer.write(b"lost")
        with pytest.raises(ConnectionResetError):
            await reader.read()
        times.append(context.loop.now_ps)
        assert vpc.statistics().streams_failed == 1

    run(tmp_path, client, echoing, rules=(down,))
    assert times == [3 * MS + 12_600 * MS]


def test_a_peer_that_does_not_answer_times_the_connection_out(tmp_path: Path) -> None:
    """As the operating system: TimeoutError with its number, after all tries of the SYN."""
    times: list[int] = []

    async def client(context: Context, vpc: Vpc) -> None:
        with pytest.raises(TimeoutError) as caught:
            await vpc.open_connection("node01", 80)
        assert caught.value.errno == 110
        times.append(context.loop.now_ps)

    run(tmp_path, client, echoing, rules=(rule(effects.Partition()),))
    assert times == [START_PS + 12_600 * MS]


BAD_LINKS: dict[str, effects.Effect] = {
    "loss": effects.Loss(probability=Fraction(1, 5)),
    "corrupt": effects.Corrupt(probability=Fraction(1, 5)),
    "duplicate": effects.Duplicate(probability=Fraction(1, 2)),
    "jitter": effects.Jitter(jitter_ps=100 * US),
    "rate": effects.Rate(factor=Fraction(1, 1000)),
    "flap": effects.Flap(period_ps=30 * US, down_ps=10 * US),
}


def bad_link(folder: Path, effect: effects.Effect, seed: int) -> tuple[str, bytes, Any]:
    """Send and echo 1 MB over a link with a fault: digest, what came back, the client's counters."""
    back: list[bytes] = []
    counters: list[Any] = []
    sent = bytes(at * at % 251 for at in range(100_000)) * 10

    async def client(context: Context, vpc: Vpc) -> None:
        reader, writer = await vpc.open_connection("node01", 80)
        for at in range(0, len(sent), 10_000):
            writer.write(sent[at : at + 10_000])
        writer.write_eof()
        back.append(await reader.read())
        counters.append(vpc.statistics())

    digest = run(folder, client, echoing, rules=(rule(effect),), seed=seed)
    assert back == [sent]
    return digest, back[0], counters[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", BAD_LINKS)
def test_a_bad_link_changes_no_byte_and_repeats_by_its_seed(tmp_path: Path, name: str) -> None:
    """Lost, flipped, doubled, swapped, slow: all bytes in order once; one seed, one digest."""
    digest, _, counters = bad_link(tmp_path, BAD_LINKS[name], seed=1)
    again, _, _ = bad_link(tmp_path, BAD_LINKS[name], seed=1)
    assert digest == again
    if name in ("loss", "corrupt", "duplicate", "jitter"):
        other, _, _ = bad_link(tmp_path, BAD_LINKS[name], seed=2)
        assert digest != other
    if name in ("loss", "corrupt"):
        assert counters.streams.chunks_resent > 0
    if name == "corrupt":
        assert counters.frames_corrupt > 0
    if name == "duplicate":
        assert counters.streams.duplicates > 0


def test_a_peer_that_knows_nothing_of_a_stream_resets_it(tmp_path: Path) -> None:
    """A restarted process is a new one: the first byte to it is answered by a reset."""
    servers: list[Vpc] = []
    times: list[int] = []

    async def server(_: Context, vpc: Vpc) -> None:
        servers.append(vpc)
        await vpc.create_server(asyncio.Protocol, 80)

    async def client(context: Context, vpc: Vpc) -> None:
        reader, writer = await vpc.open_connection("node01", 80)
        await context.loop.sleep_ps(S)
        servers[0]._streams.clear()
        posted_ps = context.loop.now_ps
        writer.write(b"hello again")
        with pytest.raises(ConnectionResetError):
            await reader.read()
        times.append(context.loop.now_ps - posted_ps)

    run(tmp_path, client, server)
    assert times == [delivery_ps(11) + PROPAGATION_PS]


def test_only_who_awaits_an_answer_is_told_that_a_stream_is_no_more(tmp_path: Path) -> None:
    """A late acknowledgement of a forgotten stream is no reason to break what is still read."""

    async def client(context: Context, vpc: Vpc) -> None:
        for kind, answers in ((ACK, 0), (RST, 0), (DATA, 1), (PROBE, 1), (SYN_ACK, 1)):
            before = context.fabric.statistics()["VPC"]["frames"]
            vpc._handle((1, 999, True), Message(kind))
            await context.loop.sleep_ps(1)
            assert context.fabric.statistics()["VPC"]["frames"] - before == answers

    run(tmp_path, client, echoing)


# --- ends -----------------------------------------------------------------------------------------


def test_an_abort_resets_the_peer(tmp_path: Path) -> None:
    """One propagation later, behind what had left before."""
    log: list[Any] = []

    async def client(context: Context, vpc: Vpc) -> None:
        _, writer = await vpc.open_connection("node01", 80)
        writer.write(b"last words")
        await context.loop.sleep_ps(1 * US)
        writer.transport.abort()
        await context.loop.sleep_ps(S)

    run(tmp_path, client, counting(log))
    opened_ps = START_PS + RTT_PS
    assert log[0] == (opened_ps + delivery_ps(10), 10)
    assert log[1][0] == opened_ps + 1 * US + PROPAGATION_PS
    assert isinstance(log[1][1], ConnectionResetError)


def test_a_close_sends_what_was_written(tmp_path: Path) -> None:
    """connection_lost(None) at both ends, every byte there, no stream left over."""
    log: list[Any] = []
    left: list[int] = []

    async def client(context: Context, vpc: Vpc) -> None:
        _, writer = await vpc.open_connection("node01", 80)
        writer.write(bytes(1_000_000))
        writer.close()
        await writer.wait_closed()
        await context.loop.sleep_ps(S)
        left.append(vpc.statistics().streams_now)

    run(tmp_path, client, counting(log))
    assert log[-2:] == [
        (START_PS + RTT_PS + delivery_ps(1_000_000), 1_000_000),
        (START_PS + RTT_PS + delivery_ps(1_000_000), None),
    ]
    assert left == [0]


def test_a_half_close_leaves_the_other_half_open(tmp_path: Path) -> None:
    """The server sees the end, answers, and ends as well."""

    async def client(_: Context, vpc: Vpc) -> None:
        reader, writer = await vpc.open_connection("node01", 80)
        writer.write(b"question")
        writer.write_eof()
        assert await reader.read() == b"question"
        with pytest.raises(RuntimeError):
            writer.write(b"more")

    run(tmp_path, client, echoing)


def test_a_server_reads_slowly_what_a_client_left_behind(tmp_path: Path) -> None:
    """The client is gone and forgot the stream; its bytes were all acknowledged and are still read."""
    got: list[int] = []

    async def client(context: Context, vpc: Vpc) -> None:
        _, writer = await vpc.open_connection("node01", 80)
        writer.write(bytes(2 << 20))
        writer.close()
        await context.loop.sleep_ps(10 * S)
        assert vpc.statistics().streams_now == 0

    async def server(context: Context, vpc: Vpc) -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await context.loop.sleep_ps(2 * S)
            while data := await reader.read(100_000):
                got.append(len(data))
                await context.loop.sleep_ps(10 * MS)
            writer.close()

        await vpc.start_server(serve, 80)

    run(tmp_path, client, server)
    assert sum(got) == 2 << 20


# --- names and servers ----------------------------------------------------------------------------


def test_nobody_listens_there(tmp_path: Path) -> None:
    """Refused after exactly one round trip, and counted at the other end."""
    refused: list[Callable[[], Any]] = []
    times: list[int] = []

    async def server(_: Context, vpc: Vpc) -> None:
        refused.append(vpc.statistics)

    async def client(context: Context, vpc: Vpc) -> None:
        with pytest.raises(ConnectionRefusedError):
            await vpc.open_connection("node01", 81)
        times.append(context.loop.now_ps - START_PS)

    run(tmp_path, client, server)
    assert times == [RTT_PS]
    assert refused[0]().streams_refused == 1


def test_no_process_has_that_name(tmp_path: Path) -> None:
    """As a resolver: gaierror, at once."""

    async def client(_: Context, vpc: Vpc) -> None:
        with pytest.raises(socket.gaierror, match="node77"):
            await vpc.open_connection("node77", 80)

    run(tmp_path, client, echoing)


def test_a_port_is_listened_on_once_and_free_again_after_close(tmp_path: Path) -> None:
    """Address in use, as the operating system has it; streams of the closed server go on."""

    async def client(_: Context, vpc: Vpc) -> None:
        server = await vpc.create_server(asyncio.Protocol, 90)
        with pytest.raises(OSError, match="port 90 of node00 is taken"):
            await vpc.create_server(asyncio.Protocol, 90)
        server.close()
        await server.wait_closed()
        assert not server.is_serving()
        await vpc.create_server(asyncio.Protocol, 90)

    run(tmp_path, client, echoing)


def test_a_closed_server_refuses_but_its_streams_go_on(tmp_path: Path) -> None:
    """Closing a listener is not closing what it accepted."""
    servers: list[Any] = []

    async def server(_: Context, vpc: Vpc) -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(await reader.readexactly(4))

        servers.append(await vpc.start_server(serve, 80))

    async def client(context: Context, vpc: Vpc) -> None:
        reader, writer = await vpc.open_connection("node01", 80)
        await context.loop.sleep_ps(1 * MS)
        servers[0].close()
        writer.write(b"ping")
        assert await reader.readexactly(4) == b"ping"
        with pytest.raises(ConnectionRefusedError):
            await vpc.open_connection("node01", 80)

    run(tmp_path, client, server)


def test_a_process_reaches_itself_past_its_ports(tmp_path: Path) -> None:
    """Loopback: two ways of 5 us for the handshake, two for the echo; nothing is charged."""
    times: list[int] = []

    async def client(context: Context, vpc: Vpc) -> None:
        await echoing(context, vpc)
        reader, writer = await vpc.open_connection("localhost", 80)
        writer.write(bytes(1 << 20))
        await reader.readexactly(1 << 20)
        times.append(context.loop.now_ps - START_PS)
        writer.close()
        await context.loop.sleep_ps(S)
        assert vpc.statistics().streams_now == 0
        assert context.fabric.statistics()["VPC"]["frames"] == 0

    run(tmp_path, client, echoing)
    assert times == [4 * LOOPBACK_PS]


def test_a_cancelled_connection_leaves_nothing(tmp_path: Path) -> None:
    """The task was cancelled half way: no stream at either end, no error anywhere."""
    left: list[Callable[[], Any]] = []

    async def server(context: Context, vpc: Vpc) -> None:
        left.append(vpc.statistics)
        await echoing(context, vpc)

    async def client(context: Context, vpc: Vpc) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(15e-6):
                await vpc.open_connection("node01", 80)
        await context.loop.sleep_ps(S)
        assert vpc.statistics().streams_now == 0

    run(tmp_path, client, server)
    assert left[0]().streams_now == 0
    assert left[0]().streams_accepted == 0


@pytest.mark.slow
def test_every_process_reaches_every_other(tmp_path: Path) -> None:
    """mininet#917: all-to-all on the whole machine, 48 nodes; no stream fails."""
    on = machine(tmp_path, "cloudmatrix384")
    done: list[int] = []
    failed: list[Callable[[], Any]] = []

    async def reach_all(context: Context, vpc: Vpc) -> None:
        for process in on.processes:
            if process.index != context.process:
                reader, writer = await vpc.open_connection(process.name, 80)
                writer.write(context.name.encode())
                writer.write_eof()
                assert await reader.read() == context.name.encode()
                writer.close()
        done.append(context.process)

    async def server(context: Context, vpc: Vpc) -> None:
        failed.append(vpc.statistics)
        await echoing(context, vpc)
        await context.loop.sleep_until_ps(START_PS)
        await reach_all(context, vpc)

    async def client(context: Context, vpc: Vpc) -> None:
        await echoing(context, vpc)
        await reach_all(context, vpc)
        await context.loop.sleep_ps(S)

    run(tmp_path, client, server, on=on)
    assert sorted(done) == list(range(49))
    assert [count().streams_failed for count in failed] == [0] * 48


def test_the_shipped_chunk_is_what_the_tests_reckon_with(tmp_path: Path) -> None:
    """The numbers above are those of the topology."""
    assert chunk_bytes(machine(tmp_path)) == 1 << 16
