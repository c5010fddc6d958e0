"""Units: integer picoseconds, bytes and bits per second, read from strings and printed.

Owns the only conversions between text and numbers. A quantity in a file or on the command line is a
string with its unit ("196 GB/s", "1.9 us"); inside the program it is an exact integer whose name ends
in its unit. Decimal arithmetic is exact: a text that is no whole number of the base unit is refused.

>>> parse_duration_ps("1.9 us")
1900000
>>> parse_rate_bps("196 GB/s")
1568000000000
>>> parse_bytes("1 MiB")
1048576
>>> serialization_delay_ps(512, parse_rate_bps("164 GB/s"))
3122
"""

from __future__ import annotations

import re
from decimal import Decimal, localcontext

PS_PER_S = 10**12
NEVER_PS = 2**63 - 1
"""No event: later than any instant of a run (int64 picoseconds hold 106 days)."""

_NUMBER = re.compile(r"\s*([+-]?\d+(?:\.\d+)?)(?:[eE]([+-]?\d+))?\s*([A-Za-z/]*)\s*")
_DIGITS_MAX, _EXPONENT_MAX = 40, 999
"""So few that a product has less than 160 digits and is exact below."""
_DURATIONS = {"ps": 1, "ns": 10**3, "us": 10**6, "ms": 10**9, "s": 10**12, "min": 60 * 10**12}
_DURATIONS["h"] = 3600 * 10**12
_BYTES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BYTES |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_RATES = {f"{unit}/s": 8 * factor for unit, factor in _BYTES.items()}
_RATES |= {"bit/s": 1, "kbit/s": 10**3, "Mbit/s": 10**6, "Gbit/s": 10**9, "Tbit/s": 10**12}
_FLOPS = {"GFLOPS": 10**9, "TFLOPS": 10**12}


def _parse(text: str, factors: dict[str, int], what: str) -> int:
    example = {"duration": "1.9 us", "size": "4 MiB", "rate": "196 GB/s", "speed": "376 TFLOPS"}
    match = _NUMBER.fullmatch(text)
    if match is None or match[3] not in factors:
        units = ", ".join(factors)
        raise ValueError(f"a {what} with a unit of {units}, such as {example[what]!r}")
    exponent = match[2] or "0"
    if len(match[1]) > _DIGITS_MAX or len(exponent) > 4 or abs(int(exponent)) > _EXPONENT_MAX:
        raise ValueError(f"a {what} of ordinary size, such as {example[what]!r}")
    with localcontext() as exact:
        exact.prec = 160
        value = Decimal(f"{match[1]}e{exponent}") * factors[match[3]]
    if value < 0:
        raise ValueError(f"a {what} that is not negative")
    if value != value.to_integral_value():
        raise ValueError(f"a {what} that is a whole number of its smallest unit")
    return int(value)


def parse_duration_ps(text: str) -> int:
    """Picoseconds of a text such as ``"1.9 us"``. Raises ValueError that says what would be right."""
    return _parse(text, _DURATIONS, "duration")


def parse_bytes(text: str) -> int:
    """Bytes of a text such as ``"4 MiB"``. Raises ValueError that says what would be right."""
    return _parse(text, _BYTES, "size")


def parse_rate_bps(text: str) -> int:
    """Bits per second of ``"196 GB/s"`` or ``"400 Gbit/s"``. Raises ValueError, and for a rate of 0."""
    rate_bps = _parse(text, _RATES, "rate")
    if rate_bps == 0:
        raise ValueError("a rate above 0")
    return rate_bps


def parse_flops(text: str) -> int:
    """Operations per second of ``"376 TFLOPS"``. Raises ValueError that says what would be right."""
    return _parse(text, _FLOPS, "speed")


def serialization_delay_ps(charged_bytes: int, rate_bps: int) -> int:
    """Time a lone frame takes on its link: ceil(bits x 10^12 / rate), design 2.1."""
    return -(-charged_bytes * 8 * PS_PER_S // rate_bps)


def nearest_ps(seconds: float) -> int:
    """The picosecond nearest to a float number of seconds, exactly (no double rounding).

    >>> nearest_ps(1e-3)
    1000000000
    """
    top, bottom = seconds.as_integer_ratio()
    return (2 * top * PS_PER_S + bottom) // (2 * bottom)


def format_ps(at_ps: int) -> str:
    """A length or an instant for people, in the largest unit below it.

    >>> format_ps(1900000), format_ps(0), format_ps(12)
    ('1.9 us', '0 s', '12 ps')
    """
    for unit in ("s", "ms", "us", "ns"):
        if abs(at_ps) >= _DURATIONS[unit]:
            return f"{at_ps / _DURATIONS[unit]:.6g} {unit}"
    return f"{at_ps} ps" if at_ps else "0 s"


def format_bytes(count_bytes: int) -> str:
    """A number of bytes for people, decimal units.

    >>> format_bytes(7_680), format_bytes(12)
    ('7.68 KB', '12 B')
    """
    for unit in ("TB", "GB", "MB", "KB"):
        if count_bytes >= _BYTES[unit]:
            return f"{count_bytes / _BYTES[unit]:.4g} {unit}"
    return f"{count_bytes} B"


def format_rate(rate_bps: int) -> str:
    """A rate for people, bytes per second.

    >>> format_rate(1_568_000_000_000)
    '196 GB/s'
    """
    return f"{rate_bps / 8e9:.6g} GB/s"
