"""aiohttp, unmodified, as client and server over the plane: exact, repeatable, at any origin."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import aiohttp.connector
import aiohttp.cookiejar
import aiohttp.helpers
import pytest
from aiohttp import web

from cmnet import entropy
from cmnet.launch.agent import Context
from planes.vpc import Vpc
from planes.vpc_aiohttp import _Shuffler, make_socket, prepare_aiohttp
from tests import closed_form
from tests.planes.vpc_machine import MS, PROPAGATION_PS, RATE_BPS, START_PS, US, S, run

pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")

RTT_PS = 2 * PROPAGATION_PS


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """prepare_aiohttp changes modules: other tests get them as they were."""
    places: list[Any] = [aiohttp.connector, aiohttp.helpers, aiohttp.cookiejar]
    kept = [dict(vars(place)) for place in places]
    yield
    for place, names in zip(places, kept):
        vars(place).update(names)


async def slow(_: web.Request) -> web.Response:
    await asyncio.sleep(0.75)
    return web.Response(text="slow")


async def never(_: web.Request) -> web.Response:
    await asyncio.sleep(1000)
    return web.Response()


async def chunks(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    for _ in range(5):
        await response.write(b"c" * 1000)
        await asyncio.sleep(0.01)
    await response.write_eof()
    return response


async def post(request: web.Request) -> web.Response:
    return web.Response(text=str(len(await request.read())))


async def websocket(request: web.Request) -> web.WebSocketResponse:
    answer = web.WebSocketResponse()
    await answer.prepare(request)
    async for message in answer:
        await answer.send_str(message.data.upper())
    return answer


async def serve(context: Context, _: Vpc) -> None:
    prepare_aiohttp(context.loop, context.stream("aiohttp"))
    app = web.Application(client_max_size=1 << 30)
    app.add_routes(
        [
            web.get("/slow", slow),
            web.get("/never", never),
            web.get("/chunks", chunks),
            web.post("/post", post),
            web.get("/websocket", websocket),
        ]
    )
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, None, 8080).start()
    assert runner.addresses == [("10.0.0.2", 8080)]


class Client:
    """One session and the log of what it saw, with instants."""

    def __init__(self, context: Context, vpc: Vpc, session: aiohttp.ClientSession) -> None:
        self.context = context
        self.vpc = vpc
        self.session = session
        self.log: list[Any] = []

    def note(self, *seen: Any) -> None:
        self.log.append((*seen, self.context.loop.now_ps))

    async def get(self, path: str, **options: Any) -> None:
        async with self.session.get(path, **options) as response:
            self.note(path, response.status, len(await response.read()))


def play(folder: Path, act: Any, *, origin_ps: int = 0) -> tuple[str, list[Any]]:
    """Digest of the run and the client's log."""
    logs: list[list[Any]] = []

    async def client(context: Context, vpc: Vpc) -> None:
        connector = aiohttp.TCPConnector(socket_factory=make_socket, limit=4)
        base = "http://node01:8080"
        async with aiohttp.ClientSession(base, connector=connector) as session:
            one = Client(context, vpc, session)
            await act(one)
            logs.append(one.log)

    digest = run(folder, client, serve, origin_ps=origin_ps)
    return digest, logs[0]


async def everything(client: Client) -> None:
    """The list of the design, before its first float deadline."""
    await client.get("/slow")
    await asyncio.gather(*[client.get("/chunks") for _ in range(10)])
    async with client.session.post("/post", data=bytes(8 << 20)) as response:
        client.note(await response.text())
    with pytest.raises(aiohttp.ClientConnectorError):
        await client.get("http://node01:9/")
    client.note("refused")
    with pytest.raises(aiohttp.ClientConnectorDNSError):
        await client.get("http://node77:9/")
    client.note("unknown")
    await asyncio.sleep(200)
    await client.get("/slow")


@pytest.mark.slow
@pytest.mark.parametrize("origin_s", [20_000_000, 1_700_000_000])
def test_the_same_picoseconds_come_out_at_any_origin(tmp_path: Path, origin_s: int) -> None:
    """Slow handler, 10 chunked streams over 4 connections, 8 MiB, refused, 200 s idle and again."""
    digest, log = play(tmp_path, everything)
    assert [entry[0] for entry in log] == [
        "/slow",
        *["/chunks"] * 10,
        str(8 << 20),
        "refused",
        "unknown",
        "/slow",
    ]
    assert play(tmp_path, everything, origin_ps=origin_s * S) == (digest, log)


