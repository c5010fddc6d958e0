"""Sequences of a decode node, what a step makes of one, and how they are split in micro-batches. Pure.

Owns a sequence's KV rows, its last token and its draft. A step writes rows behind those that are in use
and keeps what it found in a ``Turn``; only ``Sequence.commit`` changes the sequence, so a step that is
given up is simply done again. Rows of a rejected draft are never in use: the next step writes over them.
"""

from __future__ import annotations

import msgspec
import numpy as np

from nodes.model import drafts
from nodes.model.body import Array
from nodes.serving import messages


class Turn(msgspec.Struct, kw_only=True):
    """What one step made of one sequence, until it is committed."""

    tokens: list[int]
    """New ones, at least one; never more than were asked for."""
    seals: list[int]
    proposed: int
    accepted: int
    fold: int = 0
    """Of the MTP layer's states."""
    draft: int | None = None
    """The next proposal."""


class Sequence:
    """One request being decoded. ``rows`` is [carried layers, room], of which ``length`` are used."""

    __slots__ = (
        "attempt",
        "draft",
        "fold",
        "kv_tokens",
        "length",
        "mtp_rows",
        "produced",
        "prompt",
        "rank",
        "request",
        "rows",
        "share",
        "token",
        "total",
    )

    def __init__(self, message: messages.Rows, rows: Array) -> None:
        self.request = message.request
        self.attempt = message.attempt
        self.rank = message.rank
        self.kv_tokens = message.input_tokens
        self.token = message.token
        self.draft: int | None = None
        """The proposal for the token after ``token``; none in the first step."""
        self.produced = 1
        self.total = message.output_tokens
        self.prompt = self.length = message.rows
        self.share = message.share
        self.fold = 0
        room = message.rows + message.output_tokens
        self.rows = np.zeros((rows.shape[0], room), dtype=rows.dtype)
        self.rows[:, : message.rows] = rows
        self.mtp_rows = np.zeros(message.output_tokens, dtype=rows.dtype)
        """Of the MTP layer, whose first row is at place ``prompt``; as many are used as tokens were
        fed: ``length - prompt``."""

    @property
    def key(self) -> tuple[int, int]:
        """(request, attempt)"""
        return self.request, self.attempt

    @property
    def fed(self) -> list[int]:
        """Tokens of the next step, from place ``length`` on."""
        return [self.token] if self.draft is None else [self.token, self.draft]

    def turn(self, sampled: list[int], seals: list[int]) -> Turn:
        """What the main model says to ``fed``: a token for each, of which those behind a wrong proposal
        mean nothing."""
        proposed = self.fed[1:]
        right = drafts.accepted(proposed, sampled)
        kept = min(1 + right, self.total - self.produced)
        return Turn(
            tokens=sampled[:kept], seals=seals[:kept], proposed=len(proposed), accepted=right
        )

    def commit(self, turn: Turn) -> None:
        """The step happened."""
        self.token, self.draft = turn.tokens[-1], turn.draft
        self.length += len(turn.tokens)
        self.kv_tokens += len(turn.tokens)
        self.produced += len(turn.tokens)
        self.fold = (self.fold + turn.fold) % 2**64

    @property
    def ended(self) -> bool:
        """All tokens that were asked for are there."""
        return self.produced == self.total


def split(sequences: list[Sequence], ranks: list[int], *, parts: int) -> list[list[Sequence]]:
    """The sequences of these ranks in micro-batches, those of one rank neighbours, in the order of
    ``ranks``: each rank's are dealt out evenly, the first part gets one more."""
    found: list[list[Sequence]] = [[] for _ in range(parts)]
    for rank in ranks:
        ours = [sequence for sequence in sequences if sequence.rank == rank]
        edges = [-(-len(ours) * part // parts) for part in range(parts + 1)]
        for part, held in enumerate(found):
            held += ours[edges[part] : edges[part + 1]]
    return found
