"""Numbers of a topology: a value with its unit, its kind and its source.

Owns the five sorts of number that a topology (and its extension sections) may hold and how their
text becomes an exact integer. Does not own which numbers exist (``schema``) nor their limits. A
number says where it comes from, because a figure without a source cannot be trusted or corrected:

    propagation: {value: "2 us", kind: assumed, source: "unpublished", range: ["1 us", "10 us"]}

>>> Rate(value="28 GB/s", kind=Kind.PUBLISHED, source="paper, section 1.2").amount
224000000000
"""

from __future__ import annotations

import enum
import re
from typing import ClassVar

import msgspec

from cmnet import units


class FieldError(ValueError):
    """A field of a struct is wrong. ``field`` is relative to where it is raised, dotted.

    Raise it from ``__post_init__`` or ``check_machine`` of an extension section; the loader adds
    the file and the rest of the key and turns it into an InputError.
    """

    def __init__(self, field: str, expected: str) -> None:
        self.field, self.expected = field, expected
        super().__init__(f"{field}: expected {expected}")


class Kind(enum.Enum):
    """How far a number can be trusted."""

    PUBLISHED = "published"
    """Printed by the paper or another measurement of the machine."""
    DERIVED = "derived"
    """Follows from published numbers by arithmetic."""
    FITTED = "fitted"
    """Chosen so that a published result comes out."""
    ASSUMED = "assumed"
    """No source; ``range`` says between which values to try."""


_PERCENT = re.compile(r"\s*(\d{1,3})(?:\.(\d{1,4}))?\s*%\s*")


def parse_share_ppm(text: str) -> int:
    """Millionths of ``"91 %"``. Raises ValueError that says what would be right.

    >>> parse_share_ppm("91 %")
    910000
    """
    match = _PERCENT.fullmatch(text)
    if match is None:
        raise ValueError("a share in percent, such as '91 %'")
    return int(match[1]) * 10_000 + int((match[2] or "").ljust(4, "0"))


class Quantity(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A number with its unit. ``amount`` is what the program computes with."""

    example: ClassVar[str]

    value: str
    kind: Kind
    source: str
    range: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        _check_origin(self)
        if self.range is None:
            self._read("value", self.value)
            return
        low, high = (self._read(f"range[{end}]", self.range[end]) for end in (0, 1))
        if not low <= self._read("value", self.value) <= high:
            raise FieldError(
                "value", f"a value within its range, {self.range[0]} to {self.range[1]}"
            )

    def _read(self, field: str, text: str) -> int:
        try:
            return self.parse(text)
        except ValueError as error:
            raise FieldError(field, str(error)) from None
        except ArithmeticError:  # Decimal's own, of an exponent beyond all sizes
            raise FieldError(field, f"a value of ordinary size, such as {self.example!r}") from None

    @staticmethod
    def parse(text: str) -> int:
        """Text to integer, in the unit that the subclass names. Raises ValueError."""
        raise NotImplementedError

    @property
    def amount(self) -> int:
        """The exact integer, in the unit that the subclass names."""
        return self.parse(self.value)


class Duration(Quantity, frozen=True, kw_only=True):
    """A length of time; ``amount`` in picoseconds."""

    example: ClassVar[str] = "1.9 us"

    @staticmethod
    def parse(text: str) -> int:
        return units.parse_duration_ps(text)


class Size(Quantity, frozen=True, kw_only=True):
    """A number of bytes; ``amount`` in bytes."""

    example: ClassVar[str] = "4 MiB"

    @staticmethod
    def parse(text: str) -> int:
        return units.parse_bytes(text)


class Rate(Quantity, frozen=True, kw_only=True):
    """A rate, one direction; ``amount`` in bits per second, above 0."""

    example: ClassVar[str] = "196 GB/s"

    @staticmethod
    def parse(text: str) -> int:
        return units.parse_rate_bps(text)


class Share(Quantity, frozen=True, kw_only=True):
    """A part of a whole; ``amount`` in millionths."""

    example: ClassVar[str] = "91 %"

    @staticmethod
    def parse(text: str) -> int:
        return parse_share_ppm(text)


class Count(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How many; a plain integer has no unit."""

    example: ClassVar[int] = 8

    value: int
    kind: Kind
    source: str
    range: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        _check_origin(self)
        if self.range is not None and not self.range[0] <= self.value <= self.range[1]:
            raise FieldError(
                "value", f"a value within its range, {self.range[0]} to {self.range[1]}"
            )

    @staticmethod
    def parse(text: str) -> int:
        return int(text)

    @property
    def amount(self) -> int:
        """The same integer."""
        return self.value


Number = Duration | Size | Rate | Share | Count
NUMBERS = (Duration, Size, Rate, Share, Count)


def _check_origin(number: Quantity | Count) -> None:
    if not number.source.strip():
        raise FieldError("source", "where this number comes from, in words")
    if number.range is None and number.kind is Kind.ASSUMED:
        raise FieldError("range", "[least, most] to try, since kind is assumed")
