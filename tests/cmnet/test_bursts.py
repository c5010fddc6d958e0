"""Bursts: exactly the messages that ``send`` would have sent one by one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cmnet import bursts
from cmnet.bursts import Bundle
from cmnet.errors import CausalityError, FrameError
from cmnet.link import effects
from cmnet.link.reach import Ends, Where
from cmnet.link.rules import Rule
from cmnet.messages import Arrival
from cmnet.topology.machine import Operation, Plane
from cmnet.wire.frames import FLAG_COPY
from tests.rig import Rig, machine

KIND = 1
Post = tuple[int, int, list[tuple[int, int, bytes]]]
"""(instant, source device, items)"""
Got = dict[tuple[int, bytes], int]
"""(target, data) -> delivered_ps"""

UB_DEVICES = [device.device_id for device in machine("mini").devices if device.kind != "node"]


def send_burst(rig: Rig, source: int, items: list[tuple[int, int, bytes]], **more: Any) -> None:
    rig.fabric_of(source).send_burst(
        source=source,
        plane=Plane.UB,
        operation=Operation.WRITE,
        kind=KIND,
        head=b"head",
        items=items,
        **more,
    )


def send_each(rig: Rig, source: int, items: list[tuple[int, int, bytes]]) -> None:
    fabric = rig.fabric_of(source)
    for target, charged_bytes, data in items:
        route = fabric.route(Plane.UB, Operation.WRITE, source, target)
        fabric.send(route, KIND, charged_bytes=charged_bytes, payload=data)


def collect(rig: Rig, got: list[tuple[int, bytes, int]]) -> None:
    """Bind both forms of the kind: bundles, and single messages, whose copies planes refuse."""

    def handle(arrived: Bundle | Arrival) -> None:
        if isinstance(arrived, Bundle):
            assert rig.loop.now_ps == max(delivered for _, _, delivered in arrived.items)
            got.extend((target, bytes(data), at_ps) for target, data, at_ps in arrived.items)
        elif not arrived.flags & FLAG_COPY:
            assert rig.loop.now_ps == arrived.delivered_ps
            got.append((arrived.target, bytes(arrived.payload), arrived.delivered_ps))

    for fabric in rig.fabrics:
        fabric.bind(KIND, handle)


def outcome(
    posts: list[Post], send: Callable[..., None], rules: tuple[Rule, ...] = (), **settings: Any
) -> tuple[list[tuple[int, bytes, int]], list[list[str]], list[dict[str, dict[str, int]]]]:
    """(what arrived where and when, journals as sets, statistics) of posts sent in one way."""
    got: list[tuple[int, bytes, int]] = []
    with Rig("mini", rules=rules) as rig:
        for key, value in settings.items():
            setattr(rig.machine, key, value)
        collect(rig, got)
        for at_ps, source, items in posts:
            rig.at(at_ps, functools.partial(send, rig, source, items))
        rig.run()
        statistics = [fabric.statistics() for fabric in rig.fabrics]
        for planes in statistics:
            for counts in planes.values():
                del counts["carried_bytes"]
        return sorted(got), [sorted(map(_when_it_counts, lines)) for lines in rig.lines], statistics


def _when_it_counts(line: str) -> str:
    """A drop is written at its slice's start, that of a single message at its own egress start."""
    return line.partition(" ")[2] if " drop " in line else line


@st.composite
def posts(draw: st.DrawFn) -> list[Post]:
    """Bursts of a few sources close together in time, so that they meet at their targets."""
    made = []
    number = 0
    for at_ps in draw(st.lists(st.integers(0, 3_000_000), min_size=1, max_size=5)):
        source = draw(st.sampled_from(UB_DEVICES))
        others = [device for device in UB_DEVICES if device != source]
        pairs = st.tuples(
            st.sampled_from(others),
            st.one_of(st.integers(0, 20_000), st.sampled_from([0, 512, 7680, 1 << 20])),
        )
        items = []
        for target, charged_bytes in draw(st.lists(pairs, min_size=1, max_size=12)):
            number += 1
            items.append((target, charged_bytes, number.to_bytes(4, "little") * (number % 3)))
        made.append((at_ps, source, items))
    return made


