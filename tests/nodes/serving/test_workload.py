"""Workloads: exact instants, every wrong row named, the generated one a function of its seed."""

from __future__ import annotations

import os
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cmnet.errors import InputError
from nodes.serving.workload import UNIQUE_IDS, Request, Workload, generate, read_trace
from tests.nodes.serving import twins

GOOD = '{"timestamp": 5, "input_length": 700, "output_length": 6, "hash_ids": [0, 1]}'
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


def read(path: Path, *, requests: int | None = None, rate: Fraction = Fraction(1)) -> Workload:
    return read_trace(path, requests=requests, rate=rate, max_tokens=131_072, block_tokens=512)


def generated(requests: int = 40, seed: int = 1, max_tokens: int = 131_072) -> Workload:
    return generate(seed=seed, requests=requests, max_tokens=max_tokens, block_tokens=512)


def published(name: str) -> Path:
    folder = os.environ.get("CMNET_TRACES")
    if folder is None:
        pytest.skip("CMNET_TRACES is not set to a folder with the published traces")
    return Path(folder) / name


def cut(request: Request, grain_ps: int) -> Request:
    """The request as a format with a coarser clock holds it."""
    return Request(
        index=request.index,
        arrival_ps=request.arrival_ps // grain_ps * grain_ps,
        input_tokens=request.input_tokens,
        output_tokens=request.output_tokens,
        hash_ids=request.hash_ids,
    )


def test_a_mooncake_twin_reads_back_equal(tmp_path: Path) -> None:
    """Lengths, block ids and instants to the millisecond that the format has."""
    workload = generated()
    back = read(twins.write_mooncake(tmp_path / "twin.jsonl", workload))
    assert back.requests == tuple(cut(request, 10**9) for request in workload.requests)
    assert (back.kind, back.skipped, back.rows_read) == ("mooncake", (), 40)


def test_an_azure_twin_reads_back_to_the_digit_and_shares_nothing(tmp_path: Path) -> None:
    """Seven decimals, over midnight; every prompt is unique and no id can be a Mooncake one."""
    workload = generated()
    back = read(twins.write_azure(tmp_path / "twin.csv", workload))
    assert [request.arrival_ps for request in back.requests] == [
        request.arrival_ps // 10**5 * 10**5 for request in workload.requests
    ]
    assert [(request.input_tokens, request.output_tokens) for request in back.requests] == [
        (request.input_tokens, request.output_tokens) for request in workload.requests
    ]
    assert back.block_references == workload.block_references == back.distinct_blocks
    assert min(block for request in back.requests for block in request.hash_ids) == UNIQUE_IDS
    assert back.kind == "azure"


def test_the_format_is_told_by_content(tmp_path: Path) -> None:
    """A file may be called anything."""
    assert read(twins.write_azure(tmp_path / "twin.jsonl", generated(3))).kind == "azure"
    assert read(twins.write_mooncake(tmp_path / "twin", generated(3))).kind == "mooncake"


