"""The emulator's dispatch and combine against a closed form that shares nothing with it.

What the closed form gets from us is which rank each token's experts are on, when each operator began, and
what the operators add before a write and after the last flag. Everything between is its own arithmetic.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import run
from cmnet import entropy
from nodes.model import bodies
from nodes.moe import placement, seen, setup
from nodes.moe.exchange import FLAG_BYTES
from nodes.moe.operators import Operators
from nodes.moe.setup import Told
from nodes.moe.table import table
from nodes.moe.verify import tokens
from tests import closed_form_moe
from tests.closed_form_moe import ACROSS, IN_NODE, IN_PACKAGE, US, Message

ROOT = Path(run.__file__).resolve().parent
DISPATCH_BYTES, COMBINE_BYTES = 7_680, 14_336


def ser(size: int, way: closed_form_moe.Way) -> int:
    return closed_form_moe.serialization_ps(size, way.rate_bps)


def test_a_lone_message_is_in_after_propagation_and_serialization() -> None:
    """On each of the three kinds of path."""
    for target, way in ((1, IN_PACKAGE), (2, IN_NODE), (16, ACROSS)):
        sends: list[list[Message]] = [[] for _ in range(17)]
        sends[0] = [Message(target, DISPATCH_BYTES, 5)]
        assert closed_form_moe.deliveries_ps(sends)[0] == [5 + way.propagation_ps + ser(7680, way)]


def test_messages_of_one_source_follow_each_other_and_rounding_adds_up_once() -> None:
    """Three of 14,336 B at one rate: the last ends when all their bits have passed."""
    sends = [[Message(2, COMBINE_BYTES, 0)] * 3, [], []]
    expected = [IN_NODE.propagation_ps + ser(COMBINE_BYTES * count, IN_NODE) for count in (1, 2, 3)]
    assert closed_form_moe.deliveries_ps(sends)[0] == expected


def test_two_sources_share_the_ingress_and_own_messages_are_free() -> None:
    sends = [[Message(4, 7680, 0)], [Message(1, 7680, 9)], [Message(4, 7680, 0)], [], []]
    found = closed_form_moe.deliveries_ps(sends)
    first = IN_NODE.propagation_ps + ser(7680, IN_NODE)
    assert (found[0], found[1]) == ([first], [9])
    assert found[2] == [IN_NODE.propagation_ps + ser(2 * 7680, IN_NODE)]


@pytest.mark.slow
def test_random_routing_costs_what_a_queueing_model_of_its_own_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A separate FIFO model (137 GB/s, 1.3 us, no path of the package; uniform top 8 of 256) gives dispatch
    52.7 and combine 99.3 us in the mean at EP 8 and batch 128. A combine ends with the rank that has the
    most rows, so it depends on the draw: 3 % between draws."""
    way = closed_form_moe.Way(137 * closed_form_moe.GB_PER_S, 1_300_000)
    monkeypatch.setattr(closed_form_moe, "IN_NODE", way)
    monkeypatch.setattr(closed_form_moe, "IN_PACKAGE", way)
    stream = entropy.stream(7, "closed form")
    targets = [[[expert // 32 for expert in _choice(stream)] for _ in range(128)] for _ in range(8)]
    mean = statistics.fmean(closed_form_moe.dispatch(targets, size=DISPATCH_BYTES)) / US
    assert mean == pytest.approx(52.7, rel=0.01)
    mean = statistics.fmean(closed_form_moe.combine(targets, size=COMBINE_BYTES)) / US
    assert mean == pytest.approx(99.3, rel=0.04)


def _choice(stream: entropy.Stream) -> list[int]:
    """Eight that differ of 256."""
    found: list[int] = []
    while len(found) < 8:
        expert = stream.below(256)
        if expert not in found:
            found.append(expert)
    return found


@pytest.mark.slow
@pytest.mark.machine
@pytest.mark.parametrize("isolated", [False, True])
@pytest.mark.parametrize("ep", [8, pytest.param(256, marks=pytest.mark.soak)])
def test_the_emulator_is_the_closed_form_to_the_picosecond(
    ep: int, isolated: bool, tmp_path: Path
) -> None:
    """When every rank has all tokens, and all results: 2 % were asked for, mean and last."""
    options = ["--ep", str(ep), "--batch", "128", "--out", str(tmp_path / "run"), "--no-verify"]
    options += ["--isolated"] if isolated else []
    ended = subprocess.run(
        [sys.executable, str(ROOT / "run.py"), "moe", *options],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ},
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    compare(tmp_path / "run")


def compare(folder: Path) -> None:
    """One layer of a run's folder."""
    told = setup.read_told(folder)
    found, job = seen.read(folder, told), told.job
    cost = Operators(ep_size=job.ep_size, model=job.model, engine_start_ps=told.engine_start_ps)
    targets, flag_sizes = routes(told)
    began = found.began_ps[0, 0] + cost.dispatch_start_ps
    ends = closed_form_moe.dispatch(
        targets,
        size=DISPATCH_BYTES,
        begin_ps=began.tolist(),
        token_ps=cost.tokens_ready_ps(job.batch).tolist(),
        flag_sizes=flag_sizes,
    )
    reorder = [cost.reorder_ps(int(rows)) for rows in found.rows[0, 0]]
    assert (found.dispatched_ps[0, 0] - reorder).tolist() == ends
    began = found.combine_began_ps[0, 0] + cost.combine_start_ps
    ends = closed_form_moe.combine(
        targets,
        size=COMBINE_BYTES,
        begin_ps=began.tolist(),
        row_ps=cost.results_ready_ps(int(found.rows.max())).tolist(),
        flag_size=FLAG_BYTES,
    )
    sums = [cost.sum_ps(count) for count in job.counts]
    assert (found.combined_ps[0, 0] - sums).tolist() == ends


def routes(told: Told) -> tuple[list[list[list[int]]], list[int]]:
    """Ranks of each token's experts, [rank][token][k], and the size of the flag to each rank."""
    job = told.job
    body = bodies.make(job.body, job.model, skew=job.skew)
    seeds, index = tokens(job)
    states = np.concatenate(
        [
            body.start_prompt(seeds[rank * job.batch :][: job.batch], first_place=rank * job.batch)
            for rank in range(job.ep_size)
        ]
    )
    experts = body.gate(states, layer=0).experts
    placed = placement.initial(
        experts=job.model.routed_experts,
        ep_size=job.ep_size,
        redundant=job.redundant,
        shared_ranks=job.shared_ranks,
    )
    routed = placement.targets(placed, experts, index)
    shared = np.repeat(np.array(placed.shared), job.batch)[:, None]
    whole = np.concatenate([routed, shared], axis=1).reshape(job.ep_size, job.batch, -1)
    written = table(placed, job.model.routed_experts).written
    return whole.tolist(), [FLAG_BYTES * max(int(count), 1) for count in written]
