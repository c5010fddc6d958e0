"""Ports against exact rational arithmetic, against the closed form, and against reported mistakes."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cmnet import units
from cmnet.link.port import Server
from tests import closed_form

US = 10**6
MS = 10**9
S = 10**12
RATES = (1_000, 999_983, 10**6, 400 * 10**9, 164 * 8 * 10**9, 196 * 8 * 10**9, 10**11)

charged = st.integers(min_value=0, max_value=1 << 22)
rates = st.sampled_from(RATES)
gaps = st.one_of(st.just(0), st.just(1), st.integers(min_value=0, max_value=10**8))
frames = st.lists(st.tuples(gaps, charged, rates), min_size=1, max_size=30)


class ExactServer:
    """Design 2.1 in rational numbers: a busy period is its begin, its rate and its bits so far."""

    def __init__(self) -> None:
        self.free_ps = 0
        self.rate_bps: int | None = None

    def serve(self, start_ps: int, charged_bytes: int, rate_bps: int) -> int:
        if self.rate_bps != rate_bps or start_ps != self.free_ps:
            self.begin_ps, self.bits, self.rate_bps = Fraction(start_ps), Fraction(0), rate_bps
        self.bits += 8 * charged_bytes
        self.free_ps = ceil(self.begin_ps + self.bits / Fraction(rate_bps, S))
        return self.free_ps

    def receive(self, first_ps: int, last_ps: int, charged_bytes: int, rate_bps: int) -> int:
        served_ps = self.serve(max(first_ps, self.free_ps), charged_bytes, rate_bps)
        if served_ps < last_ps:
            self.free_ps, self.rate_bps = last_ps, None
        return self.free_ps


@settings(deadline=None, max_examples=60)
@given(frames)
def test_egress_equals_exact_arithmetic(sequence: list[tuple[int, int, int]]) -> None:
    """Any mix of sizes, idle gaps and rate changes: not a picosecond of difference."""
    server, exact, now_ps = Server(), ExactServer(), 0
    for gap_ps, size, rate_bps in sequence:
        now_ps += gap_ps
        start_ps = max(now_ps, server.free_ps)
        assert server.serve(start_ps, size, rate_bps) == exact.serve(start_ps, size, rate_bps)
        assert server.free_ps == exact.free_ps


@settings(deadline=None, max_examples=60)
@given(frames, st.lists(gaps, min_size=30, max_size=30))
def test_ingress_equals_exact_arithmetic(
    sequence: list[tuple[int, int, int]], stretches: list[int]
) -> None:
    """Cut-through arrivals whose last byte comes at any time after the first."""
    server, exact, first_ps = Server(), ExactServer(), 0
    for (gap_ps, size, rate_bps), stretch_ps in zip(sequence, stretches):
        first_ps += gap_ps
        last_ps = first_ps + stretch_ps
        delivered_ps = server.receive(first_ps, last_ps, size, rate_bps)
        assert delivered_ps == exact.receive(first_ps, last_ps, size, rate_bps)
        assert delivered_ps >= last_ps


@settings(deadline=None, max_examples=60)
@given(st.lists(charged, min_size=1, max_size=40), rates, st.integers(0, 10**13))
def test_rounding_never_adds_up(sizes: list[int], rate_bps: int, begin_ps: int) -> None:
    """The k-th finish of a busy period depends on the sum of the bits only, however it is cut."""
    server = Server()
    finish_ps = server.serve(begin_ps, 0, rate_bps)
    for size in sizes:
        finish_ps = server.serve(server.free_ps, size, rate_bps)
    assert finish_ps == begin_ps + units.serialization_delay_ps(sum(sizes), rate_bps)


@settings(deadline=None, max_examples=60)
@given(frames, st.integers(0, 10**9))
def test_an_idle_ingress_of_the_same_rate_adds_nothing(
    sequence: list[tuple[int, int, int]], propagation_ps: int
) -> None:
    """Design 2.1: an uncontended frame pays its serialisation once, in busy periods too."""
    egress, ingress, now_ps = Server(), Server(), 0
    rate_bps = sequence[0][2]
    for gap_ps, size, _ in sequence:
        now_ps += gap_ps
        start_ps = max(now_ps, egress.free_ps)
        finish_ps = egress.serve(start_ps, size, rate_bps)
        first_ps, last_ps = start_ps + propagation_ps, finish_ps + propagation_ps
        assert ingress.receive(first_ps, last_ps, size, rate_bps) == last_ps


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(0, 4 * US), st.integers(0, 2 * US), st.integers(1, 1 << 18)),
        min_size=1,
        max_size=40,
    )
)
def test_incast_is_the_recurrence_of_the_design(arrivals: list[tuple[int, int, int]]) -> None:
    """Many sources at one ingress, in order of first byte; 1 B takes exactly 20 ps at this rate."""
    rate_bps = 400 * 10**9
    ordered = sorted((first, first + stretch, size) for first, stretch, size in arrivals)
    server = Server()
    measured = [server.receive(first, last, size, rate_bps) for first, last, size in ordered]
    assert measured == closed_form.incast_deliveries_ps(ordered, rate_bps=rate_bps)


def chunk_by_chunk(
    sizes: list[int], *, chunk_bytes: int, rate_bps: int, propagation_ps: int
) -> list[int]:
    """Play the port's rule literally: a started chunk queues its flow's next behind what waits."""
    egress, ingress = Server(), Server()
    left = list(sizes)
    waiting = list(range(len(sizes)))
    delivered = [0] * len(sizes)
    while waiting:
        flow = waiting.pop(0)
        size = min(left[flow], chunk_bytes)
        left[flow] -= size
        if left[flow]:
            waiting.append(flow)
        first_ps = egress.free_ps + propagation_ps
        last_ps = egress.serve(egress.free_ps, size, rate_bps) + propagation_ps
        delivered[flow] = ingress.receive(first_ps, last_ps, size, rate_bps)
    return delivered


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 20_000), min_size=1, max_size=12), st.integers(1, 5_000), rates)
def test_the_closed_form_of_uneven_flows(sizes: list[int], chunk_bytes: int, rate_bps: int) -> None:
    """Flows of any size that share a port chunk by chunk: closed form = played, 0 ps apart."""
    shape = {"chunk_bytes": chunk_bytes, "rate_bps": rate_bps, "propagation_ps": 613_000}
    assert chunk_by_chunk(sizes, **shape) == closed_form.uneven_deliveries_ps(sizes, **shape)


@pytest.mark.parametrize("flows", [1, 2, 10, 100, 1000])
@pytest.mark.parametrize("size", [0, 32, 512, 65_536, 65_537, 1 << 20, 3_000_000, 1 << 30])
def test_the_closed_form_of_equal_flows(flows: int, size: int) -> None:
    """The two closed forms agree, and at most 64 chunks are also played through the ports."""
    shape = {"chunk_bytes": 1 << 20, "rate_bps": 164 * 8 * 10**9, "propagation_ps": 948_439}
    expected = closed_form.deliveries_ps(flows, size, **shape)
    if flows <= 100:
        assert expected == closed_form.uneven_deliveries_ps([size] * flows, **shape)
    if flows * max(1, size >> 20) <= 3_000:
        assert expected == chunk_by_chunk([size] * flows, **shape)


def test_a_small_frame_on_a_slow_idle_link_is_not_free() -> None:
    """Reported of a kernel shaper: 50 B crossed a 1000 B/s idle link in 0 s."""
    rate_bps = units.parse_rate_bps("1 KB/s")
    egress, ingress = Server(), Server()
    finish_ps = egress.serve(5 * S, 50, rate_bps)
    assert finish_ps == 5 * S + 50 * MS
    delivered_ps = ingress.receive(5 * S + US, finish_ps + US, 50, rate_bps)
    assert delivered_ps == 5 * S + 50 * MS + US


def test_bytes_are_not_bits() -> None:
    """Reported of a container emulator: 1 Gb/s gave 7.1 Gb/s. 125 MB take one second."""
    assert Server().serve(0, 125_000_000, units.parse_rate_bps("1 Gbit/s")) == S
    assert Server().serve(0, 125_000_000, units.parse_rate_bps("125 MB/s")) == S
    assert Server().serve(0, 125_000_000, units.parse_rate_bps("1 GB/s")) == S // 8


@pytest.mark.parametrize("exponent", range(3, 12))
def test_no_rate_is_truncated(exponent: int) -> None:
    """Reported of a shaper's configuration: rates from 1 kbit/s to 100 Gbit/s lost digits."""
    rate_bps = 10**exponent
    assert Server().serve(0, 1500, rate_bps) == 12_000 * 10 ** (12 - exponent)
    assert Server().serve(0, 1500, rate_bps - 1) == -(-12_000 * S // (rate_bps - 1))


@pytest.mark.parametrize("delay_ps", [0, 3 * MS, 30 * MS, 60 * MS])
@pytest.mark.parametrize("rate_bps", [10**8, 10**9])
def test_propagation_takes_no_bandwidth(delay_ps: int, rate_bps: int) -> None:
    """Reported: 100 Mb/s with 3, 30, 60 ms gave 750, 710, 380 Mb/s. Rate and delay are apart."""
    delivered = closed_form.deliveries_ps(
        1, 10**7, chunk_bytes=1 << 16, rate_bps=rate_bps, propagation_ps=delay_ps
    )
    played = chunk_by_chunk(
        [10**7], chunk_bytes=1 << 16, rate_bps=rate_bps, propagation_ps=delay_ps
    )
    assert delivered == played == [8 * 10**7 * S // rate_bps + delay_ps]


def test_a_rate_changes_with_the_next_frame() -> None:
    """Reported: a live change dropped the queue. 10, 5, none-like, 20 Mb/s: each frame its own."""
    server = Server()
    for rate_mbps in (10, 5, 10**5, 20):
        before_ps = server.free_ps
        assert server.serve(before_ps, 1250, rate_mbps * 10**6) - before_ps == 10**10 // rate_mbps


def test_an_asymmetric_link_has_two_rates() -> None:
    """Reported: the upward rate was ignored. The slower of the two ports decides, in both orders."""
    for out_bps, in_bps in ((10**7, 10**6), (10**6, 10**7)):
        finish_ps = Server().serve(0, 1250, out_bps)
        assert Server().receive(US, finish_ps + US, 1250, in_bps) == 10 * MS + US


def test_a_lone_ub_read_completes_at_the_printed_latency() -> None:
    """Design 2.3: propagation is chosen for that; an odd picosecond is the reader's."""
    rate_bps, latency_ps = units.parse_rate_bps("164 GB/s"), 1_900_000
    there_ps = closed_form.ub_propagation_ps(latency_ps, rate_bps)
    request_ps = Server().serve(0, 0, rate_bps) + there_ps
    data_ps = Server().serve(request_ps, 512, rate_bps) + there_ps
    assert 0 <= latency_ps - data_ps <= 1
    shape = {"latency_ps": latency_ps, "rate_bps": rate_bps}
    assert closed_form.read_completion_ps(512, **shape) == latency_ps
    one = closed_form.read_completions_ps(1, 1 << 21, chunk_bytes=1 << 20, **shape)
    assert one == [closed_form.read_completion_ps(1 << 21, **shape)]
