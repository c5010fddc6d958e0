"""The VPC plane between real processes: as in one process, to the digest; deaths and restarts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from cmnet.launch.agent import Context
from cmnet.launch.supervisor import NodeFault
from cmnet.testing import LocalMachine
from planes.vpc import Vpc
from planes.vpc_aiohttp import make_socket, prepare_aiohttp
from tests.machine.conftest import Runner
from tests.machine.conftest import run as run
from tests.planes.vpc_machine import MS, START_PS, machine

pytestmark = [pytest.mark.machine, pytest.mark.slow]

SIZE = 300_000


async def echo(vpc: Vpc) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        writer.close()

    await vpc.start_server(serve, 80)


async def all_to_all(context: Context) -> None:
    """Every node echoes with every other over streams, then over aiohttp; node00 ends the run."""
    vpc = Vpc(context)
    await echo(vpc)
    prepare_aiohttp(context.loop, context.stream("aiohttp"))
    runner = web.AppRunner(web.Application(client_max_size=1 << 30))
    runner.app.router.add_post("/", answer)
    await runner.setup()
    await web.TCPSite(runner, None, 8080).start()
    await context.loop.sleep_until_ps(START_PS)
    connector = aiohttp.TCPConnector(socket_factory=make_socket)
    async with aiohttp.ClientSession(connector=connector) as session:
        for process in context.machine.processes:
            if process.is_node and process.index != context.process:
                await one_echo(context, vpc, process.name)
                async with session.post(f"http://{process.name}:8080/", data=b"x" * SIZE) as got:
                    context.mark(f"http {await got.text()}")
    await context.loop.sleep_until_ps(500 * MS)
    if context.process == 0:
        context.finish()
    await context.loop.create_future()


async def answer(request: web.Request) -> web.Response:
    return web.Response(text=str(len(await request.read())))


async def one_echo(context: Context, vpc: Vpc, host: str) -> None:
    reader, writer = await vpc.open_connection(host, 80)
    sent = context.name.encode() * (SIZE // 6)
    writer.write(sent)
    writer.write_eof()
    same = await reader.read() == sent
    writer.close()
    context.mark(f"{host} {same}")


def test_real_processes_give_the_digest_of_one_process(run: Runner, tmp_path: Path) -> None:
    """Every delivery, size and mark at the same picosecond, also through buffers of 64 KiB."""
    folder = tmp_path / "local"
    folder.mkdir()
    alone = LocalMachine(machine(folder, "mini"), folder=folder).run(all_to_all)
    for bytes_ in (4 << 20, 64 << 10):
        result = run(all_to_all, socket_buffer_bytes=bytes_)
        assert (result.error, result.digest) == ("", alone)


async def writing_to_the_dead(context: Context) -> None:
    """node00 writes to node01 after its death, and connects to it again and again."""
    vpc = Vpc(context)
    await echo(vpc)
    if context.process == 0:
        reader, writer = await vpc.open_connection("node01", 80)
        await context.loop.sleep_until_ps(20 * MS)
        writer.write(b"hello?")
        try:
            await reader.read()
        except ConnectionResetError:
            context.mark("reset")
            (context.run_folder / "reset").write_text(str(context.loop.now_ps))
        writer.close()
        reader, writer = await vpc.open_connection("node01", 80)
        writer.write(b"again")
        if await reader.readexactly(5) == b"again":
            (context.run_folder / "again").write_text(str(context.loop.now_ps))
        context.finish()
    await context.loop.create_future()


@pytest.mark.parametrize(
    ("back_ms", "reset_ps"),
    [
        (100, 220 * MS + 20_000_120),  # the second try meets a new process: one round trip
        (13_000, 12_620 * MS),  # six tries met nobody
    ],
)
def test_a_writer_learns_of_a_death_by_its_own_timeouts(
    run: Runner, back_ms: int, reset_ps: int
) -> None:
    """No goodbye: a reset from the new incarnation, or the end of the tries; then a new stream."""
    faults = [
        NodeFault(at_ps=10 * MS, kind="kill", process=1),
        NodeFault(at_ps=back_ms * MS, kind="restart", process=1),
    ]
    result = run(writing_to_the_dead, node_faults=faults)
    assert result.error == ""
    assert (Path(result.folder) / "reset").read_text() == str(reset_ps)
    assert (Path(result.folder) / "again").exists()