def test_the_first_row_arrives_at_0_and_the_rate_divides_exactly(tmp_path: Path) -> None:
    """3 s at a rate of 7/2 is 6/7 s, rounded down to the picosecond."""
    path = tmp_path / "trace.jsonl"
    later = GOOD.replace('"timestamp": 5', '"timestamp": 3005')
    path.write_text(f"{GOOD}\n{later}\n")
    arrivals = [request.arrival_ps for request in read(path, rate=Fraction(7, 2)).requests]
    assert arrivals == [0, 6 * 10**12 // 7]


def test_only_the_rows_asked_for_are_read(tmp_path: Path) -> None:
    """A wrong row behind them cannot spoil a short run; more than there are is said, not refused."""
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{GOOD}\n{GOOD}\nnonsense\n")
    assert [request.index for request in read(path, requests=2).requests] == [0, 1]
    path.write_text(f"{GOOD}\n")
    workload = read(path, requests=100)
    assert (workload.rows_asked, workload.rows_read, len(workload.requests)) == (100, 1, 1)


def test_a_row_longer_than_the_model_allows_is_skipped_and_listed(tmp_path: Path) -> None:
    """Counted, listed, never a crash; the others keep their instants and are numbered without gap."""
    path = tmp_path / "trace.csv"
    rows = ["2023-11-16 18:17:03,131072,1", "2023-11-16 18:17:04,131071,1"]
    path.write_text("\n".join([HEADER, *rows]))
    workload = read(path)
    assert [(row.line, row.reason) for row in workload.skipped] == [
        (2, "131072 + 1 tokens, more than 131072")
    ]
    assert [(row.index, row.arrival_ps) for row in workload.requests] == [(0, 10**12)]
    assert workload.rows_read == 2


AZURE_ROW = "2023-11-16 18:17:03.9799600,4808,10"
WRONG = {
    "missing key": (GOOD.replace('"output_length": 6, ', ""), "line 1: output_length"),
    "unknown key": (GOOD.replace("}", ', "model": 1}'), "line 1: model: 1 .* only timestamp"),
    "text for a number": (GOOD.replace("700", '"700"'), "line 1: input_length: '700'"),
    "float for a number": (GOOD.replace("700", "700.0"), "line 1: input_length: 700.0"),
    "bool for a number": (GOOD.replace("6,", "true,"), "line 1: output_length: True"),
    "null": (GOOD.replace("5,", "null,"), "line 1: timestamp: None"),
    "negative instant": (GOOD.replace("5,", "-5,"), "line 1: timestamp: -5 .* 0 or more"),
    "no input": (GOOD.replace("700", "0"), "line 1: input_length: 0 .* 1 or more"),
    "no output": (GOOD.replace("6,", "0,"), "line 1: output_length: 0 .* 1 or more"),
    "a block too few": (GOOD.replace("[0, 1]", "[0]"), "line 1: hash_ids: '1 block ids' .* 2: one"),
    "a block too many": (GOOD.replace("[0, 1]", "[0, 1, 2]"), "line 1: hash_ids: '3 block ids'"),
    "blocks are no list": (GOOD.replace("[0, 1]", '"0,1"'), "line 1: hash_ids: '0,1'"),
    "a block is no number": (GOOD.replace("[0, 1]", '[0, "1"]'), r"line 1: hash_ids\[1\]: '1'"),
    "a negative block": (GOOD.replace("[0, 1]", "[0, -1]"), r"line 1: hash_ids\[1\]: -1"),
    "a block of the made-up range": (
        GOOD.replace("[0, 1]", f"[0, {UNIQUE_IDS}]"),
        r"line 1: hash_ids\[1\].* 0 to 2\^62 - 1",
    ),
    "backwards": (f"{GOOD}\n{GOOD.replace('5,', '4,')}", "line 2: timestamp.* of line 1"),
    "truncated": (f"{GOOD}\n{GOOD[:40]}", "line 2: .*one whole JSON object"),
    "blank line": (f"{GOOD}\n\n{GOOD}", "line 2: ''.*one whole JSON object"),
    "an array": (f"{GOOD}\n[1]", "line 2: .*one whole JSON object"),
    "empty": ("", "an empty file"),
    "neither format": ("hello\n", "line 1: 'hello'.*Mooncake JSONL"),
    "wrong header": ("TIMESTAMP,Context,Generated\n", "line 1: .*Azure header"),
    "header only": (HEADER, "no rows"),
    "two fields": (f"{HEADER}\n2023-11-16 18:17:03,7", "line 2: .*three fields"),
    "no instant": (f"{HEADER}\nnow,7,7", "line 2: TIMESTAMP: 'now'"),
    "no such day": (f"{HEADER}\n2023-02-30 18:17:03,7,7", "line 2: TIMESTAMP: '2023-02-30"),
    "words for tokens": (f"{HEADER}\n{AZURE_ROW}\n{AZURE_ROW}x", "line 3: GeneratedTokens: '10x'"),
    "no context": (f"{HEADER}\n2023-11-16 18:17:03,0,7", "line 2: ContextTokens: '0'"),
    "negative context": (f"{HEADER}\n2023-11-16 18:17:03,-1,7", "line 2: ContextTokens: '-1'"),
    "csv backwards": (
        f"{HEADER}\n{AZURE_ROW}\n2023-11-16 18:17:03.9799599,1,1",
        "line 3: timestamp.* of line 2",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_trace_is_refused_with_file_line_and_field(name: str, tmp_path: Path) -> None:
    """The message must be enough to mend the file."""
    text, message = WRONG[name]
    path = tmp_path / "wrong.trace"
    path.write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "expected" in str(caught.value)


def test_bytes_that_are_not_utf8_are_refused_with_their_line(tmp_path: Path) -> None:
    """Not a traceback of the decoder."""
    path = tmp_path / "wrong.jsonl"
    path.write_bytes(GOOD.encode() + b"\n\xff\n")
    with pytest.raises(InputError, match=r"line 2: b'\\xff' is wrong; expected UTF-8"):
        read(path)


def test_a_file_that_is_not_there_is_an_input_error(tmp_path: Path) -> None:
    """Also a folder, or one that may not be read."""
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(InputError, match="a trace file that can be read"):
            read(path)


def test_blocks_of_another_size_than_mooncakes_are_refused(tmp_path: Path) -> None:
    """Its ids name 512 tokens each; with other blocks they would name nothing."""
    path = twins.write_mooncake(tmp_path / "twin.jsonl", generated(2))
    with pytest.raises(InputError, match=r"model.block_tokens: 128 is wrong; expected 512"):
        read_trace(path, max_tokens=131_072, block_tokens=128)


@pytest.mark.parametrize(("requests", "rate"), [(0, Fraction(1)), (5, Fraction(0))])
def test_nothing_to_serve_and_no_speed_are_refused(requests: int, rate: Fraction) -> None:
    """The options are named."""
    with pytest.raises(InputError, match=r"--(requests|rate): .* is wrong"):
        generate(seed=1, requests=requests, rate=rate, max_tokens=4096, block_tokens=512)


def test_a_generated_workload_is_a_function_of_its_seed() -> None:
    """And a longer one begins with the shorter."""
    assert generated(20) == generated(20)
    assert generated(20).requests == generated(40).requests[:20]
    assert generated(20).requests != generated(20, seed=2).requests


def test_a_generated_workload_shares_prefixes_like_the_trace() -> None:
    """Between 45 and 75 % of block references are repeats (the published trace: 64 %)."""
    workload = generated(1000)
    hits = 1 - workload.distinct_blocks / workload.block_references
    assert 0.45 < hits < 0.75


def test_a_generated_workload_arrives_like_the_trace() -> None:
    """A mean gap of 256 ms (the table's is 20 % above, its last step is long), half as much at rate 2."""
    workload = generated(1000)
    assert 0.2 < workload.requests[-1].arrival_ps / 999 / 10**12 < 0.35
    fast = generate(seed=1, requests=1000, rate=Fraction(2), max_tokens=131_072, block_tokens=512)
    assert [request.arrival_ps for request in fast.requests] == [
        request.arrival_ps // 2 for request in workload.requests
    ]


@settings(deadline=None, max_examples=50)
@given(
    seed=st.integers(0, 2**64),
    max_tokens=st.integers(2, 20_000),
    block_tokens=st.sampled_from([1, 16, 128, 512]),
)
def test_generated_requests_are_whole_and_prefix_chained(
    seed: int, max_tokens: int, block_tokens: int
) -> None:
    """Within the limit, a block for each part of the prompt, and an id has one parent and one place."""
    workload = generate(seed=seed, requests=12, max_tokens=max_tokens, block_tokens=block_tokens)
    parents: dict[int, tuple[int, int, int]] = {}
    for request in workload.requests:
        assert request.input_tokens >= 1
        assert request.output_tokens >= 1
        assert request.input_tokens + request.output_tokens <= max_tokens
        assert len(request.hash_ids) == -(-request.input_tokens // block_tokens)
        parent = -1
        for place, block in enumerate(request.hash_ids):
            fill = min(block_tokens, request.input_tokens - place * block_tokens)
            assert parents.setdefault(block, (parent, place, fill)) == (parent, place, fill)
            parent = block


@pytest.mark.slow
def test_the_published_mooncake_trace_has_its_known_counts() -> None:
    """FAST'25 release: 3,993 requests, 121,877 references, 43,924 blocks, hit rate 0.6396."""
    workload = read_trace(published("mooncake_synthetic.jsonl"), max_tokens=10**6, block_tokens=512)
    assert len(workload.requests) == 3993
    assert workload.block_references == 121_877
    assert workload.distinct_blocks == 43_924
    assert round(1 - workload.distinct_blocks / workload.block_references, 4) == 0.6396


@pytest.mark.slow
def test_the_published_mooncake_trace_has_rows_that_the_model_cannot_serve() -> None:
    """Every row is either served or listed."""
    workload = read(published("mooncake_synthetic.jsonl"))
    assert len(workload.requests) + len(workload.skipped) == 3993
    assert 0 < len(workload.skipped) < 40


@pytest.mark.slow
def test_the_published_azure_trace_is_read_to_the_digit() -> None:
    """8,819 requests over 3,435.948056 s; nothing is shared."""
    workload = read(published("azure_llm_2023_code.csv"))
    assert len(workload.requests) == 8819
    assert workload.requests[1].arrival_ps == 52_000_000_000
    assert workload.requests[-1].arrival_ps == 3_435_948_056_000_000
    assert workload.distinct_blocks == workload.block_references


@pytest.mark.parametrize(("days", "rate"), [(107, Fraction(1)), (11, Fraction(1, 10))])
def test_a_trace_longer_than_a_run_can_be_is_refused(
    days: int, rate: Fraction, tmp_path: Path
) -> None:
    """Picoseconds in 64 bits hold 106 days; the row that goes beyond is named."""
    file = tmp_path / "long.jsonl"
    row = '{{"timestamp": {}, "input_length": 5, "output_length": 1, "hash_ids": [1]}}\n'
    file.write_text(row.format(0) + row.format(days * 86_400_000))
    with pytest.raises(InputError) as caught:
        read_trace(str(file), max_tokens=100, block_tokens=512, rate=rate)
    assert (caught.value.file, caught.value.key) == (str(file), "line 2: timestamp")
