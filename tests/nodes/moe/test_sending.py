"""What a node's ranks write: every (token, expert) once, to a rank that has it, in a slot of its own."""

from __future__ import annotations

import collections
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodes.model.body import I64
from nodes.moe import buffers, layout, placement, sending
from nodes.moe.layout import Outgoing, TokenRows, Tokens
from nodes.moe.placement import Placement
from nodes.moe.sending import Leg
from nodes.moe.table import Table, table
from nodes.settings import ModelSettings

MODEL = ModelSettings()
EXPERTS, TOP_K, SHARED = MODEL.routed_experts, MODEL.top_k, MODEL.shared_expert
FLAG_BYTES = 32

GROUPS: dict[str, Placement] = {
    "EP 4": placement.initial(experts=EXPERTS, ep_size=4),
    "EP 8, redundant": placement.initial(experts=EXPERTS, ep_size=8, redundant=16),
    "EP 64": placement.initial(experts=EXPERTS, ep_size=64),
    "EP 320": placement.initial(experts=EXPERTS, ep_size=320, redundant=32, shared_ranks=32),
    "one dead": placement.without(
        placement.initial(experts=EXPERTS, ep_size=8, redundant=256), dead=frozenset({3})
    ),
}


class Sent(NamedTuple):
    """What some ranks of one node send."""

    placement: Placement
    held: Table
    tokens: Tokens
    legs: dict[int, Leg]
    rows: Outgoing
    max_tokens: int


def send(name: str, counts: list[int], *, first: int = 4, number: int = 0) -> Sent:
    """Ranks from ``first`` on send so many tokens each, with experts at random."""
    group = GROUPS[name]
    held = table(group, EXPERTS)
    first = min(first, group.ep_size - len(counts))
    batch, total = max([*counts, 1]), sum(counts)
    keys = np.random.Philox(key=number).random_raw(total * EXPERTS).reshape(total, EXPERTS)
    tokens = Tokens(
        ranks=np.repeat(np.arange(first, first + len(counts)), counts),
        numbers=layout.running_index(np.repeat(np.arange(len(counts)), counts)),
        experts=np.argsort(keys, axis=1)[:, :TOP_K].astype(np.int64),
        vectors=np.arange(total * 8, dtype=np.uint64).reshape(total, 8),
    )
    max_tokens = buffers.max_tokens(batch, int(held.written.max()), MODEL)
    routed = placement.targets(group, tokens.experts, tokens.ranks * batch + tokens.numbers)
    rows = sending.token_rows(tokens, routed, held, shared_expert=SHARED, max_tokens=max_tokens)
    legs = {first + n: Leg(1000 + n, 5000 + 10 * n) for n in range(len(counts))}
    return Sent(group, held, tokens, legs, rows, max_tokens)


COUNTS = st.lists(st.integers(0, 6), min_size=1, max_size=4)
NAMES = st.sampled_from(list(GROUPS))


@settings(max_examples=25, deadline=None)
@given(NAMES, COUNTS, st.integers(0, 99))
def test_every_token_and_expert_once_where_the_expert_is(
    name: str, counts: list[int], number: int
) -> None:
    """And the shared expert of every token at the rank that has it for its rank."""
    sent = send(name, counts, number=number)
    rows, tokens = sent.rows, sent.tokens
    found = collections.Counter(
        zip(rows.sources.tolist(), rows.tokens.tolist(), rows.experts.tolist(), strict=True)
    )
    wanted = collections.Counter(
        (rank, token, expert)
        for rank, token, experts in zip(
            tokens.ranks.tolist(), tokens.numbers.tolist(), tokens.experts.tolist(), strict=True
        )
        for expert in (*experts, SHARED)
    )
    assert found == wanted
    for target, source, expert in zip(
        rows.targets.tolist(), rows.sources.tolist(), rows.experts.tolist(), strict=True
    ):
        at_home = expert == SHARED and target == sent.placement.shared[source]
        assert at_home or target in sent.placement.replicas(expert)


