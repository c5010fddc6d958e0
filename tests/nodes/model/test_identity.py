"""Identities: equal prefixes and only they share rows."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodes.model.identity import field, integer_field, prompt_rows
from nodes.settings import ModelSettings

MODEL = ModelSettings()


def identities(hash_ids: list[int], input_tokens: int, model: ModelSettings = MODEL) -> list[bytes]:
    return prompt_rows(hash_ids, input_tokens=input_tokens, settings=model).identities


def test_rows_blocks_and_lengths_of_a_prompt() -> None:
    """1,300 tokens: two full blocks, then two full rows and one of 20 tokens."""
    rows = prompt_rows([7, 8, 9], input_tokens=1300, settings=MODEL)
    assert rows.tokens_per_row.tolist() == [128] * 10 + [20]
    assert rows.block_keys == [rows.identities[i] for i in (3, 7, 10)]
    assert rows.full_blocks == 2
    assert rows.seeds.tolist() == [int.from_bytes(i[:8], "little") for i in rows.identities]
    assert {len(identity) for identity in rows.identities} == {32}


def test_a_full_last_block_is_not_counted_twice() -> None:
    rows = prompt_rows([7, 8], input_tokens=1024, settings=MODEL)
    assert rows.block_keys == [rows.identities[3], rows.identities[7]]
    assert rows.full_blocks == 2


def test_a_partial_row_is_never_the_full_one() -> None:
    """A partial row must not be taken for a full row of the same block."""
    lasts = {identities([1], tokens)[-1] for tokens in range(1, 513)}
    assert len(lasts) == 512


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.integers(-3, 3), min_size=1, max_size=4),
    st.lists(st.integers(-3, 3), min_size=1, max_size=4),
)
def test_prompts_share_rows_exactly_as_far_as_their_blocks_agree(
    one: list[int], other: list[int]
) -> None:
    """The same block after another prefix is another block: identities are chained."""
    common = 0
    while common < min(len(one), len(other)) and one[common] == other[common]:
        common += 1
    left, right = identities(one, 512 * len(one)), identities(other, 512 * len(other))
    assert left[: 4 * common] == right[: 4 * common]
    assert not set(left[4 * common :]) & set(right[4 * common :])


def test_another_layout_shares_nothing() -> None:
    """Rows of another number of carried layers cannot be read, so they have another name."""
    assert identities([1], 512) != identities([1], 512, ModelSettings(carried_layers=3))


def test_fields_are_framed() -> None:
    """('a', 'bc') is not ('ab', 'c'), absent is not empty, and -1 is not 255."""
    assert field(1, b"a") + field(1, b"bc") != field(1, b"ab") + field(1, b"c")
    assert field(1, b"") != b""
    encoded = {
        integer_field(2, value) for value in (0, 1, 127, 128, 255, -1, -128, 2**64, -(2**70))
    }
    assert len(encoded) == 9


@pytest.mark.parametrize(("hash_ids", "tokens"), [([1], 513), ([1, 2], 512), ([], 0), ([1], 0)])
def test_blocks_that_do_not_fit_the_tokens_are_refused(hash_ids: list[int], tokens: int) -> None:
    with pytest.raises(ValueError, match="hash_ids"):
        prompt_rows(hash_ids, input_tokens=tokens, settings=MODEL)
