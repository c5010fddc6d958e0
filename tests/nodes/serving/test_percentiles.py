"""Times of requests: definitions on exact integers."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from nodes.serving import percentiles

TIMES = st.lists(st.integers(0, 10**15), min_size=1, max_size=60)


def test_a_request_has_one_ttft_one_tpot_and_a_gap_less_than_tokens() -> None:
    """Sent at 5; tokens at 105, 125, 125 (one step made two) and 150."""
    received_ps = [105, 125, 125, 150]
    assert percentiles.ttft_ps(sent_ps=5, received_ps=received_ps) == 100
    assert percentiles.tpot_ps(received_ps) == 15
    assert percentiles.itl_ps(received_ps) == [20, 0, 25]


def test_one_token_has_no_tpot_and_no_gap() -> None:
    """Nothing to divide by; 0 would make the percentiles look better than they are."""
    assert percentiles.tpot_ps([7]) is None
    assert percentiles.itl_ps([7]) == []
    assert percentiles.summarize([]) is None


@settings(deadline=None, max_examples=100)
@given(values=TIMES, per_mille=st.integers(1, 1000))
def test_the_percentile_is_the_least_value_with_that_share_at_or_below_it(
    values: list[int], per_mille: int
) -> None:
    """The definition itself, counted the slow way."""
    share = Fraction(per_mille, 1000)
    enough = [
        value
        for value in values
        if Fraction(sum(other <= value for other in values), len(values)) >= share
    ]
    assert percentiles.nearest_rank(sorted(values), per_mille=per_mille) == min(enough)


@settings(deadline=None, max_examples=50)
@given(values=TIMES)
def test_a_summary_is_the_same_in_any_order_and_keeps_the_order_of_its_columns(
    values: list[int],
) -> None:
    """Values arrive in the order of nodes; the report must not depend on it."""
    summary = percentiles.summarize(values)
    assert summary == percentiles.summarize(values[::-1])
    assert summary is not None
    assert summary.p50_ps <= summary.p90_ps <= summary.p99_ps <= summary.max_ps == max(values)
    assert abs(summary.mean_ps - Fraction(sum(values), len(values))) <= Fraction(1, 2)
