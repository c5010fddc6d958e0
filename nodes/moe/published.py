"""Published figures of dispatch and combine, as ``moe --table`` prints them beside its own. Pure.

Owns the figures and how far each is confirmed: [P] by the source itself, [V2] by two readings of it, [V1] by
one, [M] recalled. Latencies in us. Does not own what is compared with them.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Operator = Literal["dispatch", "combine"]
OPERATORS: tuple[Operator, ...] = ("dispatch", "combine")

PRINTED_UNIT = 2**20 / 10**6
"""The paper's bandwidth column is bytes x this / latency in all 12 rows, to rounding: a unit slip [D]."""


class Figure(msgspec.Struct, frozen=True):
    """One printed number."""

    value: float
    tag: str


class Pair(msgspec.Struct, frozen=True):
    """Of both operators."""

    dispatch: Figure
    combine: Figure


def _pair(dispatch: float, dispatch_tag: str, combine: float, combine_tag: str) -> Pair:
    return Pair(Figure(dispatch, dispatch_tag), Figure(combine, combine_tag))


CANN_SOURCE = "CloudMatrix384, arXiv 2506.12708, table 6, batch 128: CANN EP"
CANN: dict[int, Pair] = {
    8: _pair(116, "V2", 118, "V2"),
    16: _pair(131, "M", 126, "M"),
    32: _pair(133, "M", 139, "M"),
    64: _pair(141, "M", 139, "M"),
    128: _pair(152, "M", 147, "M"),
    256: _pair(152, "V2", 149, "V2"),
}
CANN_PRINTED_GB_PER_S: dict[int, Pair] = {
    8: _pair(71, "V2", 131, "V2"),
    16: _pair(63, "M", 122, "M"),
    32: _pair(62, "M", 111, "M"),
    64: _pair(58, "M", 111, "M"),
    128: _pair(54, "M", 105, "M"),
    256: _pair(54, "V2", 103, "V2"),
}
FITTED_EP = (8, 256)
"""What the three constants of the exchange are fitted to; the rows between are predictions."""

DEEPEP_SOURCE = "DeepEP's README at release, the same shape on H800 with CX7: another machine"
DEEPEP: dict[int, Pair] = {
    8: _pair(163, "P", 318, "P"),
    16: _pair(173, "P", 329, "P"),
    32: _pair(182, "P", 350, "P"),
    64: _pair(186, "P", 353, "P"),
    128: _pair(192, "P", 369, "P"),
    256: _pair(194, "P", 360, "P"),
}

DEEPEP_ASCEND_SOURCE = (
    "DeepEP-Ascend on this machine, low latency mode, sgl-kernel-npu README @f425bdf: no goal, as the"
    " paper's own 116 us is 12 % under its 132"
)
DEEPEP_ASCEND: dict[int, Pair] = {
    8: _pair(132, "P", 126, "P"),
    16: _pair(139, "P", 135, "P"),
    32: _pair(153, "P", 151, "P"),
}

XDEEPSERVE_SOURCE = "xDeepServe, arXiv 2508.02520, figure 6 (a plot, pull-based operators), EP 128"
XDEEPSERVE: dict[int, Pair] = {4: _pair(20, "V1", 25, "V1"), 128: _pair(100, "V1", 120, "V1")}
"""By batch."""

EP_TABLE = (8, 16, 32, 64, 128, 256)
EP_TABLE_BATCH = 128
BATCH_TABLE = (4, 8, 16, 32, 64, 80, 96, 128)
BATCH_TABLE_EP = 128
