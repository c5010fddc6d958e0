"""When the two streams of a decode node were busy, step by step. Pure.

Owns the record: stream 0 is attention, stream 1 gate, dispatch, experts and combine. Of carried layers
only; the others' time is in a step's length.
"""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple


class Stage(NamedTuple):
    """One micro-batch in one stream."""

    stream: int
    part: int
    layer: int
    began_ps: int
    ended_ps: int


class Timeline:
    """Of one node."""

    def __init__(self) -> None:
        self.stages: list[Stage] = []
        """Of the step in progress, or of the last one."""
        self._began_ps = 0
        self._steps: dict[str, array[int]] = {
            name: array("q") for name in ("step_ps", "attention_ps", "moe_ps", "both_ps")
        }

    def begin(self, now_ps: int) -> None:
        """A step begins."""
        self._began_ps, self.stages = now_ps, []

    def end(self, now_ps: int) -> None:
        """It is over."""
        attention, moe = (
            [stage for stage in self.stages if stage.stream == stream] for stream in (0, 1)
        )
        values = (
            now_ps - self._began_ps,
            busy_ps(attention),
            busy_ps(moe),
            both_ps(attention, moe),
        )
        for held, value in zip(self._steps.values(), values, strict=True):
            held.append(value)

    def statistics(self) -> dict[str, Any]:
        """A value a step: its length, how long each stream was busy, and how long both were; and the
        stages of the last step."""
        return {name: held.tolist() for name, held in self._steps.items()} | {
            "stages": [list(stage) for stage in self.stages]
        }


def busy_ps(stages: list[Stage]) -> int:
    """How long one stream was busy: its stages follow each other."""
    return sum(stage.ended_ps - stage.began_ps for stage in stages)


def both_ps(first: list[Stage], second: list[Stage]) -> int:
    """How long two streams were busy at once, each in the order of its stages."""
    found = i = j = 0
    while i < len(first) and j < len(second):
        one, other = first[i], second[j]
        began_ps, ended_ps = max(one.began_ps, other.began_ps), min(one.ended_ps, other.ended_ps)
        found += max(ended_ps - began_ps, 0)
        if one.ended_ps <= other.ended_ps:
            i += 1
        else:
            j += 1
    return found
