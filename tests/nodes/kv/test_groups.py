"""Connection groups: the published formulas and what they are for, balance."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodes.kv import groups


def test_the_evaluated_deployment_has_32_groups_of_10() -> None:
    """Prefill TP32, decode TP1 DP320: decode ranks 0-9 ask prefill rank 0, ..., 310-319 rank 31."""
    evaluated = groups.Groups(prefill_tp_size=32, decode_tp_size=1, decode_dp_size=320)
    assert (evaluated.ratio, evaluated.group_size) == (32, 10)
    ranks = [evaluated.prefill_tp_rank(decode_dp_rank=rank) for rank in range(320)]
    assert ranks == [rank // 10 for rank in range(320)]


def test_decode_with_tensor_parallelism_uses_all_prefill_ranks() -> None:
    """Prefill TP32, decode TP4 DP80: r = 8, g = 10, and each of the 32 prefill ranks has 10 links."""
    sizes = groups.Groups(prefill_tp_size=32, decode_tp_size=4, decode_dp_size=80)
    links = Counter(
        sizes.prefill_tp_rank(decode_dp_rank=dp_rank, decode_tp_rank=tp_rank)
        for dp_rank in range(80)
        for tp_rank in range(4)
    )
    assert (sizes.ratio, sizes.group_size) == (8, 10)
    assert links == dict.fromkeys(range(32), 10)


@settings(deadline=None, max_examples=50)
@given(decode_tp_size=st.integers(1, 8), ratio=st.integers(1, 16), group_size=st.integers(1, 12))
def test_every_prefill_rank_serves_equally_many_decode_ranks(
    decode_tp_size: int, ratio: int, group_size: int
) -> None:
    """The purpose of the grouping, for every admissible size."""
    sizes = groups.Groups(
        prefill_tp_size=ratio * decode_tp_size,
        decode_tp_size=decode_tp_size,
        decode_dp_size=ratio * group_size,
    )
    links = Counter(
        sizes.prefill_tp_rank(decode_dp_rank=dp_rank, decode_tp_rank=tp_rank)
        for dp_rank in range(sizes.decode_dp_size)
        for tp_rank in range(decode_tp_size)
    )
    assert links == dict.fromkeys(range(sizes.prefill_tp_size), group_size)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((32, 3, 320), "prefill_tp_size: 32 is wrong; expected a multiple of 3"),
        ((32, 1, 319), "decode_dp_size: 319 is wrong; expected a multiple of 32"),
        ((32, 1, 16), "decode_dp_size: 16 is wrong; expected a multiple of 32"),
        ((32, 0, 320), "decode_tp_size: 0 is wrong; expected 1 or more"),
    ],
)
def test_sizes_that_cannot_be_balanced_are_refused(
    sizes: tuple[int, int, int], message: str
) -> None:
    """Never rounded: an uneven group would overload one port and say nothing."""
    prefill, tp, dp = sizes
    with pytest.raises(ValueError, match=message):
        groups.Groups(prefill_tp_size=prefill, decode_tp_size=tp, decode_dp_size=dp)
