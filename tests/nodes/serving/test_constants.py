"""The one list of numbers: complete, sourced, and few of them fitted."""

from __future__ import annotations

import pytest

from cmnet.topology.quantity import Kind
from nodes.constants import CONSTANTS, Constant

FITTED_MAX = 9
"""In the whole product."""


def test_the_list_holds_every_constant_once() -> None:
    """Reports print the list: what is not in it would be a hidden number."""
    names = [constant.name for constant in CONSTANTS]
    assert len(set(names)) == len(names) > 20


def test_the_eight_fitted_numbers_are_the_ones_that_published_figures_can_tell_apart() -> None:
    """One more would be noise that looks like agreement."""
    fitted = [constant.name for constant in CONSTANTS if constant.kind is Kind.FITTED]
    assert fitted == [
        "dispatch_token",
        "combine_token",
        "exchange_growth",
        "layer_overhead",
        "token_overhead",
        "hottest_expert",
        "prefill_rest",
        "prefill_hidden",
    ]
    assert len(fitted) <= FITTED_MAX


@pytest.mark.parametrize("constant", CONSTANTS, ids=lambda constant: constant.name)
def test_a_constant_says_where_it_comes_from(constant: Constant) -> None:
    """A fitted or assumed one also says what was tried, and lies within it."""
    assert constant.source.strip()
    assert constant.unit.strip()
    if constant.kind in (Kind.FITTED, Kind.ASSUMED):
        assert constant.range is not None
        assert constant.range[0] <= constant.value <= constant.range[1]
