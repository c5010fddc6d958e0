"""Values of options: exact, or refused with the option's name and what would be right."""

from __future__ import annotations

import doctest
from fractions import Fraction

import pytest

from cmnet.errors import InputError
from cmnet.launch import options


def test_the_examples_hold() -> None:
    """They are the documentation."""
    assert doctest.testmod(options).failed == 0


@pytest.mark.parametrize(("text", "value"), [("0", 0), ("9223372036854775807", 2**63 - 1)])
def test_seeds_are_63_bits(text: str, value: int) -> None:
    """Both ends of the range."""
    assert options.seed(text) == value


@pytest.mark.parametrize("text", ["", "-1", "+1", "1_0", "9223372036854775808", "٣", "1" * 30])
def test_other_seeds_are_refused(text: str) -> None:
    """Python's int() takes more than people mean."""
    with pytest.raises(InputError, match="--seed"):
        options.seed(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2", Fraction(2)),
        ("0.1", Fraction(1, 10)),
        ("1/3", Fraction(1, 3)),
        ("1e3", Fraction(1000)),
    ],
)
def test_rates_are_exact(text: str, value: Fraction) -> None:
    """A float of 0.1 is not a tenth, and arrivals would move by picoseconds."""
    assert options.positive(text, option="--rate") == value


@pytest.mark.parametrize("text", ["0", "0.0", "-1", "inf", "nan", "1/0", "", "2x", " 2", "0/5"])
def test_other_rates_are_refused(text: str) -> None:
    """Nothing arrives at rate 0, and time does not go back."""
    with pytest.raises(InputError, match="--rate"):
        options.positive(text, option="--rate")


@pytest.mark.parametrize("text", ["4KiB", "4 KiB", "4096 B"])
def test_a_size_may_stand_with_or_without_a_space(text: str) -> None:
    """A shell splits at spaces."""
    assert options.socket_buffer_bytes(text) == 4096


@pytest.mark.parametrize("text", ["4095 B", "2 GiB", "4096", "KiB", "-4 KiB", "0.5 B"])
def test_other_sizes_are_refused(text: str) -> None:
    """Out of range, or without a unit."""
    with pytest.raises(InputError, match="--socket-buffer"):
        options.socket_buffer_bytes(text)


def test_counts_have_both_ends() -> None:
    """Least and most are allowed, the neighbours are not."""
    assert [options.count(text, option="--n", least=2, most=4) for text in "234"] == [2, 3, 4]
    for text in ("1", "5", "2.0", "", "two"):
        with pytest.raises(InputError, match="from 2 to 4"):
            options.count(text, option="--n", least=2, most=4)


def test_a_choice_tells_what_is_planned_from_what_is_wrong() -> None:
    """Somebody who read the design must not look for a slip of his own."""
    assert options.choice("a", option="--x", built=("a", "b")) == "a"
    with pytest.raises(InputError, match="a or b: not built yet"):
        options.choice("c", option="--x", built=("a", "b"), planned=("c",))
    with pytest.raises(InputError, match=r"'d' is wrong; expected a or b$"):
        options.choice("d", option="--x", built=("a", "b"), planned=("c",))
