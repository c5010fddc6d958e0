"""Busy times of two streams, by hand and against counting."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nodes.serving import timeline
from nodes.serving.timeline import Stage, Timeline


def stages(stream: int, lengths: list[tuple[int, int]]) -> list[Stage]:
    """Stages of so long, each after a pause of so long."""
    found, at_ps = [], 0
    for pause_ps, length_ps in lengths:
        found.append(Stage(stream, 0, 0, at_ps + pause_ps, at_ps + pause_ps + length_ps))
        at_ps = found[-1].ended_ps
    return found


LENGTHS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=6)


@given(first=LENGTHS, second=LENGTHS)
def test_both_is_what_counting_instant_by_instant_gives(
    first: list[tuple[int, int]], second: list[tuple[int, int]]
) -> None:
    """Also with stages of no length and streams that end early."""
    one, other = stages(0, first), stages(1, second)
    busy = [{t for s in some for t in range(s.began_ps, s.ended_ps)} for some in (one, other)]
    assert timeline.both_ps(one, other) == len(busy[0] & busy[1])
    assert [timeline.busy_ps(one), timeline.busy_ps(other)] == [len(each) for each in busy]


def test_a_step_leaves_a_line_and_the_last_one_its_stages() -> None:
    kept = Timeline()
    for number in (1, 2):
        kept.begin(100 * number)
        kept.stages.append(Stage(0, 0, 0, 100 * number, 100 * number + 30))
        kept.stages.append(Stage(1, 1, 0, 100 * number + 20, 100 * number + 40 + number))
        kept.end(100 * number + 60)
    assert kept.statistics() == {
        "step_ps": [60, 60],
        "attention_ps": [30, 30],
        "moe_ps": [21, 22],
        "both_ps": [10, 10],
        "stages": [[0, 0, 0, 200, 230], [1, 1, 0, 220, 242]],
    }
