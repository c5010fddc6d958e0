"""UB: exact latencies, one-sided semantics, order of flags, and every way in which it can fail."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cmnet.errors import LinkError, MemoryRangeError, OperationError, PeerDeadError
from cmnet.launch.agent import Context
from cmnet.link import effects
from cmnet.topology.machine import Operation, Plane
from planes.ub import Message, Ub
from planes.ub_order import COMPLETION_TIMEOUT_PS
from tests import closed_form
from tests.planes.two_nodes import US, device, rule, run
from tests.rig import machine

A, B = device("node00/npu0/die0"), device("node01/npu0/die0")
R, MAILBOX, F = 7, 3, 1
MIB = 1 << 20
PATH = machine("pair").path(plane=Plane.UB, operation=Operation.WRITE, source=A, target=B)
READ = machine("pair").path(plane=Plane.UB, operation=Operation.READ, source=A, target=B)


async def serve(context: Context) -> None:
    """A target: a region of a mebibyte, wholly carried."""
    Ub(context).memory.register(B, R, charged_bytes=MIB)


PRINTED = {
    ("node00/npu0/die0", "node00/npu1/die1"): (1.2, 1.3, 167, 137),
    ("node00/npu0/die0", "node01/npu0/die0"): (1.9, 2.1, 164, 135),
    ("node00/npu0/die0", "node00/cpu0"): (1.0, 1.1, 151, 110),
    ("node02/cpu0", "node01/npu0/die0"): (1.7, 1.9, 147, 107),
    ("node02/cpu0", "node01/cpu0"): (1.7, 1.9, 147, 107),
}
"""Table 1 of the paper: read us, write us, read GB/s, write GB/s."""


@pytest.mark.parametrize("ends", PRINTED)
@pytest.mark.parametrize("size", [512, 8, 65_536, 3 * MIB + 5])
def test_a_lone_operation_completes_at_the_printed_latency(
    ends: tuple[str, str], size: int
) -> None:
    """512 B exactly at the table's latency; other sizes differ by their serialization alone."""
    source, target = (device(name, "mini") for name in ends)
    node = machine("mini").devices
    took = {}

    async def every(context: Context) -> None:
        ub = Ub(context)
        if context.process == node[target].process:
            ub.memory.register(target, R, charged_bytes=size, carried_bytes=0)
        if context.process != node[source].process:
            return
        for what in ("read", "write"):
            begin_ps = context.loop.now_ps
            if what == "read":
                await ub.read(source=source, target=target, region=R, charged_bytes=size)
            else:
                await ub.write(source=source, target=target, region=R, charged_bytes=size)
            took[what] = context.loop.now_ps - begin_ps

    run({node[source].process: every}, name="mini", others=every)
    read_us, write_us, read_gb, write_gb = PRINTED[ends]
    assert took["read"] == closed_form.read_completion_ps(
        size, latency_ps=round(read_us * US), rate_bps=read_gb * 8 * 10**9
    )
    assert took["write"] == closed_form.write_completion_ps(
        size, latency_ps=round(write_us * US), rate_bps=write_gb * 8 * 10**9
    )
    if size == 512:
        assert (took["read"], took["write"]) == (round(read_us * US), round(write_us * US))


@pytest.mark.parametrize("size", [1, 8, 512, MIB, MIB + 1, 5 * MIB])
def test_a_message_is_there_after_propagation_and_serialization(size: int) -> None:
    """Visible earlier than complete; a bulk message when its last chunk is in, with all its bytes."""
    payload = bytes(range(256)) * 4
    got: list[tuple[int, bytes, bytes, int]] = []

    async def target(context: Context) -> None:
        def arrived(m: Message) -> None:
            got.append((context.loop.now_ps, m.body, bytes(m.payload), m.charged_bytes))

        Ub(context).on_message(B, MAILBOX, arrived)

    async def source(context: Context) -> None:
        await Ub(context).send(A, B, MAILBOX, b"body", payload, size)

    run({0: source, 1: target})
    visible_ps = closed_form.write_visible_ps(
        size, propagation_ps=PATH.propagation_ps, rate_bps=PATH.rate_bps
    )
    assert got == [(visible_ps, b"body", payload, size)]


