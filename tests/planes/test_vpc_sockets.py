"""Names, fake sockets and the hooks of the loop, as libraries use them."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from cmnet.launch.agent import Context
from planes.vpc import Vpc
from planes.vpc_sockets import Addresses, FakeSocket, make_socket
from tests.planes.vpc_machine import START_PS, US, machine, run

pytestmark = pytest.mark.filterwarnings("ignore:unclosed <StreamWriter:ResourceWarning")


@pytest.fixture
def addresses(tmp_path: Path) -> Addresses:
    """Of process 3 of the whole machine: 48 nodes and the gateway."""
    return Addresses(machine(tmp_path, "cloudmatrix384"), 3)


@pytest.mark.parametrize(
    ("host", "process"),
    [
        ("node00", 0),
        ("node47", 47),
        ("gateway", 48),
        ("Node05.", 5),
        (b"node05", 5),
        ("10.0.0.1", 0),
        ("10.0.0.49", 48),
        ("localhost", 3),
        ("127.0.0.1", 3),
    ],
)
def test_a_host_is_a_process(addresses: Addresses, host: Any, process: int) -> None:
    """By name, by address, or oneself."""
    assert addresses.process(host) == process


@pytest.mark.parametrize("host", ["node48", "10.0.0.50", "example.org", "", None, 5])
def test_an_unknown_host_is_an_error_of_the_resolver(addresses: Addresses, host: Any) -> None:
    """The exception that every library expects."""
    with pytest.raises(socket.gaierror):
        addresses.process(host)


def test_a_look_up_gives_the_one_address(addresses: Addresses) -> None:
    """As getaddrinfo; a server's empty host is every address."""
    streams = (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "")
    assert addresses.info("node09", "80", 0, 0) == [(*streams, ("10.0.0.10", 80))]
    assert addresses.info(None, None, socket.AF_INET, socket.SOCK_STREAM) == [
        (*streams, ("0.0.0.0", 0))
    ]


@pytest.mark.parametrize(
    ("host", "port", "family", "kind"),
    [
        ("node01", 80, socket.AF_INET6, 0),
        ("node01", 80, 0, socket.SOCK_DGRAM),
        ("node01", "http", 0, 0),
        ("node99", 80, 0, 0),
    ],
)
def test_what_the_plane_has_not_is_refused(
    addresses: Addresses, host: str, port: Any, family: int, kind: int
) -> None:
    """No IPv6, no datagrams, no names of services."""
    with pytest.raises(socket.gaierror):
        addresses.info(host, port, family, kind)


def test_a_fake_socket_keeps_options_and_touches_nothing() -> None:
    """Libraries set TCP_NODELAY and the like; there is no file behind it."""
    fake = FakeSocket(("10.0.0.1", 5))
    fake.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    fake.setblocking(False)
    fake.settimeout(1.0)
    assert fake.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
    assert (fake.getsockname(), fake.fileno(), fake.gettimeout()) == (("10.0.0.1", 5), -1, 0.0)
    with pytest.raises(OSError, match="not connected"):
        fake.getpeername()


def test_asyncios_own_functions_reach_the_plane(tmp_path: Path) -> None:
    """open_connection and start_server of asyncio, in both processes of one loop."""
    got: list[bytes] = []

    async def server(context: Context, _: Vpc) -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(context.name.encode())
            writer.close()

        made = await asyncio.start_server(serve, None, 80)
        assert made.sockets[0].getsockname() == ("10.0.0.2", 80)

    async def client(_: Context, __: Vpc) -> None:
        reader, writer = await asyncio.open_connection("node01", 80)
        got.append(await reader.read())
        writer.close()
        await writer.wait_closed()

    run(tmp_path, client, server)
    assert got == [b"node01"]


