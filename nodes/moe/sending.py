"""What the ranks of one node write in one phase, as arrays: rows, flags, sizes, instants. Pure.

Owns the order of messages and which slot each goes to. Does not own bytes (``layout``) nor links.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from nodes.model.body import I64, U64
from nodes.moe import layout
from nodes.moe.layout import U8, Outgoing, ResultRows, TokenRows, Tokens
from nodes.moe.table import Table


class Leg(NamedTuple):
    """One rank's operator: when it began, and when its first stage may begin."""

    began_ps: int
    first_ps: int


class Writes(NamedTuple):
    """Messages of ranks to ranks; those of one source are neighbours, in order."""

    sources: I64
    targets: I64
    charged_bytes: I64
    ready_ps: I64
    data: U8

    def chosen(self, index: I64) -> Writes:
        """Some of the messages."""
        return Writes(
            sources=self.sources.take(index),
            targets=self.targets.take(index),
            charged_bytes=self.charged_bytes.take(index),
            ready_ps=self.ready_ps.take(index),
            data=self.data.take(index, axis=0),
        )


@functools.cache
def nothing(width: int = 0) -> Writes:
    """No messages, of so many bytes each."""
    none = np.empty(0, dtype=np.int64)
    return Writes(none, none, none, none, np.empty((0, width), dtype=np.uint8))


def token_rows(
    tokens: Tokens, routed: I64, held: Table, *, shared_expert: int, max_tokens: int
) -> Outgoing:
    """A row for each (token, expert) in (token, k) order, the shared expert last. ``routed`` [n, top_k]
    are the ranks of the replicas; ``max_tokens``: slots of a source at a target."""
    count, top_k = tokens.experts.shape
    slots = top_k + 1
    experts = np.full((count, slots), shared_expert, dtype=np.int64)
    experts[:, :-1] = tokens.experts
    targets = np.empty((count, slots), dtype=np.int64)
    targets[:, :-1] = routed
    targets[:, -1] = held.shared.take(tokens.ranks)
    sources, to = np.repeat(tokens.ranks, slots), targets.ravel()
    first = int(tokens.ranks.min(initial=0))
    running = layout.running_index((sources - first) * len(held.shared) + to)
    return Outgoing(
        targets=to,
        sources=sources,
        slots=sources * max_tokens + running,
        experts=experts.ravel(),
        tokens=np.repeat(tokens.numbers, slots),
        k=np.tile(np.arange(slots), count),
        of=np.repeat(np.arange(count), slots),
    )


def result_order(rows: TokenRows) -> I64:
    """The order in which experts' ranks write results: by rank, then (token, k, source)."""
    return layout.order_by(rows.targets, rows.tokens, rows.k, rows.sources)


def token_writes(
    tokens: Tokens,
    rows: Outgoing,
    legs: dict[int, Leg],
    *,
    stages_ps: I64,
    charged_bytes: int,
) -> tuple[TokenRows, I64, Writes]:
    """Rows that stay at their rank with the instants at which they are there, and the writes of all
    others. ``stages_ps``: when each token of a rank may be written, from its first stage on."""
    ready_ps = first_ps(legs, rows.sources) + stages_ps.take(rows.tokens)
    here = rows.sources == rows.targets
    own, away = np.flatnonzero(here), np.flatnonzero(~here)
    stay, leave = rows.chosen(own), rows.chosen(away)
    writes = Writes(
        sources=leave.sources,
        targets=leave.targets,
        charged_bytes=np.full(len(away), charged_bytes, dtype=np.int64),
        ready_ps=ready_ps.take(away),
        data=layout.pack_tokens(leave, tokens.vectors),
    )
    mine = TokenRows(*stay[:6], vectors=tokens.vectors.take(stay.of, axis=0))
    return mine, ready_ps.take(own), writes


def result_writes(
    rows: TokenRows,
    results: U64,
    legs: dict[int, Leg],
    *,
    stages_ps: Callable[[int], I64],
    charged_bytes: int,
) -> tuple[ResultRows, I64, Writes]:
    """As ``token_writes``, for the results [n, words] of rows on their way back. ``stages_ps`` of a
    number of rows: when each may be written, from the first copy on."""
    if not len(rows.tokens):
        mine = ResultRows(rows.sources, rows.targets, rows.tokens, rows.k, results)
        return mine, rows.tokens, nothing(8 * (layout.RESULT_WORDS + results.shape[1]))
    order = result_order(rows)
    sources, targets = rows.sources.take(order), rows.targets.take(order)
    tokens, k = rows.tokens.take(order), rows.k.take(order)
    running = layout.running_index(targets)
    ready_ps = first_ps(legs, targets)
    ready_ps += stages_ps(int(running.max(initial=0)) + 1).take(running)
    here = sources == targets
    own, away = np.flatnonzero(here), np.flatnonzero(~here)
    mine = ResultRows(
        targets=sources.take(own),
        sources=targets.take(own),
        tokens=tokens.take(own),
        k=k.take(own),
        results=results.take(order.take(own), axis=0),
    )
    writes = Writes(
        sources=targets.take(away),
        targets=sources.take(away),
        charged_bytes=np.full(len(away), charged_bytes, dtype=np.int64),
        ready_ps=ready_ps.take(away),
        data=layout.pack_results(tokens.take(away), k.take(away), results, order.take(away)),
    )
    return mine, ready_ps.take(own), writes


