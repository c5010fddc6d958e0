"""The verifier: every token of every answered request, against what the workload asked."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from nodes.serving import verify
from nodes.serving.decoding import Decoding
from nodes.serving.result import RequestResult
from tests.nodes.serving import answers


def verified(*results: RequestResult) -> verify.Verified:
    verifier = verify.Verifier(answers.SERVING)
    for each in results:
        verifier.take(msgspec.json.encode(each))
    return verifier.verified


def test_right_answers_are_right() -> None:
    """All tokens are counted, whatever the order in which requests end."""
    found = verified(answers.right(1), answers.right(0))
    assert (found.checked, found.wrong, found.requests, found.first) == (4, 0, 2, None)
    assert found.finished_at_s > 0


def test_tokens_of_a_failed_request_are_not_checked() -> None:
    """It says itself that there is no answer."""
    found = verified(answers.failed(0), answers.right(1))
    assert (found.checked, found.wrong, found.requests) == (1, 0, 1)


WRONG: dict[str, tuple[dict[str, Any], int]] = {
    "a token": ({"tokens": [1, 2, 3]}, 3),
    "a seal": ({"seals": [1, *answers.right(0).seals[1:]]}, 1),
    "the receipt": ({"receipt": 5}, 1),
    "no receipt": ({"receipt": None}, 3),
    "a token is missing": ({"tokens": answers.right(0).tokens[:2]}, 3),
    "another prompt": ({"input_tokens": 1101}, 3),
    "fewer tokens than asked": ({"output_tokens": 2}, 3),
    "another arrival": ({"arrival_ps": 1}, 3),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_counted_and_named(name: str) -> None:
    """The run cannot make its own task easier: what was asked comes from the workload."""
    changes, wrong = WRONG[name]
    found = verified(answers.right(0, **changes))
    assert found.checked == 3
    assert 1 <= found.wrong <= wrong
    assert found.first is not None and found.first.startswith("request 0")


def test_a_second_result_of_a_request_is_wrong() -> None:
    """Each request ends once."""
    found = verified(answers.right(1), answers.right(1))
    assert (found.checked, found.wrong) == (1, 1)
    assert found.first == "request 1: has a second result"


@pytest.mark.parametrize("index", [-1, 2])
def test_a_result_of_no_request_is_wrong(index: int) -> None:
    """Something made it up."""
    found = verified(msgspec.structs.replace(answers.right(0), index=index))
    assert (found.checked, found.wrong) == (0, 1)


def test_a_line_that_is_no_result_is_wrong() -> None:
    """Two writers in one file, for instance."""
    verifier = verify.Verifier(answers.SERVING)
    verifier.take(b'{"index": 0, "arr')
    assert verifier.verified.wrong == 1


def test_a_fold_is_there_with_drafts_and_only_then() -> None:
    """A run that leaves it out would have nothing checked of its MTP layer."""
    serving = msgspec.structs.replace(answers.SERVING, decoding=Decoding(drafts=1))
    verifier = verify.Verifier(serving)
    verifier.take(msgspec.json.encode(answers.right(0)))
    assert (verifier.verified.wrong, verifier.verified.checked) == (3, 3)
    verifier.take(msgspec.json.encode(answers.right(1, draft_fold=0)))
    assert (verifier.verified.wrong, verifier.verified.checked) == (3, 4)
    assert verified(answers.right(1, draft_fold=0)).wrong == 1
