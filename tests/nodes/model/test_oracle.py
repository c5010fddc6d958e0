"""The oracle: it agrees with step-by-step decode, and it sees every kind of transport fault."""

from __future__ import annotations

import ast
import collections
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cmnet import entropy
from nodes.model import oracle
from nodes.model.seal import SealBody
from nodes.model.tamper import KINDS, Items, Tamper
from nodes.settings import ModelSettings
from tests.nodes.model import stepwise

MODEL = ModelSettings()
BODY = SealBody(MODEL)
PROMPT: dict[str, Any] = {"hash_ids": [5, 6, 7], "input_tokens": 1200, "output_tokens": 5}
PLACES = 20
"""Random places per kind of fault (acceptance 8 of the issue)."""


def serve(**changes: Any) -> oracle.ClaimedRequest:
    return stepwise.serve(BODY, **{**PROMPT, "chunk": 4, **changes})


def check(request: oracle.ClaimedRequest) -> oracle.Verdict:
    return oracle.Oracle(MODEL).check(request)


def altered(request: oracle.ClaimedRequest, **changes: Any) -> oracle.ClaimedRequest:
    return msgspec.structs.replace(request, **changes)


def test_it_imports_nothing_of_what_it_checks() -> None:
    """An error in shared code is invisible to a comparison."""
    tree = ast.parse(Path(oracle.__file__).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {getattr(node, "module", None) or node.names[0].name for node in imports}
    allowed = {"__future__", "hashlib", "collections.abc", "msgspec", "numpy", "numpy.typing"}
    assert names <= {*allowed, "nodes.settings"}


@pytest.mark.slow
def test_it_agrees_with_step_by_step_decode_on_many_requests() -> None:
    """Any prompt length, any chunks, prefixes shared with earlier requests (the memory)."""
    draw, judge, checked = entropy.stream(5, "requests"), oracle.Oracle(MODEL), 0
    for _ in range(60):
        input_tokens = 1 + draw.below(3000)
        prefix = draw.below(3)
        hash_ids = [block % 3 + 10 * prefix for block in range(-(-input_tokens // 512))]
        request = serve(
            hash_ids=hash_ids,
            input_tokens=input_tokens,
            output_tokens=1 + draw.below(12),
            chunk=1 + draw.below(9),
        )
        verdict = judge.check(request)
        assert (verdict.wrong, verdict.first) == (0, None)
        checked += verdict.checked_tokens
    assert checked > 300


@pytest.mark.parametrize(
    "model",
    [
        ModelSettings(carried_layers=1, tokens_per_carried=512),
        ModelSettings(carried_layers=4, tokens_per_carried=32),
        ModelSettings(routed_experts=60, groups=5, top_groups=2, top_k=5, vocabulary=97),
    ],
    ids=["one layer", "four layers", "another gate"],
)
def test_it_agrees_for_other_models(model: ModelSettings) -> None:
    request = stepwise.serve(SealBody(model), **PROMPT, chunk=3)
    judge = oracle.Oracle(model)
    for _ in range(2):
        assert judge.check(request) == oracle.Verdict(checked_tokens=5, wrong=0, first=None)


def test_the_model_of_other_settings_is_another() -> None:
    """The number of carried layers changes tokens; reports print it for that reason."""
    request = serve()
    assert oracle.Oracle(ModelSettings(carried_layers=3)).check(request).wrong == 5


@pytest.mark.parametrize("kind", KINDS)
def test_every_fault_is_seen(kind: str) -> None:
    """Each kind of transport fault at 20 random places: 100 % seen."""
    passes = collections.Counter[str]()

    def count(part: str, items: Items) -> Items:
        passes[part] += 1
        return items

    assert check(serve(touch=count)).wrong == 0
    draw = entropy.stream(8, f"tamper {kind}")
    seen = 0
    while seen < PLACES:
        tamper = Tamper(kind, passes=draw.below(passes[KINDS[kind][0]]), draw=draw.below)
        request = serve(touch=tamper.touch)
        if not tamper.done:
            continue  # the pass drawn was the last, and nothing there could be exchanged
        assert check(request).wrong > 0, (kind, seen)
        seen += 1


@pytest.mark.parametrize("index", range(5))
def test_one_wrong_token_is_found_where_it_is(index: int) -> None:
    request = serve()
    tokens = list(request.tokens)
    tokens[index] = (tokens[index] + 1) % MODEL.vocabulary
    verdict = check(altered(request, tokens=tokens))
    assert verdict.wrong == 5 - index, "those behind it were made from another token"
    assert verdict.first is not None
    assert verdict.first.startswith(f"request: token {index}: token {tokens[index]}, not ")


@pytest.mark.parametrize("index", range(5))
def test_one_wrong_seal_is_one_wrong_token(index: int) -> None:
    request = serve()
    seals = list(request.seals)
    seals[index] ^= 1
    verdict = check(altered(request, seals=seals))
    assert verdict.wrong == 1
    assert verdict.first is not None
    assert f"token {index}: seal" in verdict.first


def test_a_wrong_receipt_counts_against_the_last_token() -> None:
    """The experts' last output at prompt rows is read by nothing else."""
    verdict = check(altered(serve(), receipt=0))
    assert (verdict.checked_tokens, verdict.wrong) == (5, 1)
    assert "token 4: receipt" in str(verdict.first)


@pytest.mark.parametrize("count", [0, 4, 6])
def test_tokens_too_few_or_too_many_are_all_wrong(count: int) -> None:
    """A request that lost its end must not count as checked."""
    request = serve(output_tokens=6)
    cut = altered(
        request, output_tokens=5, tokens=request.tokens[:count], seals=request.seals[:count]
    )
    assert check(cut).wrong == 5


@pytest.mark.parametrize(
    ("field", "value"), [("hash_ids", [5, 6, 8]), ("hash_ids", [6, 5, 7]), ("input_tokens", 1199)]
)
def test_another_prompt_is_seen(field: str, value: Any) -> None:
    """Wrong block, blocks exchanged, one token fewer in the last row."""
    assert check(altered(serve(), **{field: value})).wrong == 5


def test_a_token_outside_the_vocabulary_is_wrong_and_no_crash() -> None:
    request = serve()
    for token in (-1, 2**64, MODEL.vocabulary):
        assert check(altered(request, tokens=[token, *request.tokens[1:]])).wrong == 5


@pytest.mark.parametrize(("part", "text"), [("rows", "attention"), ("results", "experts")])
def test_a_log_names_layer_and_part(part: str, text: str) -> None:
    """With the optional log a difference is traced to the layer and the part that made it."""
    kind = {"rows": "KV bit flipped", "results": "result bit flipped"}[part]
    passes = {"rows": 2 * 3 + 2 + 2 * 2 + 1, "results": 2 * 3 + 2 * 2 + 1}[part]
    draw = entropy.stream(2, part)
    tamper = Tamper(kind, passes=passes, draw=draw.below)
    verdict = check(serve(touch=tamper.touch))
    assert tamper.done
    assert verdict.first is not None
    assert verdict.first.startswith("request: token 3: seal")
    assert f": layer 1, {text}" in verdict.first


def test_a_known_prefix_gives_the_same_answer() -> None:
    """The memory of prefixes: cold, warm, a longer one, and one that ends inside it."""
    judge = oracle.Oracle(MODEL)
    for hash_ids, tokens in (([1, 2], 1024), ([1, 2], 1024), ([1, 2, 3], 1500), ([1], 512)):
        request = serve(hash_ids=hash_ids, input_tokens=tokens)
        assert judge.check(request).wrong == 0
        wrong = altered(request, receipt=request.receipt ^ 1)
        assert judge.check(wrong).wrong == 1
