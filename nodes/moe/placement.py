"""Which decode rank holds which expert. Pure.

The deployment of 320 dies (arXiv 2506.12708, section 3.1 of the public readings): one expert a die,
ranks 0-255 the routed ones, 256-287 replicas of the shared expert, 288-319 redundant. Smaller groups:
routed experts contiguous, and every rank computes the shared expert of its own tokens. What lay on
ranks of nodes that are gone goes, piece by piece, to the living rank that has least: redundant ranks
first. Nothing else moves.
"""

from __future__ import annotations

import collections
import heapq

import msgspec


class ExpertPlacement(msgspec.Struct, frozen=True):
    """``ranks[e]`` holds routed expert e; ``shared[r]`` computes rank r's shared expert."""

    ranks: tuple[int, ...]
    shared: tuple[int, ...]


def place(*, experts: int, ep_size: int, alive: frozenset[int]) -> ExpertPlacement:
    """The placement over the ranks that live, all of 0..ep_size-1 at first."""
    assert alive
    if ep_size > experts:
        home = list(range(experts))
        replicas = max((ep_size - experts) // 2, 1)
        shared = [experts + rank % replicas for rank in range(ep_size)]
    else:
        home = [expert * ep_size // experts for expert in range(experts)]
        shared = list(range(ep_size))
    held = collections.Counter(rank for rank in home + shared if rank in alive)
    least = [(held[rank], rank) for rank in sorted(alive)]
    return ExpertPlacement(
        ranks=_on_living(home, alive, least), shared=_on_living(shared, alive, least)
    )


def _on_living(
    homes: list[int], alive: frozenset[int], least: list[tuple[int, int]]
) -> tuple[int, ...]:
    """The homes, those that are gone replaced by the living rank with least; ties: the lower rank.

    ``least`` is (pieces held, rank) of those that live, and is kept up to date.
    """
    heapq.heapify(least)
    living = []
    for rank in homes:
        if rank not in alive:
            count, rank = least[0]
            heapq.heapreplace(least, (count + 1, rank))
        living.append(rank)
    return tuple(living)
