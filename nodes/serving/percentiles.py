"""What a request's times are called, and how many of them become one line of a report.

Owns the definitions of TTFT, TPOT and ITL and of a percentile, on exact integers. Does not own the
instants: it is given when a request was sent and when each of its output tokens was received.

- TTFT: request sent to first output token received; queueing, prefill and network included.
- TPOT: (last token - first token) / (output tokens - 1), one value a request with two tokens or more.
- ITL: the gap between two tokens, one value a gap; tokens that one step makes together have gap 0.
- Percentile: the nearest rank, that is the least value with at least this share of all values at or
  below it. It is always a value that occurred; nothing is interpolated.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import msgspec


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Many times in one line."""

    count: int
    mean_ps: int
    """Rounded to the nearest, half up."""
    p50_ps: int
    p90_ps: int
    p99_ps: int
    max_ps: int


def ttft_ps(*, sent_ps: int, received_ps: Sequence[int]) -> int:
    """Request sent to first token received."""
    return received_ps[0] - sent_ps


def tpot_ps(received_ps: Sequence[int]) -> int | None:
    """Mean time per output token after the first; None for fewer than two tokens.

    >>> tpot_ps([10, 20, 31])
    11
    """
    if len(received_ps) < 2:
        return None
    return _nearest(received_ps[-1] - received_ps[0], len(received_ps) - 1)


def itl_ps(received_ps: Sequence[int]) -> list[int]:
    """The gaps between tokens, in order.

    >>> itl_ps([10, 20, 20, 31])
    [10, 0, 11]
    """
    return [after - before for before, after in itertools.pairwise(received_ps)]


def nearest_rank(ordered: Sequence[int], *, per_mille: int) -> int:
    """The percentile of values in ascending order: 500 is the median, 990 the 99th.

    >>> nearest_rank([15, 20, 35, 40, 50], per_mille=300)
    20
    >>> nearest_rank([15, 20, 35, 40, 50], per_mille=1000)
    50
    """
    assert ordered, "no values, no percentile"
    assert 0 < per_mille <= 1000, per_mille
    return ordered[-(-len(ordered) * per_mille // 1000) - 1]


def summarize(values_ps: Iterable[int]) -> Summary | None:
    """One line of a report; None where there is nothing to report."""
    ordered = sorted(values_ps)
    if not ordered:
        return None
    return Summary(
        count=len(ordered),
        mean_ps=_nearest(sum(ordered), len(ordered)),
        p50_ps=nearest_rank(ordered, per_mille=500),
        p90_ps=nearest_rank(ordered, per_mille=900),
        p99_ps=nearest_rank(ordered, per_mille=990),
        max_ps=ordered[-1],
    )


def _nearest(total: int, count: int) -> int:
    return (2 * total + count) // (2 * count)
