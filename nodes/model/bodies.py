"""Which body a run has, by its name: the exact one, or seals only; and the oracle that judges it.

Owns the choice only.
"""

from __future__ import annotations

from typing import Literal, Protocol

from nodes.model import exact, exact_oracle, oracle, seal
from nodes.model.body import Body
from nodes.settings import ModelSettings

Name = Literal["exact", "seal"]


class Judge(Protocol):
    """Any body's oracle."""

    def check(self, request: oracle.ClaimedRequest) -> oracle.Verdict:
        """See ``oracle.Oracle.check``."""


def make(name: Name, settings: ModelSettings, *, skew: str = "uniform") -> Body:
    """The body of this name; the exact one is made once a process, so call it before the fork.
    ``skew`` (``exact_skew``) is the exact one's alone."""
    if name == "exact":
        return exact.prepared(settings, skew)
    assert skew == "uniform", "a body of seals has no biases"
    return seal.SealBody(settings)


def judge(name: Name, settings: ModelSettings) -> Judge:
    """A new oracle for this body."""
    if name == "exact":
        return exact_oracle.ExactOracle(settings)
    return oracle.Oracle(settings)
