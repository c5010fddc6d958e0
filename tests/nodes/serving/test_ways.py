"""Whole runs with micro-batches and drafts: other times, the same answers, and a fold that is checked."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nodes.model import bodies
from nodes.serving.decoding import PLAIN, Decoding
from tests.nodes.serving import broken, local
from tests.nodes.serving.local import Served

pytestmark = pytest.mark.slow

MACHINE = local.mini()
REQUESTS = local.busy_requests()
S = 10**12
BOTH = Decoding(microbatch="on", drafts=1)
WAYS = {
    "micro-batches": Decoding(microbatch="on"),
    "drafts": Decoding(drafts=1),
    "drafts, naive": Decoding(drafts=1, graphs="naive"),
    "both": BOTH,
    "none right": Decoding(microbatch="on", drafts=1, accept="0"),
    "all right": Decoding(drafts=1, accept="1"),
}


def serve(folder: Path, decoding: Decoding, body: bodies.Name = "seal", **more: Any) -> Served:
    folder.mkdir(parents=True, exist_ok=True)
    job = local.job_of(MACHINE, REQUESTS, body=body, decoding=decoding)
    return local.serve(MACHINE, job, folder, **more)


def answers(served: Served) -> list[tuple[Any, ...]]:
    """By request."""
    keys = ("index", "status", "tokens", "seals", "receipt")
    found = [tuple(each[key] for key in keys) for each in served.requests]
    return sorted(found, key=lambda answer: answer[0])


@functools.cache
def ran(decoding: Decoding, body: bodies.Name = "seal") -> Served:
    """A run without faults, which several tests look at."""
    with tempfile.TemporaryDirectory() as folder:
        return serve(Path(folder), decoding, body)


@pytest.mark.parametrize("body", ["seal", "exact"])
@pytest.mark.parametrize("name", WAYS)
def test_tokens_seals_and_receipts_are_those_without(name: str, body: bodies.Name) -> None:
    """And right: the oracle checks all of them, and with drafts the MTP layer's states too."""
    plain, served = ran(PLAIN, body), ran(WAYS[name], body)
    assert (served.checked, served.wrong) == (plain.checked, 0), served.first
    assert answers(served) == answers(plain)
    assert served.digest != plain.digest
    for record in served.requests:
        assert (record["draft_fold"] is not None) == (WAYS[name].drafts == 1)
        assert bool(record["draft_fold"]) == (
            WAYS[name].drafts == 1 and record["output_tokens"] > 1
        )


def test_right_drafts_save_time_and_wrong_ones_cost_it() -> None:
    """From first token to last, 40 tokens: one draft in one or none right, and all between."""

    def taken_ps(served: Served) -> int:
        long = next(each for each in served.requests if each["output_tokens"] == 40)
        return int(long["token_ps"][-1] - long["token_ps"][0])

    plain = taken_ps(ran(PLAIN))
    none, some, every = (
        taken_ps(ran(Decoding(drafts=1, accept=accept))) for accept in ("0", "0.7", "1")
    )
    assert every < some < plain < none
    assert every > plain / 2


def test_two_tokens_of_a_step_come_together() -> None:
    """In order, at one instant; never more than were asked for."""
    served = ran(Decoding(drafts=1, accept="1"))
    for record in served.requests:
        times = record["token_ps"]
        assert len(times) == record["output_tokens"]
        assert times == sorted(times)
        assert len(set(times)) == 1 + len(times) // 2


def test_a_run_with_both_repeats(tmp_path: Path) -> None:
    """Coins and streams are of the seed and of virtual time alone; another seed draws other coins."""
    first, again = ran(BOTH).digest, serve(tmp_path / "again", BOTH).digest
    other = Decoding(microbatch="on", drafts=1, seed=1)
    assert first == again != serve(tmp_path / "other", other).digest


@pytest.mark.parametrize("body", ["seal", "exact"])
@pytest.mark.parametrize("part", ["fresh", "results"])
def test_a_fault_of_the_mtp_layer_is_seen_in_the_fold(
    part: str, body: bodies.Name, tmp_path: Path
) -> None:
    """A wrong token into it, or a wrong result of its exchange: tokens stay right, the fold tells."""
    passes = {"fresh": 0, "results": 0}

    def touch(what: str, items: Any) -> Any:
        if what not in passes or not len(items):
            return items
        passes[what] += 1
        mtp = passes[what] % 3 == 0 if what == "results" else True
        if what != part or not mtp or passes["fresh"] < 5:
            return items
        changed = items.copy()
        if part == "fresh":
            changed[0] ^= 1
        else:
            changed.reshape(-1).view(np.uint64)[0] ^= np.uint64(1 << 17)
        passes["fresh"] = -(10**9)
        return changed

    requests = [local.a_request(0, 0, 600, 30, (1, 2))]
    job = local.job_of(MACHINE, requests, body=body, decoding=Decoding(drafts=1))
    served = local.serve(MACHINE, job, tmp_path, touch=touch)
    assert passes["fresh"] < 0
    assert served.wrong == 1 and "draft fold" in str(served.first), served.first


PLANS = {
    "loss on UB": "[{at: 0 s, for: 20 s, target: plane ub, kind: loss, p: 0.3}]",
    "a decode node off UB for a while": (
        "[{at: 2 s, for: 3 s, target: node03, plane: ub, kind: partition}]"
    ),
    "the leader off VPC": "[{at: 2 s, for: 8 s, target: node02, plane: vpc, kind: partition}]",
    "jitter": (
        "[{at: 0 s, target: plane ub, kind: jitter, jitter: 20 ms}, "
        "{at: 0 s, target: plane vpc, kind: jitter, jitter: 300 ms}]"
    ),
    "frames doubled": "[{at: 0 s, target: plane ub, kind: duplicate, p: 0.5}]",
    "a slow die": ("[{at: 0 s, target: node03/npu0/die1, kind: rate, factor: 0.01, plane: ub}]"),
}


@pytest.mark.parametrize("name", PLANS)
def test_under_faults_every_request_ends_right_or_with_an_error(name: str, tmp_path: Path) -> None:
    """A step that is given up leaves neither a draft nor a token behind, whichever half it was in."""
    served = serve(tmp_path, BOTH, rules=broken.rules(PLANS[name]))
    assert sorted(record["index"] for record in served.requests) == list(range(len(REQUESTS)))
    assert served.wrong == 0, served.first
    plain = {answer[0]: answer for answer in answers(ran(PLAIN))}
    for answer in answers(served):
        assert answer[1] == "error" or answer == plain[answer[0]]
    assert sum(record["status"] == "ok" for record in served.requests) >= 5
