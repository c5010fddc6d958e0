"""Drafts: acceptance is the setting's, tokens never depend on it, and the oracle sees the MTP layer."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import msgspec
import numpy as np
import pytest

from cmnet import entropy
from nodes.model import bodies, drafts
from nodes.model.body import Body
from nodes.model.identity import prompt_rows
from nodes.model.oracle import Verdict
from nodes.model.tamper import KINDS, Tamper
from nodes.settings import ModelSettings
from tests.nodes.model import drafting, stepwise

MODEL = ModelSettings()
PROMPT: dict[str, Any] = {"hash_ids": [5, 6, 7], "input_tokens": 1200, "output_tokens": 8}
NAMES: tuple[bodies.Name, ...] = ("exact", "seal")


BODIES = {name: bodies.make(name, MODEL) for name in NAMES}


def body_of(name: bodies.Name) -> Body:
    return BODIES[name]


def coins(seed: int) -> list[bool]:
    places = [(request, index) for index in range(50) for request in range(100)]
    return [drafts.coin(seed, request=r, index=i, accept=0.7) for r, i in places]


def test_a_coin_is_a_function_of_its_names_and_falls_as_often_as_asked() -> None:
    """5,000 coins: 6 standard deviations are 195. 0.7 is what the paper has for one MTP layer."""
    heads = coins(1)
    assert heads == coins(1)
    assert abs(sum(heads) - 3_500) < 195
    assert abs(sum(a != b for a, b in zip(heads, coins(2))) - 2_100) < 210


def test_coins_of_neighbours_are_independent() -> None:
    """Pairs along requests and along indexes: a quarter of each kind, 5 standard deviations."""
    table = np.array(
        [[drafts.coin(3, request=r, index=i, accept=0.5) for i in range(100)] for r in range(100)]
    )
    for pairs in (table[1:] * 2 + table[:-1], table[:, 1:] * 2 + table[:, :-1]):
        counts = np.bincount(pairs.ravel(), minlength=4)
        assert abs(counts - pairs.size / 4).max() < 220


def test_never_and_always_are_exact() -> None:
    """A coin of 0 or 1 has no exception in 2^53."""
    assert not any(drafts.coin(1, request=0, index=i, accept=0) for i in range(1000))
    assert all(drafts.coin(1, request=0, index=i, accept=1) for i in range(1000))
    half = [drafts.coin(1, request=0, index=i, accept=Fraction(1, 2)) for i in range(1000)]
    assert half == [drafts.coin(1, request=0, index=i, accept=0.5) for i in range(1000)]


def test_a_larger_chance_only_adds_heads() -> None:
    """The same draw against a higher threshold: runs of two settings differ as little as they can."""
    for index in range(1000):
        heads = [drafts.coin(1, request=0, index=index, accept=p / 10) for p in range(11)]
        assert heads == sorted(heads)


@pytest.mark.parametrize("accept", [-0.1, 1.1, float("nan")])
def test_other_chances_are_refused(accept: float) -> None:
    with pytest.raises(ValueError, match="0 to 1"):
        drafts.coin(1, request=0, index=0, accept=accept)


def test_a_proposal_is_right_when_the_coin_says_so_and_else_never() -> None:
    for draft in range(5):
        for true in range(5):
            assert drafts.propose(draft, true=true, right=True) == true
            wrong = drafts.propose(draft, true=true, right=False)
            assert wrong != true
            assert wrong == draft or (draft == true and 0 <= wrong <= max(draft, 1))


@pytest.mark.parametrize(
    ("proposed", "sampled", "count"),
    [
        ([], [4], 0),
        ([4], [4, 9], 1),
        ([5], [4, 9], 0),
        ([4, 9, 3], [4, 9, 3, 1], 3),
        ([4, 8, 3], [4, 9, 3, 1], 1),
    ],
)
def test_proposals_are_accepted_up_to_the_first_wrong_one(
    proposed: list[int], sampled: list[int], count: int
) -> None:
    assert drafts.accepted(proposed, sampled) == count


@pytest.mark.parametrize("name", NAMES)
def test_tokens_ahead_are_those_that_the_exchange_makes(name: bodies.Name) -> None:
    """Three sequences of other lengths at once, twice in a row; nothing that was given is changed."""
    body = body_of(name)
    tokens, places, rows, right = [], [], [], []
    for number in range(3):
        request = stepwise.serve(
            body, hash_ids=[number], input_tokens=130 * (1 + number), output_tokens=3
        )
        held, last, _ = stepwise.prefill(
            body,
            prompt_rows([number], input_tokens=130 * (1 + number), settings=MODEL).seeds,
            cached=body.rows_from_bytes(b"").reshape(2, 0),
        )
        assert int(body.sample(last[-1:])[0]) == request.tokens[0]
        tokens.append(request.tokens[0])
        places.append(held.shape[1])
        rows.append(list(held))
        right.append(request.tokens[1:])
    kept = [[layer.tobytes() for layer in own] for own in rows]
    first = drafts.tokens_ahead(body, np.array(tokens), places=np.array(places), rows=rows)
    assert first.tokens.tolist() == [own[0] for own in right]
    assert [[layer.tobytes() for layer in own] for own in rows] == kept
    longer = [
        [np.concatenate([own[layer], first.rows[layer][i : i + 1]]) for layer in range(2)]
        for i, own in enumerate(rows)
    ]
    second = drafts.tokens_ahead(body, first.tokens, places=np.array(places) + 1, rows=longer)
    assert second.tokens.tolist() == [own[1] for own in right]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_ahead_of_no_sequence(name: bodies.Name) -> None:
    none = np.empty(0, dtype=np.int64)
    assert drafts.tokens_ahead(body_of(name), none, places=none, rows=[]).tokens.shape == (0,)


@pytest.mark.parametrize("name", NAMES)
def test_tokens_do_not_depend_on_drafts(name: bodies.Name) -> None:
    """Design 3.2: no drafts, none right, some, all: one answer, and one fold of the MTP layer."""
    body, judge = body_of(name), bodies.judge(name, MODEL)
    plain = stepwise.serve(body, **PROMPT)
    folds = set()
    for accept in (0.0, 0.5, 1.0):
        claimed = drafting.serve(body, **PROMPT, accept=accept).claimed
        assert (claimed.tokens, claimed.seals) == (plain.tokens, plain.seals)
        assert claimed.receipt == plain.receipt
        assert judge.check(claimed) == Verdict(checked_tokens=8, wrong=0, first=None)
        folds.add(claimed.draft_fold)
    assert len(folds) == 1


@pytest.mark.parametrize("name", NAMES)
def test_the_coins_are_what_is_accepted(name: bodies.Name) -> None:
    """Verified over the exchange: every proposal that was to be right is, and no other."""
    body = body_of(name)
    never, always = (drafting.serve(body, **PROMPT, accept=p) for p in (0.0, 1.0))
    assert (never.steps, never.proposed, never.accepted) == (7, 6, 0)
    assert (always.steps, always.proposed, always.accepted) == (4, 3, 3)
    some = drafting.serve(body, **PROMPT, accept=0.7, seed=4)
    index, expected = 2, []
    while index < 8:
        expected.append(drafts.coin(4, request=7, index=index, accept=0.7))
        index += 1 + expected[-1]
    assert (some.proposed, some.accepted) == (len(expected), sum(expected))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("output_tokens", [1, 2])
def test_short_answers_are_folded_too(name: bodies.Name, output_tokens: int) -> None:
    """One token: nothing was fed back, and the fold is 0."""
    request = {**PROMPT, "output_tokens": output_tokens}
    claimed = drafting.serve(body_of(name), **request).claimed
    assert (claimed.draft_fold == 0) == (output_tokens == 1)
    assert bodies.judge(name, MODEL).check(claimed).wrong == 0


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_fold_counts_against_the_last_token(name: bodies.Name) -> None:
    claimed = drafting.serve(body_of(name), **PROMPT).claimed
    assert claimed.draft_fold is not None
    wrong = msgspec.structs.replace(claimed, draft_fold=claimed.draft_fold ^ 1)
    verdict = bodies.judge(name, MODEL).check(wrong)
    assert (verdict.wrong, verdict.checked_tokens) == (1, 8)
    assert "token 7: draft fold" in str(verdict.first)


MTP_KINDS = [
    kind for kind in KINDS if KINDS[kind][0] not in ("seeds", "places") and kind != "stale KV row"
]
"""Not those of a prompt, which does not go through the layer; and its rows are never overwritten."""


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", MTP_KINDS)
def test_every_fault_in_the_mtp_layer_is_seen_and_no_token_is_wrong(
    kind: str, name: bodies.Name
) -> None:
    """10 random places: a wrong draft costs time, never a token; the fold tells."""
    body, judge, draw = body_of(name), bodies.judge(name, MODEL), entropy.stream(12, kind)
    clean, seen = drafting.serve(body, **PROMPT, accept=0.5).claimed, 0
    for _ in range(100):
        tamper = Tamper(kind, passes=draw.below(5), draw=draw.below)
        claimed = drafting.serve(body, **PROMPT, accept=0.5, touch=tamper.touch).claimed
        if not tamper.done:
            continue
        assert (claimed.tokens, claimed.seals) == (clean.tokens, clean.seals)
        assert "draft fold" in str(judge.check(claimed).first), (kind, seen)
        seen += 1
        if seen == 10:
            break
    assert seen == 10


@pytest.mark.parametrize("name", NAMES)
def test_state_token_and_place_count(name: bodies.Name) -> None:
    """What begins the MTP layer reads its state's seal, its token, and keeps its place."""
    body = body_of(name)
    states = body.start_tokens(np.array([1, 1, 2, 1]), places=np.array([5, 6, 5, 5]))
    begun = body.mtp_start(states, np.array([3, 3, 3, 4]))
    assert len(set(body.seals(begun).tolist())) == 4
    again = body.mtp_start(states[2:3], np.array([3]))
    assert again.tobytes() == begun[2:3].tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_many_requests_with_drafts_agree_with_the_oracle(name: bodies.Name) -> None:
    """Other lengths, other coins; half of them without a fold, in one call where there is one."""
    body, draw, requests = body_of(name), entropy.stream(6, "drafts"), []
    for number in range(12):
        input_tokens = 1 + draw.below(3000)
        request = drafting.serve(
            body,
            hash_ids=[draw.below(3) * 100 + i for i in range(-(-input_tokens // 512))],
            input_tokens=input_tokens,
            output_tokens=1 + draw.below(30),
            accept=draw.unit(),
            seed=number,
        ).claimed
        folded = request.draft_fold if number % 2 else None
        requests.append(msgspec.structs.replace(request, draft_fold=folded))
    judge = bodies.judge(name, MODEL)
    assert [judge.check(request).first for request in requests] == [None] * 12
