"""How long the store's memory and disk take, in virtual time.

Owns the rates and the two durations. Does not own queues: operations of a node overlap freely, and
the transfer between client and owner is the plane's, charged at its ports. Pure; integer
picoseconds of charged bytes (design 2.2).

A put is acknowledged when it is on the disk (EVS) and then in DRAM: "data is written to EVS for
durability first". A get is served from DRAM.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from cmnet.units import parse_duration_ps, parse_rate_bps, serialization_delay_ps


class Constant(msgspec.Struct, frozen=True, kw_only=True):
    """A number of the real machine, as a text with its unit, and where it comes from."""

    name: str
    value: str
    kind: Literal["published", "derived", "fitted", "assumed"]
    source: str


EVS_RATE = Constant(
    name="evs_rate",
    value="400 Gbit/s",
    kind="derived",
    source="CloudMatrix384 paper, EMS: SSD reads of 48 x 400 Gbit/s together, so one node's VPC"
    " port; writes taken as fast as reads",
)
EVS_LATENCY = Constant(
    name="evs_latency",
    value="1 ms",
    kind="published",
    source="Huawei Cloud, EVS disk types and performance, table 1: single-queue access latency of"
    " Ultra-high I/O disks (Extreme SSD: below 1 ms)",
)
DRAM_RATE = Constant(
    name="dram_rate",
    value="160 GB/s",
    kind="assumed",
    source="memory at least as fast as the UB port of its CPU (~160 GB/s); range 100 to 320 GB/s",
)
DRAM_LATENCY = Constant(
    name="dram_latency",
    value="1 us",
    kind="assumed",
    source="finding the key and starting the copy; range 0.2 to 5 us",
)
CONSTANTS = (EVS_RATE, EVS_LATENCY, DRAM_RATE, DRAM_LATENCY)

_EVS_RATE_BPS = parse_rate_bps(EVS_RATE.value)
_EVS_LATENCY_PS = parse_duration_ps(EVS_LATENCY.value)
_DRAM_RATE_BPS = parse_rate_bps(DRAM_RATE.value)
_DRAM_LATENCY_PS = parse_duration_ps(DRAM_LATENCY.value)


def put_duration_ps(charged_bytes: int) -> int:
    """From the owner's having all bytes to its acknowledgement: disk, then memory.

    >>> put_duration_ps(0), put_duration_ps(50_000_000)
    (1001000000, 2313500000)
    """
    evs_ps = _EVS_LATENCY_PS + serialization_delay_ps(charged_bytes, _EVS_RATE_BPS)
    return evs_ps + get_duration_ps(charged_bytes)


def get_duration_ps(charged_bytes: int) -> int:
    """From the request at the owner to all bytes ready to send: memory only.

    >>> get_duration_ps(0), get_duration_ps(16_000_000)
    (1000000, 101000000)
    """
    return _DRAM_LATENCY_PS + serialization_delay_ps(charged_bytes, _DRAM_RATE_BPS)
