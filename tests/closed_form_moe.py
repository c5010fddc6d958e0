"""Dispatch and combine on the links alone, in closed form: what the emulator's operators must equal.

Imports nothing of cmnet: plain integers and a sort, so that it can be checked by hand. Times are picoseconds,
sizes bytes, rates bits per second. Figures: CloudMatrix384 (arXiv 2506.12708), table 1, and StrataCL
(arXiv 2607.26444) for the two dies of one package.

Each die writes its messages one after the other through its one egress, in the order in which they are given,
each not before it is ready. Its first byte is at the target one propagation later; there all arrivals pass
one ingress, in the order of their first bytes (ties: lower source, then earlier message), cut through: a
message is in when its own last byte is, or when the ingress has had the time for it, whichever is later. A
message of a die to itself passes no link: it is in when it is ready. Flags follow the messages of their die,
the one to itself too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

PS_PER_S = 10**12
GB_PER_S = 8 * 10**9
US = 10**6

DIES_PER_PACKAGE = 2
DIES_PER_NODE = 16


class Way(NamedTuple):
    """A path between two dies."""

    rate_bps: int
    propagation_ps: int


def serialization_ps(size: int, rate_bps: int) -> int:
    """ceil(bits x 10^12 / rate)."""
    return -(-8 * size * PS_PER_S // rate_bps)


def one_way_ps(read_latency_ps: int, read_rate_bps: int) -> int:
    """A lone read of 512 B completes at the printed latency: there and back, and its serialization."""
    return (read_latency_ps - serialization_ps(512, read_rate_bps)) // 2


IN_PACKAGE = Way(210 * GB_PER_S, 200_000)
IN_NODE = Way(137 * GB_PER_S, one_way_ps(1_200_000, 167 * GB_PER_S))
ACROSS = Way(135 * GB_PER_S, one_way_ps(1_900_000, 164 * GB_PER_S))


def way(source: int, target: int) -> Way:
    """Between two ranks, numbered die by die, package by package, node by node."""
    if source // DIES_PER_PACKAGE == target // DIES_PER_PACKAGE:
        return IN_PACKAGE
    if source // DIES_PER_NODE == target // DIES_PER_NODE:
        return IN_NODE
    return ACROSS


class Message(NamedTuple):
    """One write."""

    target: int
    size: int
    ready_ps: int
    is_flag: bool = False


class Port:
    """One direction of a die's port. While it is busy at one rate, ends are those of the bits so far."""

    def __init__(self) -> None:
        self.free_ps = self.begin_ps = self.bits = self.rate_bps = 0

    def serve(self, start_ps: int, size: int, rate_bps: int) -> int:
        """When a message is through that starts then, at or after ``free_ps``."""
        if start_ps > self.free_ps or rate_bps != self.rate_bps:
            self.begin_ps, self.bits, self.rate_bps = start_ps, 0, rate_bps
        self.bits += 8 * size
        self.free_ps = self.begin_ps - (-self.bits * PS_PER_S // rate_bps)
        return self.free_ps


def deliveries_ps(sends: Sequence[Sequence[Message]]) -> list[list[int]]:
    """When each message of each source is in, for ``sends[source]`` in the order of writing."""
    delivered = [[0] * len(messages) for messages in sends]
    arrivals: list[list[tuple[int, int, int, int, Message]]] = [[] for _ in sends]
    for source, messages in enumerate(sends):
        egress = Port()
        for index, message in enumerate(messages):
            if message.target == source:
                flag_ps = max(message.ready_ps, egress.free_ps) if message.is_flag else 0
                delivered[source][index] = max(message.ready_ps, flag_ps)
                continue
            rate_bps, propagation_ps = way(source, message.target)
            start_ps = max(message.ready_ps, egress.free_ps)
            end_ps = egress.serve(start_ps, message.size, rate_bps)
            arrival = (start_ps + propagation_ps, source, index, end_ps + propagation_ps, message)
            arrivals[message.target].append(arrival)
    for at_target in arrivals:
        ingress = Port()
        for first_ps, source, index, last_ps, message in sorted(at_target):
            rate_bps = way(source, message.target).rate_bps
            through_ps = ingress.serve(max(first_ps, ingress.free_ps), message.size, rate_bps)
            if last_ps > through_ps:
                ingress.free_ps = through_ps = last_ps
                ingress.rate_bps = 0
            delivered[source][index] = through_ps
    return delivered


def last_ps(sends: Sequence[Sequence[Message]]) -> list[int]:
    """When the last message for each rank is in."""
    last = [0] * len(sends)
    for messages, ends_ps in zip(sends, deliveries_ps(sends), strict=True):
        for message, end_ps in zip(messages, ends_ps, strict=True):
            last[message.target] = max(last[message.target], end_ps)
    return last


def dispatch(
    targets: Sequence[Sequence[Sequence[int]]],
    *,
    size: int,
    begin_ps: Sequence[int] | None = None,
    token_ps: Sequence[int] | None = None,
    flag_sizes: Sequence[int] | None = None,
) -> list[int]:
    """When each rank has all. ``targets[source][token]`` are the ranks of a token's experts, k by k.

    ``begin_ps``: when each source's first stage begins; ``token_ps``: when each token is ready after that;
    ``flag_sizes``: of the flag that every source writes to each rank. None: 0, and no flags.
    """
    sends = []
    for source, tokens in enumerate(targets):
        first_ps = 0 if begin_ps is None else begin_ps[source]
        messages = [
            Message(target, size, first_ps + (0 if token_ps is None else token_ps[token]))
            for token, ranks in enumerate(tokens)
            for target in ranks
        ]
        flags = [] if flag_sizes is None else list(enumerate(flag_sizes))
        sends.append([*messages, *(Message(rank, flag, first_ps, True) for rank, flag in flags)])
    return last_ps(sends)


def combine(
    targets: Sequence[Sequence[Sequence[int]]],
    *,
    size: int,
    begin_ps: Sequence[int] | None = None,
    row_ps: Sequence[int] | None = None,
    flag_size: int | None = None,
) -> list[int]:
    """When each source has all results back. Experts' ranks write them in the order (token, k, source).

    ``begin_ps`` and ``row_ps`` as in ``dispatch``, of the experts' ranks and of each one's rows in turn;
    ``flag_size``: of the flag that each writes to every source.
    """
    rows: list[list[tuple[int, int, int]]] = [[] for _ in targets]
    for source, tokens in enumerate(targets):
        for token, ranks in enumerate(tokens):
            for k, rank in enumerate(ranks):
                rows[rank].append((token, k, source))
    sends = []
    for rank, of_rank in enumerate(rows):
        first_ps = 0 if begin_ps is None else begin_ps[rank]
        messages = [
            Message(source, size, first_ps + (0 if row_ps is None else row_ps[place]))
            for place, (_, _, source) in enumerate(sorted(of_rank))
        ]
        if flag_size is not None:
            sources = range(len(targets))
            messages += [Message(source, flag_size, first_ps, is_flag=True) for source in sources]
        sends.append(messages)
    return last_ps(sends)