def dispatch_flags(
    rows: Outgoing, legs: dict[int, Leg], experts: I64, held: Table, *, flag_bytes: int
) -> Writes:
    """A flag of each leg to each rank with experts, with a count for each of its experts."""
    ep_size, counts = len(held.shared), None
    if len(rows.targets):
        slot = held.local_slot.ravel().take(rows.targets * held.local_slot.shape[1] + rows.experts)
        flat = _leg_of(legs, ep_size=ep_size).take(rows.sources) * ep_size + rows.targets
        counts = np.bincount(flat * held.slots + slot, minlength=len(legs) * ep_size * held.slots)
        counts = counts.reshape(len(legs), ep_size, held.slots)
    charged = flag_bytes * np.maximum(held.written.take(experts), 1)
    return _flags(legs, experts, counts, charged, width=held.slots)


def combine_flags(
    rows: TokenRows, legs: dict[int, Leg], to: I64, *, ep_size: int, flag_bytes: int
) -> Writes:
    """A flag of each leg to each source ``to``, with the count of its results for it."""
    counts = None
    if len(rows.targets):
        flat = _leg_of(legs, ep_size=ep_size).take(rows.targets) * ep_size + rows.sources
        counts = np.bincount(flat, minlength=len(legs) * ep_size)
        counts = counts.reshape(len(legs), ep_size, 1)
    return _flags(legs, to, counts, np.full(len(to), flag_bytes), width=1)


def _flags(
    legs: dict[int, Leg], to: I64, counts: I64 | None, charged: I64, *, width: int
) -> Writes:
    """``counts`` [legs, ep_size, width] of rows; None: there are none. ``charged`` [to]."""
    pairs = _pairs(tuple(legs), to.tobytes(), charged.tobytes())
    instants_ps = np.array(list(legs.values()), dtype=np.int64).repeat(len(to), axis=0)
    if counts is None:
        of_pairs = np.zeros((len(instants_ps), width), dtype=np.int64)
    else:
        of_pairs = counts.take(to, axis=1).reshape(-1, width)
    return Writes(
        sources=pairs[0],
        targets=pairs[1],
        charged_bytes=pairs[2].copy(),
        ready_ps=instants_ps[:, 1],
        data=layout.pack_flags(instants_ps[:, 0], of_pairs),
    )


@functools.lru_cache(maxsize=16)
def _pairs(legs: tuple[int, ...], to: bytes, charged: bytes) -> I64:
    """[3, n] source, target and charged bytes of a flag of each leg to each rank, 0 bytes to itself: a
    node's ranks have the same peers for many layers. Not to be written to."""
    targets = np.tile(np.frombuffer(to, dtype=np.int64), len(legs))
    sources = np.array(legs, dtype=np.int64).repeat(len(to) // 8)
    sizes = np.tile(np.frombuffer(charged, dtype=np.int64), len(legs))
    return np.stack([sources, targets, np.where(sources == targets, 0, sizes)])


def _leg_of(legs: dict[int, Leg], *, ep_size: int) -> I64:
    """[ep_size] which of the legs is a rank's; -1: none."""
    leg_of = np.full(ep_size, -1, dtype=np.int64)
    leg_of[list(legs)] = np.arange(len(legs))
    return leg_of


def first_ps(legs: dict[int, Leg], ranks: I64) -> I64:
    """When the first stage of each rank [n] may begin."""
    of_rank = np.zeros(max(legs) + 1, dtype=np.int64)
    of_rank[list(legs)] = [leg.first_ps for leg in legs.values()]
    return of_rank.take(ranks)


def rows_sent(rows: Outgoing, legs: dict[int, Leg], *, ep_size: int) -> I64:
    """Rows that each leg sends to each rank [legs, ep_size]."""
    flat = _leg_of(legs, ep_size=ep_size).take(rows.sources) * ep_size + rows.targets
    return np.bincount(flat, minlength=len(legs) * ep_size).reshape(len(legs), ep_size)
