"""RDMA: exact completions, order, go-back-N to the chunk, the error state, and connections."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cmnet.errors import LinkError, MemoryRangeError, OperationError, PeerDeadError
from cmnet.launch.agent import Context
from cmnet.launch.run import NodeFault, Settings
from cmnet.launch.supervisor import Supervisor
from cmnet.link import effects
from cmnet.link.rules import Rule
from cmnet.topology.machine import Operation, Plane
from planes.rdma import QueuePair, Rdma, Received
from planes.ub import Ub
from tests import closed_form
from tests.planes.two_nodes import MS, US, device, rule, run
from tests.rig import machine

A, B = device("node00/npu0/die0"), device("node01/npu0/die0")
R = 7
CHUNK = 4 << 20
TIMEOUT_PS, TRIES = 67 * MS, 7
"""As the topology file has them."""
PATH = machine("pair").path(plane=Plane.RDMA, operation=Operation.WRITE, source=A, target=B)
ONE_PS = closed_form.serialization_ps(CHUNK, PATH.rate_bps)
CONNECTED_PS = 2 * PATH.propagation_ps
"""When ``connect`` returns: the posts of these tests are made then."""

Work = Callable[[Context, QueuePair], Awaitable[None]]


def connected(
    work: Work,
    *,
    rules: tuple[Rule, ...] = (),
    seed: int = 0,
    region_bytes: int = 0,
    data: bytes = b"",
) -> tuple[list[Received], Rdma]:
    """Run ``work`` with a queue pair from A to B; returns what B received, and B's plane."""
    got: list[Received] = []
    planes: list[Rdma] = []

    async def target(context: Context) -> None:
        rdma = Rdma(context)
        planes.append(rdma)
        rdma.on_receive(B, got.append)
        region = rdma.memory.register(B, R, charged_bytes=region_bytes, carried_bytes=len(data))
        region.data[:] = data

    async def source(context: Context) -> None:
        pair = await Rdma(context).connect(A, B)
        assert context.loop.now_ps == CONNECTED_PS
        await work(context, pair)

    run({0: source, 1: target}, rules=rules, seed=seed)
    return got, planes[0]


def lost(chunk: int, *, source: int = A, kind: Any = None) -> Rule:
    """Cut the path when the chunk of this place in the first transmission starts."""
    at_ps = CONNECTED_PS + closed_form.serialization_ps(chunk * CHUNK, PATH.rate_bps)
    effect = effects.Partition() if kind is None else kind
    return rule(effect, source=source, start_ps=at_ps, until_ps=at_ps + 1)


async def _error(awaitable: Awaitable[object]) -> OperationError:
    with pytest.raises(OperationError) as caught:
        await awaitable
    return caught.value


@pytest.mark.parametrize("size", [0, 1, 512, CHUNK, CHUNK + 1, 40 * CHUNK - 3])
def test_a_lone_message_completes_one_propagation_after_its_delivery(size: int) -> None:
    """All bytes, the immediate, and the instant; a read of the same size takes as long."""
    data = bytes(range(256)) * 8

    async def work(context: Context, pair: QueuePair) -> None:
        expected_ps = closed_form.rdma_write_completion_ps(
            size, propagation_ps=PATH.propagation_ps, rate_bps=PATH.rate_bps
        )
        begin_ps = context.loop.now_ps
        await pair.write_with_imm(data, immediate=2**63 + 5, charged_bytes=size)
        assert context.loop.now_ps - begin_ps == expected_ps
        begin_ps = context.loop.now_ps
        assert await pair.read(region=R, charged_bytes=size) == (data if size else b"")
        assert context.loop.now_ps - begin_ps == closed_form.rdma_read_completion_ps(
            size, propagation_ps=PATH.propagation_ps, rate_bps=PATH.rate_bps
        )

    got, _ = connected(work, region_bytes=size, data=data)
    assert [(m.data, m.immediate, m.charged_bytes) for m in got] == [(data, 2**63 + 5, size)]


