"""Messages as bytes: what is packed comes back, whatever its width, and rows are ordered and counted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodes.model import tiles
from nodes.model.body import I64, U64
from nodes.model.tiles import Scale
from nodes.moe import layout
from nodes.moe.layout import Outgoing
from nodes.settings import ModelSettings

MODEL = ModelSettings()
SCALES = {
    (text, exact): tiles.parse_scale(text, MODEL, exact=exact)
    for text in ("64", "128", "full")
    for exact in (False, True)
}
EXPERTS, RANKS = 257, 320


def words(count: int, width: int, number: int) -> U64:
    return np.random.Philox(key=number).random_raw(count * width).reshape(count, width)


def below(limit: int, count: int, number: int) -> I64:
    found: I64 = (words(count, 1, number)[:, 0] % np.uint64(limit)).astype(np.int64)
    return found


def outgoing(count: int, tokens: int, number: int) -> Outgoing:
    """Rows with the largest values that occur: the last expert, the last slot of EP 320 at batch 128."""
    limits = (RANKS, RANKS, RANKS * 128 * 8, EXPERTS, 4096, 9, tokens)
    parts = [below(limit, count, number + place) for place, limit in enumerate(limits)]
    for part, limit in zip(parts, limits, strict=True):
        part[-1:] = limit - 1
    return Outgoing(*parts)


def item_words(scale: Scale) -> tuple[int, int]:
    return scale.vector.item_words, scale.result.item_words


@pytest.mark.parametrize("scale", SCALES.values(), ids=str)
@pytest.mark.parametrize("count", [0, 1, 7])
def test_tokens_come_back(count: int, scale: Scale) -> None:
    rows, vectors = outgoing(count, 5, number=1), words(5, item_words(scale)[0], 9)
    data = layout.pack_tokens(rows, vectors)
    assert data.shape == (count, 16 + 8 * vectors.shape[1])
    found = layout.unpack_tokens(rows.targets, rows.sources, data)
    for name in ("targets", "sources", "slots", "experts", "tokens", "k"):
        part = getattr(found, name)
        assert (part.dtype, part.tolist()) == (np.int64, getattr(rows, name).tolist()), name
    assert (found.vectors == vectors[rows.of]).all()


@pytest.mark.parametrize("scale", SCALES.values(), ids=str)
@pytest.mark.parametrize("count", [0, 1, 7])
def test_results_come_back(count: int, scale: Scale) -> None:
    tokens, k = below(4096, count, 1), below(9, count, 2)
    results, ends = words(count, item_words(scale)[1], 3), np.arange(count)
    data = layout.pack_results(tokens, k, results[::-1], np.arange(len(k))[::-1].copy())
    assert data.shape == (count, 8 + 8 * results.shape[1])
    found = layout.unpack_results(ends, ends + 1, data)
    assert [part.tolist() for part in found[:4]] == [
        part.tolist() for part in (ends, ends + 1, tokens, k)
    ]
    assert (found.results == results).all()


@given(st.integers(0, 2**62), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_flags_come_back(began_ps: int, counts: int, most: int) -> None:
    began = np.array([began_ps, 0, 2**62], dtype=np.int64)
    given = below(most + 1, 3 * counts, 4).reshape(3, counts)
    given[0, 0] = most
    found, back = layout.unpack_flags(layout.pack_flags(began, given))
    assert (found.tolist(), back.tolist()) == (began.tolist(), given.tolist())


@pytest.mark.parametrize("scale", SCALES.values(), ids=str)
def test_words_are_repeated_to_what_is_carried(scale: Scale) -> None:
    """The words that say which message it is come once."""
    for tiling, lead_words in ((scale.vector, 2), (scale.result, 1)):
        found = layout.repeat(tiling, lead_words=lead_words)
        carried = found.body_bytes * found.copies + found.tail_bytes * found.tail_copies
        assert (found.lead_bytes, carried) == (8 * lead_words, tiling.item_bytes)
        assert found.body_bytes + found.tail_bytes == 8 * tiling.item_words


def test_full_scale_carries_what_is_charged() -> None:
    """7.5 KB and 14 KB, and a few bytes that say which."""
    scale = SCALES["full", False]
    assert scale.vector.item_bytes == MODEL.dispatch_bytes
    assert scale.result.item_bytes == MODEL.combine_bytes


@given(st.lists(st.integers(0, 6)))
def test_a_running_index_counts_earlier_ones_of_the_group(groups: list[int]) -> None:
    index = layout.running_index(np.array(groups, dtype=np.int64))
    assert index.tolist() == [groups[:place].count(one) for place, one in enumerate(groups)]


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.sampled_from([0, 65_535, 70_000])))
)
def test_an_order_is_that_of_tuples_and_stable(rows: list[tuple[int, int, int]]) -> None:
    """With keys on both sides of 2^16."""
    keys = [np.array([row[place] for row in rows], dtype=np.int64) for place in range(3)]
    order = layout.order_by(*keys).tolist()
    assert order == sorted(range(len(rows)), key=lambda place: (rows[place], place))


def test_lots_are_joined_in_their_order() -> None:
    scale = SCALES["64", False]
    rows, vectors = outgoing(5, 5, number=1), words(5, item_words(scale)[0], 2)
    data = layout.pack_tokens(rows, vectors)
    whole = layout.unpack_tokens(rows.targets, rows.sources, data)
    parts = [whole.chosen(np.arange(2)), whole.chosen(np.arange(2, 5))]
    for found, right in zip(layout.joined(parts, 8), whole, strict=True):
        assert (found == right).all()
    nothing = layout.joined([], 8)
    assert (nothing.vectors.shape, len(nothing.k)) == ((0, 8), 0)
