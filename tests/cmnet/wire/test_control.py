"""Control messages come back as they were sent."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from cmnet.units import NEVER_PS
from cmnet.vtime.horizon import Grant
from cmnet.wire import control
from cmnet.wire.control import Report

INSTANTS = st.integers(0, NEVER_PS)
U32 = st.integers(0, 2**32 - 1)


@settings(deadline=None, max_examples=60)
@given(
    window=U32, horizon_ps=INSTANTS, frames_expected=st.integers(0, 2**63), barrier=st.booleans()
)
def test_grants(window: int, horizon_ps: int, frames_expected: int, barrier: bool) -> None:
    packet = control.encode_grant(Grant(3, window, horizon_ps, frames_expected, barrier))
    assert packet[0] == control.GRANT
    assert control.decode_grant(packet) == (window, horizon_ps, frames_expected, barrier)


@settings(deadline=None, max_examples=60)
@given(
    window=U32,
    instants=st.tuples(INSTANTS, INSTANTS, INSTANTS, INSTANTS),
    outstanding=st.integers(-(2**31), 2**31 - 1),
    sends=st.lists(st.tuples(st.integers(0, 2**16 - 1), U32, INSTANTS, INSTANTS), max_size=60),
)
def test_reports(
    window: int,
    instants: tuple[int, int, int, int],
    outstanding: int,
    sends: list[tuple[int, int, int, int]],
) -> None:
    report = Report(window, *instants, outstanding, bytes(range(16)), sends)
    packet = control.encode_report(report)
    assert packet[0] == control.REPORT
    assert control.decode_report(packet) == report


def test_a_report_of_a_machine_of_a_thousand_nodes_fits_a_packet() -> None:
    sends = [(peer, 2**32 - 1, NEVER_PS, NEVER_PS) for peer in range(1000)]
    report = Report(2**32 - 1, NEVER_PS, NEVER_PS, NEVER_PS, NEVER_PS, 1, bytes(16), sends)
    assert len(control.encode_report(report)) < control.PACKET_BYTES_MAX


def test_rare_messages() -> None:
    packet = control.encode_rare("peer_down", process=3, what_else=["a", 1])
    assert packet[0] == control.RARE
    assert control.decode_rare(packet) == {"what": "peer_down", "process": 3, "what_else": ["a", 1]}