def test_reads_posted_at_one_instant_share_the_target_chunk_by_chunk() -> None:
    """The data of reads are flows of the target's port, in the order of the requests."""
    size = 3 * MIB + 7
    done: dict[int, int] = {}

    async def target(context: Context) -> None:
        Ub(context).memory.register(B, R, charged_bytes=size, carried_bytes=1000).data[:] = (
            b"x" * 1000
        )

    async def source(context: Context) -> None:
        ub = Ub(context)

        async def one(flow: int) -> None:
            data = await ub.read(source=A, target=B, region=R, charged_bytes=size)
            assert data == b"x" * 1000
            done[flow] = context.loop.now_ps

        async with asyncio.TaskGroup() as group:
            for flow in range(10):
                group.create_task(one(flow))

    run({0: source, 1: target})
    assert [done[flow] for flow in range(10)] == closed_form.read_completions_ps(
        10, size, chunk_bytes=MIB, rate_bps=READ.rate_bps, latency_ps=1_900_000
    )


def test_sdma_starts_late_and_is_slower_by_its_share() -> None:
    """5 us before the port, 91 % of the path's rate, in both directions (topology file)."""
    took = {}

    async def source(context: Context) -> None:
        ub = Ub(context)
        ends: dict[str, Any] = {"source": A, "target": B, "region": R, "engine": "sdma"}
        await ub.write(**ends, charged_bytes=MIB)
        took["write"] = context.loop.now_ps
        await ub.read(**ends, charged_bytes=MIB)
        took["read"] = context.loop.now_ps - took["write"]

    run({0: source, 1: serve})
    write_ps = closed_form.serialization_ps(MIB, PATH.rate_bps * 91 // 100)
    read_ps = closed_form.serialization_ps(MIB, READ.rate_bps * 91 // 100)
    assert took["write"] == 5 * US + PATH.propagation_ps + write_ps + PATH.completion_ps
    assert took["read"] == 5 * US + 2 * READ.propagation_ps + read_ps + READ.completion_ps


def test_memory_is_written_and_read_at_charged_offsets() -> None:
    """A region that carries a part: an offset lies at its proportional place."""

    async def target(context: Context) -> None:
        Ub(context).memory.register(B, R, charged_bytes=1000, carried_bytes=100)

    async def source(context: Context) -> None:
        ub = Ub(context)
        ends: dict[str, Any] = {"source": A, "target": B, "region": R}
        await ub.write(**ends, offset=500, data=b"abcde", charged_bytes=50)
        ub.post_write(**ends, offset=550, data=b"fghij", charged_bytes=50)
        await ub.write(**ends, offset=600, data=b"k", charged_bytes=10)
        assert await ub.read(**ends, offset=480, charged_bytes=140) == b"\0\0abcdefghijk\0"

    run({0: source, 1: target})


def test_an_atomic_adds_once_and_costs_a_read() -> None:
    """In order of delivery, each initiator sees what was before; a doubled frame adds nothing."""
    old: dict[str, list[int]] = {"a": [], "b": []}
    names = {"a": "node00/npu0/die0", "b": "node02/npu0/die1"}
    target = device("node01/npu0/die0", "mini")

    async def part(context: Context) -> None:
        ub = Ub(context)
        if context.process == 1:
            ub.memory.register(target, R, charged_bytes=16)
        for key, name in names.items():
            source = device(name, "mini")
            if machine("mini").devices[source].process == context.process:
                for _ in range(3):
                    begin_ps = context.loop.now_ps
                    value = await ub.atomic_add(
                        source=source, target=target, region=R, offset=8, amount=5
                    )
                    old[key].append(value)
                    took_ps = context.loop.now_ps - begin_ps
        if context.process == 0:
            await context.loop.sleep_ps(100 * US)
            assert took_ps == closed_form.read_completion_ps(
                8, latency_ps=1_900_000, rate_bps=READ.rate_bps
            )

    double = rule(effects.Duplicate(probability=Fraction(1)))
    run({0: part}, name="mini", rules=(double,), others=part)
    assert sorted(old["a"] + old["b"]) == [0, 5, 10, 15, 20, 25]
    assert old["a"] == sorted(old["a"])


# --- flags ---------------------------------------------------------------------------------------


@given(
    jitter_us=st.integers(0, 300),
    sizes=st.lists(st.sampled_from([8, 512, 100_000, MIB, 3 * MIB]), min_size=1, max_size=6),
    engine=st.sampled_from(["aiv", "sdma"]),
    seed=st.integers(0, 2**32),
)
@settings(deadline=None, max_examples=40)
def test_a_flag_is_never_visible_before_the_writes_before_it(
    jitter_us: int, sizes: list[int], engine: str, seed: int
) -> None:
    """Whatever is delayed, chunked, or started late: at each flag's instant all before it is there."""
    seen: list[int] = []

    async def target(context: Context) -> None:
        ub = Ub(context)
        region = ub.memory.register(B, R, charged_bytes=8 * MIB, carried_bytes=8)
        for index in range(len(sizes)):
            await ub.wait_flag(B, F, index + 1)
            seen.append(region.data[index])
            assert all(region.data[: index + 1])

    async def source(context: Context) -> None:
        ub = Ub(context)
        for index, size in enumerate(sizes):
            ub.post_write(
                source=A,
                target=B,
                region=R,
                offset=index * MIB,
                data=b"\1",
                charged_bytes=size if size >= MIB else MIB,
                engine=engine,
            )
            ub.post_flag(A, B, F, index + 1)
        await context.loop.sleep_ps(100_000 * US)

    jitter = rule(effects.Jitter(jitter_ps=jitter_us * US))
    run({0: source, 1: target}, rules=(jitter,), seed=seed)
    assert seen == [1] * len(sizes)


def test_jitter_does_reorder_writes() -> None:
    """So the test before this one could fail: UB itself restores no order."""
    order: list[int] = []

    async def target(context: Context) -> None:
        Ub(context).on_message(B, MAILBOX, lambda m: order.append(m.body[0]))

    async def source(context: Context) -> None:
        ub = Ub(context)
        for index in range(50):
            ub.post(A, B, MAILBOX, bytes((index,)))
        await context.loop.sleep_ps(1000 * US)

    run({0: source, 1: target}, rules=(rule(effects.Jitter(jitter_ps=50 * US)),))
    assert sorted(order) == list(range(50)) != order


def test_a_flag_takes_no_time_beyond_its_word_and_polls_see_every_value() -> None:
    """Visible at the delivery of 8 bytes; a waiter misses no value that was there for an instant."""
    seen: list[tuple[int, int]] = []

    async def target(context: Context) -> None:
        ub = Ub(context)
        value = await ub.wait_flag(B, F, lambda value: value == 4)
        seen.append((value, context.loop.now_ps))
        assert ub.flags.value(B, F) == 4

    async def source(context: Context) -> None:
        ub = Ub(context)
        for value in (9, 4, 7):
            ub.post_flag(A, B, F, value)
        await context.loop.sleep_ps(10 * US)

    run({0: source, 1: target})
    at_ps = closed_form.write_visible_ps(
        16, propagation_ps=PATH.propagation_ps, rate_bps=PATH.rate_bps
    )
    assert seen == [(4, at_ps)]


# --- loss ----------------------------------------------------------------------------------------


async def _error(awaitable: Any) -> OperationError:
    with pytest.raises(OperationError) as caught:
        await awaitable
    return caught.value


def test_a_write_that_the_link_gave_up_is_not_visible_nor_is_its_flag() -> None:
    """The error comes after 3 tries of 1 us and is definite; once it was raised, flags pass again."""
    regions = []

    async def target(context: Context) -> None:
        ub = Ub(context)
        regions.append(ub.memory.register(B, R, charged_bytes=MIB))
        assert await ub.wait_flag(B, F, 1) == 2
        assert bytes(regions[0].data[:3]) == b"new"

    async def source(context: Context) -> None:
        ub = Ub(context)
        ends: dict[str, Any] = {"source": A, "target": B, "region": R, "data": b"new"}
        async with asyncio.TaskGroup() as group:
            task = group.create_task(_error(ub.write(**ends)))
            await asyncio.sleep(0)
            ub.post_flag(A, B, F, 1)
            context.loop.call_at_ps(2 * US, ub.post_flag, A, B, F, 1)
        error = task.result()
        assert (type(error), error.definite, context.loop.now_ps) == (LinkError, True, 3 * US)
        await context.loop.sleep_ps(20 * US)
        assert not any(regions[0].data)
        await ub.write(**ends)
        ub.post_flag(A, B, F, 2)
        await context.loop.sleep_ps(20 * US)

    cut = rule(effects.Partition(), source=A, until_ps=1)
    run({0: source, 1: target}, rules=(cut,))


def test_after_a_failed_post_flags_wait_until_it_is_forgiven() -> None:
    """Nobody was told of the failure, so no flag may claim that the write is there."""
    flags = []

    async def target(context: Context) -> None:
        ub = Ub(context)
        ub.memory.register(B, R, charged_bytes=MIB)
        flags.append(ub.flags)

    async def source(context: Context) -> None:
        ub = Ub(context)
        for _ in range(2):
            ub.post_write(source=A, target=B, region=R, data=b"lost")
        await context.loop.sleep_ps(20 * US)
        ub.post_flag(A, B, F, 1)
        await context.loop.sleep_ps(20 * US)
        assert flags[0].value(B, F) == 0
        assert ub.forgive(A, B) == 2
        assert ub.forgive(A, B) == 0
        ub.post_flag(A, B, F, 2)
        await context.loop.sleep_ps(20 * US)
        assert flags[0].value(B, F) == 2

    cut = rule(effects.Partition(), source=A, until_ps=10 * US)
    run({0: source, 1: target}, rules=(cut,))


def test_a_bulk_write_that_loses_a_chunk_is_not_visible_at_all() -> None:
    """Chunks that came are forgotten once they surely have all come; nothing is left behind."""
    ubs = []

    async def target(context: Context) -> None:
        ubs.append(Ub(context))
        ubs[0].memory.register(B, R, charged_bytes=8 * MIB, carried_bytes=8)

    async def source(context: Context) -> None:
        ub = Ub(context)
        write = ub.write(source=A, target=B, region=R, data=b"12345678", charged_bytes=8 * MIB)
        error = await _error(write)
        lost_ps = closed_form.serialization_ps(3 * MIB, PATH.rate_bps)
        assert (type(error), error.definite) == (LinkError, True)
        assert context.loop.now_ps == lost_ps + 3 * US
        await context.loop.sleep_ps(2 * COMPLETION_TIMEOUT_PS)
        assert not any(ubs[0].memory.region(B, R).data)
        ub.post_flag(A, B, F, 1)
        await context.loop.sleep_ps(10 * US)
        assert ubs[0].flags.value(B, F) == 1
        assert ubs[0].statistics()["bulk_incoming"] == 0

    third_ps = closed_form.serialization_ps(3 * MIB, PATH.rate_bps)
    cut = rule(effects.Partition(), source=A, start_ps=third_ps - 5, until_ps=third_ps + 5)
    run({0: source, 1: target}, rules=(cut,))


@pytest.mark.parametrize("effect", [effects.Loss, effects.Corrupt])
def test_the_link_tries_again_a_microsecond_later(effect: Any) -> None:
    """A lost or corrupt frame costs 1 us per try; after 3 it has failed. Nothing corrupt gets through."""
    delays: dict[int, int] = {}
    failed = []

    async def target(context: Context) -> None:
        def arrived(message: Message) -> None:
            (index,) = message.body
            begin_ps = index * 100 * US
            delays[index] = context.loop.now_ps - begin_ps
            assert message.payload == b"as it was"

        Ub(context).on_message(B, MAILBOX, arrived)

    async def source(context: Context) -> None:
        ub = Ub(context)
        for index in range(200):
            await context.loop.sleep_until_ps(index * 100 * US)
            try:
                await ub.send(A, B, MAILBOX, bytes((index,)), b"as it was", 8)
            except LinkError:
                failed.append(index)

    lossy = rule(effect(probability=Fraction(1, 2)), source=A)
    run({0: source, 1: target}, rules=(lossy,))
    visible_ps = closed_form.write_visible_ps(
        8, propagation_ps=PATH.propagation_ps, rate_bps=PATH.rate_bps
    )
    tries = [(delay - visible_ps) // US for delay in delays.values()]
    assert all((delay - visible_ps) % US == 0 for delay in delays.values())
    assert set(tries) == {0, 1, 2}
    assert set(failed) | set(delays) == set(range(200)) and not set(failed) & set(delays)
    assert 5 < len(failed) < 50


def test_a_lost_completion_is_indefinite_and_the_write_is_there() -> None:
    """Only the way back is cut: the initiator cannot know, and says so."""
    regions = []

    async def target(context: Context) -> None:
        regions.append(Ub(context).memory.register(B, R, charged_bytes=MIB))

    async def source(context: Context) -> None:
        error = await _error(Ub(context).write(source=A, target=B, region=R, data=b"there"))
        assert (type(error), error.definite) == (PeerDeadError, False)
        assert bytes(regions[0].data[:5]) == b"there"

    run({0: source, 1: target}, rules=(rule(effects.Partition(), source=B),))


@pytest.mark.parametrize("what", ["write", "read", "atomic_add", "bulk"])
def test_an_operation_on_a_dead_peer_ends(what: str) -> None:
    """Exactly the completion timeout after its last frame left."""

    async def source(context: Context) -> None:
        ub = Ub(context)
        ends: dict[str, Any] = {"source": A, "target": B, "region": R}
        operations: dict[str, Callable[[], Awaitable[object]]] = {
            "write": lambda: ub.write(**ends, data=b"x"),
            "read": lambda: ub.read(**ends, charged_bytes=8),
            "atomic_add": lambda: ub.atomic_add(**ends, offset=0, amount=1),
            "bulk": lambda: ub.write(**ends, charged_bytes=3 * MIB),
        }
        error = await _error(operations[what]())
        assert (type(error), error.definite) == (PeerDeadError, False)
        last_ps = closed_form.serialization_ps(2 * MIB, PATH.rate_bps) if what == "bulk" else 0
        assert context.loop.now_ps == last_ps + COMPLETION_TIMEOUT_PS
        assert ub.statistics()["operations_waiting"] == 0

    run({0: source}, dead=(1,))


def test_a_long_read_with_progress_does_not_time_out() -> None:
    """The timeout counts from the last chunk: 2 GB at a hundredth of the rate take longer."""

    async def target(context: Context) -> None:
        Ub(context).memory.register(B, R, charged_bytes=2 * 10**9, carried_bytes=0)

    async def source(context: Context) -> None:
        ub = Ub(context)
        await ub.read(source=A, target=B, region=R, charged_bytes=2 * 10**9)
        assert context.loop.now_ps > 1.2 * COMPLETION_TIMEOUT_PS

    slow = rule(effects.Rate(factor=Fraction(1, 100)))
    run({0: source, 1: target}, rules=(slow,))


def test_an_answer_that_the_link_gave_up_is_reported() -> None:
    """The target's port knows: the reader hears of it at once where the way back works again."""

    async def source(context: Context) -> None:
        error = await _error(Ub(context).read(source=A, target=B, region=R, charged_bytes=512))
        assert (type(error), error.definite) == (LinkError, True)
        assert context.loop.now_ps < 10 * US

    lossy = rule(effects.Loss(probability=Fraction(9, 10)), source=B)
    outcomes = set()
    for seed in range(12):
        try:
            run({0: source, 1: serve}, rules=(lossy,), seed=seed)
            outcomes.add("reported")
        except BaseExceptionGroup:
            outcomes.add("other")
    assert "reported" in outcomes


# --- bounds, copies, messages --------------------------------------------------------------------


def test_accesses_outside_of_what_is_registered_are_refused() -> None:
    """Definite, and nothing is changed: before, beyond, too many carried bytes, no such region."""

    async def target(context: Context) -> None:
        ub = Ub(context)
        ub.memory.register(B, R, charged_bytes=MIB)
        ub.memory.register(B, 8, charged_bytes=MIB, carried_bytes=10)
        ub.memory.register(B, 9, charged_bytes=8)
        ub.memory.unregister(B, 9)

    async def source(context: Context) -> None:
        ub = Ub(context)
        ends: dict[str, Any] = {"source": A, "target": B}
        refused = [
            ub.write(**ends, region=R, offset=MIB - 1, data=b"ab"),
            ub.write(**ends, region=R, offset=MIB, charged_bytes=5 * MIB),
            ub.write(**ends, region=8, offset=0, data=b"abc", charged_bytes=8),
            ub.read(**ends, region=R, offset=1, charged_bytes=MIB),
            ub.read(**ends, region=9, charged_bytes=1),
            ub.atomic_add(**ends, region=R, offset=MIB - 7, amount=1),
            ub.atomic_add(**ends, region=8, offset=0, amount=1),
            ub.send(A, B, 99, b"no such mailbox"),
        ]
        for operation in refused:
            error = await _error(operation)
            assert (type(error), error.definite) == (MemoryRangeError, True)
        assert not any(await ub.read(**ends, region=R, charged_bytes=MIB))

    run({0: source, 1: target})


def test_a_refused_post_is_counted() -> None:
    """Nobody waits, so the target's statistics are where it shows."""

    async def target(context: Context) -> None:
        ub = Ub(context)
        await context.loop.sleep_ps(10 * US)
        assert ub.statistics()["refused"] == 2

    async def source(context: Context) -> None:
        ub = Ub(context)
        ub.post_write(source=A, target=B, region=R, data=b"x")
        ub.post(A, B, MAILBOX)
        await context.loop.sleep_ps(20 * US)

    run({0: source, 1: target})


def test_a_doubled_message_is_handed_over_once() -> None:
    """Single frames and chunks alike: the link layer refuses copies."""
    got: list[int] = []

    async def target(context: Context) -> None:
        ub = Ub(context)
        ub.on_message(B, MAILBOX, lambda m: got.append(m.charged_bytes))
        await context.loop.sleep_ps(90 * US)
        assert ub.statistics()["copies_refused"] == 4

    async def source(context: Context) -> None:
        ub = Ub(context)
        ub.post(A, B, MAILBOX, charged_bytes=5)
        ub.post(A, B, MAILBOX, charged_bytes=2 * MIB + 1)
        await context.loop.sleep_ps(100 * US)

    run({0: source, 1: target}, rules=(rule(effects.Duplicate(probability=Fraction(1)), source=A),))
    assert got == [5, 2 * MIB + 1]


def test_room_keeps_order_and_loses_no_wakeup() -> None:
    """More than the queue holds: first come first served, never more waiting than is allowed, all
    delivered, and bulk flows beside them (70 chunks wait: more than the queue holds) starve nobody."""
    got: list[int] = []
    waiting = []

    async def target(context: Context) -> None:
        ub = Ub(context)
        ub.on_message(B, MAILBOX, lambda m: got.append(m.body[0]))
        ub.on_message(B, MAILBOX + 1, lambda m: got.append(-1))

    async def source(context: Context) -> None:
        ub = Ub(context)
        port = context.fabric.route(Plane.UB, Operation.WRITE, A, B).egress
        for _ in range(70):
            ub.post(A, B, MAILBOX + 1, charged_bytes=20 * MIB)

        async def one(index: int) -> None:
            await ub.room(A, B, MIB)
            ub.post(A, B, MAILBOX, bytes((index,)), charged_bytes=MIB)
            waiting.append(port.waiting_bytes)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(index)) for index in range(200)]
            await context.loop.sleep_ps(10 * US)
            tasks[150].cancel()
        await context.loop.sleep_ps(1_000_000 * US)

    run({0: source, 1: target})
    assert max(waiting) == machine("pair").queue_bytes_max[Plane.UB]
    assert got.index(-1) > 100
    assert [one for one in got if one >= 0] == [index for index in range(200) if index != 150]


def test_a_cancelled_operation_leaves_nothing() -> None:
    """Its completion, when it comes, belongs to nobody."""

    async def source(context: Context) -> None:
        ub = Ub(context)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1e-6):
                await ub.write(source=A, target=B, region=R, data=b"x")
        assert ub.statistics()["operations_waiting"] == 0
        await context.loop.sleep_ps(10 * US)

    run({0: source, 1: serve})


def test_the_same_seed_gives_the_same_digest() -> None:
    """And another seed another one, where rules draw."""

    async def source(context: Context) -> None:
        ub = Ub(context)
        for _ in range(20):
            ub.post_write(source=A, target=B, region=R, data=b"x" * 100)
            ub.post_flag(A, B, F, 1)
        await context.loop.sleep_ps(1000 * US)

    jitter = rule(effects.Jitter(jitter_ps=10 * US))
    digests = [run({0: source, 1: serve}, rules=(jitter,), seed=seed) for seed in (1, 1, 2)]
    assert digests[0] == digests[1] != digests[2]
