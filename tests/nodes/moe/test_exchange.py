"""The exchange between nodes: order and speed of arrival mean nothing, and what is wrong is seen."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest

from cmnet import burst_frames, entropy, testing
from cmnet.errors import CorruptError
from cmnet.link import effects
from cmnet.link.reach import Ends, Where
from cmnet.link.rules import Rule
from cmnet.topology.machine import Plane
from cmnet.wire import frames
from nodes.model.tamper import KINDS, Tamper
from nodes.moe.job import MoeJob
from tests.nodes.moe.moe_run import Run, make_job, mini

pytestmark = pytest.mark.slow

US = 10**6
PARTS = ("vectors", "experts", "weights", "results", "slots", "shared")
TAMPERS = [kind for kind, (part, _) in KINDS.items() if part in PARTS]


def jitter(jitter_ps: int, number: int) -> Rule:
    """Its own random stream by its name."""
    return Rule(
        rule_id=f"jitter {number}",
        owner="test",
        effect=effects.Jitter(jitter_ps=jitter_ps),
        where=Where(plane=Plane.UB),
    )


@functools.cache
def seals(**options: Any) -> dict[tuple[int, int, int], list[int]]:
    with tempfile.TemporaryDirectory() as folder:
        run = Run(make_job(**options), Path(folder))
    assert run.wrong()[1:] == (0, 0)
    return run.seals()


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("algo", ["fused", "unfused"])
def test_order_of_arrival_means_nothing(algo: str, number: int, tmp_path: Path) -> None:
    """From less than a message to many times the exchange: the same bits, at other instants."""
    length_ps = (US // 10, 10 * US, 3000 * US)[number % 3]
    job = make_job(algo=algo, ep=16)
    run = Run(job, tmp_path, rules=(jitter(length_ps, number),))
    assert run.errors() == ""
    assert run.seals() == seals(algo=algo, ep=16)


SKEWED = [(8, 24), (8, 96), (16, 48)]


@pytest.mark.parametrize(("ep_size", "batch"), SKEWED)
def test_ranks_of_one_node_may_end_far_apart(ep_size: int, batch: int, tmp_path: Path) -> None:
    """One die has a hot expert: its results leave long after those of its neighbours, and it has all
    that it waits for before its own are away. Nobody learns too late that it is complete."""
    run = Run(make_job(ep=ep_size, model="exact", skew="hot:1:30", batch=batch), tmp_path)
    assert run.wrong() == (2 * ep_size * batch, 0, 0)
    assert run.late() == 0


@pytest.mark.parametrize("late_us", [60, 100, 150])
def test_a_rank_whose_own_results_come_last_goes_on_with_them(late_us: int, tmp_path: Path) -> None:
    """Rank 5 gets its tokens late, so it has the results of all others before its own are away: no flag
    of theirs comes any more to tell it."""
    slow = Rule(
        rule_id="it",
        owner="test",
        effect=effects.Delay(delay_ps=late_us * US),
        where=Where(plane=Plane.UB, other=Ends(devices=(mini().dies(3)[1],))),
        until_ps=60 * US,
    )
    run = Run(make_job(batch=96), tmp_path, rules=(slow,))
    assert run.wrong()[1:] == (0, 0)
    assert run.lines[0, 0, 5].combine_began_ps > run.lines[0, 0, 4].combine_began_ps + 40 * US
    assert run.late() == 0


# --- what is wrong is seen ------------------------------------------------------------------------


def flip(monkeypatch: pytest.MonkeyPatch, *, byte: int, bit: int) -> list[int]:
    """One bit of the first frame of messages between nodes is another when it arrives. ``byte``: of the
    messages' data, from its end if below 0. Returns a list of the nodes to which that happened."""
    carry = testing.LocalMachine.carry
    done: list[int] = []

    def carry_flipped(
        local: testing.LocalMachine, peer: int, plane: int, head: bytes, body: bytes, payload: Any
    ) -> None:
        header, data = frames.HEADER.unpack(head), bytearray(payload)
        if not done and header[5] & frames.FLAG_BUNDLE and burst_frames.counts_of(header)[0]:
            messages, flags, width = burst_frames.counts_of(header)
            rows_bytes = (messages + flags) * burst_frames.ROW_BYTES
            data[byte - flags * width if byte < 0 else rows_bytes + byte] ^= 1 << bit
            done.append(peer)
        carry(local, peer, plane, head, body, bytes(data))

    monkeypatch.setattr(testing.LocalMachine, "carry", carry_flipped)
    return done


def ends_with(text: str, job: MoeJob, folder: Path) -> None:
    """The run ends with a CorruptError that says this."""
    with pytest.raises((BaseExceptionGroup, CorruptError)) as found:
        Run(job, folder)
    if isinstance(found.value, BaseExceptionGroup):
        assert found.group_contains(CorruptError, match=text), found.value.exceptions
    else:
        assert found.match(text)


def test_a_row_for_an_expert_that_its_target_does_not_hold_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The expert's number is another by 128, so of another rank; both ranks and the expert are named."""
    done = flip(monkeypatch, byte=0, bit=7)
    text = r"rank \d does not hold expert \d+, of a token of rank \d"
    ends_with(text, make_job(), tmp_path)
    assert done


@pytest.mark.parametrize("scale", ["128", "full"])
@pytest.mark.parametrize("model", ["seal", "exact"])
def test_a_carried_byte_that_is_wrong_ends_the_run(
    model: str, scale: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bit in the last copy of a token's words; both ends are named."""
    done = flip(monkeypatch, byte=-17 if model == "exact" else -1, bit=0)
    text = r"message of node\d\d/npu\d/die\d to node\d\d/npu\d/die\d differs"
    ends_with(text, make_job(model=model, scale=scale, batch=2), tmp_path)
    assert done


@pytest.mark.parametrize("model", ["seal", "exact"])
@pytest.mark.parametrize("kind", TAMPERS)
def test_what_transport_does_to_data_is_seen_by_the_seals(
    kind: str, model: str, tmp_path: Path
) -> None:
    """Each kind of fault in several places: some token is wrong each time."""
    for number in range(6):
        draw = entropy.stream(number, f"{kind} {model}")
        tamper = Tamper(kind, passes=draw.below(4), draw=draw.below)
        folder = tmp_path / str(number)
        run = Run(make_job(model=model, batch=3), folder, touch=tamper.touch)
        assert tamper.done, "nothing was changed"
        assert run.wrong()[1] > 0, f"place {number} was not seen"
