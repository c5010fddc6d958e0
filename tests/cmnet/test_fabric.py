"""Links end to end: exact against plain arithmetic, and what happens to what waits in a port."""

from __future__ import annotations

import functools
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cmnet.errors import CausalityError, FrameError
from cmnet.link import effects
from cmnet.link.reach import Ends, Where
from cmnet.link.rules import Rule
from cmnet.messages import Arrival
from cmnet.topology.machine import Operation, Plane
from tests import closed_form
from tests.rig import Rig, machine

KIND = 1
UB_DEVICES = [device.device_id for device in machine("mini").devices if device.kind != "node"]
Send = tuple[int, int, int, int]
"""(instant, source, target, charged bytes)"""


def collect(rig: Rig) -> list[tuple[int, int, int, int]]:
    """(delivered, source, target, number) of all that arrives."""
    got: list[tuple[int, int, int, int]] = []

    def handle(arrival: Arrival) -> None:
        assert arrival.delivered_ps == rig.loop.now_ps
        number = int.from_bytes(arrival.body, "little")
        got.append((arrival.delivered_ps, arrival.source, arrival.target, number))

    for fabric in rig.fabrics:
        fabric.bind(KIND, handle)
    return got


def send(rig: Rig, source: int, target: int, charged_bytes: int, number: int = 0) -> None:
    fabric = rig.fabric_of(source)
    route = fabric.route(Plane.UB, Operation.WRITE, source, target)
    fabric.send(route, KIND, charged_bytes=charged_bytes, body=number.to_bytes(4, "little"))


