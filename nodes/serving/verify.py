"""The verifier: every token of every answered request against the oracle, while the run goes on.

Runs as a process of its own beside the run (``python -m nodes.serving.verify PARENT FOLDER``): it reads
the gateway's lines as they come and writes ``verified.json`` when the run is over. What was asked is
taken from the workload, never from the run. A token of a request that failed is not checked. Does
not own the truth: that is ``nodes.model.oracle``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from cmnet.launch import beside
from cmnet.record import record as records
from cmnet.record import tail
from nodes.model import bodies
from nodes.model.oracle import ClaimedRequest
from nodes.serving import result
from nodes.serving.result import RequestResult, Serving

FILE = "verified.json"


class Verified(msgspec.Struct, kw_only=True):
    """``wrong`` of ``checked`` tokens of ``requests`` answered requests."""

    checked: int = 0
    wrong: int = 0
    requests: int = 0
    first: str | None = None
    """The first thing that was wrong, in words."""
    finished_at_s: float = 0.0
    """Wall clock of this host (``cmnet.record.tail.wall_s``) at the last verification."""


class Verifier:
    """Checks results one by one."""

    def __init__(self, serving: Serving) -> None:
        self.verified = Verified()
        self._requests = serving.workload.requests
        self._drafts = serving.decoding.drafts > 0
        self._oracle = bodies.judge(serving.body, serving.model)
        self._seen: set[int] = set()

    def take(self, line: bytes) -> None:
        """Check one line of the gateway."""
        try:
            self._check(result.parse(line))
        except msgspec.DecodeError as error:
            self._count(1, 1, f"a line that is no result: {error}")
        self.verified.finished_at_s = tail.wall_s()

    def _check(self, answer: RequestResult) -> None:
        name = f"request {answer.index}"
        if not 0 <= answer.index < len(self._requests):
            self._count(0, 1, f"{name}: the workload has no such request")
            return
        request = self._requests[answer.index]
        if answer.index in self._seen:
            self._count(0, request.output_tokens, f"{name}: has a second result")
            return
        self._seen.add(answer.index)
        if answer.status != "ok":
            return
        self.verified.requests += 1
        folded = (answer.draft_fold is not None) == self._drafts
        if not answer.is_answer_to(request) or answer.receipt is None or not folded:
            asked = request.output_tokens
            self._count(asked, asked, f"{name}: is not what the workload asked for")
            return
        claimed = ClaimedRequest(
            name=name,
            hash_ids=request.hash_ids,
            input_tokens=request.input_tokens,
            output_tokens=request.output_tokens,
            tokens=answer.tokens,
            seals=answer.seals,
            receipt=answer.receipt,
            draft_fold=answer.draft_fold,
        )
        verdict = self._oracle.check(claimed)
        self._count(verdict.checked_tokens, verdict.wrong, verdict.first)

    def _count(self, checked: int, wrong: int, first: str | None) -> None:
        self.verified.checked += checked
        self.verified.wrong += wrong
        self.verified.first = self.verified.first or first


def verify(folder: Path) -> Verified:
    """Verify a run's folder until told that the run is over."""
    verifier = Verifier(result.read_serving(folder))
    for line in tail.follow(folder / result.REQUESTS, ended=beside.told_to_finish):
        verifier.take(line)
    return verifier.verified


def read(folder: Path) -> Verified:
    """``verified.json``; nothing checked where there is none. Raises InputError at a damaged one."""
    path = folder / FILE
    if not path.exists():
        return Verified(first="the verifier did not finish")
    return records.decoded(path, Verified, expected="what the verifier of the run wrote")


if __name__ == "__main__":
    beside.enter(sys.argv[1])
    run_folder = Path(sys.argv[2])
    (run_folder / FILE).write_bytes(msgspec.json.encode(verify(run_folder)))
