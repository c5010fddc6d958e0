"""The verifier: the seal of every token after every layer, against the oracle, while the run goes on.

Runs as a process of its own beside the run (``python -m nodes.moe.verify PARENT FOLDER``): it reads the
lines of all nodes as they come and writes ``verified.json`` when the run is over. What was to be done is
taken from ``moe.json``, never from the lines; only how many passes a re-placement takes is not known before.
There stages must follow each other as they may (``rebalancing``), up to the pass after it. Tokens that a rank
has lost, and says so, are failed, not checked. Does not own the truth (``nodes.model.layer_oracle``), nor
whether a death or a fault explains what is missing (``report``).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from cmnet.launch import beside
from cmnet.record import record as records
from cmnet.record import tail
from nodes.model import layer_oracle
from nodes.model.body import I64, U64
from nodes.moe import rebalancing, result, setup
from nodes.moe.job import DISTINCT_ROWS, FIRST_SEED, MoeJob
from nodes.moe.result import RankLayer

FILE = "verified.json"

Place = tuple[int, int, int, int]
"""step, layer, rank, token: what is named first is the least of these that is wrong."""


class Missing(msgspec.Struct, frozen=True):
    """Lines that a rank never wrote."""

    rank: int
    lines: int
    step: int
    """Of the first of them, with its layer."""
    layer: int


class Verified(msgspec.Struct, kw_only=True):
    """``wrong`` of ``checked`` token-layers; ``failed`` ones have no result, as their rank says itself."""

    checked: int = 0
    wrong: int = 0
    failed: int = 0
    first: str | None = None
    """The first thing that was wrong, in words."""
    missing: list[Missing] = []
    finished: bool = False
    """Every line that was written has been looked at, and what is missing is known."""
    finished_at_s: float = 0.0
    """Wall clock of this host (``cmnet.record.tail.wall_s``) at the last verification."""


class Verifier:
    """Checks lines one by one, in any order."""

    def __init__(self, job: MoeJob) -> None:
        self.verified = Verified()
        self._job = job
        self._firsts = np.concatenate([[0], np.cumsum(job.counts)])
        seeds, places = tokens(job)
        self._truth = layer_oracle.make(
            job.body, job.model, seeds=seeds, places=places, skew=job.skew
        )
        shape = (job.steps, job.model.carried_layers, job.ep_size)
        self._seen: npt.NDArray[np.bool_] = np.zeros(shape, dtype=np.bool_)
        self._excused: npt.NDArray[np.bool_] = np.zeros((job.steps, job.ep_size), dtype=np.bool_)
        """Ranks that have said an error in this step: tokens that they lost stay lost in later layers."""
        self._stages: dict[int, str] = {}
        """Of each pass, as the first rank said it that has not stopped."""
        self._first: Place | None = None

    def prepare(self) -> None:
        """The truth of all layers, before there is anything to compare with it: while others launch."""
        self._truth.seals(self._job.model.carried_layers - 1)

    def take(self, data: bytes) -> None:
        """Check one line of a node."""
        try:
            self._check(result.decode(data))
        except (msgspec.DecodeError, ValueError) as error:
            self._wrong(1, (0, 0, 0, 0), f"a line that is no result: {error}")
        self.verified.finished_at_s = tail.wall_s()

    def finish(self) -> Verified:
        """What is missing counts now."""
        if self._job.eplb:
            self._check_order()
        for rank in np.flatnonzero(~self._seen.all(axis=(0, 1))).tolist():
            absent = np.argwhere(~self._seen[:, :, rank])
            step, layer = map(int, absent[0])
            self.verified.missing.append(Missing(rank, len(absent), step, layer))
        self.verified.finished = True
        return self.verified

    def _check(self, line: RankLayer) -> None:
        place = (line.step, line.layer, line.rank)
        where = _where(*place)
        if not self._has(line):
            self._wrong(1, (*place, 0), f"{where}: the run has no such place")
            return
        if self._job.eplb:
            self._check_stage(line)
        count = self._job.counts[line.rank]
        if self._seen[place]:
            self._wrong(max(count, 1), (*place, 0), f"{where}: has a second result")
            return
        self._seen[place] = True
        if line.error:
            self._excused[line.step, line.rank] = True
        index, found = result.index(line), result.seals(line)
        right_shape = line.tokens == count and len(found) == len(index) and _is_index(index, count)
        if not right_shape:
            what = f"{line.tokens} tokens, of them {len(index)} with {len(found)} seals; it has {count}"
            self._wrong(max(count, 1), (*place, 0), f"{where}: {what}")
            return
        self.verified.checked += len(index)
        self.verified.failed += count - len(index)
        self._compare(index, found, place)
        if len(index) < count and not self._excused[line.step, line.rank]:
            token = int(np.setdiff1d(np.arange(count), index)[0])
            what = f"{where}, token {token}: no result, and no error says why"
            self._wrong(count - len(index), (*place, token), what)

    def _has(self, line: RankLayer) -> bool:
        """The run has such a place; passes beyond those that all runs have are made room for."""
        steps, layers, ranks = self._seen.shape
        most = rebalancing.PASSES_MAX if self._job.eplb else steps
        if not (0 <= line.step < most and 0 <= line.layer < layers and 0 <= line.rank < ranks):
            return False
        if (more := line.step + 1 - steps) > 0:
            self._seen = np.pad(self._seen, ((0, more), (0, 0), (0, 0)))
            self._excused = np.pad(self._excused, ((0, more), (0, 0)))
        return True

    def _check_stage(self, line: RankLayer) -> None:
        """All ranks that are in a pass are in one stage."""
        if line.stage == "stopped":
            return
        stage = self._stages.setdefault(line.step, line.stage)
        if stage != line.stage:
            place = (line.step, line.layer, line.rank)
            what = f"{_where(*place)}: in stage {line.stage!r}, others in {stage!r}"
            self._wrong(max(line.tokens, 1), (*place, 0), what)

    def _check_order(self) -> None:
        """From before to after; a pass that should have followed and did not is missing at all ranks."""
        before = ""
        for step, stage in sorted(self._stages.items()):
            if stage not in rebalancing.FOLLOWERS.get(before, ("before",)):
                what = f"step {step}: stage {stage!r} after {before or 'nothing'!r}"
                self._wrong(1, (step, 0, 0, 0), what)
            before = stage
        if before != "after" and len(self._seen) == len(self._stages):
            self._seen = np.pad(self._seen, ((0, 1), (0, 0), (0, 0)))

    def _compare(self, index: I64, found: U64, place: tuple[int, int, int]) -> None:
        _, layer, rank = place
        right = self._truth.seals(layer)[self._firsts[rank] + index]
        differs = np.flatnonzero(found != right)
        if not len(differs):
            return
        first = int(differs[0])
        token = int(index[first])
        seals = f"seal {int(found[first]):016x}, not {int(right[first]):016x}"
        group_index = rank * self._job.batch + token
        where = f"{_where(*place)}, token {token} ({group_index} of the group)"
        self._wrong(len(differs), (*place, token), f"{where}: {seals}")

    def _wrong(self, count: int, place: Place, text: str) -> None:
        self.verified.wrong += count
        if self._first is None or place < self._first:
            self._first, self.verified.first = place, text


def tokens(job: MoeJob) -> tuple[U64, I64]:
    """Seed of the content, and place, of each token of the group, rank after rank."""
    ranks = [rank * job.batch + np.arange(count) for rank, count in enumerate(job.counts)]
    index = np.concatenate(ranks).astype(np.int64)
    return np.uint64(FIRST_SEED) + (index % DISTINCT_ROWS).astype(np.uint64), index


def verify(folder: Path) -> Verified:
    """Verify a run's folder until told that the run is over; waits until it says what is to be done."""
    while not ((folder / setup.FILE).exists() or beside.told_to_finish(tail.POLL_S)):
        pass
    told = setup.read_told(folder)
    verifier = Verifier(told.job)
    verifier.prepare()
    paths = [result.path(folder, node) for node in told.nodes]
    lines: Iterable[bytes] = tail.follow_all(paths, ended=beside.told_to_finish)
    for line in lines:
        verifier.take(line)
    return verifier.finish()


def read(folder: Path) -> Verified:
    """``verified.json``; nothing checked where there is none. Raises InputError at a damaged one."""
    path = folder / FILE
    if not path.exists():
        return Verified(first="the verifier did not finish")
    return records.decoded(path, Verified, expected="what the verifier of the run wrote")


def _is_index(index: I64, count: int) -> bool:
    """Rising, so that none comes twice, and of tokens that there are."""
    rising = bool((np.diff(index) > 0).all())
    return rising and (not len(index) or (index[0] >= 0 and index[-1] < count))


def _where(step: int, layer: int, rank: int) -> str:
    return f"step {step}, layer {layer}, rank {rank}"


if __name__ == "__main__":
    beside.enter(sys.argv[1])
    run_folder = Path(sys.argv[2])
    (run_folder / FILE).write_bytes(msgspec.json.encode(verify(run_folder)))
