"""Who is slow: a rule over the waits of a dispatch or a combine. Pure.

Owns the rule. Does not own measuring (``seen``). In a dispatch a destination's wait for a source is how long
after the beginning of its own operator that source's flag was there, 0 if it was there already. In a combine
ranks begin when their experts are done, and one whose experts got more rows begins later and has more to
write: that is load and nobody's fault. So there it is how long after the beginning of the *source's* operator
its flag was there, as for equally many rows everywhere (``levelled``): who computes for long is not named. A
flag that never came is -1 in both.

The rule. A wait is high if it is more than MULTIPLE times what is usual beside it, and what is usual counts
at least as FLOOR_PS. In this order, each step without what the steps before it named:

1. never came: a source whose flag nobody got; a destination that got none; single flags that are missing.
2. slow sender: a source whose waits are high at three of four destinations or more, against the other
   sources at the same destination. (The usual there: the quarter. So a whole node of slow ranks, even three
   quarters of the group, is still told from the rest.)
3. slow receiver: a destination that waits long for three of four sources or more, against the other
   destinations of the same source. (The usual there: the median. So fewer than half.)
4. slow path: one source at one destination, high against both.

A slow sender is late at every destination, so its cells are not paths; one huge cell is a path and does not
make its source a slow sender, as three of four must be high. A rank that begins late is a slow sender, and
as a destination waits for nobody; where nothing is waited for, nothing is known, and it does not vote. A
rank whose experts are hot is a slow receiver: it gets more rows than the others and its link is busy for
longer. That is true, and the loads say why. In a group of two, a sender, a receiver and the path between
them look alike: it is called a path.

MULTIPLE is 2: without faults the waits of a call differ by queueing on links only, 6 % between the mean and
the last destination, 20 % at most; two waits 20 % above and below their mean are 1.5 apart. What is meant to
be found is larger: a decode group in production had dispatches of 185 to 1,231 us (xDeepServe, arXiv
2508.02520, figure 20). FLOOR_PS is 1 us: destinations in the same package are 0.8 us nearer than others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from nodes.moe.placement import I64

MULTIPLE = 2
FLOOR_PS = 10**6
NAMED_MAX = 16
"""So many are named in a text: the dies of one node."""

NEVER = -1
"""The wait for a flag that did not come."""

Flags = npt.NDArray[np.bool_]
Kind = Literal["never came", "slow sender", "slow receiver", "slow path", "none"]

_LAST = np.iinfo(np.int64).max


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What stands out first, and the rest of it."""

    kind: Kind
    ranks: tuple[int, ...] = ()
    """The ranks named, rising; for paths their sources."""
    paths: tuple[tuple[int, int], ...] = ()
    """(source, destination) of each, when single paths are named."""
    ratio: float = 1.0
    """Their middle wait over the usual one; 0 for what never came."""
    text: str
    """For people, with what is in ``also``."""
    also: tuple[Finding, ...] = ()


def judge(waits: I64, *, names: Sequence[str] | None = None) -> Finding:
    """Look at waits [destinations, sources] in ps, both in the order of ranks; the diagonal is not used.

    ``names``: what to call the ranks; "rank 7" unless said.
    """
    table = _Waits(
        waits, names if names is not None else [f"rank {rank}" for rank in range(len(waits))]
    )
    steps = (table.never_came, table.senders, table.receivers, table.paths)
    found = [finding for step in steps for finding in step()]
    if not found:
        return Finding(kind="none", text="none stands out")
    text = "; ".join(finding.text for finding in found)
    return msgspec.structs.replace(found[0], text=text, also=tuple(found[1:]))


