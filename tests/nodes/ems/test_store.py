"""Client and server of the store on one machine: prefixes, timeouts, durability, damage."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from cmnet.chaos import plan as plans
from cmnet.launch.agent import Context
from cmnet.testing import LocalMachine
from cmnet.topology.machine import Plane
from nodes.carriers import UbCarrier
from nodes.ems import client, device
from nodes.ems.client import StoreClient
from nodes.ems.engine import DiskFullError
from nodes.ems.placement import NodeWeight, make_view
from nodes.ems.server import StoreServer
from nodes.post import Post
from nodes.serving import messages
from tests.nodes.serving import local
from tests.rig import machine

MINI = machine("mini")
CLIENT = 0
TIMEOUT_PS = 100_000_000_000
CHARGED = 36_000_000
"""A block of 512 tokens."""
VIEW = make_view(1, [NodeWeight(MINI.processes[node].name) for node in range(4)])


def keys(count: int, name: str = "") -> list[bytes]:
    return [hashlib.sha256(f"{name}{index}".encode()).digest() for index in range(count)]


def owned_by(node: int, count: int) -> list[bytes]:
    return [key for key in keys(400) if VIEW.owner(key) == MINI.processes[node].name][:count]


def value_of(key: bytes) -> bytes:
    return key * 12


class Store:
    """What a test needs of the machine: the client, and each node's server."""

    def __init__(self) -> None:
        self.client: StoreClient
        self.servers: dict[int, StoreServer] = {}
        self.post: Post

    def put(self, some: list[bytes]) -> None:
        for key in some:
            self.client.put(key, value_of(key), CHARGED)

    async def load(self, some: list[bytes]) -> int:
        """How many leading blocks came; each is the right one."""
        values = await self.client.load_prefix(some)
        assert values == [value_of(key) for key in some[: len(values)]]
        return len(values)

    def count(self, name: str) -> int:
        return sum(server.counts[name] for server in self.servers.values())


def run(folder: Path, work: Callable[[Store], Awaitable[None]], plan: str = "[]") -> None:
    """Servers on all four nodes; the work runs where a prefill instance would."""
    rules = plans.parse(plan, file="test", machine=local.mini()).rules
    whole = LocalMachine(MINI, folder=folder, rules=rules)
    store = Store()

    async def program(context: Context) -> None:
        if not MINI.processes[context.process].is_node:
            return
        post = Post(context.loop, {Plane.UB: UbCarrier(context)}, messages.TYPES)
        store.servers[context.process] = StoreServer(context, post)
        if context.process == CLIENT:
            store.post = post
            store.client = StoreClient(context, post, VIEW, timeout_ps=TIMEOUT_PS)
            await asyncio.sleep(0)
            await work(store)
            context.finish()

    whole.run(program)


