"""Bursts: exactly the messages that ``send`` would have sent one by one."""

from __future__ import annotations

import functools
import sys
from fractions import Fraction
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cmnet import burst_frames, bursts
from cmnet.burst_arrivals import Bundle
from cmnet.burst_frames import ROW_BYTES
from cmnet.bursts import Messages
from cmnet.errors import CausalityError, CorruptError, FrameError, InputError
from cmnet.link import effects, port_kernels
from cmnet.link.reach import Ends, Where
from cmnet.link.rules import Rule
from cmnet.messages import Arrival, Payload, Repeat
from cmnet.topology.machine import Operation, Plane
from cmnet.units import NEVER_PS
from cmnet.wire import frames
from cmnet.wire.frames import FLAG_COPY
from tests.rig import Rig, machine

KIND, SINGLE = 1, 2
FLAG_BYTES = 32
WHOLE_PS = 10**12
"""A slice that no burst here fills."""

UB_DEVICES = [device.device_id for device in machine("mini").devices if device.kind != "node"]

Got = list[tuple[int, int, bytes, int]]
"""(source, target, data, delivered_ps)"""


class Post(NamedTuple):
    """Messages of one source that the program sends at an instant, and a flag to each target."""

    at_ps: int
    source: int
    items: list[tuple[int, int, int]]
    """(target, charged bytes, ready after ``at_ps``)"""
    in_burst: bool = True

    def targets(self) -> list[int]:
        return sorted({target for target, _, _ in self.items})

    def data(self, index: int) -> bytes:
        return self.at_ps.to_bytes(6, "little") + index.to_bytes(2, "little")


def table(
    source: int, items: list[tuple[int, int, int]], data: list[bytes], width: int = 8
) -> Messages:
    """(target, charged bytes, ready_ps) of one source as arrays."""
    columns = np.array(items, np.int64).reshape(len(items), 3).T.copy()
    return Messages(
        np.full(len(items), source),
        columns[0],
        columns[1],
        columns[2],
        np.frombuffer(b"".join(data), np.uint8).reshape(len(items), width),
    )


def flags_to(source: int, targets: list[int], ready_ps: int = 0) -> Messages:
    items = [(target, FLAG_BYTES, ready_ps) for target in targets]
    return table(source, items, [b"" for _ in items], width=0)


def post_burst(rig: Rig, post: Post, **more: Any) -> None:
    items = [(target, size, post.at_ps + ready) for target, size, ready in post.items]
    messages = table(post.source, items, [post.data(index) for index in range(len(items))])
    rig.fabric_of(post.source).send_burst(
        kind=KIND,
        head=b"head",
        messages=messages,
        flags=flags_to(post.source, post.targets()),
        **more,
    )


def post_singly(rig: Rig, post: Post) -> None:
    """What a burst does, with what there was before: messages, then flags with a fence."""
    fabric = rig.fabric_of(post.source)

    def send(target: int, size: int, **more: Any) -> None:
        fabric.send(
            fabric.route(Plane.UB, Operation.WRITE, post.source, target),
            KIND,
            charged_bytes=size,
            **more,
        )

    def flag(target: int) -> None:
        route = fabric.route(Plane.UB, Operation.WRITE, post.source, target)
        send(target, FLAG_BYTES, fence=route.failures)

    last_ps = 0
    for index, (target, size, ready_ps) in enumerate(post.items):
        one = functools.partial(send, target, size, payload=post.data(index))
        last_ps = ready_ps
        rig.at(post.at_ps + ready_ps, one) if ready_ps else one()
    for target in post.targets():
        one = functools.partial(flag, target)
        rig.at(post.at_ps + last_ps, one) if last_ps else one()


def post_as_it_says(rig: Rig, post: Post) -> None:
    (post_burst if post.in_burst else post_singly)(rig, post)


def collect(rig: Rig, got: Got) -> None:
    """Bind both forms of the kind: bundles, and single messages, whose copies planes refuse."""

    def handle(arrived: Bundle | Arrival) -> None:
        if isinstance(arrived, Bundle):
            assert arrived.head == b"head"
            columns = arrived.sources, arrived.targets, arrived.delivered_ps
            for row, (source, target, at_ps) in enumerate(zip(*[c.tolist() for c in columns])):
                got.append((source, target, arrived.data[row].tobytes(), at_ps))
        elif not arrived.flags & FLAG_COPY:
            assert rig.loop.now_ps == arrived.delivered_ps
            got.append(
                (arrived.source, arrived.target, bytes(arrived.payload), arrived.delivered_ps)
            )

    for fabric in rig.fabrics:
        fabric.bind(KIND, handle)