@settings(max_examples=25, deadline=None)
@given(NAMES, COUNTS, st.integers(0, 99))
def test_slots_are_of_one_row_each_and_inside(name: str, counts: list[int], number: int) -> None:
    """Slot = f(source, running index): no two rows of one target meet, from whatever source, and those
    that pass a link stay within batch x min(top_k, slots)."""
    sent = send(name, counts, number=number)
    rows = sent.rows
    assert len(set(zip(rows.targets.tolist(), rows.slots.tolist(), strict=True))) == len(rows.slots)
    away = rows.sources != rows.targets
    index = rows.slots - rows.sources * sent.max_tokens
    pairs = list(zip(rows.sources.tolist(), rows.targets.tolist(), strict=True))
    assert index.tolist() == [pairs[:place].count(pair) for place, pair in enumerate(pairs)]
    assert (index[away] >= 0).all() and (index[away] < sent.max_tokens).all()


@settings(max_examples=20, deadline=None)
@given(NAMES, COUNTS)
def test_a_source_sends_in_token_and_k_order(name: str, counts: list[int]) -> None:
    """In the order of experts, every rank would begin with expert 0."""
    rows = send(name, counts).rows
    keys = list(zip(rows.sources.tolist(), rows.tokens.tolist(), rows.k.tolist(), strict=True))
    assert keys == sorted(keys)
    assert (rows.experts[rows.k == TOP_K] == SHARED).all()


@settings(max_examples=20, deadline=None)
@given(NAMES, COUNTS, st.integers(0, 99))
def test_flags_count_the_rows_of_each_expert(name: str, counts: list[int], number: int) -> None:
    """One of each rank to each, also of a rank without tokens; when its first stage may begin."""
    sent = send(name, counts, number=number)
    held, everyone = sent.held, np.arange(sent.placement.ep_size)
    flags = sending.dispatch_flags(sent.rows, sent.legs, everyone, held, flag_bytes=FLAG_BYTES)
    pairs = [(source, target) for source in sent.legs for target in everyone.tolist()]
    assert list(zip(flags.sources.tolist(), flags.targets.tolist(), strict=True)) == pairs
    began_ps, counted = layout.unpack_flags(flags.data)
    right = np.zeros((len(pairs), held.slots), dtype=np.int64)
    place = {pair: index for index, pair in enumerate(pairs)}
    for target, source, expert in zip(
        sent.rows.targets.tolist(),
        sent.rows.sources.tolist(),
        sent.rows.experts.tolist(),
        strict=True,
    ):
        right[place[source, target], held.local_slot[target, expert]] += 1
    assert (counted == right).all()
    assert began_ps.tolist() == [sent.legs[source].began_ps for source, _ in pairs]
    assert flags.ready_ps.tolist() == [sent.legs[source].first_ps for source, _ in pairs]
    charged = FLAG_BYTES * np.maximum(held.written, 1)
    sizes = [0 if source == target else int(charged[target]) for source, target in pairs]
    assert flags.charged_bytes.tolist() == sizes, "to itself: no link"
    totals = right.sum(axis=1).reshape(len(sent.legs), -1)
    rows_sent = sending.rows_sent(sent.rows, sent.legs, ep_size=sent.placement.ep_size)
    assert (rows_sent == totals).all()


def test_who_is_gone_gets_no_flag() -> None:
    sent = send("one dead", [2, 0])
    others = np.delete(np.arange(8), 3)
    flags = sending.dispatch_flags(sent.rows, sent.legs, others, sent.held, flag_bytes=FLAG_BYTES)
    assert flags.targets.tolist() == [0, 1, 2, 4, 5, 6, 7] * 2
    assert 3 not in sent.rows.targets


@pytest.mark.parametrize("name", GROUPS)
def test_ranks_without_tokens_send_flags_of_nothing(name: str) -> None:
    sent = send(name, [0, 0])
    assert len(sent.rows.targets) == 0
    everyone = np.arange(sent.placement.ep_size)
    flags = sending.dispatch_flags(sent.rows, sent.legs, everyone, sent.held, flag_bytes=FLAG_BYTES)
    assert len(flags.targets) == 2 * sent.placement.ep_size
    assert not layout.unpack_flags(flags.data)[1].any()


