"""Numbers with a source: what they read as, and what they refuse."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from cmnet.topology.quantity import (
    Count,
    Duration,
    FieldError,
    Kind,
    Number,
    Rate,
    Share,
    Size,
    parse_share_ppm,
)

CASES: list[tuple[type[Number], Any, int]] = [
    (Duration, "1.9 us", 1_900_000),
    (Duration, "0 us", 0),
    (Size, "1 MiB", 1_048_576),
    (Size, "512 B", 512),
    (Rate, "28 GB/s", 224_000_000_000),
    (Rate, "200 Gbit/s", 200_000_000_000),
    (Share, "91 %", 910_000),
    (Share, "100%", 1_000_000),
    (Share, "12.5 %", 125_000),
    (Count, 48, 48),
]


@pytest.mark.parametrize(("sort", "value", "amount"), CASES)
def test_amount_is_the_exact_integer_of_the_text(
    sort: type[Number], value: Any, amount: int
) -> None:
    """ps, bytes, bit/s, millionths, or the count itself."""
    data = {"value": value, "kind": "published", "source": "paper"}
    assert msgspec.convert(data, sort).amount == amount


@pytest.mark.parametrize("text", ["", "91", "-1 %", "1e2 %", "1.23456 %", "ninety %", "1000 %"])
def test_a_share_is_a_plain_percentage(text: str) -> None:
    """Nothing that could be read in two ways."""
    with pytest.raises(ValueError, match="percent"):
        parse_share_ppm(text)


def duration(**changes: Any) -> Duration:
    fields = {"value": "2 us", "kind": Kind.ASSUMED, "source": "ours", "range": ("1 us", "10 us")}
    return Duration(**{**fields, **changes})


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"range": None}, "range", "assumed"),
    ({"source": "  "}, "source", "where this number comes from"),
    ({"value": "11 us"}, "value", "within its range, 1 us to 10 us"),
    ({"value": "0.5 us"}, "value", "within its range"),
    ({"range": ("10 us", "1 us")}, "value", "within its range"),
    ({"range": ("1", "10 us")}, "range[0]", "unit"),
    ({"range": ("1 us", "10 GB/s")}, "range[1]", "unit"),
    ({"value": "2"}, "value", "unit"),
    ({"value": "2.0000001 us"}, "value", "whole number of its smallest unit"),
    ({"value": "-2 us"}, "value", "not negative"),
]


@pytest.mark.parametrize(("changes", "field", "expected"), REFUSED)
def test_a_wrong_field_is_named(changes: dict[str, Any], field: str, expected: str) -> None:
    """The loader builds the key from ``field``, so each refusal says which field it means."""
    with pytest.raises(FieldError) as caught:
        duration(**changes)
    assert caught.value.field == field
    assert expected in caught.value.expected


def test_a_count_outside_its_range_is_refused() -> None:
    """As a quantity's, but without units."""
    with pytest.raises(FieldError, match="within its range, 1 to 8"):
        Count(value=9, kind=Kind.ASSUMED, source="ours", range=(1, 8))
    assert Count(value=8, kind=Kind.ASSUMED, source="ours", range=(1, 8)).amount == 8


def test_an_assumed_count_needs_a_range() -> None:
    """No number without a source may stand alone."""
    with pytest.raises(FieldError, match="range"):
        Count(value=8, kind=Kind.ASSUMED, source="ours")
