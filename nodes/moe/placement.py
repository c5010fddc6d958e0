"""Which decode rank holds which expert. Pure.

The deployment of 320 dies (arXiv 2506.12708, section 3.1 of the public readings): one expert a die,
ranks 0-255 the routed ones, 256-287 replicas of the shared expert, 288-319 redundant. Smaller groups:
routed experts contiguous, and every rank computes the shared expert of its own tokens. Ranks of nodes
that are gone are replaced: their experts go to ranks that live, in turn.
"""

from __future__ import annotations

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
    return ExpertPlacement(_only(home, alive), _only(shared, alive))


def _only(ranks: list[int], alive: frozenset[int]) -> tuple[int, ...]:
    left = sorted(alive)
    moved = 0
    result = []
    for rank in ranks:
        if rank not in alive:
            rank = left[moved % len(left)]
            moved += 1
        result.append(rank)
    return tuple(result)