def test_tokens_leave_as_their_stages_are_done() -> None:
    """A rank's rows to itself pass no link; all others have bytes of their token."""
    sent = send("EP 8, redundant", [3, 0, 5])
    stages_ps = np.array([7, 20, 40, 60, 80, 100])
    mine, here_ps, writes = sending.token_writes(
        sent.tokens,
        sent.rows,
        sent.legs,
        stages_ps=stages_ps,
        charged_bytes=7680,
    )
    rows = sent.rows
    own = rows.sources == rows.targets
    ready_ps = np.array([sent.legs[source].first_ps for source in rows.sources.tolist()])
    ready_ps += stages_ps[rows.tokens]
    assert (here_ps.tolist(), writes.ready_ps.tolist()) == (
        ready_ps[own].tolist(),
        ready_ps[~own].tolist(),
    )
    assert (mine.vectors == sent.tokens.vectors[rows.of[own]]).all()
    assert set(writes.charged_bytes.tolist()) == {7680}
    back = layout.unpack_tokens(writes.targets, writes.sources, writes.data)
    assert (back.vectors == sent.tokens.vectors[rows.of[~own]]).all()
    assert back.slots.tolist() == rows.slots[~own].tolist()


# --- results --------------------------------------------------------------------------------------


def arrived(count: int, number: int) -> TokenRows:
    """Rows that came to ranks 2 and 3 of 6, in the order in which experts compute them."""
    raw = np.random.Philox(key=number).random_raw(4 * count).reshape(4, count).astype(np.int64)
    targets, sources = 2 + raw[0] % 2, raw[1] % 6
    tokens, k = raw[2] % 5, raw[3] % 9
    _, first = np.unique(np.stack([sources, tokens, k]), axis=1, return_index=True)
    slots = np.arange(count)
    rows = TokenRows(targets, sources, slots, k, tokens, k, np.zeros((count, 8), dtype=np.uint64))
    return rows.chosen(np.sort(first))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 40), st.integers(0, 99))
def test_results_go_back_by_token_k_and_source(count: int, number: int) -> None:
    """Each result to the slot of its row's token, in order, each copied before it is written."""
    rows = arrived(count, number)
    size = len(rows.k)
    results = np.arange(size * 16, dtype=np.uint64).reshape(size, 16)
    legs = {2: Leg(50, 100), 3: Leg(60, 200)}
    mine, here_ps, writes = sending.result_writes(
        rows,
        results,
        legs,
        stages_ps=lambda rows: 10 * (1 + np.arange(rows)),
        charged_bytes=14_336,
    )
    back = layout.unpack_results(writes.targets, writes.sources, writes.data)
    keys = list(zip(*(part.tolist() for part in (back.sources, back.tokens, back.k, back.targets))))
    assert keys == sorted(keys)
    right = {
        (int(r), int(t), int(k), int(s)): results[n].tolist()
        for n, (r, t, k, s) in enumerate(zip(rows.targets, rows.tokens, rows.k, rows.sources))
    }
    own = list(zip(*(part.tolist() for part in (mine.sources, mine.tokens, mine.k, mine.targets))))
    found = dict(zip(keys, back.results.tolist())) | dict(zip(own, mine.results.tolist()))
    assert found == right and len(keys) + len(own) == size
    turn: I64 = np.zeros(4, dtype=np.int64)
    instants = dict(zip(keys, writes.ready_ps.tolist())) | dict(zip(own, here_ps.tolist()))
    for key in sorted(right):
        turn[key[0]] += 1
        assert instants[key] == legs[key[0]].first_ps + 10 * turn[key[0]]


def test_combine_flags_count_what_each_source_gets() -> None:
    rows = arrived(40, 3)
    legs = {2: Leg(50, 100), 3: Leg(60, 200)}
    to = np.array([0, 2, 3, 5])
    flags = sending.combine_flags(rows, legs, to, ep_size=6, flag_bytes=FLAG_BYTES)
    began_ps, counts = layout.unpack_flags(flags.data)
    pairs = collections.Counter(zip(rows.targets.tolist(), rows.sources.tolist(), strict=True))
    expected = [(rank, source) for rank in (2, 3) for source in to.tolist()]
    assert list(zip(flags.sources.tolist(), flags.targets.tolist(), strict=True)) == expected
    assert counts[:, 0].tolist() == [pairs[pair] for pair in expected]
    assert began_ps.tolist() == [50] * 4 + [60] * 4
    sizes = [0 if rank == source else FLAG_BYTES for rank, source in expected]
    assert flags.charged_bytes.tolist() == sizes
