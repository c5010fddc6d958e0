"""The cost model: its closed forms give the figures they were derived with, and scale sensibly.

Published figures stand beside ours where both are known. A figure that was fitted is no proof, and
the tolerance is of rounding (the figures are printed to three digits), not of agreement.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodes.moe.operators import Operators
from nodes.serving.cost import DecodeCost, Load, Microbatch, PrefillCost, Prompt
from nodes.settings import ModelSettings

DECODE = DecodeCost(dies=320)
DECODE_ALONE = DecodeCost(
    dies=320, layer_overhead=65.4e-6, token_overhead=1.49e-6, hottest_expert=1.60
)
"""The three decode constants fitted to decode alone, with a load of the hottest expert of its own."""

TOKENS_PER_STEP = 1.7
"""One draft, right in 70 % of cases: arXiv 2506.12708, MTP."""

ROWS = {128: 1024 + 1024 // 2, 112: 2048 + 256 // 2, 96: 4224, 24: 4224, 8: 4224}
"""SLO table of the paper: batch per NPU -> mean KV length (prompt and half of the output)."""

PAPER_TPOT_MS = {128: 46.8, 112: 47.4, 96: 49.4, 24: 24.6, 8: 14.9}


def load(batch_npu: int, kv_length: int, queries: int = 2) -> Load:
    sequences = batch_npu / 2
    return Load(sequences=sequences, queries=queries, kv_tokens=sequences * kv_length)


def microbatch(batch_npu: int) -> Microbatch:
    """The paper leaves micro-batches off where there is too little to split."""
    return "on" if batch_npu >= 24 else "off"


def tpot_ms(cost: DecodeCost, batch_npu: int) -> float:
    row = load(batch_npu, ROWS[batch_npu])
    return cost.step_ps(row, microbatch=microbatch(batch_npu)) / TOKENS_PER_STEP / 1e9


@pytest.mark.parametrize(
    ("cost", "expected"),
    [
        (DECODE_ALONE, {128: 49.9, 112: 44.7, 96: 47.8, 24: 23.5, 8: 15.3}),
        (DECODE, {128: 48.1, 112: 43.3, 96: 47.4, 24: 23.7, 8: 15.6}),
    ],
    ids=["fitted to decode alone", "one hottest expert for prefill and decode"],
)
def test_decode_gives_the_tpot_of_its_derivation(
    cost: DecodeCost, expected: dict[int, float]
) -> None:
    """Both sets of fitted numbers. The derivation had 0.53 and 0.15 us a token for dispatch and combine;
    here they are the operators', which are fitted to them alone: up to 0.2 ms of a step."""
    for batch_npu, expected_ms in expected.items():
        assert tpot_ms(cost, batch_npu) == pytest.approx(expected_ms, abs=0.25)


@pytest.mark.parametrize("batch_npu", ROWS)
def test_decode_is_within_10_percent_of_the_papers_tpot(batch_npu: int) -> None:
    """All five rows, with the constants that the product uses."""
    assert tpot_ms(DECODE, batch_npu) == pytest.approx(PAPER_TPOT_MS[batch_npu], rel=0.10)


def test_a_layer_takes_861_us_without_and_1302_us_with_a_draft() -> None:
    """The paper: 874 and 1,260 us."""
    without = DECODE.layer_ps(load(96, 4224, queries=1), microbatch="on")
    with_draft = DECODE.layer_ps(load(96, 4224), microbatch="on")
    assert without / 1e6 == pytest.approx(861, abs=0.5)
    assert with_draft / 1e6 == pytest.approx(1302, abs=0.5)


def test_micro_batches_gain_what_the_derivation_says() -> None:
    """0.5, 4.7, 7.3 % at 64, 96, 128 (the paper: 5.8, 9.4, 6.9; a smooth model cannot do that)."""
    gains = []
    for batch_npu in (64, 96, 128):
        off, on = (DECODE.step_ps(load(batch_npu, 4224), microbatch=m) for m in ("off", "on"))
        gains.append(100 * (off / on - 1))
    assert gains == pytest.approx([0.5, 4.7, 7.3], abs=0.3)


def test_a_draft_gains_49_percent_at_batch_8_and_5_at_128() -> None:
    """The paper: 6 to 49 %. Not fitted: a step without drafts has no MTP layer and one head."""
    gains = []
    for batch_npu in (8, 128):
        split = microbatch(batch_npu)
        without = DECODE.step_ps(load(batch_npu, 4224, queries=1), microbatch=split)
        with_draft = DECODE.step_ps(load(batch_npu, 4224), microbatch=split)
        gains.append(100 * (TOKENS_PER_STEP * without / with_draft - 1))
    assert gains == pytest.approx([49.1, 5.2], abs=0.1)


def test_another_system_on_the_same_machine_is_predicted() -> None:
    """xDeepServe (arXiv 2508.02520), 60 sequences a die at 3K: 93 ms. Used in no fit."""
    step_ms = DECODE.step_ps(load(120, 3000), microbatch="off") / 1e9
    assert step_ms == pytest.approx(90.1, abs=0.25)


def test_a_layer_that_is_not_carried_is_the_sum_of_what_a_carried_one_charges() -> None:
    """The engine adds the parts itself where dispatch and combine are real."""
    row = load(96, 4224)
    rows = 9 * row.tokens * DECODE.hottest_expert
    parts_ps = (
        DECODE.attention_ps(row)
        + DECODE.dispatch_ps(row.tokens)
        + DECODE.expert_ps(rows=rows)
        + DECODE.combine_ps(row.tokens)
    )
    assert DECODE.layer_ps(row, microbatch="off") == parts_ps
    operators = Operators(ep_size=320)
    visits = operators.reorder_ps(8 * row.tokens)
    assert operators.dispatch_start_ps + visits < DECODE.dispatch_ps(row.tokens)
    assert operators.combine_start_ps + operators.sum_ps(row.tokens) < DECODE.combine_ps(row.tokens)


