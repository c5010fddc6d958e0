"""What the ranks of one node write in one phase, as arrays: rows, flags, sizes, instants. Pure.

Owns the order of messages and which slot each goes to. Does not own bytes (``layout``) nor links.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from nodes.model.body import I64
from nodes.moe import layout
from nodes.moe.layout import U8, TokenRows, Tokens
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

    def chosen(self, index: Any) -> Writes:
        """Some of the messages."""
        return Writes(*(part[index] for part in self))


_NONE = np.empty(0, dtype=np.int64)
NOTHING = Writes(_NONE, _NONE, _NONE, _NONE, np.empty((0, 0), dtype=np.uint8))
"""No messages."""


def token_rows(
    tokens: Tokens, routed: I64, held: Table, *, shared_expert: int, max_tokens: int
) -> TokenRows:
    """A row for each (token, expert) in (token, k) order, the shared expert last. ``routed`` [n, top_k]
    are the ranks of the replicas; ``max_tokens``: slots of a source at a target."""
    count, top_k = tokens.experts.shape
    slots = top_k + 1
    experts = np.full((count, slots), shared_expert, dtype=np.int64)
    experts[:, :-1] = tokens.experts
    targets = np.empty((count, slots), dtype=np.int64)
    targets[:, :-1] = routed
    targets[:, -1] = held.shared[tokens.ranks]
    sources, to = np.repeat(tokens.ranks, slots), targets.ravel()
    running = layout.running_index(sources * len(held.shared) + to)
    return TokenRows(
        targets=to,
        sources=sources,
        slots=sources * max_tokens + running,
        experts=experts.ravel(),
        tokens=np.repeat(tokens.numbers, slots),
        k=np.tile(np.arange(slots), count),
        vectors=np.repeat(tokens.vectors, slots, axis=0),
    )


def result_order(rows: TokenRows) -> I64:
    """The order in which experts' ranks write results: by rank, then (token, k, source)."""
    return np.lexsort((rows.sources, rows.k, rows.tokens, rows.targets))


def dispatch_flags(
    rows: TokenRows, legs: dict[int, Leg], experts: I64, held: Table, *, flag_bytes: int
) -> Writes:
    """A flag of each leg to each rank with experts, with a count for each of its experts."""
    ep_size = len(held.shared)
    leg_of = np.full(ep_size, -1, dtype=np.int64)
    leg_of[list(legs)] = np.arange(len(legs))
    slot = held.local_slot[rows.targets, rows.experts]
    flat = (leg_of[rows.sources] * ep_size + rows.targets) * held.slots + slot
    counts = np.bincount(flat, minlength=len(legs) * ep_size * held.slots)
    per_target = counts.reshape(len(legs), ep_size, held.slots)[:, experts]
    charged = flag_bytes * np.maximum(held.written[experts], 1)
    return _flags(legs, experts, per_target.reshape(-1, held.slots), charged)


def combine_flags(
    rows: TokenRows, legs: dict[int, Leg], to: I64, *, ep_size: int, flag_bytes: int
) -> Writes:
    """A flag of each leg to each source ``to``, with the count of its results for it."""
    leg_of = np.full(ep_size, -1, dtype=np.int64)
    leg_of[list(legs)] = np.arange(len(legs))
    flat = leg_of[rows.targets] * ep_size + rows.sources
    counts = np.bincount(flat, minlength=len(legs) * ep_size).reshape(len(legs), ep_size)
    charged = np.full(len(to), flag_bytes, dtype=np.int64)
    return _flags(legs, to, counts[:, to].reshape(-1, 1), charged)


def _flags(legs: dict[int, Leg], to: I64, counts: I64, charged: I64) -> Writes:
    began_ps = np.array([leg.began_ps for leg in legs.values()], dtype=np.int64)
    first_ps = np.array([leg.first_ps for leg in legs.values()], dtype=np.int64)
    return Writes(
        sources=np.repeat(np.array(list(legs), dtype=np.int64), len(to)),
        targets=np.tile(to, len(legs)),
        charged_bytes=np.tile(charged, len(legs)),
        ready_ps=np.repeat(first_ps, len(to)),
        data=layout.pack_flags(np.repeat(began_ps, len(to)), counts),
    )


def first_ps(legs: dict[int, Leg], ranks: I64) -> I64:
    """When the first stage of each rank [n] may begin."""
    of_rank = np.zeros(max(legs) + 1, dtype=np.int64)
    of_rank[list(legs)] = [leg.first_ps for leg in legs.values()]
    return of_rank[ranks]


def rows_sent(rows: TokenRows, legs: dict[int, Leg], *, ep_size: int) -> I64:
    """Rows that each leg sends to each rank [legs, ep_size]."""
    leg_of = np.full(ep_size, -1, dtype=np.int64)
    leg_of[list(legs)] = np.arange(len(legs))
    flat = leg_of[rows.sources] * ep_size + rows.targets
    return np.bincount(flat, minlength=len(legs) * ep_size).reshape(len(legs), ep_size)
