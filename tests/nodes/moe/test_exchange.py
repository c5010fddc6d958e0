"""The exchange between nodes: order and speed of arrival mean nothing, and what is wrong is seen."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cmnet import entropy, testing
from cmnet.errors import CorruptError
from cmnet.link import effects
from cmnet.link.reach import Where
from cmnet.link.rules import Rule
from cmnet.topology.machine import Plane
from cmnet.wire import frames
from nodes.model.body import I64
from nodes.model.tamper import KINDS, Tamper
from nodes.moe import placement
from nodes.moe.placement import Placement
from tests.nodes.moe.moe_run import Run, make_job

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
    that it waits for before its own are away."""
    run = Run(make_job(ep=ep_size, model="exact", skew="hot:1:30", batch=batch), tmp_path)
    assert run.wrong() == (2 * ep_size * batch, 0, 0)


def test_a_rank_whose_own_flag_comes_last_is_complete_with_it(tmp_path: Path) -> None:
    """Nobody else's flag comes any more to tell it: 4 ms late, it goes on at once all the same."""
    slow = Rule(
        rule_id="it",
        owner="test",
        effect=effects.Delay(delay_ps=4000 * US),
        where=Where(plane=Plane.UB),
        until_ps=30 * US,
    )
    run = Run(make_job(), tmp_path, rules=(slow,))
    assert run.wrong()[1:] == (0, 0)
    for line in run.lines.values():
        flags = np.frombuffer(line.combine_flags_ps, dtype="<i8")
        assert 0 <= line.combined_ps - flags.max() < 100 * US


# --- what is wrong is seen ------------------------------------------------------------------------


def test_a_row_for_an_expert_that_its_target_does_not_hold_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node with another placement than the others."""
    right = placement.targets

    def wrong(held: Placement, experts: I64, index: I64) -> I64:
        return (right(held, experts, index) + 4) % 8

    monkeypatch.setattr(placement, "targets", wrong)
    with pytest.raises((BaseExceptionGroup, CorruptError)) as found:
        Run(make_job(), tmp_path)
    assert "does not hold expert" in str(found.value) or found.group_contains(
        CorruptError, match=r"rank \d does not hold expert \d+, of a token of rank \d"
    )


@pytest.mark.parametrize("scale", ["128", "full"])
@pytest.mark.parametrize("model", ["seal", "exact"])
def test_a_carried_byte_that_is_wrong_ends_the_run(
    model: str, scale: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last byte of the last message of a frame; the message says where it is."""
    carry = testing.LocalMachine.carry
    done: list[int] = []

    def flips(
        local: testing.LocalMachine, peer: int, plane: int, head: bytes, body: bytes, payload: Any
    ) -> None:
        flags = frames.HEADER.unpack(head)[5]
        data = bytearray(payload)
        if flags & frames.FLAG_QUIET and flags & frames.FLAG_BUNDLE and not done:
            data[-1] ^= 1
            done.append(peer)
        carry(local, peer, plane, head, body, bytes(data))

    monkeypatch.setattr(testing.LocalMachine, "carry", flips)
    with pytest.raises((BaseExceptionGroup, CorruptError)) as found:
        Run(make_job(model=model, scale=scale, batch=2), tmp_path)
    assert done
    text = r"byte \d+ differs from its first"
    if isinstance(found.value, BaseExceptionGroup):
        assert found.group_contains(CorruptError, match=text)
    else:
        assert found.match(text)


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
