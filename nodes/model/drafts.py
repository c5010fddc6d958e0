"""Drafts: which are to be right, what is proposed, and how much of it is accepted. Pure.

A draft is the token that the MTP layer's state samples. How often real drafts are right is a property of
trained weights, which we have not; here it is a setting. A coin of (seed, request, index) decides whether
the proposal for one place of an answer is the main model's own token, which the node computes for itself
without an exchange (``tokens_ahead``), or another one, made of the draft. The main model then verifies each
proposal as it would any: fed behind the last token, over the exchange, accepted if it is the token sampled
before it, else rolled back. So neither tokens nor seals depend on the coins or on the setting.

Owns these decisions. Does not own the layer (``Body.mtp_start`` and the steps after it), nor the rows
that a rejected proposal leaves and that its node takes back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from fractions import Fraction

import msgspec
import numpy as np

from nodes.model.body import I64, Array, Body

BITS = 53
"""Of a coin: what a float between 0 and 1 can tell apart."""


class Ahead(msgspec.Struct, frozen=True, eq=False):
    """One step of the main model for some sequences, without an exchange."""

    tokens: I64
    """[n]: the token after each that was fed."""

    rows: list[Array]
    """Per carried layer [n]: the rows that a real step over the same tokens will leave."""


def coin(seed: int, *, request: int, index: int, accept: float | Fraction) -> bool:
    """Whether the proposal for token ``index`` of a request's answer is to be right.

    True with the chance ``accept``, rounded down to a multiple of 2^-53. A digest and no stream of
    ``cmnet.entropy``: whoever asks, in whichever order, after whichever restart, gets the same answer.
    ValueError: ``accept`` is not within 0..1.
    """
    if not 0 <= accept <= 1:
        raise ValueError("a chance of 0 to 1")
    data = f"cmnet draft {seed} {request} {index}".encode()
    drawn = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
    return drawn >> (64 - BITS) < int(Fraction(accept) * 2**BITS)


def propose(draft: int, *, true: int, right: bool) -> int:
    """The proposal: the true token, or the draft, moved by one where it is right by chance."""
    if right:
        return true
    if draft != true:
        return draft
    return draft - 1 if draft else 1


def accepted(proposed: Sequence[int], sampled: Sequence[int]) -> int:
    """How many leading proposals are right.

    ``sampled`` are the main model's tokens, of which each was sampled one place before the proposal of
    the same index, so there may be one more. Those behind the first wrong proposal mean nothing.
    """
    wrong = (i for i, token in enumerate(proposed) if token != sampled[i])
    return next(wrong, len(proposed))


def tokens_ahead(body: Body, tokens: I64, *, places: I64, rows: Sequence[Sequence[Array]]) -> Ahead:
    """The main model's tokens after these ones [n], each fed at its place, all in this process.

    ``rows``: for each sequence and carried layer the KV rows of all places before, from place 0. They
    stay as they are. For more than one token ahead append ``Ahead.rows`` to a copy and ask again.
    """
    states, left = body.start_tokens(tokens, places=places), []
    for layer in range(body.settings.carried_layers):
        own = body.kv_rows(states, layer=layer)
        sums = [
            body.read(one, np.concatenate([before[layer], row]), layer=layer, first_place=0)
            for before, one, row in zip(rows, _single(states), _single(own), strict=True)
        ]
        if sums:
            states = body.attend(states, np.concatenate(sums), layer=layer)
        states = body.moe_here(states, layer=layer)
        left.append(own)
    return Ahead(tokens=body.sample(states), rows=left)


def _single(items: Array) -> list[Array]:
    """Each item in an array of its own."""
    return [items[i : i + 1] for i in range(len(items))]
