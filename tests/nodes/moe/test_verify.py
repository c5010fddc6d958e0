"""The verifier: every seal of every token after every layer, against the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from nodes.moe import result, setup, verify
from nodes.moe.result import RankLayer
from tests.nodes.moe import made_up

JOB = made_up.job()
TOKENS = sum(JOB.counts)
FIRST = made_up.line(JOB, 0, 0, 2)
BAD = np.frombuffer(FIRST.seals, dtype="<u8").copy()
BAD[1] ^= 1


def verified(lines: list[RankLayer]) -> verify.Verified:
    verifier = verify.Verifier(JOB)
    for each in lines:
        verifier.take(result.encode(each))
    return verifier.finish()


def test_right_lines_are_right_in_any_order() -> None:
    """Every token of every layer is counted; ranks without tokens have lines too."""
    for lines in (made_up.lines(JOB), made_up.lines(JOB)[::-1]):
        found = verified(lines)
        assert (found.checked, found.wrong, found.failed) == (2 * TOKENS, 0, 0)
        assert (found.first, found.missing) == (None, [])
        assert found.finished_at_s > 0


def test_the_seal_model_is_verified_as_well() -> None:
    job = made_up.job(model="seal")
    verifier = verify.Verifier(job)
    for each in made_up.lines(job):
        verifier.take(result.encode(each))
    found = verifier.finish()
    assert (found.checked, found.wrong) == (2 * TOKENS, 0)


WRONG: dict[str, tuple[dict[str, Any], int, str]] = {
    "a seal": (
        {"seals": BAD.tobytes()},
        1,
        "step 0, layer 0, rank 2, token 1 (7 of the group): seal",
    ),
    "a seal is missing": ({"seals": FIRST.seals[:16]}, 3, "3 tokens, of them 3 with 2 seals"),
    "a token is missing": (
        {"seals": FIRST.seals[:16], "index": FIRST.index[:8]},
        1,
        "step 0, layer 0, rank 2, token 2: no result, and no error says why",
    ),
    "a token twice": ({"index": np.array([0, 1, 1], dtype="<i4").tobytes()}, 3, "rank 2: 3 tokens"),
    "a token too far": ({"index": np.array([0, 1, 3], dtype="<i4").tobytes()}, 3, "it has 3"),
    "another number of tokens": ({"tokens": 2}, 3, "rank 2: 2 tokens"),
    "another rank": ({"rank": 8}, 1, "rank 8: the run has no such place"),
    "another layer": ({"layer": 2}, 1, "layer 2, rank 2: the run has no such place"),
    "another step": ({"step": -1}, 1, "the run has no such place"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_counted_and_named(name: str) -> None:
    changes, wrong, text = WRONG[name]
    lines = [msgspec.structs.replace(FIRST, **changes)]
    found = verified(lines)
    assert found.wrong == wrong
    assert found.first is not None and text in found.first


def test_the_first_of_several_is_named_whatever_came_first() -> None:
    """By step, layer, rank and token."""
    later = made_up.line(JOB, 0, 1, 0, seals=made_up.line(JOB, 0, 0, 0).seals)
    found = verified([later, made_up.line(JOB, 0, 0, 2, seals=BAD.tobytes())])
    assert found.wrong == 4
    assert found.first is not None and found.first.startswith("step 0, layer 0, rank 2, token 1")


def test_lost_tokens_with_an_error_are_failed_also_in_later_layers() -> None:
    """A rank says once what it lost; what it still has is checked."""
    half = {"index": FIRST.index[:4]}
    said = made_up.line(JOB, 0, 0, 2, seals=FIRST.seals[:8], error="no results of ranks 5", **half)
    after = made_up.line(JOB, 0, 1, 2, seals=made_up.line(JOB, 0, 1, 2).seals[:8], **half)
    found = verified([said, after])
    assert (found.checked, found.failed, found.wrong) == (2, 4, 0)
    silent = msgspec.structs.replace(said, error="")
    assert verified([silent, after]).wrong == 4


def test_a_second_line_of_a_place_is_wrong() -> None:
    found = verified([*made_up.lines(JOB), made_up.line(JOB, 0, 0, 2)])
    assert (found.checked, found.wrong) == (2 * TOKENS, 3)
    assert found.first == "step 0, layer 0, rank 2: has a second result"


def test_what_was_never_written_is_listed() -> None:
    """Whether it is explained is for the report to say."""
    lines = [each for each in made_up.lines(JOB) if (each.rank, each.layer) not in {(3, 1), (5, 0)}]
    found = verified(lines)
    assert found.wrong == 0
    assert found.missing == [verify.Missing(3, 1, 0, 1), verify.Missing(5, 1, 0, 0)]
    assert found.finished


@pytest.mark.parametrize("data", [b'{"step": 0, "la', b"{}", b'{"step": "a"}'])
def test_a_line_that_is_no_result_is_wrong(data: bytes) -> None:
    verifier = verify.Verifier(JOB)
    verifier.take(data)
    assert verifier.verified.wrong == 1


def test_it_reads_all_nodes_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it is told that nothing more comes."""
    monkeypatch.setattr("cmnet.launch.beside.told_to_finish", lambda _: True)
    told = made_up.told()
    folder = made_up.write_run(tmp_path / "run", told, made_up.lines(JOB))
    assert setup.read_told(folder) == told
    found = verify.verify(folder)
    assert (found.checked, found.wrong, found.missing) == (2 * TOKENS, 0, [])
    assert len(told.nodes) == 2