def test_an_idle_die_still_takes_its_part_in_the_step() -> None:
    """It reads its weights and waits in the exchange; nothing divides by its sequences."""
    idle = Load(sequences=0, queries=2, kv_tokens=0)
    assert DECODE.dispatch_ps(0) == 17_000_000
    assert DECODE.combine_ps(0) == 11_000_000
    assert (
        0 < DECODE.step_ps(idle, microbatch="off") < DECODE.step_ps(load(8, 4224), microbatch="off")
    )


def test_a_smaller_group_reads_more_weights_per_die() -> None:
    """8 dies hold 33 experts each: small batches are bound by memory, as on a real machine."""
    few = DecodeCost(dies=8)
    assert few.expert_ps(rows=8) > 20 * DECODE.expert_ps(rows=8) - 20 * DECODE.expert_ps(rows=0)
    assert few.expert_ps(rows=8, experts=1) == DECODE.expert_ps(rows=8)


@settings(deadline=None, max_examples=50)
@given(sequences=st.integers(0, 64), kv_length=st.integers(1, 131_072), more=st.integers(1, 1000))
def test_more_work_never_takes_less_time(sequences: int, kv_length: int, more: int) -> None:
    """A cost model that is not monotonic makes a scheduler do absurd things."""
    small = Load(sequences=sequences, queries=2, kv_tokens=sequences * kv_length)
    large = Load(sequences=sequences + more, queries=2, kv_tokens=(sequences + more) * kv_length)
    for split in ("on", "off"):
        assert DECODE.step_ps(small, microbatch=split) <= DECODE.step_ps(large, microbatch=split)


PERFECT = PrefillCost(dies=32, hottest_expert=1.0)
BATCH = [Prompt(new_tokens=4096)] * 64
"""64 prompts of 4K on 32 dies: 8,192 tokens a die."""


def test_prefill_gives_the_parts_of_its_derivation() -> None:
    """GEMM 0.969 s, attention 0.341 s, exchange 0.939 s, rest 0.879 s; 3,128 ms in all."""
    parts = PERFECT.batch_time(BATCH, microbatch="off")
    seconds = [part / 1e12 for part in (parts.gemm_ps, parts.attention_ps, parts.exchange_ps)]
    assert seconds == pytest.approx([0.969, 0.341, 0.939], abs=0.0006)
    assert parts.total_ps / 1e9 == pytest.approx(3128, abs=0.5)


def test_prefill_with_micro_batches_makes_6522_tokens_a_second_and_npu() -> None:
    """Ascend's own figure, which two constants were fitted to; the paper: 6,688 (-2.5 %)."""
    taken_ps = PERFECT.prefill_ps(BATCH)
    assert 16_384 / (taken_ps / 1e12) == pytest.approx(6522, abs=1)


def test_the_default_balance_is_within_3_percent_of_the_papers_throughput() -> None:
    """5,655 tok/s per NPU; the load of the hottest expert was derived from it, relative to 6,688."""
    taken_ps = PrefillCost(dies=32).prefill_ps(BATCH)
    assert 16_384 / (taken_ps / 1e12) == pytest.approx(5655, rel=0.03)


def test_micro_batches_gain_27_to_22_percent_from_1k_to_8k() -> None:
    """The paper: 23 to 31 % over prompt lengths."""
    gains = []
    for length in (1024, 2048, 4096, 8192):
        prompts = [Prompt(new_tokens=length)] * (262_144 // length)
        off, on = (PERFECT.prefill_ps(prompts, microbatch=m) for m in ("off", "on"))
        gains.append(100 * (off / on - 1))
    assert gains == pytest.approx([27, 26, 25, 22], abs=0.6)


def test_a_cached_prefix_speeds_prefill_up_as_published() -> None:
    """1.41x at 50 %, 2.34x at 90 % (the paper: 1.42x and 2.28x). Used in no fit."""
    base_ps = PERFECT.prefill_ps(BATCH)
    speedups = []
    for new in (2048, 410):
        prompts = [Prompt(new_tokens=new, cached_tokens=4096 - new)] * 64
        speedups.append(base_ps / PERFECT.prefill_ps(prompts))
    assert speedups == pytest.approx([1.41, 2.34], abs=0.005)


def test_the_rest_is_the_same_for_the_measured_batch_and_vanishes_per_token() -> None:
    """Two readings of one fitted number: equal where it was measured, 0.9 s apart for a short prompt."""
    per_token = PrefillCost(dies=32, hottest_expert=1.0, rest_per="token")
    assert per_token.prefill_ps(BATCH) == PERFECT.prefill_ps(BATCH)
    short = [Prompt(new_tokens=32)]
    assert PERFECT.prefill_ps(short) > 879_000_000_000
    assert per_token.prefill_ps(short) < 100_000_000_000


def test_fewer_dies_take_longer_and_fewer_layers_less() -> None:
    """So that a small topology has times of the right order."""
    four = PrefillCost(dies=4)
    small = PrefillCost(dies=4, model=ModelSettings(layers=11, moe_layers=8))
    assert four.prefill_ps(BATCH) > 4 * PrefillCost(dies=32).prefill_ps(BATCH)
    assert small.prefill_ps(BATCH) < four.prefill_ps(BATCH)