@given(
    jitter_us=st.integers(0, 5000),
    sizes=st.lists(st.integers(0, 3 * CHUNK), min_size=1, max_size=8),
    loss=st.sampled_from([0, 1, 3]),
    seed=st.integers(0, 2**32),
)
@settings(deadline=None, max_examples=40)
def test_messages_come_in_order_whatever_rules_do(
    jitter_us: int, sizes: list[int], loss: int, seed: int
) -> None:
    """Jitter, loss, corruption and copies together: each message once, whole, in order, or an error
    that says that it may be missing."""
    errors: list[OperationError] = []

    async def work(context: Context, pair: QueuePair) -> None:
        futures = [
            pair.post_write_with_imm(bytes((index,)) * 9, immediate=index, charged_bytes=size)
            for index, size in enumerate(sizes)
        ]
        for future in futures:
            try:
                await future
            except OperationError as error:
                errors.append(error)
        assert loss or pair.statistics()["chunks_resent"] == 0

    start_ps = CONNECTED_PS
    few = Fraction(loss, 10)
    kinds: list[effects.Effect] = [
        effects.Jitter(jitter_ps=jitter_us * US),
        effects.Loss(probability=few),
        effects.Corrupt(probability=few),
        effects.Duplicate(probability=Fraction(1, 2)),
    ]
    rules = [rule(effect, start_ps=start_ps + place) for place, effect in enumerate(kinds)]
    got, _ = connected(work, rules=tuple(rules), seed=seed)
    assert [m.immediate for m in got] == list(range(len(got)))
    assert [m.data for m in got] == [bytes((m.immediate,)) * 9 for m in got]
    assert {type(error) for error in errors} <= {PeerDeadError}
    assert len(got) + len(errors) >= len(sizes)
    assert loss or not errors


def test_a_lost_chunk_goes_back_to_the_last_acknowledgement() -> None:
    """40 chunks, chunk 20 lost. Chunks 0 to 15 are acknowledged; 21 to 39 are refused, being ahead;
    chunk 31 asked and started the timer; 16 to 39 go again: 24 chunks, of which 4 are copies."""

    async def work(context: Context, pair: QueuePair) -> None:
        await pair.write_with_imm(b"whole", charged_bytes=40 * CHUNK)
        asked_ps = CONNECTED_PS + 31 * ONE_PS
        assert context.loop.now_ps == asked_ps + TIMEOUT_PS + 24 * ONE_PS + 2 * PATH.propagation_ps
        assert pair.statistics() == {"chunks_sent": 64, "chunks_resent": 24, "timeouts": 1}

    got, plane = connected(work, rules=(lost(20),))
    assert [m.data for m in got] == [b"whole"]
    statistics = plane.statistics()
    assert statistics["refused_ahead"] == 19
    assert statistics["refused_copies"] == 4


def test_a_corrupt_chunk_counts_as_lost() -> None:
    """Its checksum shows it; the next message behind it waits its turn."""

    async def work(context: Context, pair: QueuePair) -> None:
        first = pair.post_write_with_imm(b"first", charged_bytes=2 * CHUNK)
        second = pair.post_write_with_imm(b"second", charged_bytes=CHUNK)
        await first
        await second
        assert pair.statistics() == {"chunks_sent": 6, "chunks_resent": 3, "timeouts": 1}

    corrupt = lost(0, kind=effects.Corrupt(probability=Fraction(1)))
    got, plane = connected(work, rules=(corrupt,))
    assert [m.data for m in got] == [b"first", b"second"]
    assert plane.statistics()["refused_corrupt"] == 1


def test_a_lost_acknowledgement_costs_copies_not_a_second_delivery() -> None:
    """The message is delivered once; its retransmission is acknowledged anew."""

    async def work(context: Context, pair: QueuePair) -> None:
        await pair.write_with_imm(b"once", charged_bytes=CHUNK)
        assert context.loop.now_ps == (CONNECTED_PS + TIMEOUT_PS + ONE_PS + 2 * PATH.propagation_ps)

    at_ps = CONNECTED_PS + ONE_PS + PATH.propagation_ps
    cut = rule(effects.Partition(), source=B, start_ps=at_ps, until_ps=at_ps + 1)
    got, plane = connected(work, rules=(cut,))
    assert [m.data for m in got] == [b"once"]
    assert plane.statistics()["refused_copies"] == 1


def test_many_queue_pairs_share_a_port_without_timeouts() -> None:
    """A pair's chunk waits its turn for longer than the timeout: the timer runs only for what left."""
    flows, size = 500, 2 * CHUNK
    got: list[int] = []

    async def target(context: Context) -> None:
        Rdma(context).on_receive(B, lambda m: got.append(m.immediate))

    async def source(context: Context) -> None:
        rdma = Rdma(context)
        pairs = [await rdma.connect(A, B) for _ in range(flows)]
        futures = [
            pair.post_write_with_imm(b"x", immediate=index, charged_bytes=size)
            for index, pair in enumerate(pairs)
        ]
        for future in futures:
            await future
        assert rdma.statistics()["timeouts"] == 0

    assert flows * ONE_PS > TIMEOUT_PS
    run({0: source, 1: target})
    assert got == list(range(flows))


