"""What a carrier promises on each plane: whole messages, in order, once; and what may be lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from cmnet.chaos import plan as plans
from cmnet.errors import LinkError, OperationError
from cmnet.launch.agent import Context
from cmnet.testing import LocalMachine
from nodes.carriers import WAITING_BYTES_MAX, RdmaCarrier, UbCarrier, VpcCarrier
from tests.nodes.serving import local
from tests.rig import machine

MINI = machine("mini")
NODE, OTHER = 1, 3
Came = list[tuple[int, int, bytes, bytes]]


def kept(came: Came) -> Callable[[int, int, bytes, bytes], None]:
    return lambda *message: came.append(message)


def run(
    folder: Path, sends: Callable[[Context], Awaitable[None]], receives: Callable[[Context], object],
    plan: str = "[]",
) -> LocalMachine:  # fmt: skip  # one line a thing
    """One node sends, another receives; the run ends when the sender has."""
    rules = plans.parse(plan, file="test", machine=local.mini()).rules
    whole = LocalMachine(MINI, folder=folder, rules=rules)

    async def program(context: Context) -> None:
        if context.process == OTHER:
            receives(context)
            await asyncio.Event().wait()
        elif context.process == NODE:
            await asyncio.sleep(0)
            await sends(context)
            context.finish()

    whole.run(program)
    return whole


@pytest.mark.parametrize("payload_bytes", [0, 1, 3_000_000])
def test_ub_carries_body_and_payload_apart(tmp_path: Path, payload_bytes: int) -> None:
    source, target = MINI.dies(NODE)[1], MINI.cpus(OTHER)[0]
    came: Came = []

    async def sends(context: Context) -> None:
        ub = UbCarrier(context)
        ub.send(source, target, b"body", bytes(payload_bytes), 3_000_000)
        await ub.complete(source, target, b"second", b"", 6)
        await asyncio.sleep(0.001)

    run(tmp_path, sends, lambda context: UbCarrier(context).on_message(kept(came)))
    expected = [(source, target, b"body", bytes(payload_bytes)), (source, target, b"second", b"")]
    assert sorted(came) == sorted(expected)


def test_ub_says_when_its_way_is_cut(tmp_path: Path) -> None:
    """``complete`` raises, ``send`` loses; with the way repaired both arrive."""
    source, target = MINI.dies(NODE)[0], MINI.dies(OTHER)[0]
    came: Came = []

    async def sends(context: Context) -> None:
        ub = UbCarrier(context)
        ub.send(source, target, b"lost", b"", 4)
        with pytest.raises(LinkError):
            await ub.complete(source, target, b"failed", b"", 6)
        await asyncio.sleep(1)
        ub.send(source, target, b"a", b"", 1)
        await ub.complete(source, target, b"b", b"", 1)

    plan = "[{at: 0 s, for: 1 s, target: node03, plane: ub, kind: partition}]"
    run(tmp_path, sends, lambda context: UbCarrier(context).on_message(kept(came)), plan)
    assert [body for _, _, body, _ in came] == [b"a", b"b"]


def test_rdma_carries_each_message_once_in_order_though_chunks_are_lost(tmp_path: Path) -> None:
    source, target = MINI.dies(NODE)[1], MINI.dies(OTHER)[0]
    came: Came = []

    async def sends(context: Context) -> None:
        rdma = RdmaCarrier(context)
        async with asyncio.TaskGroup() as group:
            for number in range(20):
                body = str(number).encode()
                group.create_task(rdma.complete(source, target, body, bytes(number), 10_000_000))

    plan = "[{at: 0 s, target: plane rdma, kind: loss, p: 0.2}]"
    run(tmp_path, sends, lambda context: RdmaCarrier(context).on_message(kept(came)), plan)
    assert came == [(source, target, str(n).encode(), bytes(n)) for n in range(20)]


def test_rdma_reconnects_after_an_error(tmp_path: Path) -> None:
    """A partition longer than all tries ends the message in flight with an error; the next arrives."""
    source, target = MINI.dies(NODE)[0], MINI.dies(OTHER)[0]
    came: Came = []

    async def sends(context: Context) -> None:
        rdma = RdmaCarrier(context)
        await rdma.complete(source, target, b"before", b"", 100)
        await asyncio.sleep(1)
        for _ in range(2):
            with pytest.raises(OperationError):
                await rdma.complete(source, target, b"cut", b"", 100)
        await asyncio.sleep(5)
        await rdma.complete(source, target, b"after", b"", 100)

    plan = "[{at: 1 s, for: 4 s, target: node03, plane: rdma, kind: partition}]"
    run(tmp_path, sends, lambda context: RdmaCarrier(context).on_message(kept(came)), plan)
    assert [body for _, _, body, _ in came] == [b"before", b"after"]


def test_vpc_carries_in_order_from_the_first_message_on(tmp_path: Path) -> None:
    """Sizes around a chunk; those sent before the stream is open wait for it."""
    sizes = [0, 1, 65_535, 65_536, 200_000, 3]
    source, target = MINI.vpc_port(NODE), MINI.vpc_port(OTHER)
    came: Came = []

    async def sends(context: Context) -> None:
        vpc = VpcCarrier(context)
        for number, size in enumerate(sizes):
            vpc.send(source, target, str(number).encode(), bytes(size), 0)
        await asyncio.sleep(1)
        vpc.send(source, target, b"later", b"", 0)
        await asyncio.sleep(1)

    run(tmp_path, sends, lambda context: VpcCarrier(context).on_message(kept(came)))
    expected = [(str(number).encode(), bytes(size)) for number, size in enumerate(sizes)]
    assert [message[2:] for message in came] == [*expected, (b"later", b"")]
    assert {message[:2] for message in came} == {(source, target)}


@pytest.mark.parametrize("cut_s", [2, 40])
def test_vpc_opens_a_new_stream_when_the_old_one_broke(tmp_path: Path, cut_s: int) -> None:
    """A short cut delays what is sent; a long one breaks the stream, and what waited is lost."""
    source, target = MINI.vpc_port(NODE), MINI.vpc_port(OTHER)
    came: Came = []

    async def sends(context: Context) -> None:
        vpc = VpcCarrier(context)
        for number in range(100):
            vpc.send(source, target, str(number).encode(), b"", 0)
            await asyncio.sleep(1)

    plan = f"[{{at: 9500 ms, for: {cut_s} s, target: node03, plane: vpc, kind: partition}}]"
    run(tmp_path, sends, lambda context: VpcCarrier(context).on_message(kept(came)), plan)
    numbers = [int(body) for _, _, body, _ in came]
    assert numbers == sorted(set(numbers))
    assert set(numbers) >= set(range(100)) - set(range(10, 10 + cut_s * 2 if cut_s > 30 else 10))


def test_a_forgotten_stream_is_opened_anew(tmp_path: Path) -> None:
    """What the gateway does when a node was restarted, also while the old stream still opens."""
    source, target = MINI.vpc_port(NODE), MINI.vpc_port(OTHER)
    came: Came = []

    async def sends(context: Context) -> None:
        vpc = VpcCarrier(context)
        vpc.send(source, target, b"dropped with its stream", b"", 0)
        vpc.forget(OTHER)
        for _ in range(2):
            vpc.send(source, target, b"arrives", b"", 0)
            await asyncio.sleep(1)
            vpc.forget(OTHER)
        vpc.forget(OTHER)

    run(tmp_path, sends, lambda context: VpcCarrier(context).on_message(kept(came)))
    assert [body for _, _, body, _ in came] == [b"arrives", b"arrives"]


def test_what_a_vpc_stream_loses_is_counted_and_told(tmp_path: Path) -> None:
    """Before it opens, written and not acknowledged, and forgotten; what arrived is no loss."""
    source, target = MINI.vpc_port(NODE), MINI.vpc_port(OTHER)
    came: Came = []
    lost: list[bytes] = []
    counts: list[int] = []

    async def sends(context: Context) -> None:
        vpc = VpcCarrier(context)
        vpc.on_lost(lost.append)
        vpc.send(source, target, b"never opened", b"", 0)
        await asyncio.sleep(50)
        vpc.send(source, target, b"arrives", b"", 0)
        await asyncio.sleep(10)
        vpc.send(source, target, b"cut", b"", 0)
        await asyncio.sleep(40)
        vpc.send(source, target, b"forgotten", b"", 0)
        vpc.forget(OTHER)
        counts.append(vpc.statistics()["messages_lost"])

    plan = """[{at: 0 s, for: 45 s, target: node03, plane: vpc, kind: partition},
               {at: 55 s, for: 40 s, target: node03, plane: vpc, kind: partition}]"""
    run(tmp_path, sends, lambda context: VpcCarrier(context).on_message(kept(came)), plan)
    assert [body for _, _, body, _ in came] == [b"arrives"]
    assert (lost, counts) == ([b"never opened", b"cut", b"forgotten"], [3])


def test_what_waits_for_a_vpc_stream_is_bounded(tmp_path: Path) -> None:
    """The peer is cut off: the transport takes its high-water mark, the queue its bound; what is
    more is lost at once. All else arrives when the way is back, in order."""
    source, target = MINI.vpc_port(NODE), MINI.vpc_port(OTHER)
    came: Came = []
    lost: list[bytes] = []

    async def sends(context: Context) -> None:
        vpc = VpcCarrier(context)
        vpc.on_lost(lost.append)
        vpc.send(source, target, b"first", b"", 0)
        await asyncio.sleep(1.5)
        for number in range(1000):
            vpc.send(source, target, str(number).encode(), bytes(4096), 0)
        stream = vpc._streams[OTHER]
        assert stream.waiting_bytes <= WAITING_BYTES_MAX
        assert stream.transport is not None
        assert stream.transport.get_write_buffer_size() < 3 * 65_536
        await asyncio.sleep(10)

    plan = "[{at: 1 s, for: 2 s, target: node03, plane: vpc, kind: partition}]"
    run(tmp_path, sends, lambda context: VpcCarrier(context).on_message(kept(came)), plan)
    arrived = [body for _, _, body, _ in came]
    assert len(lost) > 500
    assert arrived == [b"first", *(str(n).encode() for n in range(1000 - len(lost)))]