def test_what_was_put_is_found_and_is_the_same(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        some = keys(40)
        assert await store.load(some) == 0
        store.put(some)
        await asyncio.sleep(0.1)
        assert await store.load(some) == 40
        assert await store.load([]) == 0
        assert len({VIEW.owner(key) for key in some}) == 4

    run(tmp_path, work)


def test_the_first_hole_ends_the_prefix(tmp_path: Path) -> None:
    """Blocks behind a hole are of no use: each stands on the one before it."""

    async def work(store: Store) -> None:
        some = keys(6)
        store.put([*some[:3], *some[4:]])
        await asyncio.sleep(0.1)
        assert await store.load(some) == 3
        assert await store.load(some[4:]) == 2
        assert store.count("gets") == 5

    run(tmp_path, work)


def test_a_put_is_known_when_its_modelled_write_has_ended(tmp_path: Path) -> None:
    """Not before, however fast the host's disk was; a second put of a key is none."""

    async def work(store: Store) -> None:
        (key,) = owned_by(CLIENT, 1)
        server = store.servers[CLIENT]
        server._put(messages.Put(key, CHARGED), value_of(key), 0)
        server._put(messages.Put(key, CHARGED), value_of(key), 0)
        await asyncio.sleep((device.put_duration_ps(CHARGED) - 1) / 10**12)
        held: list[Any] = []
        server._look_up(messages.Lookup((key,)), b"", lambda *answer: held.append(answer[0].held))
        await asyncio.sleep(1e-12)
        server._look_up(messages.Lookup((key,)), b"", lambda *answer: held.append(answer[0].held))
        assert held == [(False,), (True,)]
        server._put(messages.Put(key, CHARGED), value_of(key), 0)
        assert server.counts["puts"] == 1

    run(tmp_path, work)


def test_an_owner_that_is_cut_off_is_a_miss(tmp_path: Path) -> None:
    """It costs one timeout, not the request; blocks of others before its first one still count."""

    async def work(store: Store) -> None:
        there, cut = owned_by(1, 2), owned_by(3, 1)
        store.put(there + cut)
        await asyncio.sleep(1)
        began_ps = store.client._context.loop.now_ps
        assert await store.load([*there, *cut]) == 2
        assert store.client._context.loop.now_ps - began_ps < 1.1 * TIMEOUT_PS
        assert await store.load([*cut, *there]) == 0
        await asyncio.sleep(10)
        assert await store.load([*cut, *there]) == 3

    run(tmp_path, work, "[{at: 1 s, for: 9 s, target: node03, plane: ub, kind: partition}]")


def test_an_owner_that_is_too_slow_is_a_miss(tmp_path: Path) -> None:
    """Its late answers are nobody's."""

    async def work(store: Store) -> None:
        slow = owned_by(3, 2)
        store.put(slow)
        await asyncio.sleep(1)
        assert await store.load(slow) == 0
        await asyncio.sleep(1)
        assert store.post._answers == {}

    run(tmp_path, work, "[{at: 1 s, target: node03, plane: ub, kind: delay, delay: 60 ms}]")


def test_an_owner_that_goes_between_look_up_and_get_shortens_the_prefix(tmp_path: Path) -> None:
    """No hole is papered over: what follows the block that did not come is not used."""

    async def work(store: Store) -> None:
        some = [*owned_by(1, 2), *owned_by(3, 1), *owned_by(2, 2)]
        store.put(some)
        await asyncio.sleep(0.1)
        store.servers[3]._durable.clear()
        held = await store.client._look_up(some)
        assert sum(held.values()) == 4

        async def all_held(_: Any) -> dict[bytes, bool]:
            return dict.fromkeys(some, True)

        store.client._look_up = all_held  # type: ignore[method-assign, assignment]  # a stand-in
        assert await store.load(some) == 2

    run(tmp_path, work)


def test_a_damaged_record_is_a_miss_and_is_counted(tmp_path: Path) -> None:
    """Once found, it is not promised again."""

    async def work(store: Store) -> None:
        key, after = owned_by(2, 2)
        store.put([key, after])
        await asyncio.sleep(0.1)
        server = store.servers[2]
        record = server._engine.get(key)
        assert record is not None
        flipped = record[:-1] + bytes([record[-1] ^ 1])
        server._writer.submit(server._engine.commit, [(key, flipped)], grant=1).result()
        assert await store.load([after, key]) == 1
        assert store.count("corrupt") == 1
        assert (await store.client._look_up([key, after])) == {key: False, after: True}

    run(tmp_path, work)


def test_a_disk_that_refuses_a_put_costs_only_the_block(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        refused, kept = owned_by(2, 2)
        server = store.servers[2]
        commit = server._engine.put_many

        def full(items: Any, *, grant: int) -> None:
            if items[0][0] == refused:
                raise DiskFullError("no space left on device", definite=False)
            commit(items, grant=grant)

        server._engine.put_many = full  # type: ignore[method-assign]  # a stand-in
        store.put([refused, kept])
        await asyncio.sleep(0.1)
        assert await store.load([kept, refused]) == 1
        assert (server.counts["refused"], server._writing) == (1, set())
        server._engine.put_many = commit  # type: ignore[method-assign]  # a stand-in
        store.put([refused])
        await asyncio.sleep(0.1)
        assert await store.load([kept, refused]) == 2

    run(tmp_path, work)


def test_a_restarted_server_holds_what_is_on_its_disk(tmp_path: Path) -> None:
    async def first(store: Store) -> None:
        store.put(keys(8))
        await asyncio.sleep(0.1)
        for server in store.servers.values():
            server._writer.shutdown()
            server._engine.close()

    async def second(store: Store) -> None:
        assert await store.load(keys(8)) == 8

    run(tmp_path, first)
    run(tmp_path, second)


def test_puts_leave_a_few_at_a_time_and_who_has_many_waits(tmp_path: Path) -> None:
    """A port accepts so much: of 300 puts at one instant 16 are on their way, the others follow in
    order; ``room`` returns once the blocks of one longest prompt are left."""

    async def work(store: Store) -> None:
        loop, some = asyncio.get_running_loop(), keys(300)
        store.put(some)
        await asyncio.sleep(1e-6)
        assert most_waiting(store) == client.PUTS_AT_ONCE
        await store.client.room()
        assert store.client._puts_open == client.PUTS_WAITING_MAX
        assert loop.time() > 0.005
        await asyncio.sleep(0.1)
        assert store.count("puts") == 300
        assert (store.client._puts_open, store.client.puts_lost) == (0, 0)

    run(tmp_path, work)


def most_waiting(store: Store) -> int:
    carriers: Any = store.post._carriers
    waiting: int = carriers[Plane.UB].statistics()["operations_waiting"]
    return waiting


def test_a_put_that_does_not_arrive_is_counted(tmp_path: Path) -> None:
    """The link gives up; the next one goes on."""

    async def work(store: Store) -> None:
        store.put(owned_by(3, 20))
        await asyncio.sleep(5)
        assert (store.client.puts_lost, store.client._puts_open) == (20, 0)

    run(tmp_path, work, "[{at: 0 s, target: node03, plane: ub, kind: partition}]")
