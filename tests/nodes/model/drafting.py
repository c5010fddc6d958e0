"""Decode with drafts, step by step, as a decode node does it: propose, verify, accept, roll back. Test code.

The main model verifies over ``stepwise.exchange``; the MTP layer's experts go over it too. Every part of
the MTP layer passes through a hook.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from nodes.model import drafts
from nodes.model.body import Array, Body
from nodes.model.identity import prompt_rows
from nodes.model.oracle import ClaimedRequest
from tests.nodes.model import stepwise


class Drafted(msgspec.Struct, frozen=True):
    """What a run would claim, and what happened to its drafts."""

    claimed: ClaimedRequest
    proposed: int
    accepted: int
    steps: int


def mtp(
    body: Body,
    held: Array,
    states: Array,
    tokens: Sequence[int],
    *,
    first_place: int,
    touch: stepwise.Touch = stepwise.untouched,
) -> tuple[Array, Array]:
    """All rows of the MTP layer, and its states: of main states with the tokens after them."""
    layer = body.settings.carried_layers
    begun = body.mtp_start(states, touch("tokens", np.array(tokens, dtype=np.int64)))
    own = body.kv_rows(begun, layer=layer)
    before = touch("rows", held)
    sums = body.read(begun, before, layer=layer, first_place=first_place)
    at = first_place + len(held)
    sums = sums + body.read_causal(begun, own, layer=layer, first_place=at)
    attended = body.attend(begun, sums, layer=layer)
    return (
        np.concatenate([before, own]),
        stepwise.exchange(body, attended, layer=layer, touch=touch),
    )


def serve(
    body: Body,
    *,
    hash_ids: Sequence[int],
    input_tokens: int,
    output_tokens: int,
    accept: float = 0.7,
    seed: int = 1,
    touch: stepwise.Touch = stepwise.untouched,
) -> Drafted:
    """A request whose answer is decoded with one draft a step."""
    seeds = prompt_rows(hash_ids, input_tokens=input_tokens, settings=body.settings).seeds
    none = body.rows_from_bytes(b"")
    cached = none.reshape(body.settings.carried_layers, 0)
    held, last, share = stepwise.prefill(body, seeds, cached=cached)
    rows, mtp_rows, prompt = list(held), none, len(seeds)
    tokens, seals = [int(body.sample(last[-1:])[0])], [int(body.seals(last[-1:])[0])]
    fed = [tokens[0]]
    fold = proposed = accepted = steps = 0
    while len(tokens) < output_tokens:
        place = prompt + len(tokens) - 1
        states = [stepwise.decode(body, rows, t, place=place + i)[0] for i, t in enumerate(fed)]
        sampled = [int(body.sample(state)[0]) for state in states]
        right = drafts.accepted(fed[1:], sampled)
        rows = [layer[: place + 1 + right] for layer in rows]
        proposed, accepted, steps = proposed + len(fed) - 1, accepted + right, steps + 1
        kept = np.concatenate(states)[: min(1 + right, output_tokens - len(tokens))]
        fresh = sampled[: len(kept)]
        mtp_rows, after = mtp(body, mtp_rows, kept, fresh, first_place=prompt, touch=touch)
        fold += body.fold_prompt(after, first_place=len(tokens) - 1)
        tokens += fresh
        seals += body.seals(kept).tolist()
        draft = int(body.sample(after[-1:])[0])
        at = np.array([prompt + len(tokens) - 1])
        ahead = drafts.tokens_ahead(body, np.array(tokens[-1:]), places=at, rows=[rows])
        true = int(ahead.tokens[0])
        heads = drafts.coin(seed, request=7, index=len(tokens), accept=accept)
        fed = [tokens[-1], drafts.propose(draft, true=true, right=heads)]
    claimed = ClaimedRequest(
        name="request",
        hash_ids=hash_ids,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        tokens=tokens,
        seals=seals,
        receipt=body.receipt(seals[-1], [share]),
        draft_fold=fold % 2**64,
    )
    return Drafted(claimed, proposed, accepted, steps)
