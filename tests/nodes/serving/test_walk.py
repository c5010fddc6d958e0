"""A step's way through the layers: two streams, micro-batches, drafts, and what they cost."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from cmnet.units import PS_PER_S
from nodes.serving.cost import DecodeCost, Load, Microbatch
from nodes.serving.decoding import Decoding, Graphs
from nodes.settings import ModelSettings
from tests.nodes.serving import walked
from tests.nodes.serving.walked import DECODE, Walked

LAYERS = ModelSettings().carried_layers
WAYS: tuple[Microbatch, ...] = ("off", "on")
GRAPHS: tuple[Graphs, ...] = ("fused", "naive")
US = PS_PER_S // 10**6


def one(folder: Path, decoding: Decoding, **more: int) -> Walked:
    """The first node, of a group with the paper's load: 96 sequences per NPU, 4,096 + 128 tokens."""
    given = {"sequences": 48, "kv_tokens": 4224} | more
    return walked.walk(decoding, folder, **given)[DECODE[0]]  # type: ignore[arg-type]  # options by name


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [0, 1])
def test_micro_batches_overlap_and_the_step_is_shorter_than_its_stages(
    drafts: int, tmp_path: Path
) -> None:
    """While one is at its experts the other one is in attention: never two in one stream."""
    on = one(tmp_path, Decoding(microbatch="on", drafts=drafts))
    attention, moe, both = (
        on.statistics[name][0] for name in ("attention_ps", "moe_ps", "both_ps")
    )
    assert both > 0.7 * moe
    stages = on.statistics["stages"]
    assert len(stages) == 2 * 2 * (LAYERS + drafts)
    for stream in (0, 1):
        ours = [stage for stage in stages if stage[0] == stream]
        assert [stage[1] for stage in ours] == [0, 1] * (LAYERS + drafts)
        assert all(first[4] <= second[3] for first, second in itertools.pairwise(ours))
    load = Load(sequences=48, queries=1 + drafts, kv_tokens=48 * 4224)
    cost = DecodeCost(dies=320)
    uncarried_ps = (cost.model.moe_layers - LAYERS) * cost.layer_ps(load, microbatch="on")
    carried_ps = on.steps_ps[0] - uncarried_ps - cost.step_overhead_ps(load)
    assert carried_ps == attention + moe - both
    assert carried_ps < attention + moe


@pytest.mark.slow
def test_with_drafts_and_the_papers_load_micro_batches_gain(tmp_path: Path) -> None:
    """The paper: 9.4 % at 96 sequences per NPU. With few sequences they lose, so it has them off."""
    steps_ps = {}
    for sequences in (4, 48):
        for microbatch in WAYS:
            folder = tmp_path / f"{sequences}{microbatch}"
            folder.mkdir()
            decoding = Decoding(microbatch=microbatch, drafts=1)
            found = one(folder, decoding, sequences=sequences, steps=2)
            steps_ps[sequences, microbatch] = found.steps_ps[1]
    assert 1.02 < steps_ps[48, "off"] / steps_ps[48, "on"] < 1.06
    assert steps_ps[4, "off"] < steps_ps[4, "on"]


def test_without_micro_batches_streams_take_turns(tmp_path: Path) -> None:
    """Attention, then experts, each with all cores."""
    off = one(tmp_path, Decoding(), sequences=2)
    assert off.statistics["both_ps"] == [0]
    assert [stage[0] for stage in off.statistics["stages"]] == [0, 1] * LAYERS


def test_uncarried_layers_take_what_their_closed_form_says(tmp_path: Path) -> None:
    """The pipeline stands still for them: 56 layers of the model, to the picosecond."""
    on = one(tmp_path, Decoding(microbatch="on"), sequences=2)
    cost, load = DecodeCost(dies=320), Load(sequences=2, queries=1, kv_tokens=2 * 4224)
    stages = on.statistics["stages"]
    second = next(stage for stage in stages if stage[:3] == [0, 0, 1])
    first = next(stage for stage in stages if stage[:3] == [1, 0, 0])
    attention = next(stage for stage in stages if stage[:3] == [0, 1, 0])
    share = (cost.model.moe_layers - LAYERS) // LAYERS
    held_ps = max(first[4], attention[4])
    assert second[3] - held_ps == share * cost.layer_ps(load, microbatch="on")


def test_naive_graphs_cost_a_bubble_each_and_nothing_else(tmp_path: Path) -> None:
    """0.7 ms before the model's graph and before the draft's; the tokens are the same."""
    found = {}
    for graphs in GRAPHS:
        folder = tmp_path / graphs
        folder.mkdir()
        decoding = Decoding(drafts=1, graphs=graphs)
        found[graphs] = one(folder, decoding, sequences=2, steps=3)
    fused, naive = found["fused"], found["naive"]
    longer = [n - f for n, f in zip(naive.steps_ps, fused.steps_ps, strict=True)]
    assert longer == [1400 * US] * 3
    assert turns(naive) == turns(fused)


def turns(node: Walked) -> list[list[tuple[list[int], list[int], int]]]:
    return [[(t.tokens, t.seals, t.fold) for _, t in step] for step in node.turns]


@pytest.mark.slow
@pytest.mark.parametrize("microbatch", WAYS)
def test_every_draft_that_is_right_saves_a_step(microbatch: Microbatch, tmp_path: Path) -> None:
    """The same tokens and seals in the same order, in half the steps where all are right; none where
    none is."""
    answers, steps = [], []
    for accept in ("", "0", "1"):
        folder = tmp_path / f"at {accept}"
        folder.mkdir()
        decoding = Decoding(
            microbatch=microbatch,
            drafts=int(bool(accept)),
            accept=accept or "0",
        )
        count = 4 if accept == "1" else 6
        found = one(folder, decoding, sequences=2, kv_tokens=256, steps=count)
        of_request: dict[int, list[tuple[int, int]]] = {}
        for step in found.turns:
            for sequence, turn in step:
                pairs = zip(turn.tokens, turn.seals, strict=True)
                of_request.setdefault(sequence.request, []).extend(pairs)
        answers.append(of_request)
        steps.append([len(turn.tokens) for step in found.turns for _, turn in step])
    plain, never, always = answers
    assert never == plain
    assert {r: pairs[:6] for r, pairs in always.items()} == plain
    assert set(steps[1]) == {1} and sorted(set(steps[2])) == [1, 2]


@pytest.mark.parametrize("drafts", [0, 1])
def test_ranks_without_sequences_take_part_in_both_micro_batches(
    drafts: int, tmp_path: Path
) -> None:
    """One sequence, one rank: its second micro-batch is empty, and so are both of all others; nobody
    waits for ever."""
    decoding = Decoding(microbatch="on", drafts=drafts)
    nobody = dict.fromkeys(range(1, walked.RANKS), 0)
    found = walked.walk(decoding, tmp_path, sequences=1, kv_tokens=256, steps=2, counts=nobody)
    assert [len(step) for step in found[DECODE[0]].turns] == [1, 1]
    assert [len(step) for step in found[DECODE[1]].turns] == [0, 0]
