"""A sequence: what a step makes of it, and in which micro-batch it is."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nodes.serving import messages
from nodes.serving.sequences import Sequence, split


def a_sequence(request: int = 1, *, rank: int = 0, output_tokens: int = 9) -> Sequence:
    """With three rows of its prompt, and token 7."""
    rows = np.arange(6, dtype=np.uint64).reshape(2, 3)
    return Sequence(messages.Rows(request, 0, rank, 300, output_tokens, 7, 3, 0), rows)


def test_the_first_step_has_no_draft() -> None:
    """Nobody has sampled behind the first token yet."""
    sequence = a_sequence()
    assert sequence.fed == [7]
    turn = sequence.turn([8], [80])
    assert (turn.tokens, turn.seals, turn.proposed, turn.accepted) == ([8], [80], 0, 0)
    sequence.commit(turn)
    assert (sequence.token, sequence.length, sequence.kv_tokens, sequence.produced) == (
        8,
        4,
        301,
        2,
    )


def test_a_right_draft_gives_two_tokens_and_a_wrong_one_is_rolled_back() -> None:
    """Two rows in use, or one: the draft's is written over by the next step."""
    for draft, tokens, right in ((5, [5, 6], 1), (4, [5], 0)):
        sequence = a_sequence()
        sequence.draft = draft
        assert sequence.fed == [7, draft]
        turn = sequence.turn([5, 6], [50, 60])
        assert (turn.tokens, turn.accepted, turn.proposed) == (tokens, right, 1)
        turn.draft, turn.fold = 11, 2**64 - 1
        sequence.commit(turn)
        sequence.commit(turn)
        assert (sequence.length, sequence.kv_tokens) == (3 + 2 * len(tokens), 300 + 2 * len(tokens))
        assert (sequence.fed, sequence.fold) == ([tokens[-1], 11], 2**64 - 2)


def test_no_more_tokens_than_asked_for() -> None:
    """The last step may know one too many."""
    sequence = a_sequence(output_tokens=2)
    sequence.draft = 5
    turn = sequence.turn([5, 6], [50, 60])
    assert (turn.tokens, turn.seals, turn.accepted) == ([5], [50], 1)
    sequence.commit(turn)
    assert sequence.ended


def test_a_turn_that_is_not_committed_changes_nothing() -> None:
    """The step was given up; it is done again."""
    sequence = a_sequence()
    before = (sequence.fed, sequence.length, sequence.produced, sequence.fold)
    sequence.turn([5], [50])
    assert (sequence.fed, sequence.length, sequence.produced, sequence.fold) == before


@given(ranks=st.lists(st.integers(0, 3), max_size=20), parts=st.integers(1, 2))
def test_a_split_is_even_on_each_rank_and_keeps_everybody(ranks: list[int], parts: int) -> None:
    """Neighbours by rank, in the order of ranks; sequences of other ranks are in no part."""
    sequences = [a_sequence(number, rank=rank) for number, rank in enumerate(ranks)]
    order = [3, 0, 2]
    found = split(sequences, order, parts=parts)
    for rank in order:
        counts = [sum(s.rank == rank for s in part) for part in found]
        assert sum(counts) == ranks.count(rank)
        assert counts == sorted(counts, reverse=True) and max(counts) - min(counts) <= 1
    for part in found:
        places = [order.index(sequence.rank) for sequence in part]
        assert places == sorted(places)
    everybody = [s.request for part in found for s in part]
    assert len(set(everybody)) == len(everybody)