def levelled(transits: I64, *, rows: npt.NDArray[np.float64], start_ps: int) -> I64:
    """Transits [destinations, sources] of a combine as they would be if all sources had the mean of ``rows``
    [sources] to write. NEVER stays.

    A source needs ``start_ps``, then the same time for each row: what the quickest quarter of them needs (so
    even when most sources are slow, those are seen against the rest). At EP 320 and batch 96 sources have
    from 276 to 1,511 rows, and their middle transits are from 41 to 172 us; levelled, from 94 to 105 us.
    """
    others = ~np.eye(len(transits), dtype=bool)
    known = others & (transits >= 0)
    middle = _usual(transits.T, known.T, 2)
    some = known.any(axis=0) & (rows > 0)
    if not some.any():
        return transits
    each_ps = np.sort(np.maximum(middle[some] - start_ps, 0) / rows[some])
    need_ps = start_ps + rows * each_ps[(len(each_ps) - 1) // 4]
    scale = need_ps[known.any(axis=0)].mean() / np.maximum(need_ps, 1)
    return np.where(transits >= 0, (transits * scale).astype(np.int64), NEVER)


class _Waits:
    """The waits that are left to look at: ``known`` says which."""

    def __init__(self, waits: I64, names: Sequence[str]) -> None:
        assert waits.ndim == 2 and waits.shape[0] == waits.shape[1] == len(names)
        self._waits = waits
        self._names = names
        self._others = ~np.eye(len(waits), dtype=bool)
        self.known: Flags = self._others & (waits >= 0)
        self._late: Flags = np.zeros(len(waits), dtype=bool)
        """Slow senders: as destinations they wait for nobody."""

    def never_came(self) -> list[Finding]:
        """Sources that nobody heard, destinations that heard nobody, then single flags."""
        missing: Flags = self._others & (self._waits < 0)
        if not missing.any():
            return []
        found = []
        silent = np.logical_not(self.known.any(axis=0))
        deaf = np.logical_not(self.known.any(axis=1) | silent)
        if silent.any():
            found.append(self._ranks("never came", silent, "no flag came from {}"))
        if deaf.any():
            found.append(self._ranks("never came", deaf, "no flag came to {}"))
        missing[:, silent] = missing[silent, :] = missing[deaf, :] = False
        if missing.any():
            found.append(self._paths("never came", missing, "no flag came from {}", 0.0))
        return found

    def senders(self) -> list[Finding]:
        """High at most destinations, against the other sources there."""
        usual = np.maximum(_usual(self._waits, self.known, 4), FLOOR_PS)[:, None]
        longest = np.where(self.known, self._waits, 0).max(axis=1, initial=0, keepdims=True)
        votes: Flags = self.known & (longest > FLOOR_PS)
        slow = self._most(self._high(usual), votes, axis=0)
        ratios = (self._waits / usual)[votes & slow]
        self.known[:, slow] = False
        self._late = slow
        return self._slow("slow sender", slow, ratios, "{} slow to send")

    def receivers(self) -> list[Finding]:
        """High from most sources, against the other destinations; those that began late are no measure."""
        measure = self.known & ~self._late[:, None]
        usual = np.maximum(_usual(self._waits.T, measure.T, 2), FLOOR_PS)[None, :]
        slow = self._most(self._high(usual), self.known, axis=1)
        ratios = (self._waits / usual)[self.known & slow[:, None]]
        self.known[slow] = False
        return self._slow("slow receiver", slow, ratios, "{} slow to receive")

    def paths(self) -> list[Finding]:
        """Single cells, high against their destination's and their source's others."""
        by_row = _usual(self._waits, self.known, 2)[:, None]
        by_column = _usual(self._waits.T, self.known.T, 2)[None, :]
        usual = np.maximum(by_row, by_column)
        if len(self._waits) == 2:
            usual = np.full((2, 2), self._waits[self._others].min())
        usual = np.maximum(usual, FLOOR_PS)
        slow = self._high(usual)
        if not slow.any():
            return []
        return [
            self._paths("slow path", slow, "slow path {}", _middle((self._waits / usual)[slow]))
        ]

    def _high(self, usual: I64) -> Flags:
        return self.known & (self._waits > MULTIPLE * usual)

    def _most(self, high: Flags, votes: Flags, axis: int) -> Flags:
        """Three of four, and at least two."""
        voices, highs = votes.sum(axis=axis), (high & votes).sum(axis=axis)
        most: Flags = (highs >= 2) & (4 * highs >= 3 * voices)
        return most

    def _slow(
        self, kind: Kind, slow: Flags, ratios: npt.NDArray[np.float64], text: str
    ) -> list[Finding]:
        if not slow.any():
            return []
        return [self._ranks(kind, slow, text, _middle(ratios))]

    def _ranks(self, kind: Kind, chosen: Flags, text: str, ratio: float = 0.0) -> Finding:
        ranks = tuple(np.flatnonzero(chosen).tolist())
        text = text.format(_listed([self._names[rank] for rank in ranks])) + _times(ratio)
        return Finding(kind=kind, ranks=ranks, ratio=ratio, text=text)

    def _paths(self, kind: Kind, chosen: Flags, text: str, ratio: float) -> Finding:
        paths = tuple((int(s), int(d)) for s, d in np.argwhere(chosen.T))
        names = self._names
        listed = _listed([f"{names[source]} to {names[target]}" for source, target in paths])
        ranks = tuple(sorted({source for source, _ in paths}))
        text = text.format(listed) + _times(ratio)
        return Finding(kind=kind, ranks=ranks, paths=paths, ratio=ratio, text=text)


def _usual(waits: I64, known: Flags, part: int) -> I64:
    """Of each row the lower median (part 2) or quarter (part 4) of the known; 0 where there are none.

    Counted without one of them, which is the one looked at: if that is above the result, the result is
    that of the others.
    """
    ordered = np.sort(np.where(known, waits, _LAST), axis=1)
    places = np.maximum(known.sum(axis=1) - 2, 0) // part
    usual = ordered[np.arange(len(waits)), places]
    return np.where(usual == _LAST, 0, usual)


def _middle(ratios: npt.NDArray[np.float64]) -> float:
    return float(np.sort(ratios)[(len(ratios) - 1) // 2])


def _times(ratio: float) -> str:
    return f" ({ratio:.1f} x the usual wait)" if ratio else ""


def _listed(named: list[str]) -> str:
    more = len(named) - NAMED_MAX
    return ", ".join(named[:NAMED_MAX]) + (f" and {more} more" if more > 0 else "")
