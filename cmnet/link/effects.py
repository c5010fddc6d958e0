"""What a fault rule does to the frames in its reach, as frozen data.

Owns the kinds of link fault, their parameters and the range of each. Does not own where or when a
rule acts (rules.py) nor how it is decided for one frame (verdicts.py). Every parameter is an exact
integer or Fraction; one out of its range is an InputError that names it, never clamped.
"""

from __future__ import annotations

from fractions import Fraction

import msgspec

from cmnet.errors import InputError


def _require(holds: bool, *, key: str, value: object, expected: str) -> None:
    if not holds:
        raise InputError(file="rule", key=key, value=value, expected=expected)


def _require_probability(key: str, value: Fraction) -> None:
    holds = type(value) is Fraction and 0 <= value <= 1
    _require(holds, key=key, value=value, expected="an exact probability from 0 to 1")


def _require_length(key: str, value_ps: int) -> None:
    holds = type(value_ps) is int and value_ps >= 0
    _require(holds, key=key, value=value_ps, expected="a duration that is not negative")


def _require_index(key: str, value: int) -> None:
    holds = type(value) is int and value >= 0
    _require(holds, key=key, value=value, expected="a whole number from 0")


class Loss(msgspec.Struct, frozen=True, tag="loss", tag_field="kind", kw_only=True):
    """Each frame is lost with the probability, independently of the others."""

    probability: Fraction

    def __post_init__(self) -> None:
        _require_probability("probability", self.probability)


class BurstLoss(msgspec.Struct, frozen=True, tag="burst_loss", tag_field="kind", kw_only=True):
    """Gilbert-Elliott: a chain of two states steps once per frame, then the new state loses it.

    The chain begins good. It belongs to the rule, so a burst hits whatever frames are in reach.
    """

    good_to_bad: Fraction
    bad_to_good: Fraction
    loss_in_bad: Fraction
    loss_in_good: Fraction

    def __post_init__(self) -> None:
        for key in self.__struct_fields__:
            _require_probability(key, getattr(self, key))


class Delay(msgspec.Struct, frozen=True, tag="delay", tag_field="kind", kw_only=True):
    """Each frame arrives so much later; it takes no more of either port."""

    delay_ps: int

    def __post_init__(self) -> None:
        _require_length("delay_ps", self.delay_ps)


class Jitter(msgspec.Struct, frozen=True, tag="jitter", tag_field="kind", kw_only=True):
    """Each frame arrives later by a whole number of picoseconds, uniform in [0, jitter_ps]."""

    jitter_ps: int

    def __post_init__(self) -> None:
        _require_length("jitter_ps", self.jitter_ps)


class Rate(msgspec.Struct, frozen=True, tag="rate", tag_field="kind", kw_only=True):
    """Both ports serve each frame at the factor of its rate; a factor above 1 is allowed."""

    factor: Fraction

    def __post_init__(self) -> None:
        holds = type(self.factor) is Fraction and self.factor > 0
        right = "an exact factor above 0 (for no rate at all use kind partition)"
        _require(holds, key="factor", value=self.factor, expected=right)


class Partition(msgspec.Struct, frozen=True, tag="partition", tag_field="kind", kw_only=True):
    """No frame passes."""


class Flap(msgspec.Struct, frozen=True, tag="flap", tag_field="kind", kw_only=True):
    """Down for the first ``down_ps`` of each period, counted from the start of the lease."""

    period_ps: int
    down_ps: int

    def __post_init__(self) -> None:
        _require_length("period_ps", self.period_ps)
        _require_length("down_ps", self.down_ps)
        fits = self.period_ps > 0 and self.down_ps <= self.period_ps
        right = f"a duration of at most the period, which is {self.period_ps} ps and above 0"
        _require(fits, key="down_ps", value=self.down_ps, expected=right)


class Corrupt(msgspec.Struct, frozen=True, tag="corrupt", tag_field="kind", kw_only=True):
    """Bytes of the frame are flipped with the probability; its plane says what follows."""

    probability: Fraction

    def __post_init__(self) -> None:
        _require_probability("probability", self.probability)


class Duplicate(msgspec.Struct, frozen=True, tag="duplicate", tag_field="kind", kw_only=True):
    """The frame arrives once more with the probability."""

    probability: Fraction

    def __post_init__(self) -> None:
        _require_probability("probability", self.probability)


class SubplaneDown(
    msgspec.Struct, frozen=True, tag="subplane_down", tag_field="kind", kw_only=True
):
    """One UB sub-plane is down and takes its share of bandwidth, no more (design 2.3)."""

    subplane: int

    def __post_init__(self) -> None:
        _require_index("subplane", self.subplane)


class L2Down(msgspec.Struct, frozen=True, tag="l2_down", tag_field="kind", kw_only=True):
    """One L2 chip of a sub-plane is down: its share of what crosses nodes."""

    subplane: int
    chip: int

    def __post_init__(self) -> None:
        _require_index("subplane", self.subplane)
        _require_index("chip", self.chip)


Effect = (
    Loss
    | BurstLoss
    | Delay
    | Jitter
    | Rate
    | Partition
    | Flap
    | Corrupt
    | Duplicate
    | SubplaneDown
    | L2Down
)


def enc_hook(value: object) -> str:
    """For msgspec: a Fraction as exact text. Raises TypeError for any other type."""
    if type(value) is not Fraction:
        raise TypeError(f"no plain form of {value!r}")
    return str(value)


def dec_hook(kind: type, text: object) -> Fraction:
    """For msgspec: the Fraction of ``enc_hook``'s text. Raises ValueError for any other value."""
    if kind is not Fraction or not isinstance(text, str):
        raise ValueError(f"expected a text such as '1/20', not {text!r}")
    try:
        return Fraction(text)
    except ZeroDivisionError:
        raise ValueError(f"expected a text such as '1/20', not {text!r}") from None
