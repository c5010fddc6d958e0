"""The rule that says who is slow, on made-up waits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from nodes.moe.placement import I64
from nodes.moe.waits import FLOOR_PS, MULTIPLE, NEVER, Finding, judge, levelled

US = 10**6
USUAL = 60 * US
SIZES = (3, 4, 8, 32, 320)


def healthy(size: int, number: int = 0) -> I64:
    """Waits [size, size] within 20 % of the usual, on both sides."""
    words = np.random.Philox(key=number).random_raw(size * size)
    spread = (words % np.uint64(USUAL * 2 // 5)).astype(np.int64)
    return (USUAL * 4 // 5 + spread).reshape(size, size)


Spoil = Callable[[I64, int], None]


def late(waits: I64, extra: int) -> None:
    """Rank 1 begins later by this, so its flags come later and it waits for nobody as long."""
    waits[:, 1] += extra
    waits[1] = np.maximum(waits[1] - extra, 0)


def slow_sender(waits: I64, extra: int) -> None:
    waits[:, 1] += extra


def slow_receiver(waits: I64, extra: int) -> None:
    waits[1] += extra


def slow_path(waits: I64, extra: int) -> None:
    waits[1, 2] += extra


def kinds(finding: Finding) -> list[str]:
    return [finding.kind, *(other.kind for other in finding.also)]


@pytest.mark.parametrize("size", [0, 1, 2, *SIZES])
def test_nobody_stands_out_where_all_is_well(size: int) -> None:
    """Queueing makes up to 20 % of difference; nobody is to be blamed for that."""
    for number in range(3 if size > 100 else 30):
        assert judge(healthy(size, number)).kind == "none"


@pytest.mark.parametrize("extra", [120 * US, 10**9, 10**11], ids=["120us", "1ms", "100ms"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("spoil", "kind", "ranks"),
    [
        (late, "slow sender", (1,)),
        (slow_sender, "slow sender", (1,)),
        (slow_receiver, "slow receiver", (1,)),
        (slow_path, "slow path", (2,)),
    ],
)
def test_what_is_slow_is_named_and_nothing_else(
    spoil: Spoil, kind: str, ranks: tuple[int, ...], size: int, extra: int
) -> None:
    """Whatever else it makes high: a sender its cells everywhere, a receiver those of every source."""
    waits = healthy(size)
    spoil(waits, extra)
    finding = judge(waits)
    assert (kinds(finding), finding.ranks) == ([kind], ranks)
    assert finding.paths == (((2, 1),) if kind == "slow path" else ())
    assert finding.ratio == pytest.approx(1 + extra / USUAL, rel=0.45)


@pytest.mark.parametrize("size", [24, 32, 320])
def test_a_whole_node_of_senders_is_named(size: int) -> None:
    """16 ranks begin half a millisecond late: of 24 or 32 that is most of the flags, or half of them."""
    waits = healthy(size)
    waits[:, :16] += 500 * US
    waits[:16] = np.maximum(waits[:16] - 500 * US, 0)
    finding = judge(waits, names=[f"node{r // 16:02} die {r % 16}" for r in range(size)])
    assert (kinds(finding), finding.ranks) == (["slow sender"], tuple(range(16)))
    assert "node00 die 15 slow to send" in finding.text


def test_one_that_waits_for_nobody_does_not_vote() -> None:
    """Rank 2 begins so late that all flags are there, those of rank 1, which is late itself, included."""
    waits = healthy(4)
    for rank, extra in ((1, 500 * US), (2, 1000 * US)):
        waits[:, rank] += extra
        waits[rank] = np.maximum(waits[rank] - extra, 0)
    assert (judge(waits).kind, judge(waits).ranks) == ("slow sender", (1, 2))


def test_many_are_not_all_listed() -> None:
    """Text for people: no more than a node's dies, then how many more."""
    waits = healthy(320)
    waits[:, :48] += 500 * US
    finding = judge(waits)
    assert len(finding.ranks) == 48
    assert "rank 15 and 32 more slow to send" in finding.text


def test_several_kinds_at_once() -> None:
    """In the order of the rule; each is found in what the ones before leave."""
    waits = healthy(32)
    waits[:, 3] += 400 * US
    waits[:, 30] += 300 * US
    waits[9] += 250 * US
    waits[20, 21] += 900 * US
    waits[5, 6] = NEVER
    finding = judge(waits)
    assert kinds(finding) == ["never came", "slow sender", "slow receiver", "slow path"]
    found = [finding.ranks, *(other.ranks for other in finding.also)]
    assert found == [(6,), (3, 30), (9,), (21,)]
    assert [len(finding.text.split("; ")), finding.text.count("rank 9")] == [4, 1]


def test_a_hot_expert_is_a_slow_receiver() -> None:
    """Five times the rows, five times as long on its link: that is so, and its loads say why."""
    waits = healthy(32)
    waits[7] *= 5
    assert judge(waits).ranks == (7,)
    assert judge(waits).kind == "slow receiver"


def test_a_slow_receiver_explains_its_waits_however_they_differ() -> None:
    """What is at the end of its queue waits three times as long as what is before."""
    waits = healthy(32)
    waits[7] *= 3
    waits[7, 20:24] *= 3
    assert kinds(judge(waits)) == ["slow receiver"]


