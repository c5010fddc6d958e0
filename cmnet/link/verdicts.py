"""How one rule decides about one frame.

Owns the draws (exact: a probability is compared as a Fraction of 2^64) and the state that a rule
keeps between frames. Does not own which rules are asked, nor in which order (rules.py).
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any, Protocol

from cmnet.link import effects


class Draws(Protocol):
    """What a rule needs of its random stream (cmnet.entropy.Stream has it)."""

    def u64(self) -> int: ...

    def below(self, count: int) -> int: ...


class Tally:
    """What the rules asked so far have decided about a frame."""

    __slots__ = ("copies", "corrupt", "delay_ps", "drop")

    def __init__(self) -> None:
        self.drop = False
        self.delay_ps = 0
        self.corrupt = False
        self.copies = 1


class RuleState:
    """A rule's stream and what it remembers; both outlive a change of its parameters."""

    __slots__ = ("bad", "draws", "start_ps")

    def __init__(self, draws: Draws, start_ps: int) -> None:
        self.draws = draws
        self.start_ps = start_ps
        self.bad = False

    def happens(self, probability: Fraction) -> bool:
        """One draw: never for 0, always for 1; what happens at p also happens at every p above."""
        return self.draws.u64() * probability.denominator < probability.numerator << 64


def _loss(effect: effects.Loss, state: RuleState, tally: Tally, now_ps: int) -> bool:
    tally.drop = state.happens(effect.probability)
    return tally.drop


def _burst_loss(effect: effects.BurstLoss, state: RuleState, tally: Tally, now_ps: int) -> bool:
    state.bad ^= state.happens(effect.bad_to_good if state.bad else effect.good_to_bad)
    tally.drop = state.happens(effect.loss_in_bad if state.bad else effect.loss_in_good)
    return tally.drop


def _delay(effect: effects.Delay, state: RuleState, tally: Tally, now_ps: int) -> bool:
    tally.delay_ps += effect.delay_ps
    return effect.delay_ps > 0


def _jitter(effect: effects.Jitter, state: RuleState, tally: Tally, now_ps: int) -> bool:
    extra_ps = state.draws.below(effect.jitter_ps + 1)
    tally.delay_ps += extra_ps
    return extra_ps > 0


def _partition(effect: effects.Partition, state: RuleState, tally: Tally, now_ps: int) -> bool:
    tally.drop = True
    return True


def _flap(effect: effects.Flap, state: RuleState, tally: Tally, now_ps: int) -> bool:
    tally.drop = (now_ps - state.start_ps) % effect.period_ps < effect.down_ps
    return tally.drop


def _corrupt(effect: effects.Corrupt, state: RuleState, tally: Tally, now_ps: int) -> bool:
    hit = state.happens(effect.probability)
    tally.corrupt |= hit
    return hit


def _duplicate(effect: effects.Duplicate, state: RuleState, tally: Tally, now_ps: int) -> bool:
    hit = state.happens(effect.probability)
    tally.copies += hit
    return hit


Decide = Callable[[Any, RuleState, Tally, int], bool]
"""Changes the tally; returns whether the rule did something to this frame."""

VERDICTS: dict[type, Decide] = {
    effects.Loss: _loss,
    effects.BurstLoss: _burst_loss,
    effects.Delay: _delay,
    effects.Jitter: _jitter,
    effects.Partition: _partition,
    effects.Flap: _flap,
    effects.Corrupt: _corrupt,
    effects.Duplicate: _duplicate,
}
"""Kinds that decide frame by frame; the others (rate, subplane_down, l2_down) only set the rate."""
