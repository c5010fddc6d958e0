"""Device times: exact picoseconds, each constant with its source."""

from __future__ import annotations

import pytest

from nodes.ems import device


@pytest.mark.parametrize(
    ("charged_bytes", "put_ps", "get_ps"),
    [
        (0, 1_001_000_000, 1_000_000),
        (1, 1_001_000_027, 1_000_007),
        (35_979_264, 1_945_455_680, 225_870_400),
    ],
)
def test_durations_follow_rate_and_latency(charged_bytes: int, put_ps: int, get_ps: int) -> None:
    """By hand: 20 ps and 6.25 ps a byte, rounded up; a block of 512 tokens is 35,979,264 bytes."""
    assert device.put_duration_ps(charged_bytes) == put_ps
    assert device.get_duration_ps(charged_bytes) == get_ps


def test_every_constant_says_where_it_comes_from() -> None:
    """An assumed one states the range; a published or derived one its paper or page."""
    for constant in device.CONSTANTS:
        if constant.kind == "assumed":
            assert "range" in constant.source
        else:
            assert "paper" in constant.source or "table" in constant.source
    assert len({constant.name for constant in device.CONSTANTS}) == len(device.CONSTANTS)