def test_a_callback_knows_the_process_it_runs_in(tmp_path: Path) -> None:
    """A handler in node01 that connects to localhost reaches node01, though all share one loop."""
    got: list[bytes] = []

    async def server(_: Context, __: Vpc) -> None:
        async def inner(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"inner")
            writer.close()

        async def outer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            reader, other = await asyncio.open_connection("localhost", 81)
            writer.write(await reader.read())
            writer.close()
            other.close()

        await asyncio.start_server(outer, None, 80)
        await asyncio.start_server(inner, "localhost", 81)

    async def client(_: Context, __: Vpc) -> None:
        reader, writer = await asyncio.open_connection("node01", 80)
        got.append(await reader.read())
        writer.close()

    run(tmp_path, client, server)
    assert got == [b"inner"]


def test_a_fake_socket_connects_first_and_gets_its_protocol_later(tmp_path: Path) -> None:
    """sock_connect then create_connection(sock=): what aiohappyeyeballs does. Nothing early is lost."""
    got: list[Any] = []

    async def server(_: Context, __: Vpc) -> None:
        async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"greeting")
            writer.close()

        await asyncio.start_server(serve, None, 80)

    async def client(context: Context, __: Vpc) -> None:
        loop = context.loop
        sock = make_socket()
        await loop.sock_connect(sock, ("10.0.0.2", 80))
        got.append((loop.now_ps - START_PS, sock.getpeername()))
        await loop.sleep_ps(100 * US)
        reader = asyncio.StreamReader()
        await loop.create_connection(lambda: asyncio.StreamReaderProtocol(reader), sock=sock)
        got.append(await reader.read())
        with pytest.raises(ValueError, match="not connected"):
            await loop.create_connection(asyncio.Protocol, sock=sock)

    run(tmp_path, client, server)
    assert got == [(20 * US, ("10.0.0.2", 80)), b"greeting"]


def test_closing_a_connected_fake_socket_closes_its_stream(tmp_path: Path) -> None:
    """A racing connection that lost is closed before it ever had a protocol."""

    async def server(_: Context, vpc: Vpc) -> None:
        await vpc.create_server(asyncio.Protocol, 80)

    async def client(context: Context, vpc: Vpc) -> None:
        sock = make_socket()
        await context.loop.sock_connect(sock, ("10.0.0.2", 80))
        sock.close()
        await context.loop.sleep_ps(10**12)
        assert vpc.statistics().streams_now == 0

    run(tmp_path, client, server)


def test_names_of_addresses(tmp_path: Path) -> None:
    """getnameinfo is the other way round; numeric on request."""
    got: list[Any] = []

    async def nothing(_: Context, __: Vpc) -> None:
        return

    async def client(context: Context, __: Vpc) -> None:
        got.append(await context.loop.getaddrinfo("node01", 80))
        got.append(await context.loop.getnameinfo(("10.0.0.2", 80)))
        got.append(await context.loop.getnameinfo(("10.0.0.2", 80), socket.NI_NUMERICHOST))

    run(tmp_path, client, nothing)
    assert got[0][0][4] == ("10.0.0.2", 80)
    assert got[1:] == [("node01", "80"), ("10.0.0.2", "80")]


def test_tls_and_foreign_addresses_are_refused(tmp_path: Path) -> None:
    """Refused with what would be right, never ignored."""

    async def nothing(_: Context, __: Vpc) -> None:
        return

    async def client(context: Context, __: Vpc) -> None:
        loop = context.loop
        with pytest.raises(ValueError, match="ssl=None"):
            await loop.create_connection(asyncio.Protocol, "node01", 443, ssl=True)
        with pytest.raises(ValueError, match="ssl=None"):
            await loop.create_server(asyncio.Protocol, None, 443, ssl=True)
        with pytest.raises(OSError, match="node01"):
            await loop.create_server(asyncio.Protocol, "node01", 80)
        made: Any = await loop.create_server(asyncio.Protocol, "node00", 0)
        assert made.sockets[0].getsockname() == ("10.0.0.1", 32768)

    run(tmp_path, client, nothing)
