"""What a measurement on idle, faultless links must be: design 2.1 in closed form. Pure.

Owns the numbers printed beside measured ones. The tests have their own, which imports nothing of cmnet.

N equal flows are posted at one instant, in order, between two idle ports. A flow keeps one chunk in the
port and queues its next behind what waits when that one starts, so the port serves round by round: the
first chunk of every flow, then the second of every flow. All of it is one busy period, in which a chunk
ends when the bits up to its own have passed, rounded up once. Ingress serves at the same rate, one
propagation later.

>>> deliveries_ps(2, 3, chunk_bytes=2, rate_bps=8 * 10**12, propagation_ps=100)
[105, 106]
"""

from __future__ import annotations

from cmnet.units import serialization_delay_ps


def deliveries_ps(
    flows: int, size_bytes: int, *, chunk_bytes: int, rate_bps: int, propagation_ps: int
) -> list[int]:
    """From the post to the last byte of each flow at its target."""
    full_rounds = max(0, -(-size_bytes // chunk_bytes) - 1)
    rest_bytes = size_bytes - full_rounds * chunk_bytes
    before_bytes = flows * full_rounds * chunk_bytes
    return [
        propagation_ps + serialization_delay_ps(before_bytes + place * rest_bytes, rate_bps)
        for place in range(1, flows + 1)
    ]


def completion_ps(
    size_bytes: int, *, rate_bps: int, propagation_ps: int, completion_ps: int
) -> int:
    """A lone write (or message) of any plane until its initiator knows."""
    return propagation_ps + serialization_delay_ps(size_bytes, rate_bps) + completion_ps


def read_completion_ps(
    size_bytes: int, *, rate_bps: int, propagation_ps: int, completion_ps: int
) -> int:
    """A lone read: a request of no charged bytes, then the data."""
    return 2 * propagation_ps + serialization_delay_ps(size_bytes, rate_bps) + completion_ps
