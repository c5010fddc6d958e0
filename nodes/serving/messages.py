"""What the parts of the serving system say to each other.

``request`` is a request's index in the workload, ``attempt`` counts from 0: what belongs to an attempt
that was given up is ignored. Ranks are decode ranks (one per die). Seals and receipts are 64-bit.
"""

from __future__ import annotations

import msgspec


class Prefill(msgspec.Struct, frozen=True, tag=True):
    """Gateway to the first node of a prefill instance."""

    request: int
    attempt: int
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]
    rank: int


class First(msgspec.Struct, frozen=True, tag=True):
    """Prefill to gateway: the first token."""

    request: int
    attempt: int
    token: int
    seal: int
    blocks: int
    blocks_hit: int
    receipt: int | None
    """Set when this is also the last token."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Any part to the gateway: this attempt cannot go on."""

    request: int
    attempt: int
    error: str


class Rows(msgspec.Struct, frozen=True, tag=True):
    """KV rows of a prompt, on their way to the decode rank; the payload holds them."""

    request: int
    attempt: int
    rank: int
    input_tokens: int
    output_tokens: int
    token: int
    rows: int
    share: int
    """The prompt's part of the receipt."""


class Epoch(msgspec.Struct, frozen=True, tag=True):
    """Gateway to decode nodes: who lives, from now on. The first in the list leads."""

    number: int
    nodes: tuple[int, ...]


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Decode node to leader: I am in this epoch, with these sequences of these ranks."""

    epoch: int
    node: int
    sequences: tuple[tuple[int, int, int, int], ...]
    """(request, attempt, rank, KV tokens)"""


class Joined(msgspec.Struct, frozen=True, tag=True):
    """Decode node to leader: a sequence's KV is here."""

    epoch: int
    request: int
    attempt: int
    rank: int
    kv_tokens: int


class Step(msgspec.Struct, frozen=True, tag=True):
    """Leader to decode nodes: do one step."""

    epoch: int
    number: int
    admitted: tuple[tuple[int, int], ...]
    """(request, attempt) of those that join, until their node has answered a step that named them."""
    sources: tuple[tuple[int, int], ...]
    """(rank, sequences) of every rank that has some."""
    kv_tokens: int
    """The largest KV length that any rank reads: layers that are not carried last as long."""


class StepDone(msgspec.Struct, frozen=True, tag=True):
    """Decode node to leader: my part of the step is over; these sequences are still with me."""

    epoch: int
    number: int
    node: int
    active: tuple[tuple[int, int, int], ...]
    """(request, attempt, KV tokens) of each"""
    error: str


class GiveUp(msgspec.Struct, frozen=True, tag=True):
    """Leader to decode nodes: steps keep failing; end the sequences of this last one."""

    epoch: int
    number: int
    error: str


Token = tuple[int, int, int, int, int, int | None]
"""(request, attempt, index, token, seal, receipt with the last)"""


class Tokens(msgspec.Struct, frozen=True, tag=True):
    """Decode node to gateway: what a step made; of a sequence one token, or several in their order."""

    tokens: tuple[Token, ...]
    folds: tuple[tuple[int, int, int], ...] = ()
    """(request, attempt, fold of the MTP layer) of those that end here, where a run has drafts."""


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Gateway to prefill and decode: this attempt of a request, and those before it, are given up."""

    request: int
    attempt: int


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Gateway to a node: do you live?"""

    asked_ps: int


class Pong(msgspec.Struct, frozen=True, tag=True):
    """The answer, with the instant of the question."""

    asked_ps: int
    incarnation: int


class Up(msgspec.Struct, frozen=True, tag=True):
    """A restarted node to the gateway."""

    node: int
    incarnation: int


class Lookup(msgspec.Struct, frozen=True, tag=True):
    """Prefill to a store node: which of these keys do you hold?"""

    keys: tuple[bytes, ...]


class Found(msgspec.Struct, frozen=True, tag=True):
    """One flag per key of a ``Lookup``."""

    held: tuple[bool, ...]


class Get(msgspec.Struct, frozen=True, tag=True):
    """Prefill to a store node: the value of this key."""

    key: bytes


class Value(msgspec.Struct, frozen=True, tag=True):
    """The answer to ``Get``; the payload is the value. Not held: it went away meanwhile."""

    held: bool


class Put(msgspec.Struct, frozen=True, tag=True):
    """Prefill to a store node: keep the payload under this key."""

    key: bytes
    charged_bytes: int


class Handover(msgspec.Struct, frozen=True, tag=True):
    """First node of an instance to another one of it: send these rows on to their rank."""

    rows: Rows


TYPES: tuple[type[msgspec.Struct], ...] = (
    Prefill,
    First,
    Failed,
    Rows,
    Epoch,
    Hello,
    Joined,
    Step,
    StepDone,
    GiveUp,
    Tokens,
    Cancel,
    Ping,
    Pong,
    Up,
    Lookup,
    Found,
    Get,
    Value,
    Put,
    Handover,
)