def test_loads_that_differ_a_little_everywhere_are_nobodys_fault() -> None:
    """Receivers from 0.7 to 1.3 of the mean: no step between them."""
    waits = healthy(32) * np.arange(70, 134, 2)[:, None] // 100
    assert judge(waits).kind == "none"


def test_a_huge_cell_does_not_make_its_source_slow() -> None:
    """The mean over its destinations is 100 times the usual, but one path explains it."""
    waits = healthy(8)
    waits[4, 2] = 700 * USUAL
    assert judge(waits).paths == ((2, 4),)


def test_some_paths_of_a_sender_do_not_make_it_slow() -> None:
    """The way to another node: five of its 31 destinations."""
    waits = healthy(32)
    waits[16:21, 2] += 500 * US
    finding = judge(waits)
    assert finding.kind == "slow path"
    assert finding.paths == tuple((2, d) for d in range(16, 21))


def test_ranks_that_begin_a_little_later_are_no_measure_for_the_others() -> None:
    """Ten of 32 begin 50 us late: less than one wait, so nobody is named, neither they nor the rest."""
    waits = healthy(32)
    waits[:, :10] += 50 * US
    waits[:10] = np.maximum(waits[:10] - 50 * US, 0)
    assert judge(waits).kind == "none"


def test_short_waits_differ_by_distance_only() -> None:
    """Below the floor nothing is named, a hundred times nothing included."""
    waits = np.full((8, 8), FLOOR_PS // 100)
    waits[:, 3] = FLOOR_PS * MULTIPLE
    assert judge(waits).kind == "none"
    waits[:, 3] += 1
    assert (judge(waits).kind, judge(waits).ranks) == ("slow sender", (3,))


def test_of_two_ranks_only_the_path_is_known() -> None:
    """One flag each way: sender, receiver and path look alike."""
    waits = healthy(2)
    waits[0, 1] += 900 * US
    assert judge(waits).paths == ((1, 0),)


def test_flags_that_never_came_are_named() -> None:
    """A rank that is gone: nobody heard it and it says nothing itself; it counts once."""
    waits = healthy(8)
    waits[:, 5] = waits[5] = NEVER
    assert judge(waits).text == "no flag came from rank 5"
    waits[2] = NEVER
    waits[3, 4] = NEVER
    finding = judge(waits)
    assert finding.text == (
        "no flag came from rank 5; no flag came to rank 2; no flag came from rank 4 to rank 3"
    )
    assert [finding.ratio, finding.also[1].paths] == [0.0, ((4, 3),)]
    assert judge(np.full((4, 4), NEVER)).ranks == (0, 1, 2, 3)


# --- combine --------------------------------------------------------------------------------------


def transits(rows: list[int], *, start_ps: int, each_ps: int) -> I64:
    """A source needs its start, then as long for each row."""
    return np.tile(np.array([start_ps + each_ps * count for count in rows]), (len(rows), 1))


def test_transits_are_levelled_by_rows() -> None:
    """Five times the rows, five times as long behind the start: no source stands out, none is changed
    by more than rounding."""
    rows = [100, 200, 500, 300, 0, 100, 400, 400]
    found = levelled(
        transits(rows, start_ps=11 * US, each_ps=US // 10),
        rows=np.array(rows, dtype=float),
        start_ps=11 * US,
    )
    assert (abs(found - (11 * US + 250 * US // 10)) <= 1).all()


@pytest.mark.parametrize("slow", [1, 2, 5])
def test_a_slow_sender_stands_out_after_levelling(slow: int) -> None:
    """Also when most are slow: the measure is the quickest quarter."""
    rows = [100, 200, 500, 300, 200, 100, 400, 400]
    waits = transits(rows, start_ps=11 * US, each_ps=US // 10)
    waits[:, :slow] += 300 * US
    finding = judge(levelled(waits, rows=np.array(rows, dtype=float), start_ps=11 * US))
    assert (finding.kind, finding.ranks) == ("slow sender", tuple(range(slow)))


def test_most_senders_slow_at_their_rows_are_told_from_the_rest() -> None:
    """Five of eight need three times as long for a row, and have most rows: that is not the measure."""
    rows = [500] * 5 + [100] * 3
    waits = transits(rows, start_ps=11 * US, each_ps=US // 10)
    waits[:, :5] += 2 * 500 * US // 10
    finding = judge(levelled(waits, rows=np.array(rows, dtype=float), start_ps=11 * US))
    assert (finding.kind, finding.ranks) == ("slow sender", (0, 1, 2, 3, 4))


def test_levelling_keeps_what_never_came() -> None:
    waits = transits([10] * 4, start_ps=11 * US, each_ps=US)
    waits[2, 1] = NEVER
    found = levelled(waits, rows=np.full(4, 10.0), start_ps=11 * US)
    assert np.argwhere(found == NEVER).tolist() == [[2, 1]]
    nothing = np.full((4, 4), NEVER)
    assert (levelled(nothing, rows=np.zeros(4), start_ps=11 * US) == NEVER).all()
    assert (levelled(waits, rows=np.zeros(4), start_ps=11 * US) == waits).all()