def test_a_request_takes_the_handlers_time_and_two_round_trips(tmp_path: Path) -> None:
    """The rest is serialization of some hundred bytes: below 1 us."""
    _, log = play(tmp_path, lambda client: client.get("/slow"))
    taken_ps = log[0][-1] - START_PS
    assert 0 < taken_ps - (750 * MS + 2 * RTT_PS) < 1 * US


def test_a_second_request_reuses_the_connection(tmp_path: Path) -> None:
    """One round trip less, one stream in all."""

    async def act(client: Client) -> None:
        await client.get("/slow")
        before_ps = client.context.loop.now_ps
        await client.get("/slow")
        assert client.context.loop.now_ps - before_ps - 750 * MS - RTT_PS < 1 * US
        assert client.vpc.statistics().streams_opened == 1

    play(tmp_path, act)


def test_idle_in_virtual_time_ends_a_pooled_connection(tmp_path: Path) -> None:
    """aiohttp keeps an idle connection 15 s of the *loop's* time: 200 virtual seconds expire it."""

    async def act(client: Client) -> None:
        await client.get("/slow")
        await asyncio.sleep(200)
        assert client.vpc.statistics().streams_now == 0
        await client.get("/slow")
        assert client.vpc.statistics().streams_opened == 2

    play(tmp_path, act)


def test_ten_requests_share_four_connections(tmp_path: Path) -> None:
    """The pool's limit holds, and who waits gets a connection from the run's own stream."""

    async def act(client: Client) -> None:
        await asyncio.gather(*[client.get("/chunks") for _ in range(10)])
        assert client.vpc.statistics().streams_opened == 4

    digest, log = play(tmp_path, act)
    assert [entry[:3] for entry in log] == [("/chunks", 200, 5000)] * 10
    assert play(tmp_path, act) == (digest, log)


def test_a_large_post_goes_at_the_rate_of_the_link(tmp_path: Path) -> None:
    """8 MiB at 400 Gbit/s are 168 us; the bytes leave at once and are never held back."""

    async def act(client: Client) -> None:
        await client.get("/slow")
        before_ps = client.context.loop.now_ps
        async with client.session.post("/post", data=bytes(8 << 20)) as response:
            assert await response.text() == str(8 << 20)
        taken_ps = client.context.loop.now_ps - before_ps
        pure_ps = closed_form.serialization_ps(8 << 20, RATE_BPS) + RTT_PS
        assert 0 < taken_ps - pure_ps < 1 * US

    play(tmp_path, act)


def test_a_total_timeout_fires_at_its_virtual_instant(tmp_path: Path) -> None:
    """Within the grain of a float clock; at origin 0 that is exact to a nanosecond."""

    async def act(client: Client) -> None:
        before_ps = client.context.loop.now_ps
        with pytest.raises(TimeoutError):
            await client.get("/never", timeout=aiohttp.ClientTimeout(total=2))
        assert abs(client.context.loop.now_ps - before_ps - 2 * S) < 1000

    play(tmp_path, act)


def test_websockets_work(tmp_path: Path) -> None:
    """An upgrade hands the transport to another protocol."""

    async def act(client: Client) -> None:
        async with client.session.ws_connect("/websocket") as socket:
            await socket.send_str("hello")
            assert (await socket.receive()).data == "HELLO"

    play(tmp_path, act)


def test_dates_are_the_loops(tmp_path: Path) -> None:
    """A Date header of a run at origin 0 is of 1970, so carried bytes repeat too."""

    async def act(client: Client) -> None:
        async with client.session.get("/slow") as response:
            assert response.headers["Date"] == "Thu, 01 Jan 1970 00:00:00 GMT"

    play(tmp_path, act)


def test_the_shuffle_is_the_streams(tmp_path: Path) -> None:
    """Same stream, same order; every order of three comes out."""
    orders = set()
    for seed in range(50):
        first, second = list("abc"), list("abc")
        _Shuffler(entropy.stream(seed, "x")).shuffle(first)
        _Shuffler(entropy.stream(seed, "x")).shuffle(second)
        assert first == second
        orders.add("".join(first))
    assert orders == {"".join(order) for order in itertools.permutations("abc")}