def rule(effect: effects.Effect, *targets: int) -> Rule:
    where = Where(other=Ends(devices=targets)) if targets else Where()
    return Rule(rule_id=type(effect).__name__, owner="test", effect=effect, where=where)


HARSH = (
    rule(effects.Delay(delay_ps=123_457), *UB_DEVICES[:4]),
    rule(effects.Rate(factor=Fraction(2, 7)), *UB_DEVICES[3:9]),
    rule(effects.Partition(), UB_DEVICES[5], UB_DEVICES[11]),
    rule(effects.Duplicate(probability=Fraction(1)), UB_DEVICES[7]),
)


@pytest.mark.parametrize("rules", [(), HARSH], ids=["no rules", "rules"])
@settings(deadline=None, max_examples=40)
@given(posts=posts())
def test_a_burst_is_the_same_messages_sent_one_by_one(
    rules: tuple[Rule, ...], posts: list[Post]
) -> None:
    """Deliveries, journals and counters: a burst is cheaper, nothing else. Slices are long, so that
    bursts of one source queue whole, as single messages do."""
    whole = 10**12
    assert outcome(posts, send_burst, rules, bundle_slice_ps=whole) == outcome(
        posts, send_each, rules
    )


@settings(deadline=None, max_examples=30)
@given(posts=posts(), slice_ps=st.integers(1, 20_000_000))
def test_slices_change_no_delivery_of_a_source_that_sends_one_burst(
    posts: list[Post], slice_ps: int
) -> None:
    """A slice boundary is no boundary of the busy period."""
    alone = list({source: (at_ps, source, items) for at_ps, source, items in posts}.values())
    assert outcome(alone, send_burst, bundle_slice_ps=slice_ps)[:2] == outcome(alone, send_each)[:2]


def test_rows_in_numbers_and_plain_are_the_same_bytes() -> None:
    """A large burst is one frame a process with the same rows as its messages would have had alone."""
    items = [(UB_DEVICES[5 + n % 10], 7680, n.to_bytes(2, "little")) for n in range(300)]
    posts: list[Post] = [(0, UB_DEVICES[0], items)]
    assert outcome(posts, send_burst, bundle_slice_ps=10**12) == outcome(posts, send_each)


def test_one_frame_for_each_process_and_slice_and_none_within() -> None:
    with Rig("mini") as rig:
        rig.machine.bundle_slice_ps = 50_000_000
        got: list[tuple[int, bytes, int]] = []
        collect(rig, got)
        source = rig.device("node00/npu0/die0")
        names = ["node01/npu0/die0", "node01/npu1/die1", "node00/npu1/die0", "node02/npu0/die0"]
        send_burst(rig, source, [(rig.device(name), 7680, b"x") for name in names * 3])
        rig.run()
        assert [peer for peer, *_ in rig.frames] == [1, 2]
        assert len(got) == 12


def test_a_burst_longer_than_a_slice_lets_others_in_between() -> None:
    """196 GB/s x 50 us = 9.8 MB a slice: the other message waits for one slice, not for three."""
    with Rig("pair") as rig:
        order: list[bytes] = []

        def handle(bundle: Any) -> None:
            order.extend(data for _, data, _ in bundle.items)

        rig.fabrics[1].bind(KIND, handle)
        rig.fabrics[1].bind(2, lambda arrival: order.append(bytes(arrival.payload)))
        source, target = rig.device("node00/npu0/die0"), rig.device("node01/npu0/die0")
        route = rig.fabrics[0].route(Plane.UB, Operation.WRITE, source, target)
        slice_bytes = route.path.rate_bps * rig.machine.bundle_slice_ps // (8 * 10**12)
        part = slice_bytes // 2 - 1
        send_burst(rig, source, [(target, part, bytes([n])) for n in range(6)])
        rig.fabrics[0].send(route, 2, charged_bytes=512, payload=b"other")
        rig.run()
        assert order.index(b"other") == 3  # the third message starts just within the slice


