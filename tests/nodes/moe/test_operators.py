"""What an operator costs beside its links: the numbers of the list, and that more is never less."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from nodes import constants as c
from nodes.moe.operators import Operators
from nodes.settings import ModelSettings

MODEL = ModelSettings()
US = 10**6
EPS = (1, 8, 16, 64, 256, 320)


def of(ep_size: int, **changes: object) -> Operators:
    return Operators(ep_size=ep_size, model=MODEL, **changes)  # type: ignore[arg-type]  # by name


def test_starts_are_those_of_the_list() -> None:
    """And what the engine needs, and in the unfused flow a launch before each exchange."""
    assert (of(8).dispatch_start_ps, of(8).combine_start_ps) == (17 * US, 11 * US)
    assert of(8, engine_start_ps=5 * US).dispatch_start_ps == 22 * US
    launch_ps = round(c.UNFUSED_LAUNCH.value * 1e12)
    unfused = of(8, unfused=True, engine_start_ps=5 * US)
    assert unfused.combine_start_ps == 16 * US + launch_ps
    assert (of(8).launch_ps, unfused.launch_ps) == (0, launch_ps)


def test_the_first_token_passes_two_stages_and_the_next_ones_follow() -> None:
    """A pipeline: copy and quantise of one overlap those of the one before it."""
    copy_ps = round(MODEL.combine_bytes / (c.HBM_RATE.value * c.MEMORY_SHARE.value) * 1e12)
    assert of(8).tokens_ready_ps(4).tolist() == [2 * copy_ps + copy_ps * n for n in range(4)]
    assert of(8).results_ready_ps(3).tolist() == [copy_ps, 2 * copy_ps, 3 * copy_ps]
    assert len(of(8).tokens_ready_ps(0)) == len(of(8).results_ready_ps(0)) == 0


@pytest.mark.parametrize(("small", "large"), list(itertools.pairwise(EPS)))
def test_more_ranks_rows_and_tokens_take_longer(small: int, large: int) -> None:
    """Growth counts from EP 8; below, nothing was measured."""
    before, after = (
        np.array([of(size).reorder_ps(768), of(size).sum_ps(96)]) for size in (small, large)
    )
    assert (before < after if small >= 8 else before == after).all()
    assert of(large).reorder_ps(0) == of(large).sum_ps(0) == 0
    assert of(large).reorder_ps(767) < of(large).reorder_ps(768)
    assert of(large).sum_ps(95) < of(large).sum_ps(96)


def test_a_token_of_the_smallest_group_costs_the_fitted_number() -> None:
    """Of a dispatch in top-k rows; a doubling of the group adds its part to each."""
    assert of(8).reorder_ps(MODEL.top_k) == round(c.DISPATCH_TOKEN.value * 1e12)
    assert of(8).sum_ps(1) == round(c.COMBINE_TOKEN.value * 1e12)
    doubling_ps = of(16).sum_ps(1) - of(8).sum_ps(1)
    assert doubling_ps == round(c.EXCHANGE_GROWTH.value * 1e12)
    assert of(256).sum_ps(1) - of(8).sum_ps(1) == 5 * doubling_ps


def test_instants_never_fall() -> None:
    for ready_ps in (of(320).tokens_ready_ps(96), of(320).results_ready_ps(900)):
        assert ready_ps.dtype == np.int64
        assert (np.diff(ready_ps) > 0).all()
