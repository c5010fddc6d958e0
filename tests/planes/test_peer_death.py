"""A peer dies in the midst of bulk messages: what came of them goes, what was wholly sent still comes.

The death is that of the agent: windows from one on never happened, and the fabric is told. Everything
is delayed by a millisecond, so that at the death frames of earlier windows are still on their way.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cmnet.launch.agent import Context
from cmnet.link import effects
from planes.rdma import Rdma
from planes.ub import Ub
from tests.planes.two_nodes import MS, US, device, rule, run
from tests.rig import machine

A, B = device("node00/npu0/die0"), device("node01/npu0/die0")
MAILBOX = 3
MIB = 1 << 20
LAST_WINDOW = 2
"""It never happened."""


async def die(context: Context, at_ps: int, peers: list[Context], *, until_ps: int) -> None:
    """The last window is half a microsecond; then the peer is told, and nothing leaves any more,
    until the next incarnation's first window."""
    await context.loop.sleep_until_ps(at_ps)
    context.fabric.window = LAST_WINDOW
    await context.loop.sleep_ps(US // 2)
    peers[0].fabric.forget(context.process, LAST_WINDOW)
    carry, context.fabric.carry = context.fabric.carry, lambda *_: None
    await context.loop.sleep_until_ps(until_ps)
    context.fabric.window, context.fabric.carry = LAST_WINDOW + 1, carry


@pytest.mark.parametrize("delayed_from_ps", [0, 62 * US])
@pytest.mark.parametrize("chunks", [2, 3, 20])
def test_a_bulk_message_of_a_dead_peer_does_not_stay(delayed_from_ps: int, chunks: int) -> None:
    """Its first chunk came before the death (delayed from 62 us on) or comes after it."""
    got: list[int] = []
    planes: list[Ub] = []
    contexts: list[Context] = []

    async def target(context: Context) -> None:
        contexts.append(context)
        planes.append(Ub(context))
        planes[0].on_message(B, MAILBOX, lambda message: got.append(message.charged_bytes))

    async def source(context: Context) -> None:
        ub = Ub(context)
        ub.post(A, B, MAILBOX, charged_bytes=3 * MIB)
        await context.loop.sleep_until_ps(60 * US)
        ub.post(A, B, MAILBOX, charged_bytes=chunks * MIB)
        await die(context, 61 * US, contexts, until_ps=300 * US)
        ub.post(A, B, MAILBOX, charged_bytes=8)
        await context.loop.sleep_until_ps(5 * MS)
        assert planes[0].statistics()["bulk_incoming"] == 0
        assert planes[0]._assemblies._hopeless == {}

    delay = rule(effects.Delay(delay_ps=MS), start_ps=delayed_from_ps)
    run({1: target, 0: source}, rules=(delay,))
    assert got == [3 * MIB, 8]


@given(at_us=st.integers(1, 250), delay_us=st.integers(0, 600))
@settings(deadline=None, max_examples=15)
def test_whenever_a_peer_dies_nothing_stays_and_nothing_breaks(at_us: int, delay_us: int) -> None:
    """Chunks come in any order; a message that was wholly sent by then is whole."""
    got: list[int] = []
    planes: list[Ub] = []
    contexts: list[Context] = []

    async def target(context: Context) -> None:
        contexts.append(context)
        planes.append(Ub(context))
        planes[0].on_message(B, MAILBOX, lambda message: got.append(message.charged_bytes))

    async def source(context: Context) -> None:
        ub = Ub(context)
        for chunks in range(2, 7):
            ub.post(A, B, MAILBOX, charged_bytes=chunks * MIB)
        await die(context, at_us * US, contexts, until_ps=4 * MS)
        ub.post(A, B, MAILBOX, charged_bytes=8)
        await context.loop.sleep_until_ps(6 * MS)
        assert planes[0].statistics()["bulk_incoming"] == 0
        assert planes[0]._assemblies._hopeless == {}

    delay = rule(effects.Delay(delay_ps=delay_us * US), start_ps=50 * US, until_ps=90 * US)
    run({1: target, 0: source}, rules=(delay,))
    assert got[-1] == 8
    if at_us >= 200:
        assert sorted(got[:-1]) == [chunks * MIB for chunks in range(2, 7)]


@pytest.mark.parametrize("delayed_from_ps", [0, 1500 * US])
def test_a_queue_pair_of_a_dead_peer_ends_with_its_last_frame(delayed_from_ps: int) -> None:
    """The message that was wholly sent is received; then nothing of the pair is left."""
    got: list[int] = []
    planes: list[Rdma] = []
    contexts: list[Context] = []
    chunk_bytes = machine("pair").topology.planes.rdma.chunk.amount

    async def target(context: Context) -> None:
        contexts.append(context)
        planes.append(Rdma(context))
        planes[0].on_receive(B, lambda message: got.append(message.charged_bytes))

    async def source(context: Context) -> None:
        rdma = Rdma(context)
        pair = await rdma.connect(A, B)
        await context.loop.sleep_until_ps(5 * MS)
        pair.post_write_with_imm(charged_bytes=2 * chunk_bytes)
        pair.post_write_with_imm(charged_bytes=3 * chunk_bytes)
        await die(context, 5 * MS + 400 * US, contexts, until_ps=9 * MS)
        await rdma.connect(A, B)  # quiet frames wait for one that is not
        receiver = planes[0]._receiver
        assert (list(receiver._pairs), receiver.ending) == ([(A, 2)], {})

    delay = rule(effects.Delay(delay_ps=MS), target=B, start_ps=delayed_from_ps)
    run({1: target, 0: source}, rules=(delay,))
    assert got == [2 * chunk_bytes]