def test_lost_names_the_messages_that_rules_dropped_and_the_rest_arrives() -> None:
    blocked = UB_DEVICES[6]
    with Rig("mini", rules=(rule(effects.Partition(), blocked),)) as rig:
        got: list[tuple[int, bytes, int]] = []
        lost: list[int] = []
        ended: list[bool] = []
        collect(rig, got)
        items = [(target, 100, b"") for target in (UB_DEVICES[7], blocked, UB_DEVICES[1], blocked)]
        send_burst(rig, UB_DEVICES[0], items, lost=lost.extend, started=ended.append)
        rig.run()
        assert lost == [1, 3] and ended == [False]
        assert sorted(target for target, _, _ in got) == [UB_DEVICES[1], UB_DEVICES[7]]


def test_a_copy_takes_its_time_at_the_ingress_and_no_handler_gets_it() -> None:
    """Two messages, each doubled: the second is in after three serializations, not two."""
    doubled = rule(effects.Duplicate(probability=Fraction(1)))
    with Rig("pair", rules=(doubled,)) as rig:
        got: list[tuple[int, bytes, int]] = []
        collect(rig, got)
        source, target = rig.device("node00/npu0/die0"), rig.device("node01/npu0/die0")
        send_burst(rig, source, [(target, 7680, b"a"), (target, 7680, b"b")])
        rig.run()
        assert [data for _, data, _ in got] == [b"a", b"b"]
        path = rig.fabrics[0].route(Plane.UB, Operation.WRITE, source, target).path
        third_ps = path.propagation_ps + -(-3 * 7680 * 8 * 10**12 // path.rate_bps)
        assert abs(got[1][2] - third_ps) <= 3  # rounding of each


def test_what_a_burst_lost_withdraws_no_flag() -> None:
    """``lost`` told the program: a fenced message on the same route passes."""
    cut = msgspec.structs.replace(rule(effects.Partition()), until_ps=1)
    with Rig("pair", rules=(cut,)) as rig:
        flags: list[int] = []
        lost: list[int] = []
        rig.fabrics[1].bind(KIND, lambda _: None)
        rig.fabrics[1].bind(2, lambda arrival: flags.append(arrival.kind))
        source, target = rig.device("node00/npu0/die0"), rig.device("node01/npu0/die0")
        route = rig.fabrics[0].route(Plane.UB, Operation.WRITE, source, target)
        send_burst(rig, source, [(target, 7680, b"")], lost=lost.extend)
        rig.fabrics[0].send(route, 2, charged_bytes=8, fence=0)
        rig.run()
        assert (lost, flags, route.failures) == ([0], [2], 0)


def test_back_pressure_counts_what_waits_of_a_burst() -> None:
    with Rig("pair") as rig:
        rig.fabrics[1].bind(KIND, lambda _: None)
        source, target = rig.device("node00/npu0/die0"), rig.device("node01/npu0/die0")
        fabric = rig.fabrics[0]
        route = fabric.route(Plane.UB, Operation.WRITE, source, target)
        send_burst(rig, source, [(target, 1 << 20, b"")] * 40)
        assert route.egress.waiting_bytes == 40 << 20
        rig.run(1)
        left_bytes = route.egress.waiting_bytes
        assert 0 < left_bytes < 40 << 20 and left_bytes % (1 << 20) == 0
        rig.run()
        assert route.egress.waiting_bytes == 0


def test_forget_takes_a_dead_peers_bundle_out_and_nothing_else() -> None:
    """Its parts leave the ports, its event the agenda; earlier windows stay (design 1.8)."""
    with Rig("mini") as rig:
        got: list[tuple[int, bytes, int]] = []
        collect(rig, got)
        target = rig.device("node02/npu0/die0")
        for window, name in ((4, "node00/npu0/die0"), (5, "node01/npu0/die0")):
            source = rig.device(name)
            rig.fabric_of(source).window = window
            send_burst(rig, source, [(target, 7680, name.encode()), (target + 1, 7680, b"")])
        rig.run(1)
        rig.fabrics[2].forget(1, 5)
        rig.fabrics[2].forget(0, 5)
        rig.run()
        assert [data for _, data, _ in got if data] == [b"node00/npu0/die0"]
        lone = rig.fabrics[0].route(
            Plane.UB, Operation.WRITE, rig.device("node00/npu0/die0"), target
        )
        assert got[0][2] == lone.path.propagation_ps + -(-7680 * 8 * 10**12 // lone.path.rate_bps)


def test_bytes_that_are_no_bundle_are_refused() -> None:
    with Rig("pair") as rig:
        source, target = rig.device("node00/npu0/die0"), rig.device("node01/npu0/die0")
        rig.fabrics[1].bind(KIND, lambda _: None)
        send_burst(rig, source, [(target, 512, b"abc"), (target, 512, b"de")])
        rig.run()
        _, header, body, payload = rig.frames[0]
        header = (*header[:10], rig.loop.now_ps, rig.loop.now_ps, *header[12:])
        receive = rig.fabrics[1].receive
        for count in (0, 3, 1 << 40):
            with pytest.raises(FrameError):
                receive((*header[:13], count), body, payload)
        with pytest.raises(FrameError):
            receive(header, body, payload + b"!")
        row = bursts.ROW.pack(0, 0, 0, 1, source, 5, 1)
        with pytest.raises(FrameError):
            receive((*header[:13], 1), row, payload)
        rig.fabrics[1].ran_to_ps = rig.loop.now_ps + 1
        with pytest.raises(CausalityError):
            receive(header, body, payload)


def test_the_rules_of_the_first_test_act() -> None:
    """Else it compares nothing."""
    items = [(target, 7680, b"x") for target in UB_DEVICES[1:12]]
    plain = outcome([(0, UB_DEVICES[0], items)], send_burst)
    harsh = outcome([(0, UB_DEVICES[0], items)], send_burst, HARSH)
    assert plain != harsh


def test_quiet_messages_are_handed_over_before_a_bundle_that_came_after_them() -> None:
    """A bundle is an event at its targets like any message that is not quiet."""
    with Rig("pair") as rig:
        order: list[str] = []
        rig.fabrics[1].bind(KIND, lambda _: order.append("bundle"))
        rig.fabrics[1].bind(2, lambda _: order.append("quiet"))
        source, target = rig.device("node00/npu0/die0"), rig.device("node01/npu0/die0")
        route = rig.fabrics[0].route(Plane.UB, Operation.WRITE, source, target)
        rig.fabrics[0].send(route, 2, charged_bytes=512, quiet=True)
        rig.run()
        assert order == []
        send_burst(rig, source, [(target, 512, b"")])
        rig.fabrics[0].send(route, 2, charged_bytes=512, quiet=True)
        rig.run()
        assert order == ["quiet", "bundle"]


def test_a_slice_ends_with_the_message_that_fills_it() -> None:
    """Ten messages of 7680 B take the slice: the eleventh starts at the slice's end."""
    with Rig("pair") as rig:
        rig.fabrics[1].bind(KIND, lambda _: None)
        source, target = rig.device("node00/npu0/die0"), rig.device("node01/npu0/die0")
        rate_bps = rig.fabrics[0].route(Plane.UB, Operation.WRITE, source, target).path.rate_bps
        rig.machine.bundle_slice_ps = 10 * 7680 * 8 * 10**12 // rate_bps - 5  # rounding
        send_burst(rig, source, [(target, 7680, b"")] * 95)
        rig.run()
        assert [header[13] for _, header, _, _ in rig.frames] == [10] * 9 + [5]


def test_the_sender_reports_when_the_last_message_of_a_bundle_can_be_in() -> None:
    """That is the receiver's next event, neither earlier nor later (design 1.3)."""
    with Rig("mini") as rig:
        got: list[tuple[int, bytes, int]] = []
        collect(rig, got)
        source = rig.device("node00/npu0/die0")
        names = ["node01/npu0/die0", "node02/cpu0", "node01/cpu0", "node00/cpu0"]
        send_burst(rig, source, [(rig.device(name), 7680, b"") for name in names])
        rig.run(1)
        sends = rig.fabrics[0].take_sends()
        first_event_ps = rig.loop.next_at_ps()
        rig.run()
        of_peer = {
            peer: max(at_ps for target, _, at_ps in got if rig.fabrics[peer].is_here(target))
            for peer in (0, 1, 2)
        }
        assert sends == [(1, 1, of_peer[1]), (2, 1, of_peer[2])]
        assert first_event_ps == min(of_peer.values())
