"""Values of command line options: text to exact values, or an InputError that names the option.

Owns the shapes of values that several commands share (counts, seeds, sizes, choices). Does not own
which command takes which option. Nothing is clamped or ignored, as in files.

>>> count("40", option="--requests"), size_bytes("4KiB", option="--socket-buffer")
(40, 4096)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from cmnet import units
from cmnet.errors import InputError

SEED_END = 2**63
SOCKET_BUFFER_BYTES_MIN = 4 << 10
SOCKET_BUFFER_BYTES_MAX = 1 << 30
"""Below 4 KiB the kernel gives more than it is asked for; above, int32 sums in it come near."""

_FRACTION = re.compile(r"\d{1,12}(\.\d{1,12})?([eE][+-]?\d)?|\d{1,12}/[1-9]\d{0,11}")


def wrong(option: str, value: object, expected: str) -> InputError:
    """The error of an option's value."""
    return InputError(file=option, key="", value=value, expected=expected)


def not_built(option: str, value: object, expected: str = "it left out") -> InputError:
    """The error of an option (or a value of one) whose part does not exist yet."""
    return wrong(option, value, f"{expected}: not built yet")


def count(text: str, *, option: str, least: int = 1, most: int = 10**9) -> int:
    """A whole number in plain digits."""
    if not (text.isascii() and text.isdigit() and len(text) < 19 and least <= int(text) <= most):
        raise wrong(option, text, f"a whole number from {least} to {most}")
    return int(text)


def seed(text: str, *, option: str = "--seed") -> int:
    """A seed."""
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) < SEED_END):
        raise wrong(option, text, "a whole number from 0 to 2^63 - 1")
    return int(text)


def positive(text: str, *, option: str) -> Fraction:
    """An exact number above 0, such as 2, 0.5 or 1/3."""
    value = Fraction(text) if _FRACTION.fullmatch(text) else Fraction(0)
    if value <= 0:
        raise wrong(option, text, "a number above 0, such as 2, 0.5 or 1/3")
    return value


def size_bytes(text: str, *, option: str, least: int = 0, most: int = 2**62) -> int:
    """A size with its unit, such as 4KiB."""
    try:
        value = units.parse_bytes(text)
    except ValueError as error:
        raise wrong(option, text, str(error)) from None
    if not least <= value <= most:
        right = f"a size from {least} to {most} bytes"
        raise wrong(option, text, right)
    return value


def socket_buffer_bytes(text: str, *, option: str = "--socket-buffer") -> int:
    """The size of the kernel's buffer of each socket."""
    most = SOCKET_BUFFER_BYTES_MAX
    return size_bytes(text, option=option, least=SOCKET_BUFFER_BYTES_MIN, most=most)


def choice(text: str, *, option: str, built: Sequence[str], planned: Sequence[str] = ()) -> str:
    """One of several words. ``planned`` ones are refused as not built yet."""
    if text in built:
        return text
    right = " or ".join(built) if len(built) < 3 else f"one of {', '.join(built)}"
    if text in planned:
        raise not_built(option, text, right)
    raise wrong(option, text, right)


def path(text: str | None, *, option: str) -> str | None:
    """The name of a file or folder, which need not exist."""
    if text is not None and (not text or "\0" in text):
        raise wrong(option, text, "the name of a file or folder")
    return text