def test_tries_are_counted_from_the_last_progress() -> None:
    """More timeouts than tries, and yet no error: in between something was acknowledged."""

    async def work(context: Context, pair: QueuePair) -> None:
        await pair.write_with_imm(b"whole", charged_bytes=400 * CHUNK)
        assert pair.statistics()["timeouts"] > TRIES

    lossy = rule(effects.Loss(probability=Fraction(1, 20)), source=A, start_ps=CONNECTED_PS)
    got, _ = connected(work, rules=(lossy,))
    assert [m.data for m in got] == [b"whole"]


@pytest.mark.slow
def test_a_retransmission_on_a_crowded_port_is_not_taken_for_a_second_loss() -> None:
    """450 pairs: a chunk waits 75 ms for its turn. The first of pair 0 is lost; its retransmission has
    one timeout behind it, and what still waited in the port or asked before counts for nothing."""
    counts = {}

    async def target(context: Context) -> None:
        Rdma(context).on_receive(B, lambda m: None)

    async def source(context: Context) -> None:
        rdma = Rdma(context)
        pairs = [await rdma.connect(A, B) for _ in range(450)]
        await context.loop.sleep_until_ps(10 * MS)
        sizes = [17 * CHUNK] + [36 * CHUNK] * 449
        for future in [
            pair.post_write_with_imm(charged_bytes=size)
            for pair, size in zip(pairs, sizes, strict=True)
        ]:
            await future
        counts.update(pairs[0].statistics())
        assert rdma.statistics()["timeouts"] == 1

    cut = rule(effects.Partition(), source=A, start_ps=10 * MS, until_ps=10 * MS + 1)
    run({0: source, 1: target}, rules=(cut,))
    assert counts == {"chunks_sent": 17 + 17, "chunks_resent": 17, "timeouts": 1}


def test_a_dead_peer_ends_everything_after_seven_tries() -> None:
    """An error completion at exactly 7 x 67 ms; definite only for what had not begun to leave. Then
    the queue pair is in error until it is connected anew."""

    async def work(context: Context, pair: QueuePair) -> None:
        posted = [pair.post_write_with_imm(b"x", charged_bytes=CHUNK) for _ in range(3)]
        begin_ps = context.loop.now_ps
        errors = [await _error(future) for future in posted]
        assert context.loop.now_ps == begin_ps + TRIES * TIMEOUT_PS
        assert {type(error) for error in errors} == {PeerDeadError}
        assert [error.definite for error in errors] == [False, False, False]
        refused = await _error(pair.write_with_imm(b"y"))
        assert (type(refused), refused.definite) == (LinkError, True)
        refused = await _error(pair.read(region=R, charged_bytes=0))
        assert (type(refused), refused.definite) == (LinkError, True)
        await pair.reconnect()
        await pair.write_with_imm(b"again")
        assert pair.statistics()["timeouts"] == TRIES

    until_ps = CONNECTED_PS + TRIES * TIMEOUT_PS
    cut = rule(effects.Partition(), source=A, start_ps=CONNECTED_PS, until_ps=until_ps)
    got, _ = connected(work, rules=(cut,))
    assert [m.data for m in got] == [b"again"]