class PlainServer:
    """Design 2.1 once more, in fractions: busy periods, rounded up at each finish."""

    def __init__(self) -> None:
        self.begin: Fraction = Fraction(0)
        self.work = Fraction(0)
        self.rate = 0
        self.free = 0

    def serve(self, start: int, size: int, rate: int) -> int:
        if start > self.free or rate != self.rate:
            self.begin, self.work, self.rate = Fraction(start), Fraction(0), rate
        self.work += Fraction(8 * size * 10**12, rate)
        end = self.begin + self.work
        self.free = -(-end.numerator // end.denominator)
        return self.free


def plain(sends: list[Send]) -> list[tuple[int, int, int, int]]:
    """The same sends by two passes: all egresses in order of instants, then all ingresses."""
    mini = machine("mini")
    egress = {device: PlainServer() for device in UB_DEVICES}
    arrivals: dict[int, list[tuple[int, int, int, int, int, int, int]]] = {}
    numbers = dict.fromkeys(UB_DEVICES, 0)
    order = sorted(range(len(sends)), key=lambda index: (sends[index][0], index))
    for index in order:
        at_ps, source, target, size = sends[index]
        path = mini.path(plane=Plane.UB, operation=Operation.WRITE, source=source, target=target)
        start = max(at_ps, egress[source].free)
        end = egress[source].serve(start, size, path.rate_bps)
        numbers[source] += 1
        arrivals.setdefault(target, []).append(
            (
                start + path.propagation_ps,
                source,
                numbers[source],
                end + path.propagation_ps,
                size,
                path.rate_bps,
                index,
            )
        )
    got = []
    for target, listed in arrivals.items():
        server = PlainServer()
        for first, source, _, last, size, rate, index in sorted(listed):
            delivered = server.serve(max(first, server.free), size, rate)
            if last > delivered:
                server.free = delivered = last
                server.rate = 0
            got.append((delivered, source, target, index))
    return sorted(got)


SENDS = st.lists(
    st.tuples(
        st.integers(0, 2_000_000),
        st.sampled_from(UB_DEVICES),
        st.sampled_from(UB_DEVICES),
        st.one_of(st.integers(0, 300_000), st.sampled_from([0, 1, 512, 1 << 20])),
    ).filter(lambda entry: entry[1] != entry[2]),
    max_size=40,
)


@settings(deadline=None, max_examples=80)
@given(sends=SENDS)
def test_every_delivery_under_contention_is_that_of_plain_arithmetic(sends: list[Send]) -> None:
    """Lazy settling, agenda and frames change no picosecond: nothing is simulated in the other."""
    with Rig("mini") as rig:
        got = collect(rig)
        for number, (at_ps, source, target, size) in enumerate(sends):
            rig.at(at_ps, functools.partial(send, rig, source, target, size, number))
        rig.run()
    assert sorted(got) == plain(sends)


def test_a_lone_write_is_visible_after_propagation_and_serialization() -> None:
    with Rig("pair") as rig:
        got = collect(rig)
        source, target = rig.device("node00/npu0/die0"), rig.device("node01/npu0/die0")
        path = rig.fabrics[0].route(Plane.UB, Operation.WRITE, source, target).path
        send(rig, source, target, 7680)
        rig.run()
        assert got[0][0] == closed_form.write_visible_ps(
            7680, propagation_ps=path.propagation_ps, rate_bps=path.rate_bps
        )


def test_what_waits_in_a_port_is_not_on_the_wire() -> None:
    """A process that is killed at an instant sends nothing whose egress has not started."""
    with Rig("pair") as rig:
        got = collect(rig)
        source, target = rig.device("node00/npu0/die0"), rig.device("node01/npu0/die0")
        path = rig.fabrics[0].route(Plane.UB, Operation.WRITE, source, target).path
        for number in range(10):
            send(rig, source, target, 1 << 20, number)
        each_ps = closed_form.serialization_ps(1 << 20, path.rate_bps)
        rig.run(3 * each_ps)
        assert len(rig.frames) == 3 or len(rig.frames) == 4
        started = len(rig.frames)
        rig.fabrics[0]._egress[source].queue.clear()
        rig.fabrics[0].loop.agenda.discard(lambda event: event[1] == 1)
        rig.run()
        assert [number for *_, number in got] == list(range(started))


def test_room_is_given_first_come_first_served_and_only_as_much_as_fits() -> None:
    with Rig("pair") as rig:
        collect(rig)
        source, target = rig.device("node00/npu0/die0"), rig.device("node01/npu0/die0")
        fabric = rig.fabrics[0]
        route = fabric.route(Plane.UB, Operation.WRITE, source, target)
        route.egress.queue_bytes_max = 3 << 20
        order: list[int] = []
        waiting_max = 0

        async def sender(number: int, size: int) -> None:
            nonlocal waiting_max
            await fabric.room(route, size)
            order.append(number)
            fabric.send(route, KIND, charged_bytes=size, body=bytes(4))
            waiting_max = max(waiting_max, route.egress.waiting_bytes)

        tasks = [
            rig.loop.create_task(sender(number, (1 << 20) if number % 2 else (2 << 20)))
            for number in range(12)
        ]
        rig.run()
        assert all(task.done() for task in tasks) and order == list(range(12))
        assert waiting_max == 3 << 20


def test_a_message_larger_than_the_port_accepts_goes_alone() -> None:
    with Rig("pair") as rig:
        got = collect(rig)
        source, target = rig.device("node00/npu0/die0"), rig.device("node01/npu0/die0")
        fabric = rig.fabrics[0]
        route = fabric.route(Plane.UB, Operation.WRITE, source, target)
        route.egress.queue_bytes_max = 1000

        async def main() -> None:
            for _ in range(3):
                await fabric.room(route, 5000)
                fabric.send(route, KIND, charged_bytes=5000, body=bytes(4))

        task = rig.loop.create_task(main())
        rig.run()
        assert task.done() and len(got) == 3


def rule(effect: effects.Effect, **more: Any) -> Rule:
    return Rule(rule_id=type(effect).__name__, owner="test", effect=effect, **more)


def delivered(*rules: Rule, name: str = "node01/npu0/die0", plane: Plane = Plane.UB) -> list[int]:
    """When each copy of one message of 7680 B arrives under the rules."""
    with Rig("pair", rules=rules) as rig:
        got = collect(rig)
        source, target = rig.device("node00/npu0/die0"), rig.device(name)
        fabric = rig.fabrics[0]
        route = fabric.route(plane, Operation.WRITE, source, target)
        fabric.send(route, KIND, charged_bytes=7680, body=bytes(4))
        rig.run()
        return [entry[0] for entry in got]


def test_rules_act_at_the_egress_start() -> None:
    (plain_ps,) = delivered()
    assert delivered(rule(effects.Delay(delay_ps=777))) == [plain_ps + 777]
    assert delivered(rule(effects.Partition())) == []
    (slow_ps,) = delivered(rule(effects.Rate(factor=Fraction(1, 2))))
    path = machine("pair").path(plane=Plane.UB, operation=Operation.WRITE, source=0, target=3)
    assert slow_ps == path.propagation_ps + closed_form.serialization_ps(7680, path.rate_bps // 2)
    twice = delivered(rule(effects.Duplicate(probability=Fraction(1))), plane=Plane.RDMA)
    assert len(twice) == 2 and twice[0] < twice[1]
    elsewhere = Where(other=Ends(devices=(4,)))
    assert delivered(rule(effects.Partition(), where=elsewhere)) == [plain_ps]
    assert delivered(rule(effects.Partition(), start_ps=1)) == [plain_ps]


@pytest.mark.parametrize("plane", [Plane.RDMA, Plane.VPC])
def test_a_corrupt_signal_is_lost(plane: Plane) -> None:
    """A completion's frame has a checksum as any: what fails it never came, and is counted."""
    with Rig("pair", rules=(rule(effects.Corrupt(probability=Fraction(1))),)) as rig:
        got = collect(rig)
        end = "/npu0/die0" if plane == Plane.RDMA else ""
        source, target = rig.device(f"node00{end}"), rig.device(f"node01{end}")
        fabric = rig.fabrics[0]
        route = fabric.route(plane, Operation.WRITE, source, target)
        fabric.signal(route, KIND, delay_ps=route.path.propagation_ps, body=bytes(4))
        rig.run()
        assert got == []
        assert fabric.statistics_of[plane].dropped == 1
        assert [line.split()[1] for line in rig.lines[0]] == ["drop"]


def test_ub_tries_again_and_each_try_counts_as_delay() -> None:
    """Two lost, the third passes: 2 us later (design 2.3); three lost: gone."""
    (plain_ps,) = delivered()
    retry = machine("pair").ub_retry
    losses = {
        seed: delivered(rule(effects.Loss(probability=Fraction(n, 10))))
        for seed, n in enumerate(range(11))
    }
    late = {(times[0] - plain_ps) // retry.delay_ps for times in losses.values() if times}
    assert late <= {0, 1, 2} and losses[0] == [plain_ps] and losses[10] == []


def test_a_dead_peers_last_window_never_happened() -> None:
    with Rig("pair") as rig:
        got = collect(rig)
        source, target = rig.device("node00/npu0/die0"), rig.device("node01/npu0/die0")
        for window in (3, 4, 5):
            rig.fabrics[0].window = window
            send(rig, source, target, 512, window)
            rig.run(rig.loop.now_ps + 100_000)
        rig.fabrics[1].forget(0, 4)
        rig.fabrics[1].forget(1, 0)
        rig.run()
        assert [number for *_, number in got] == [3]


def test_frames_that_cannot_be_are_refused() -> None:
    with Rig("pair") as rig:
        collect(rig)
        source, target = rig.device("node00/npu0/die0"), rig.device("node01/npu0/die0")
        send(rig, source, target, 512)
        rig.run()
        _, header, body, payload = rig.frames[0]
        receive = rig.fabrics[1].receive
        for index, value in ((7, 999), (8, source), (8, 999), (4, 3)):
            broken = (*header[:index], value, *header[index + 1 :])
            with pytest.raises(FrameError):
                receive(broken, body, payload)
        rig.fabrics[1].ran_to_ps = header[10] + 1
        with pytest.raises(CausalityError, match="node00/npu0/die0 would arrive at"):
            receive(header, body, payload)


def test_a_kind_that_nobody_bound_is_refused_at_its_delivery() -> None:
    with Rig("pair") as rig:
        source, target = rig.device("node00/npu0/die0"), rig.device("node01/npu0/die0")
        send(rig, source, target, 512)
        with pytest.raises(FrameError, match="kind 1"):
            rig.run()


def test_sends_say_what_left_for_whom_and_when_it_first_matters() -> None:
    with Rig("mini") as rig:
        collect(rig)
        source = rig.device("node00/npu0/die0")
        for name in ("node01/npu0/die0", "node00/npu1/die0", "node01/npu0/die1", "node02/cpu0"):
            send(rig, source, rig.device(name), 7680)
        rig.run()
        first = min(header[11] for peer, header, *_ in rig.frames if peer == 1)
        sends = rig.fabrics[0].take_sends()
        assert [(peer, count) for peer, count, *_ in sends] == [(1, 2), (2, 1)]
        assert sends[0][2] == first
        assert rig.fabrics[0].take_sends() == []


def test_who_is_cancelled_at_its_turn_leaves_its_room_to_the_next() -> None:
    """Else nobody would wake the next: the port is idle by then."""
    with Rig("pair") as rig:
        got = collect(rig)
        source, target = rig.device("node00/npu0/die0"), rig.device("node01/npu0/die0")
        fabric = rig.fabrics[0]
        route = fabric.route(Plane.UB, Operation.WRITE, source, target)
        route.egress.queue_bytes_max = 1000

        async def sender(number: int) -> None:
            await fabric.room(route, 1000)
            fabric.send(route, KIND, charged_bytes=1000, body=number.to_bytes(4, "little"))

        tasks = [rig.loop.create_task(sender(number)) for number in range(4)]
        waiters = route.egress.waiters

        def cancel_at_its_turn() -> None:
            """The second waiter has been woken in this instant and has not run yet."""
            if len(waiters) == 1 and tasks[2].cancel():
                return
            rig.loop.call_later(1e-12, cancel_at_its_turn)

        cancel_at_its_turn()
        rig.run()
        assert [number for *_, number in got] == [0, 1, 3]