def flush(rig: Rig) -> None:
    """A last flag for each process, so that what was settled there is handed over."""
    for fabric in rig.fabrics[: rig.machine.nodes_count]:
        for listed in fabric.rules.listing(0):
            fabric.rules.remove(listed.rule.rule_id)
        source, target = machine("mini").dies(fabric.process)[:2]
        fabric.send_burst(
            kind=KIND, head=b"head", messages=bursts.nothing(), flags=flags_to(source, [target])
        )


def outcome(
    posts: list[Post], send: Any, rules: tuple[Rule, ...] = (), slice_ps: int = WHOLE_PS
) -> tuple[Got, list[list[str]], list[dict[str, dict[str, int]]]]:
    """(what arrived where and when, journals as sets, statistics) of posts sent in one way."""
    got: Got = []
    with Rig("mini", rules=rules) as rig:
        rig.machine.bundle_slice_ps = slice_ps
        collect(rig, got)
        for post in posts:
            rig.at(post.at_ps, functools.partial(send, rig, post))
        rig.run()
        rig.at(10 * WHOLE_PS, functools.partial(flush, rig))
        rig.run()
        statistics = [fabric.statistics() for fabric in rig.fabrics]
        for planes in statistics:
            for counts in planes.values():
                del counts["carried_bytes"], counts["bundles"]
        return sorted(got), [sorted(map(_when_it_counts, lines)) for lines in rig.lines], statistics


def _when_it_counts(line: str) -> str:
    """A drop is written at its slice's start, that of a single message at its own egress start."""
    return line.partition(" ")[2] if " drop " in line else line


@st.composite
def posts(draw: st.DrawFn, *, ready: bool = False) -> list[Post]:
    """Messages of a few sources close together in time, so that they meet at their targets."""
    made = []
    for at_ps in draw(st.lists(st.integers(0, 3_000_000), min_size=1, max_size=5, unique=True)):
        source = draw(st.sampled_from(UB_DEVICES))
        others = [device for device in UB_DEVICES if device != source]
        items = draw(
            st.lists(
                st.tuples(
                    st.sampled_from(others),
                    st.one_of(st.integers(0, 20_000), st.sampled_from([0, 512, 7680, 1 << 20])),
                    st.integers(0, 10**7) if ready else st.just(0),
                ),
                min_size=1,
                max_size=12,
            )
        )
        items = [
            (target, size, ready_ps)
            for (target, size, _), ready_ps in zip(items, sorted(item[2] for item in items))
        ]
        made.append(Post(at_ps, source, items, in_burst=draw(st.integers(0, 3)) > 0))
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
@settings(deadline=None, max_examples=18)
@given(posts=posts())
def test_a_burst_is_the_same_messages_sent_one_by_one(
    rules: tuple[Rule, ...], posts: list[Post]
) -> None:
    """Deliveries, journals and counters, also beside single messages: a burst is cheaper, nothing
    else. Slices are long, so that bursts of one source queue whole, as single messages do."""
    assert outcome(posts, post_as_it_says, rules) == outcome(posts, post_singly, rules)


def alone(posts: list[Post]) -> list[Post]:
    """One burst of each source."""
    return list({post.source: post._replace(in_burst=True) for post in posts}.values())


@settings(deadline=None, max_examples=12)
@given(posts=posts(ready=True), slice_ps=st.integers(1000, 20_000_000))
def test_slices_change_no_delivery_of_a_source_that_sends_one_burst(
    posts: list[Post], slice_ps: int
) -> None:
    """A slice boundary is no boundary of the busy period, and messages start when they are ready."""
    sliced = outcome(alone(posts), post_burst, slice_ps=slice_ps)
    assert sliced[:2] == outcome(alone(posts), post_singly)[:2]