def test_reconnecting_ends_what_is_outstanding() -> None:
    """Indefinite for what had begun to leave, definite for what had not."""

    async def work(context: Context, pair: QueuePair) -> None:
        first = pair.post_write_with_imm(b"x", charged_bytes=3 * CHUNK)
        second = pair.post_write_with_imm(b"y", charged_bytes=CHUNK)
        await context.loop.sleep_ps(ONE_PS // 2)
        await pair.reconnect()
        errors = [await _error(first), await _error(second)]
        assert [(type(error), error.definite) for error in errors] == [
            (LinkError, False),
            (LinkError, True),
        ]
        await pair.write_with_imm(b"z", charged_bytes=2 * CHUNK)

    got, plane = connected(work)
    assert [m.data for m in got] == [b"z"]
    assert len(plane._receiver._pairs) == 1


def test_a_restarted_target_refuses_frames_of_the_old_connection() -> None:
    """Its new incarnation never accepted them: no half of a message is taken for a whole one."""
    planes: list[Rdma] = []
    got: list[bytes] = []

    async def target(context: Context) -> None:
        planes.append(Rdma(context))
        planes[0].on_receive(B, lambda m: got.append(m.data))

    async def source(context: Context) -> None:
        pair = await Rdma(context).connect(A, B)
        planes[0]._receiver._pairs.clear()
        error = await _error(pair.write_with_imm(b"old"))
        assert (type(error), error.definite) == (PeerDeadError, False)
        assert planes[0].statistics()["refused_unknown"] == TRIES
        await pair.reconnect()
        await pair.write_with_imm(b"new")

    run({0: source, 1: target})
    assert got == [b"new"]


def test_a_shared_pair_is_connected_once_and_keeps_order() -> None:
    """Many users at one instant, before there is a connection, and again after an error."""
    got: list[int] = []
    pairs: list[QueuePair] = []

    async def target(context: Context) -> None:
        Rdma(context).on_receive(B, lambda m: got.append(m.immediate))

    async def source(context: Context) -> None:
        rdma = Rdma(context)

        async def one(index: int) -> None:
            pair = await rdma.pair(A, B)
            pairs.append(pair)
            await pair.write_with_imm(immediate=index)

        for first in (0, 20):
            async with asyncio.TaskGroup() as group:
                for index in range(first, first + 20):
                    group.create_task(one(index))
            pairs[0].sender.fail(LinkError("as if", definite=False))

    run({0: source, 1: target})
    assert got == list(range(40))
    assert all(pair is pairs[0] for pair in pairs)


def test_connecting_to_a_dead_peer_fails() -> None:
    """After as many tries as anything else; a lost request is repeated."""

    async def source(context: Context) -> None:
        rdma = Rdma(context)
        error = await _error(rdma.connect(A, B))
        assert (type(error), error.definite) == (PeerDeadError, False)
        assert context.loop.now_ps == TRIES * TIMEOUT_PS

    run({0: source}, dead=(1,))

    async def target(context: Context) -> None:
        Rdma(context)

    async def patient(context: Context) -> None:
        await Rdma(context).connect(A, B)
        assert context.loop.now_ps == 2 * TIMEOUT_PS + 2 * PATH.propagation_ps

    cut = rule(effects.Partition(), source=A, until_ps=TIMEOUT_PS + 1)
    run({0: patient, 1: target}, rules=(cut,))


# --- memory --------------------------------------------------------------------------------------


def test_a_write_into_a_region_is_placed_and_announced() -> None:
    """With its immediate; outside of the region the queue pair ends in error, as in verbs."""

    async def work(context: Context, pair: QueuePair) -> None:
        await pair.write_with_imm(b"abc", immediate=1, region=R, offset=2)
        assert await pair.read(region=R, charged_bytes=8) == b"01abc567"
        error = await _error(pair.write_with_imm(b"abc", region=R, offset=6))
        assert (type(error), error.definite) == (MemoryRangeError, True)
        assert isinstance(await _error(pair.write_with_imm(b"x")), LinkError)
        await pair.reconnect()
        error = await _error(pair.read(region=R, offset=1, charged_bytes=8))
        assert (type(error), error.definite) == (MemoryRangeError, True)
        assert isinstance(await _error(pair.read(region=99, charged_bytes=1)), MemoryRangeError)

    got, _ = connected(work, region_bytes=8, data=b"01234567")
    assert [(m.data, m.immediate) for m in got] == [(b"abc", 1)]


def test_a_read_asks_again_from_the_chunk_that_is_missing() -> None:
    """6 chunks, the third lost on its way back: 3 to 6 are sent again, 67 ms after the second came."""
    data = bytes(range(240))

    async def work(context: Context, pair: QueuePair) -> None:
        assert await pair.read(region=R, charged_bytes=6 * CHUNK) == data
        second_ps = CONNECTED_PS + 2 * PATH.propagation_ps + 2 * ONE_PS
        assert context.loop.now_ps == (
            second_ps + TIMEOUT_PS + 2 * PATH.propagation_ps + 4 * ONE_PS
        )
        assert pair.statistics()["timeouts"] == 1

    at_ps = CONNECTED_PS + PATH.propagation_ps + 2 * ONE_PS
    cut = rule(effects.Partition(), source=B, start_ps=at_ps, until_ps=at_ps + 1)
    connected(work, rules=(cut,), region_bytes=6 * CHUNK, data=data)


def test_a_read_of_a_dead_peer_ends_and_takes_the_queue_pair_with_it() -> None:
    """7 tries of 67 ms, as for messages."""

    async def work(context: Context, pair: QueuePair) -> None:
        error = await _error(pair.read(region=R, charged_bytes=8))
        assert (type(error), error.definite) == (PeerDeadError, False)
        assert context.loop.now_ps == CONNECTED_PS + TRIES * TIMEOUT_PS
        assert isinstance(await _error(pair.write_with_imm(b"x")), LinkError)

    cut = rule(effects.Partition(), source=B, start_ps=CONNECTED_PS)
    connected(work, rules=(cut,), region_bytes=8, data=b"01234567")


def test_a_read_that_waits_in_the_target_s_port_is_not_served_twice() -> None:
    """500 reads take longer than the timeout: who asks again changes nothing while its data wait in
    the port; only the one chunk that is on the wire just then is sent again."""
    charged = []

    async def target(context: Context) -> None:
        Rdma(context).memory.register(B, R, charged_bytes=CHUNK, carried_bytes=1)
        await context.loop.sleep_ps(1000 * MS)
        charged.append(context.fabric.statistics()["RDMA"]["charged_bytes"])

    async def source(context: Context) -> None:
        rdma = Rdma(context)
        pair = await rdma.connect(A, B)
        async with asyncio.TaskGroup() as group:
            for _ in range(500):
                group.create_task(pair.read(region=R, charged_bytes=CHUNK))
        assert pair.statistics()["timeouts"] > 0

    run({0: source, 1: target})
    assert charged == [501 * CHUNK]


@given(seed=st.integers(0, 2**32), loss=st.sampled_from([1, 3, 5]))
@settings(deadline=None, max_examples=30)
def test_reads_survive_loss_and_copies(seed: int, loss: int) -> None:
    """Whatever is lost or doubled, the bytes are right or there is an error."""
    data = bytes(range(200))
    rules = (
        rule(effects.Loss(probability=Fraction(loss, 10)), start_ps=CONNECTED_PS),
        rule(effects.Corrupt(probability=Fraction(1, 10)), start_ps=CONNECTED_PS + 1),
        rule(effects.Duplicate(probability=Fraction(1, 2)), start_ps=CONNECTED_PS + 2),
    )

    async def work(context: Context, pair: QueuePair) -> None:
        try:
            assert await pair.read(region=R, charged_bytes=5 * CHUNK + 9) == data
        except PeerDeadError:
            assert loss > 1

    connected(work, rules=rules, seed=seed, region_bytes=5 * CHUNK + 9, data=data)


def test_completions_are_a_queue() -> None:
    """For a program that prefers to wait for its messages."""
    got = []

    async def target(context: Context) -> None:
        queue = Rdma(context).completions(B)
        got.append((await queue.get()).data)
        got.append((await queue.get()).data)

    async def source(context: Context) -> None:
        pair = await Rdma(context).connect(A, B)
        await pair.write_with_imm(b"1")
        await pair.write_with_imm(b"2")

    run({0: source, 1: target})
    assert got == [b"1", b"2"]


def test_a_message_that_nobody_receives_is_refused() -> None:
    """No region and no handler: the error comes back instead of silence."""

    async def target(context: Context) -> None:
        Rdma(context)

    async def source(context: Context) -> None:
        pair = await Rdma(context).connect(A, B)
        assert isinstance(await _error(pair.write_with_imm(b"x")), MemoryRangeError)

    run({0: source, 1: target})


@pytest.mark.machine
@pytest.mark.slow
def test_a_real_restart_needs_a_new_connection() -> None:
    """Killed and started anew with the same topology: the old queue pair ends in error, a new one works;
    a UB write to the dead node is indefinite."""
    settings = Settings(
        node_faults=[
            NodeFault(at_ps=1 * MS, kind="kill", process=1),
            NodeFault(at_ps=2 * MS, kind="restart", process=1),
        ]
    )
    with tempfile.TemporaryDirectory() as folder:
        for inside in ("disk", "journal", "statistics", "stacks"):
            (Path(folder) / inside).mkdir()
        run_ = Supervisor(
            machine=machine("pair"), program=_restarted, settings=settings, folder=Path(folder)
        ).run()
        assert run_.error == ""
        text = (Path(folder) / "statistics" / "node00.json").read_text()
    assert '"ends":["before","PeerDeadError","PeerDeadError","after"]' in text


async def _restarted(context: Context) -> None:
    rdma, ub = Rdma(context), Ub(context)
    if context.process == 1:
        rdma.on_receive(B, lambda m: None)
        ub.memory.register(B, R, charged_bytes=8)
        return
    ends: list[str] = []
    context.on_statistics = lambda: {"ends": ends}
    pair = await rdma.connect(A, B)
    await pair.write_with_imm(b"x", charged_bytes=CHUNK)
    ends.append("before")
    await context.loop.sleep_until_ps(1 * MS + 1)
    ends.append(type(await _error(ub.write(source=A, target=B, region=R, data=b"x"))).__name__)
    assert context.loop.now_ps > 2 * MS
    ends.append(type(await _error(pair.write_with_imm(b"y"))).__name__)
    await pair.reconnect()
    await pair.write_with_imm(b"z")
    ends.append("after")
    context.finish()
