"""A whole request, step by step with any body, every part passed through a hook. Test code only.

Prefill in pieces with the experts as messages, KV rows moved, then decode one token at a time: the
way the serving system goes, without a network and without knowing what a state or a row is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from nodes.model.body import Array, Body
from nodes.model.identity import prompt_rows
from nodes.model.oracle import ClaimedRequest

Items = npt.NDArray[Any]
Touch = Callable[[str, Items], Items]


def untouched(_part: str, items: Items) -> Items:
    return items


def exchange(body: Body, states: Array, *, layer: int, touch: Touch) -> Array:
    """Gate, dispatch, experts and combine of these tokens, message by message."""
    count, top_k = len(states), body.settings.top_k
    gate = body.gate(states, layer=layer)
    vectors = body.dispatch(states)
    experts = touch("experts", gate.experts).reshape(-1)
    sent = touch("vectors", np.repeat(vectors, top_k, axis=0))
    results = touch("results", body.expert(experts, sent, layer=layer))
    ids = np.full(count, body.settings.shared_expert, dtype=np.int64)
    shared = touch("shared", body.expert(ids, vectors, layer=layer))
    weights = touch("weights", gate.weights)
    slots = touch("slots", np.arange(top_k))
    results = results.reshape(count, top_k, body.result_words)[:, slots]
    return body.combine(states, weights[:, slots], results, shared, layer=layer)


def prefill(
    body: Body, seeds: Array, *, cached: Array, touch: Touch = untouched
) -> tuple[Array, Array, int]:
    """KV rows [layers, cached + own], states, and the receipt's share of the own rows."""
    first = cached.shape[1]
    states = body.start_prompt(touch("seeds", seeds), first_place=first)
    layers = []
    for layer in range(body.settings.carried_layers):
        own = body.kv_rows(states, layer=layer)
        before = touch("rows", cached[layer])
        place = int(touch("places", np.array([first]))[0])
        sums = body.read(states, before, layer=layer, first_place=0)
        sums = sums + body.read_causal(states, own, layer=layer, first_place=place)
        states = body.attend(states, sums, layer=layer)
        states = exchange(body, states, layer=layer, touch=touch)
        layers.append(np.concatenate([before, own]))
    return np.stack(layers), states, body.fold_prompt(states, first_place=first)


def decode(
    body: Body, rows: list[Array], token: int, *, place: int, touch: Touch = untouched
) -> tuple[Array, list[tuple[int, int]]]:
    """State after the last layer and its log; appends the token's own rows to ``rows``."""
    at = touch("places", np.array([place], dtype=np.int64))
    states, log = body.start_tokens(np.array([token], dtype=np.int64), places=at), []
    for layer in range(body.settings.carried_layers):
        rows[layer] = np.concatenate([rows[layer], body.kv_rows(states, layer=layer)])
        seen = touch("rows", rows[layer])
        sums = body.read(states, seen, layer=layer, first_place=0)
        attended = body.attend(states, sums, layer=layer)
        states = exchange(body, attended, layer=layer, touch=touch)
        log.append((int(body.seals(attended)[0]), int(body.seals(states)[0])))
    return states, log


def serve(
    body: Body,
    *,
    hash_ids: Sequence[int],
    input_tokens: int,
    output_tokens: int,
    chunk: int = 1 << 30,
    touch: Touch = untouched,
) -> ClaimedRequest:
    """Prefill in chunks of so many rows, then decode: what a run would claim."""
    seeds = prompt_rows(hash_ids, input_tokens=input_tokens, settings=body.settings).seeds
    held = body.rows_from_bytes(b"").reshape(body.settings.carried_layers, 0)
    shares, last = [], body.start_prompt(seeds[:0], first_place=0)
    for first in range(0, len(seeds), chunk):
        held, last, share = prefill(body, seeds[first : first + chunk], cached=held, touch=touch)
        shares.append(share)
    rows, last = [touch("rows", layer) for layer in held], last[-1:]
    tokens, seals = [], []
    log: list[list[tuple[int, int]]] = [[]]
    for step in range(output_tokens):
        tokens.append(int(body.sample(last)[0]))
        seals.append(int(body.seals(last)[0]))
        if step < output_tokens - 1:
            last, steps = decode(body, rows, tokens[-1], place=len(seeds) + step, touch=touch)
            log.append(steps)
    return ClaimedRequest(
        name="request",
        hash_ids=hash_ids,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        tokens=tokens,
        seals=seals,
        receipt=body.receipt(seals[-1], shares),
        log=log,
    )