def test_rows_whose_order_needs_more_than_a_key_are_put_in_order_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a kernel leaves unsorted is no other result."""
    targets = UB_DEVICES[5:9]
    made = [
        Post(number, source, [(target, 7680, 0) for target in targets])
        for number, source in enumerate(UB_DEVICES[:4])
    ]
    expected = outcome(made, post_burst)

    def unsorted(rows: Any, states: Any, first_device: int, begins: Any) -> Any:
        order = np.sort(kernel(rows, states, first_device, begins))[::-1].copy()
        begins[0] = -1
        return order

    kernel = port_kernels.settling_order
    monkeypatch.setattr(port_kernels, "settling_order", unsorted)
    assert outcome(made, post_burst) == expected


def test_the_rules_of_the_first_test_act() -> None:
    """Else it compares nothing."""
    items = [(target, 7680, 0) for target in UB_DEVICES[1:12]]
    plain = outcome([Post(0, UB_DEVICES[0], items)], post_burst)
    assert plain != outcome([Post(0, UB_DEVICES[0], items)], post_burst, HARSH)


# --- events and frames ----------------------------------------------------------------------------


def test_one_frame_for_each_process_and_slice() -> None:
    """However many sources a burst has; none within the process."""
    with Rig("mini") as rig:
        got: Got = []
        collect(rig, got)
        dies = list(rig.machine.dies(0))
        targets = [*rig.machine.dies(1), *rig.machine.dies(2), dies[-1]]
        tables = [table(die, [(t, 7680, 0) for t in targets], [b"x"] * 9, 1) for die in dies[:2]]
        messages = Messages(*[np.concatenate(parts) for parts in zip(*tables)])
        flags = Messages(
            *[np.concatenate(parts) for parts in zip(*[flags_to(die, targets) for die in dies[:2]])]
        )
        rig.fabrics[0].send_burst(kind=KIND, head=b"head", messages=messages, flags=flags)
        rig.run()
        assert [
            (peer, burst_frames.counts_of(header)[:2]) for peer, header, _, _ in rig.frames
        ] == [
            (1, (8, 8)),
            (2, (8, 8)),
        ]
        assert len(got) == 36


def test_idle_ports_have_their_slices_at_the_same_instants() -> None:
    """Though one has longer messages: what is ready a slice and more later waits for whole slices."""
    with Rig("mini") as rig:
        rig.machine.bundle_slice_ps = 10_000_000
        got: Got = []
        collect(rig, got)
        dies, target = list(rig.machine.dies(0)), rig.machine.dies(1)[0]
        tables = [
            table(die, [(target, 7680 + die, n * 9_000_000) for n in range(8)], [b"x"] * 8, 1)
            for die in dies
        ]
        messages = Messages(*[np.concatenate(parts) for parts in zip(*tables)])
        rig.fabrics[0].send_burst(
            kind=KIND,
            head=b"head",
            messages=messages,
            flags=flags_to(dies[0], [target], 63_000_000),
        )
        rig.run()
        counts = [burst_frames.counts_of(header)[:2] for _, header, _, _ in rig.frames]
        n = len(dies)
        assert counts == [(2 * n, 0), *[(n, 0)] * 5, (n, 1)]


def test_the_sender_reports_when_the_last_flag_of_a_frame_begins_and_nothing_of_messages() -> None:
    """That is the receiver's next event, neither earlier nor later (design 1.3)."""
    with Rig("mini") as rig:
        got: Got = []
        collect(rig, got)
        source = rig.device("node00/npu0/die0")
        targets = [
            rig.device(name) for name in ("node01/npu0/die0", "node01/npu1/die0", "node02/cpu0")
        ]
        messages = table(source, [(target, 7680, 0) for target in targets], [b"x"] * 3, 1)
        rig.fabrics[0].send_burst(
            kind=KIND, head=b"head", messages=messages, flags=flags_to(source, targets[:2])
        )
        rig.run(1)
        fabric = rig.fabrics[0]
        path = fabric.route(Plane.UB, Operation.WRITE, source, targets[1]).path
        sends = fabric.take_sends()
        at_ps = rig.loop.next_at_ps()
        assert sends == [(1, 1, at_ps, at_ps), (2, 1, NEVER_PS, NEVER_PS)]
        port = fabric.route(Plane.UB, Operation.WRITE, source, targets[1]).egress
        flag_ps = -(-FLAG_BYTES * 8 * 10**12 // path.rate_bps)
        assert abs(port.server.free_ps + path.propagation_ps - flag_ps - at_ps) <= 1
        rig.run()
        assert rig.loop.now_ps == at_ps and len(got) == 4


def test_a_delivery_may_lie_ahead_of_its_event_and_is_that_of_the_port() -> None:
    """Two sources, one target: the second message waits for the first; both are handed over when the
    first bytes of both flags are in."""
    with Rig("mini") as rig:
        bundles: list[tuple[int, Bundle]] = []
        rig.fabrics[1].bind(KIND, lambda bundle: bundles.append((rig.loop.now_ps, bundle)))
        target = rig.device("node01/npu0/die0")
        for source in list(rig.machine.dies(0))[:2]:
            rig.fabrics[0].send_burst(
                kind=KIND,
                head=b"head",
                messages=table(source, [(target, 1 << 20, 0)], [b"x"], 1),
                flags=flags_to(source, [target]),
            )
        rig.run()
        assert [(bundle.flags, len(bundle.sources)) for _, bundle in bundles] == [
            (False, 2), (True, 2)
        ]  # fmt: skip  # one line a thing
        now_ps, messages = bundles[0]
        path = rig.fabrics[0].route(Plane.UB, Operation.WRITE, source, target).path
        one_ps = (1 << 20) * 8 * 10**12 // path.rate_bps
        assert messages.delivered_ps[1] > now_ps + one_ps - 10**6
        assert bundles[1][1].delivered_ps.min() >= messages.delivered_ps.max()


def test_a_single_message_settles_what_came_before_it_and_only_a_flag_hands_it_over() -> None:
    with Rig("mini") as rig:
        order: list[tuple[str, int]] = []
        rig.fabrics[1].bind(KIND, lambda bundle: order.append(("bundle", bundle.delivered_ps[0])))
        rig.fabrics[1].bind(SINGLE, lambda one: order.append(("single", one.delivered_ps)))
        first, second = list(rig.machine.dies(0))[:2]
        target = rig.device("node01/npu0/die0")
        rig.fabrics[0].send_burst(
            kind=KIND,
            head=b"head",
            messages=table(first, [(target, 1 << 20, 0)], [b"x"], 1),
            flags=flags_to(first, [target], 20_000_000),
        )
        route = rig.fabrics[0].route(Plane.UB, Operation.WRITE, second, target)
        rig.at(1000, lambda: rig.fabrics[0].send(route, SINGLE, charged_bytes=512))
        rig.run()
        assert [what for what, _ in order] == ["single", "bundle", "bundle"]
        assert order[1][1] < order[0][1]


def test_a_burst_longer_than_a_slice_lets_others_in_between() -> None:
    """196 GB/s x 1 ms = 196 MB a slice: the other message waits for one slice, not for three."""
    with Rig("pair") as rig:
        order: list[tuple[int, bytes]] = []

        def handle(bundle: Any) -> None:
            data = [row.tobytes() for row in bundle.data]
            order.extend(zip(bundle.delivered_ps.tolist(), data))

        rig.fabrics[1].bind(KIND, handle)
        rig.fabrics[1].bind(SINGLE, lambda one: order.append((one.delivered_ps, b"other")))
        source, target = rig.device("node00/npu0/die0"), rig.device("node01/npu0/die0")
        route = rig.fabrics[0].route(Plane.UB, Operation.WRITE, source, target)
        slice_bytes = route.path.rate_bps * rig.machine.bundle_slice_ps // (8 * 10**12)
        items = [(target, slice_bytes // 2 - 1, 0)] * 6
        rig.fabrics[0].send_burst(
            kind=KIND,
            head=b"head",
            messages=table(source, items, [bytes([n]) for n in range(6)], 1),
            flags=flags_to(source, [target]),
        )
        rig.fabrics[0].send(route, SINGLE, charged_bytes=512)
        rig.run()
        sent = [what for _, what in sorted(order)]
        assert sent.index(b"other") == 3  # the third message starts just within the slice


def test_what_comes_to_a_port_whose_burst_is_not_ready_does_not_wait_for_it() -> None:
    """Nor do two bursts that are not ready turn for ever."""
    with Rig("pair") as rig:
        rig.machine.bundle_slice_ps = 200_000_000
        got: Got = []
        collect(rig, got)
        came: list[int] = []
        rig.fabrics[1].bind(SINGLE, lambda one: came.append(one.delivered_ps))
        source, target = rig.device("node00/npu0/die0"), rig.device("node01/npu0/die0")
        route = rig.fabrics[0].route(Plane.UB, Operation.WRITE, source, target)
        for ready_ps in (500_000_000, 300_000_000):
            rig.fabrics[0].send_burst(
                kind=KIND,
                head=b"head",
                messages=table(source, [(target, 7680, ready_ps)], [b"x"], 1),
                flags=flags_to(source, [target], ready_ps),
            )
        rig.at(1_000_000, lambda: rig.fabrics[0].send(route, SINGLE, charged_bytes=512))
        rig.run()
        wire_ps = -(-512 * 8 * 10**12 // route.path.rate_bps)
        assert came == [1_000_000 + route.path.propagation_ps + wire_ps]
        starts_ps = sorted(at_ps - route.path.propagation_ps for *_, data, at_ps in got if data)
        assert [at_ps // 10**6 for at_ps in starts_ps] == [300, 500]
        assert rig.loop.events_run < 40


def test_back_pressure_counts_what_waits_of_a_burst() -> None:
    with Rig("pair") as rig:
        rig.machine.bundle_slice_ps = 200_000_000
        rig.fabrics[1].bind(KIND, lambda _: None)
        source, target = rig.device("node00/npu0/die0"), rig.device("node01/npu0/die0")
        fabric = rig.fabrics[0]
        route = fabric.route(Plane.UB, Operation.WRITE, source, target)
        messages = table(source, [(target, 1 << 20, 0)] * 40, [b""] * 40, 0)
        fabric.send_burst(kind=KIND, head=b"", messages=messages, flags=bursts.nothing())
        assert route.egress.waiting_bytes == 40 << 20
        rig.run(1)
        left_bytes = route.egress.waiting_bytes
        assert 0 < left_bytes < 40 << 20 and left_bytes % (1 << 20) == 0
        rig.run()
        assert route.egress.waiting_bytes == 0


def test_an_engines_share_is_a_rate() -> None:
    """SDMA reaches 91 % of a path's rate: as slow as any message at that rate."""
    with Rig("pair") as rig:
        got: Got = []
        collect(rig, got)
        source, target = rig.device("node00/npu0/die0"), rig.device("node01/npu0/die0")
        post_burst(rig, Post(0, source, [(target, 7680, 0)]), rate_share=(91, 100))
        rig.run()
        path = rig.fabrics[0].route(Plane.UB, Operation.WRITE, source, target).path
        rate_bps = path.rate_bps * 91 // 100
        assert got[0][3] == path.propagation_ps - (-7680 * 8 * 10**12 // rate_bps)


def test_a_frame_that_would_be_too_large_is_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(burst_frames, "MESSAGES_MAX", 5)
    monkeypatch.setattr(burst_frames, "DATA_BYTES_MAX", 24)
    with Rig("pair") as rig:
        got: Got = []
        collect(rig, got)
        source, target = rig.device("node00/npu0/die0"), rig.device("node01/npu0/die0")
        post_burst(rig, Post(0, source, [(target, 7680, 0)] * 8))
        rig.run()
        counts = [burst_frames.counts_of(header)[:2] for _, header, _, _ in rig.frames]
        assert counts == [(3, 0), (3, 0), (2, 1)]
        assert [data[6:] for _, _, data, _ in got if data] == [bytes([n, 0]) for n in range(8)]


# --- rules ----------------------------------------------------------------------------------------


def test_lost_names_the_messages_that_rules_dropped_and_their_flag_is_withheld() -> None:
    blocked = UB_DEVICES[6]
    with Rig("mini", rules=(rule(effects.Partition(), blocked),)) as rig:
        got: Got = []
        lost: list[int] = []
        collect(rig, got)
        targets = [UB_DEVICES[7], blocked, UB_DEVICES[1], blocked]
        post = Post(0, UB_DEVICES[0], [(target, 100, 0) for target in targets])
        post_burst(rig, post, lost=lambda indices: lost.extend(indices.tolist()))
        rig.run()
        assert lost == [1, 3]
        assert (
            sorted(target for _, target, _, _ in got) == [UB_DEVICES[1]] * 2 + [UB_DEVICES[7]] * 2
        )
        assert rig.fabrics[0].statistics()["UB"]["dropped"] == 3


def test_a_rule_that_ends_between_a_message_and_its_flag_still_holds_for_the_flag() -> None:
    """Withheld behind what was dropped, not ahead of what was delayed."""
    source, late, blocked = UB_DEVICES[0], UB_DEVICES[6], UB_DEVICES[7]
    delay = rule(effects.Delay(delay_ps=40_000_000), late)
    rules = [
        msgspec.structs.replace(one, until_ps=1_000_000)
        for one in (delay, rule(effects.Partition(), blocked))
    ]
    with Rig("mini", rules=tuple(rules)) as rig:
        rig.machine.bundle_slice_ps = 1_000_000
        got: Got = []
        collect(rig, got)
        items = [(late, 100, 0), (blocked, 100, 0), (late, 1 << 19, 0)]
        post_burst(rig, Post(0, source, items))
        rig.run()
        assert not [one for one in got if one[1] == blocked]
        (flag_ps,) = [at_ps for _, _, data, at_ps in got if not data]
        assert flag_ps >= max(at_ps for _, _, data, at_ps in got if data) > 40_000_000


@pytest.mark.parametrize("start_ps", [1, 5_000_000, 17_000_001])
def test_a_rule_judges_each_message_at_its_own_start(start_ps: int) -> None:
    """Though all of them leave in one slice, some before it holds, some while it does, some after."""
    source, target = UB_DEVICES[0], UB_DEVICES[6]
    cut = msgspec.structs.replace(
        rule(effects.Partition()), start_ps=start_ps, until_ps=start_ps + 10_000_000
    )
    ready = list(range(0, 40_000_000, 1_500_000))
    with Rig("mini", rules=(cut,)) as rig:
        got: Got = []
        collect(rig, got)
        post = Post(0, source, [(target, 100, ready_ps) for ready_ps in ready])
        lost: list[int] = []
        post_burst(rig, post, lost=lambda indices: lost.extend(indices.tolist()))
        rig.run()
    held = [n for n, at_ps in enumerate(ready) if start_ps <= at_ps < start_ps + 10_000_000]
    assert held and lost == held


@pytest.mark.parametrize("dies_ps", [1, 5_000_000, 17_000_001, NEVER_PS])
def test_nothing_leaves_from_a_known_death_on(dies_ps: int) -> None:
    """Of a slice that it cuts, what starts before leaves. What waits behind it at the port, a second
    burst, waits for ever then, and does not turn."""
    source, target = UB_DEVICES[0], UB_DEVICES[6]
    with Rig("mini") as rig:
        got: Got = []
        collect(rig, got)
        rig.fabrics[0].dies_at_ps = dies_ps
        ready = list(range(0, 40_000_000, 1_500_000))
        for later_ps in (0, 40_000_000):
            items = [(target, 100, later_ps + ready_ps) for ready_ps in ready]
            post_burst(rig, Post(0, source, items))
        rig.at(WHOLE_PS, rig.fabric_of(target).arriving.deliver)
        rig.run()
        came = sum(1 for *_, data, _ in got if data)
    whole = dies_ps == NEVER_PS
    assert came == (2 * len(ready) if whole else sum(at_ps < dies_ps for at_ps in ready))


def test_a_rule_that_ended_before_the_flag_left_still_withholds_it() -> None:
    """Nothing is late then: the burst itself knows what it lost."""
    source, blocked, other = UB_DEVICES[0], UB_DEVICES[6], UB_DEVICES[7]
    cut = msgspec.structs.replace(rule(effects.Partition(), blocked), until_ps=1)
    with Rig("mini", rules=(cut,)) as rig:
        rig.machine.bundle_slice_ps = 1_000_000
        got: Got = []
        collect(rig, got)
        post_burst(rig, Post(0, source, [(blocked, 100, 0), (other, 100, 9_000_000)]))
        rig.run()
        assert [target for _, target, _, _ in got] == [other, other]


@pytest.mark.parametrize("single", [True, False])
def test_flags_do_not_overtake_what_a_rule_delayed_that_is_over(single: bool) -> None:
    """Whoever sent it: a burst before, or a single message."""
    source, target = UB_DEVICES[0], UB_DEVICES[6]
    delay = msgspec.structs.replace(rule(effects.Delay(delay_ps=10**8)), until_ps=1_000_000)
    with Rig("mini", rules=(delay,)) as rig:
        got: Got = []
        collect(rig, got)
        fabric = rig.fabrics[0]
        if single:
            route = fabric.route(Plane.UB, Operation.WRITE, source, target)
            fabric.send(route, KIND, charged_bytes=512, payload=b"late")
        else:
            messages = table(source, [(target, 512, 0)], [b"late"], 4)
            fabric.send_burst(kind=KIND, head=b"head", messages=messages, flags=bursts.nothing())
        flags = flags_to(source, [target])
        later = functools.partial(
            fabric.send_burst, kind=KIND, head=b"head", messages=bursts.nothing(), flags=flags
        )
        rig.at(2_000_000, later)
        rig.run()
        at_ps = {data: at_ps for _, _, data, at_ps in got}
        assert at_ps[b""] >= at_ps[b"late"] > 10**8


def test_a_delayed_flag_does_not_hold_up_those_beside_it() -> None:
    late, other = UB_DEVICES[6], UB_DEVICES[7]
    with Rig("mini", rules=(rule(effects.Delay(delay_ps=90_000_000), late),)) as rig:
        events: list[tuple[int, list[int]]] = []
        for fabric in rig.fabrics:
            fabric.bind(KIND, lambda b: events.append((rig.loop.now_ps, b.targets.tolist())))
        post_burst(rig, Post(0, UB_DEVICES[0], [(late, 100, 0), (other, 100, 0)]))
        rig.run()
        early = [targets for at_ps, targets in events if at_ps < 90_000_000]
        assert early == [[other], [other]] and len(events) == 4


def test_a_copy_takes_its_time_at_the_ingress_and_no_handler_gets_it() -> None:
    """Two messages, each doubled: the second is in after three serializations, not two."""
    doubled = rule(effects.Duplicate(probability=Fraction(1)))
    with Rig("pair", rules=(doubled,)) as rig:
        got: Got = []
        collect(rig, got)
        source, target = rig.device("node00/npu0/die0"), rig.device("node01/npu0/die0")
        post_burst(rig, Post(0, source, [(target, 7680, 0)] * 2))
        rig.run()
        assert [bool(data) for _, _, data, _ in got] == [True, True, False]
        path = rig.fabrics[0].route(Plane.UB, Operation.WRITE, source, target).path
        third_ps = path.propagation_ps + -(-3 * 7680 * 8 * 10**12 // path.rate_bps)
        assert abs(got[1][3] - third_ps) <= 3  # rounding of each


def test_what_a_burst_lost_withdraws_no_flag_of_others() -> None:
    """``lost`` told the program: a fenced message on the same route passes."""
    cut = msgspec.structs.replace(rule(effects.Partition()), until_ps=1)
    with Rig("pair", rules=(cut,)) as rig:
        came: list[int] = []
        lost: list[int] = []
        rig.fabrics[1].bind(SINGLE, lambda arrival: came.append(arrival.kind))
        source, target = rig.device("node00/npu0/die0"), rig.device("node01/npu0/die0")
        route = rig.fabrics[0].route(Plane.UB, Operation.WRITE, source, target)
        post_burst(rig, Post(0, source, [(target, 7680, 0)]), lost=lost.extend)
        rig.fabrics[0].send(route, SINGLE, charged_bytes=8, fence=0)
        rig.run()
        assert (lost, came, route.failures) == ([0], [SINGLE], 0)


# --- what goes wrong ------------------------------------------------------------------------------


def test_forget_takes_a_dead_peers_rows_out_and_nothing_else() -> None:
    """Rows leave the ports, events the agenda; earlier windows stay (design 1.8)."""
    with Rig("mini") as rig:
        got: Got = []
        collect(rig, got)
        target = rig.device("node02/npu0/die0")
        sources = rig.device("node00/npu0/die0"), rig.device("node01/npu0/die0")
        for window, source in zip((4, 5), sources):
            rig.fabric_of(source).window = window
            post_burst(rig, Post(0, source, [(target, 7680, 0), (target + 1, 7680, 0)]))
        rig.run(1)
        rig.fabrics[2].forget(1, 5)
        rig.fabrics[2].forget(0, 5)
        rig.run()
        assert {source for source, *_ in got} == {sources[0]} and len(got) == 4
        path = rig.fabrics[0].route(Plane.UB, Operation.WRITE, sources[0], target).path
        assert got[0][3] == path.propagation_ps - (-7680 * 8 * 10**12 // path.rate_bps)


def test_forget_takes_rows_out_that_were_in_order_with_others_already() -> None:
    """Some rows of the table are settled, then a peer dies."""
    with Rig("mini") as rig:
        got: Got = []
        collect(rig, got)
        rig.fabrics[2].bind(SINGLE, lambda _: None)
        target, dead = rig.device("node02/npu0/die0"), rig.device("node01/npu0/die0")
        alive = rig.device("node00/npu0/die0")
        rig.fabrics[1].window = 5
        post_burst(rig, Post(0, dead, [(target, 7680, 0), (target, 7680, 9_000_000)]))
        post_burst(rig, Post(0, alive, [(target, 7680, 0), (target, 7680, 9_000_000)]))
        route = rig.fabrics[0].route(Plane.UB, Operation.WRITE, alive + 1, target)
        rig.fabrics[0].send(route, SINGLE, charged_bytes=512)
        rig.run(5_000_000)
        rig.fabrics[2].forget(1, 5)
        rig.run()
        assert sorted(source for source, _, data, _ in got if data) == [alive, alive, dead]


def test_bytes_that_are_no_bundle_are_refused() -> None:
    with Rig("pair") as rig:
        source, target = rig.device("node00/npu0/die0"), rig.device("node01/npu0/die0")
        rig.fabrics[1].bind(KIND, lambda _: None)
        post_burst(rig, Post(0, source, [(target, 512, 0), (target, 512, 0)]))
        rig.run()
        _, header, body, payload = rig.frames[0]
        receive = rig.fabrics[1].receive
        messages, flags, width = burst_frames.counts_of(header)
        for wrong in ((0, 0, width), (messages + 1, flags, width), (messages, flags, width + 1)):
            counts = wrong[0] | wrong[1] << 16 | wrong[2] << 32
            with pytest.raises(FrameError):
                receive((*header[:13], counts), body, payload)
        with pytest.raises(FrameError):
            receive(header, body, payload + b"!")
        for column, value in ((1, 0), (2, -1), (2, 1 << 60), (3, 0), (4, 1 << 20), (5, source)):
            for row in range(messages + flags):
                rows = np.frombuffer(payload[: 3 * ROW_BYTES], np.int64).reshape(3, 7).copy()
                rows[row, column] = value
                with pytest.raises(FrameError):
                    receive(header, body, rows.tobytes() + payload[3 * ROW_BYTES :])
        rig.fabrics[1].ran_to_ps = rig.loop.now_ps + 1
        with pytest.raises(CausalityError):
            receive(header, body, payload)


def test_a_target_that_the_plane_does_not_join_is_refused() -> None:
    with Rig("pair") as rig:
        source, target = rig.device("node00/npu0/die0"), rig.device("node01")
        post_burst(rig, Post(0, source, [(target, 512, 0)]))
        with pytest.raises(InputError, match="two dies or CPUs"):
            rig.run()


@pytest.mark.parametrize("size", [0, 512])
def test_a_message_to_its_own_source_is_a_bug(size: int) -> None:
    """Only a flag of no bytes may come back: nothing else is settled without a port."""
    with Rig("pair") as rig:
        source = rig.device("node00/npu0/die0")
        with pytest.raises(AssertionError, match="not a flag to itself"):
            post_burst(rig, Post(0, source, [(source, size, 0)]))


def test_quiet_messages_are_handed_over_before_flags_that_came_after_them() -> None:
    """Flags are an event at their targets like any message that is not quiet."""
    with Rig("pair") as rig:
        order: list[str] = []
        rig.fabrics[1].bind(KIND, lambda _: order.append("flags"))
        rig.fabrics[1].bind(SINGLE, lambda _: order.append("quiet"))
        source, target = rig.device("node00/npu0/die0"), rig.device("node01/npu0/die0")
        route = rig.fabrics[0].route(Plane.UB, Operation.WRITE, source, target)
        rig.fabrics[0].send(route, SINGLE, charged_bytes=512, quiet=True)
        rig.run()
        assert order == []
        flags = flags_to(source, [target])
        rig.fabrics[0].send_burst(kind=KIND, head=b"", messages=bursts.nothing(), flags=flags)
        rig.fabrics[0].send(route, SINGLE, charged_bytes=512, quiet=True)
        rig.run()
        assert order == ["quiet", "flags"]


# --- data that is carried more than once ---------------------------------------------------------

THRICE = Repeat(lead_bytes=2, body_bytes=4, copies=3, tail_bytes=2, tail_copies=2)


def test_repeated_data_arrives_once_and_at_the_same_time() -> None:
    """Carried bytes are more, charged bytes and instants the same (design 2.2)."""
    items = [(target, 7680, 0) for target in UB_DEVICES[1:7]]
    plain: Got = []
    more: Got = []
    sides: list[tuple[Got, dict[int, Repeat]]] = [(plain, {}), (more, {KIND: THRICE})]
    for got, repeats in sides:
        with Rig("mini") as rig:
            collect(rig, got)
            for fabric in rig.fabrics:
                fabric.arriving.repeats.update(repeats)
            post_burst(rig, Post(0, UB_DEVICES[0], items))
            rig.run()
            carried = rig.fabrics[0].statistics()["UB"]["carried_bytes"]
            got.append((carried, 0, b"", 0))
    assert plain[:-1] == more[:-1]
    assert more[-1][0] - plain[-1][0] == len(items) * (THRICE.carried_bytes - THRICE.data_bytes)


@pytest.mark.parametrize("octet", range(2, THRICE.carried_bytes))
def test_every_carried_byte_is_compared(octet: int) -> None:
    """Of a part that is carried again; the lead is carried once, and its reader looks at it."""
    far = next(device for device in UB_DEVICES if machine("mini").devices[device].process == 1)
    with Rig("mini") as rig:
        for fabric in rig.fabrics:
            fabric.bind(KIND, lambda _: None)
            fabric.arriving.repeats[KIND] = THRICE
        carry = rig.fabrics[0].carry

        def broken(peer: int, plane: int, head: bytes, body: bytes, payload: Payload) -> None:
            changed = bytearray(payload)
            messages, flags, _ = burst_frames.counts_of(frames.HEADER.unpack(head))
            if messages:
                changed[(messages + flags) * ROW_BYTES + octet] ^= 1
            carry(peer, plane, head, body, changed)

        rig.fabrics[0].carry = broken
        post = Post(0, UB_DEVICES[0], [(far, 7680, 0)])
        with pytest.raises(CorruptError, match="differs from the first"):
            post_burst(rig, post)  # on its way at once, and a rig delivers at once


def test_flags_do_not_keep_a_frame_with_all_its_copies() -> None:
    far = next(device for device in UB_DEVICES if machine("mini").devices[device].process == 1)
    with Rig("mini") as rig:
        for fabric in rig.fabrics:
            fabric.bind(KIND, lambda _: None)
            fabric.arriving.repeats[KIND] = THRICE
        written: list[tuple[bytes, bytes, Payload]] = []
        rig.fabrics[0].carry = lambda *frame: written.append((frame[2], frame[3], frame[4]))
        post_burst(rig, Post(0, UB_DEVICES[0], [(far, 7680, 0)]))
        head, body, payload = written[0]
        kept = bytearray(payload)
        before = sys.getrefcount(kept)
        rig.fabrics[1].arriving.receive(frames.HEADER.unpack(head), body, kept)
        assert sys.getrefcount(kept) == before
