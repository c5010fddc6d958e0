"""Requests of a run: read from a trace, or generated.

Owns the two public trace formats, what is refused in them, exact arrival instants, and the generated
workload. Does not own when a request is really sent (the gateway) nor what its tokens are (the model).

- Mooncake JSONL (FAST'25 release): ``timestamp`` ms, ``input_length``, ``output_length``, ``hash_ids``
  of 512-token prefix-chained blocks, the last one partial.
- Azure CSV (2023 LLM traces): ``TIMESTAMP,ContextTokens,GeneratedTokens``, no block identities, so
  every prompt is unique.

The first row read arrives at 0 ps; the rate divides all instants, exactly. A wrong row is refused
with its line; a row longer than the model allows is skipped and listed. Block ids: those of a
Mooncake file and of a generated workload are below 2^62, those made up for Azure rows are not
(2^62 + row x 2^20 + block), so the two never meet.

>>> workload = generate(seed=1, requests=3, max_tokens=131_072, block_tokens=512)
>>> [request.index for request in workload.requests], workload.requests[0].arrival_ps
([0, 1, 2], 0)
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Literal

import msgspec

from cmnet import entropy
from cmnet.errors import InputError
from cmnet.units import PS_PER_S

MOONCAKE_BLOCK_TOKENS = 512
"""The grain of Mooncake's ``hash_ids``; part of the format."""
UNIQUE_IDS = 2**62
"""First id of blocks that no other request shares."""
ROW_IDS = 2**20
"""Ids set aside for the blocks of one Azure row: a prompt of 2^29 tokens."""

SPAN_PS_MAX = 100 * 86_400 * PS_PER_S
"""From the first arrival to the last: int64 picoseconds hold 106 days (design 1.1), the rest is for
the answers."""
REQUESTS_MAX = 1_000_000
"""As many as a generated workload's memory stays below 2 GB."""

_AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
_AZURE_INSTANT = re.compile(
    r"(\d{4})-(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)(?:\.(\d{1,12}))?(?:\+00:00)?"
)
_MOONCAKE_KEYS = ("timestamp", "input_length", "output_length", "hash_ids")
_MOONCAKE_EXAMPLE = '{"timestamp": 0, "input_length": 700, "output_length": 6, "hash_ids": [0, 1]}'

Kind = Literal["mooncake", "azure", "generated"]


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request. ``hash_ids`` names its prompt's blocks; the last may be partial."""

    index: int
    """Its place in the workload, from 0; skipped rows have none."""
    arrival_ps: int
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]


class Skipped(msgspec.Struct, frozen=True, kw_only=True):
    """A row that the model cannot serve."""

    line: int
    """In the file, from 1; of a CSV the header is line 1."""
    reason: str


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """What a run serves, and what it was told to leave out."""

    kind: Kind
    file: str
    """"" if generated."""
    requests: tuple[Request, ...]
    skipped: tuple[Skipped, ...]
    rows_asked: int | None
    """``--requests``; None: all."""
    rows_read: int
    """Rows of the file looked at, skipped ones included; below ``rows_asked`` if it has no more."""

    @property
    def block_references(self) -> int:
        """Blocks of all prompts."""
        return sum(len(request.hash_ids) for request in self.requests)

    @property
    def distinct_blocks(self) -> int:
        """Of those, the different ones: what a cache without limit would hold in the end."""
        return len({block for request in self.requests for block in request.hash_ids})


class _Row(msgspec.Struct, frozen=True):
    """A row of either format, checked; the instant counts from any fixed origin."""

    line: int
    at_ps: int
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]


def read_trace(
    path: str | Path,
    *,
    max_tokens: int,
    block_tokens: int,
    requests: int | None = None,
    rate: Fraction = Fraction(1),
) -> Workload:
    """The first ``requests`` rows of a trace, or all; ``rate`` 2 makes them arrive twice as fast.

    Raises InputError for a file that cannot be read, is of neither format, or has a wrong row among
    those asked for. The format is told by the first line, whatever the file is called.
    """
    file = str(path)
    _check_asked(requests, rate)
    lines = _lines(file)
    kind, read = _format(file, lines[0])
    rows: list[_Row] = []
    for row in read(file, lines, block_tokens):
        if rows and row.at_ps < rows[-1].at_ps:
            expected = f"an instant not before that of line {rows[-1].line}"
            raise _wrong(file, row.line, "timestamp", lines[row.line - 1], expected)
        rows.append(row)
        if len(rows) == requests:
            break
    if not rows:
        raise InputError(file=file, key="", value="no rows", expected="at least one request")
    served, skipped = _split(rows, max_tokens)
    return Workload(
        kind=kind,
        file=file,
        requests=_arrive(served, file=file, origin_ps=rows[0].at_ps, rate=rate),
        skipped=skipped,
        rows_asked=requests,
        rows_read=len(rows),
    )


def _check_asked(requests: int | None, rate: Fraction) -> None:
    if requests is not None and requests < 1:
        raise InputError(file="--requests", key="", value=requests, expected="1 or more")
    if requests is not None and requests > REQUESTS_MAX:
        expected = f"at most {REQUESTS_MAX}"
        raise InputError(file="--requests", key="", value=requests, expected=expected)
    if rate <= 0:
        raise InputError(file="--rate", key="", value=str(rate), expected="a number above 0")


def _split(rows: list[_Row], max_tokens: int) -> tuple[list[_Row], tuple[Skipped, ...]]:
    served, skipped = [], []
    for row in rows:
        total = row.input_tokens + row.output_tokens
        if total <= max_tokens:
            served.append(row)
        else:
            reason = f"{row.input_tokens} + {row.output_tokens} tokens, more than {max_tokens}"
            skipped.append(Skipped(line=row.line, reason=reason))
    return served, tuple(skipped)


def _check_span(rows: list[_Row], *, file: str, origin_ps: int, rate: Fraction) -> None:
    for row in rows:
        if (row.at_ps - origin_ps) * rate.denominator // rate.numerator > SPAN_PS_MAX:
            expected = (
                "at most 100 days after the first row, divided by --rate (a run lasts 106 days)"
            )
            days = (row.at_ps - origin_ps) / (86_400 * PS_PER_S)
            raise InputError(
                file=file,
                key=f"line {row.line}: timestamp",
                value=f"{days:.6g} days",
                expected=expected,
            )


def _arrive(rows: list[_Row], *, file: str, origin_ps: int, rate: Fraction) -> tuple[Request, ...]:
    _check_span(rows, file=file, origin_ps=origin_ps, rate=rate)
    return tuple(
        Request(
            index=index,
            arrival_ps=(row.at_ps - origin_ps) * rate.denominator // rate.numerator,
            input_tokens=row.input_tokens,
            output_tokens=row.output_tokens,
            hash_ids=row.hash_ids,
        )
        for index, row in enumerate(rows)
    )


# --- files ---------------------------------------------------------------------------------------

_Reader = Callable[[str, list[str], int], Iterator[_Row]]


def _lines(file: str) -> list[str]:
    try:
        content = Path(file).read_bytes()
    except OSError as error:
        expected = "a trace file that can be read"
        raise InputError(file=file, key="", value=error.strerror, expected=expected) from None
    try:
        lines = content.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        value = content[error.start : error.start + 1]
        raise InputError(file=file, key=f"line {line}", value=value, expected="UTF-8") from None
    if lines[-1] == "":
        lines.pop()
    if not lines:
        raise InputError(file=file, key="", value="an empty file", expected="a trace")
    return [line.removesuffix("\r") for line in lines]


def _format(file: str, first: str) -> tuple[Kind, _Reader]:
    if first.startswith("{"):
        return "mooncake", _mooncake_rows
    if first == _AZURE_HEADER:
        return "azure", _azure_rows
    expected = f"Mooncake JSONL, such as {_MOONCAKE_EXAMPLE}, or the Azure header {_AZURE_HEADER}"
    raise InputError(file=file, key="line 1", value=_short(first), expected=expected)


def _wrong(file: str, line: int, field: str, value: object, expected: str) -> InputError:
    shown = _short(value) if isinstance(value, str) else value
    return InputError(file=file, key=f"line {line}: {field}", value=shown, expected=expected)


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."


# --- Mooncake ------------------------------------------------------------------------------------


def _mooncake_rows(file: str, lines: list[str], block_tokens: int) -> Iterator[_Row]:
    if block_tokens != MOONCAKE_BLOCK_TOKENS:
        expected = f"{MOONCAKE_BLOCK_TOKENS}, the blocks of a Mooncake trace"
        raise InputError(file=file, key="model.block_tokens", value=block_tokens, expected=expected)
    for line, text in enumerate(lines, 1):
        yield _mooncake_row(file, line, text)


def _mooncake_row(file: str, line: int, text: str) -> _Row:
    row = _mooncake_object(file, line, text)
    for field, least in (("timestamp", 0), ("input_length", 1), ("output_length", 1)):
        if type(row[field]) is not int or row[field] < least:
            expected = f"a whole number of {least} or more"
            raise _wrong(file, line, field, row[field], expected)
    input_tokens = row["input_length"]
    blocks = -(-input_tokens // MOONCAKE_BLOCK_TOKENS)
    return _Row(
        line=line,
        at_ps=row["timestamp"] * (PS_PER_S // 1000),
        input_tokens=input_tokens,
        output_tokens=row["output_length"],
        hash_ids=_hash_ids(file, line, row["hash_ids"], blocks),
    )


def _mooncake_object(file: str, line: int, text: str) -> dict[str, int]:
    try:
        row = msgspec.json.decode(text)
    except msgspec.DecodeError:
        row = None
    if not isinstance(row, dict):
        key, expected = f"line {line}", f"one whole JSON object, such as {_MOONCAKE_EXAMPLE}"
        raise InputError(file=file, key=key, value=_short(text), expected=expected)
    for field in _MOONCAKE_KEYS:
        if field not in row:
            raise _wrong(file, line, field, "nothing", f"the keys {', '.join(_MOONCAKE_KEYS)}")
    for field in row:
        if field not in _MOONCAKE_KEYS:
            raise _wrong(file, line, field, row[field], f"only {', '.join(_MOONCAKE_KEYS)}")
    return row


def _hash_ids(file: str, line: int, value: object, blocks: int) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise _wrong(file, line, "hash_ids", value, f"a list of {blocks} block ids")
    if len(value) != blocks:
        expected = f"{blocks}: one for each {MOONCAKE_BLOCK_TOKENS} tokens of input_length"
        raise _wrong(file, line, "hash_ids", f"{len(value)} block ids", expected)
    for place, block in enumerate(value):
        if type(block) is not int or not 0 <= block < UNIQUE_IDS:
            expected = "a whole number from 0 to 2^62 - 1"
            raise _wrong(file, line, f"hash_ids[{place}]", block, expected)
    return tuple(value)


# --- Azure ---------------------------------------------------------------------------------------


def _azure_rows(file: str, lines: list[str], block_tokens: int) -> Iterator[_Row]:
    for line, text in enumerate(lines[1:], 2):
        yield _azure_row(file, line, text, block_tokens)


def _azure_row(file: str, line: int, text: str, block_tokens: int) -> _Row:
    fields = text.split(",")
    if len(fields) != 3:
        key, expected = f"line {line}", f"three fields, {_AZURE_HEADER}"
        raise InputError(file=file, key=key, value=_short(text), expected=expected)
    input_tokens = _azure_count(file, line, "ContextTokens", fields[1])
    first = UNIQUE_IDS + (line - 2) * ROW_IDS
    blocks = min(-(-input_tokens // block_tokens), ROW_IDS)
    return _Row(
        line=line,
        at_ps=_azure_instant(file, line, fields[0]),
        input_tokens=input_tokens,
        output_tokens=_azure_count(file, line, "GeneratedTokens", fields[2]),
        hash_ids=tuple(range(first, first + blocks)),
    )


def _azure_count(file: str, line: int, field: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 19 and int(text) >= 1):
        raise _wrong(file, line, field, text, "a whole number of 1 or more")
    return int(text)


def _azure_instant(file: str, line: int, text: str) -> int:
    """Picoseconds since year 1, all digits kept."""
    match = _AZURE_INSTANT.fullmatch(text)
    try:
        if match is None:
            raise ValueError
        year, month, day, hour, minute, second = (int(part) for part in match.groups()[:6])
        moment = datetime.datetime(year, month, day, hour, minute, second)
    except ValueError:
        expected = "an instant such as 2023-11-16 18:17:03.9799600"
        raise _wrong(file, line, "TIMESTAMP", text, expected) from None
    seconds = moment.toordinal() * 86_400 + hour * 3600 + minute * 60 + second
    return seconds * PS_PER_S + int((match[7] or "").ljust(12, "0"))


# --- generated -----------------------------------------------------------------------------------

_INPUT_TOKENS: tuple[int, ...] = (
    *(13, 22, 30, 45, 88, 277, 912, 2777, 4365, 6657, 11_587),
    *(14_730, 16_289, 17_642, 19_411, 23_175, 28_430, 34_376, 38_615, 49_009, 100_000),
)
_OUTPUT_TOKENS: tuple[int, ...] = (
    *(1, 2, 4, 6, 8, 11, 16, 22, 32, 49, 69),
    *(92, 126, 169, 211, 250, 289, 333, 389, 519, 893),
)
_GAP_MS: tuple[int, ...] = (
    *(0, 13, 26, 41, 55, 72, 90, 109, 129, 152, 175),
    *(202, 229, 267, 311, 354, 417, 489, 584, 785, 2119),
)
"""Every 5th percentile of mooncake_synthetic (FAST'25 release), least and most at the ends; the
longest prompts are cut. Between two of them values are uniform: integers only, so no libm decides."""

_SHARED_PER_MILLE = 450
"""Requests that continue an earlier prompt: 45 % of that trace find 88 % or more of their blocks.
They continue the longer of two earlier ones: long prompts are those that recur there."""
_SUFFIX_TOKENS_MAX = 2048
"""What such a request adds: 4 blocks; the trace's misses are 0 to 12 % of its prompts."""


def generate(
    *,
    seed: int,
    max_tokens: int,
    block_tokens: int,
    requests: int = 40,
    rate: Fraction = Fraction(1),
) -> Workload:
    """A workload that looks like Mooncake's: long prompts, shared prefixes, uneven gaps.

    A function of its arguments alone. No request is longer than ``max_tokens`` (2 at least).
    """
    _check_asked(requests, rate)
    stream = entropy.stream(seed, "workload")
    rows: list[_Row] = []
    at_ps = next_id = 0
    for index in range(requests):
        row = _generated_row(stream, rows, max_tokens=max_tokens, block_tokens=block_tokens)
        rows.append(_numbered(row, line=index + 1, at_ps=at_ps, next_id=next_id))
        next_id = max(next_id, *(block + 1 for block in rows[-1].hash_ids))
        at_ps += _draw(stream, _GAP_MS, PS_PER_S // 1000)
    return Workload(
        kind="generated",
        file="",
        requests=_arrive(rows, file="generated", origin_ps=0, rate=rate),
        skipped=(),
        rows_asked=requests,
        rows_read=requests,
    )


def _generated_row(
    stream: entropy.Stream, earlier: list[_Row], *, max_tokens: int, block_tokens: int
) -> _Row:
    """A row whose ids are -1 where they are to be new."""
    output_tokens = min(_draw(stream, _OUTPUT_TOKENS), max_tokens // 2)
    input_tokens = _draw(stream, _INPUT_TOKENS)
    prefix: tuple[int, ...] = ()
    if stream.below(1000) < _SHARED_PER_MILLE and earlier:
        parent = max(
            _some(stream, earlier), _some(stream, earlier), key=lambda row: row.input_tokens
        )
        prefix = parent.hash_ids[: parent.input_tokens // block_tokens]
        input_tokens = len(prefix) * block_tokens + 1 + stream.below(_SUFFIX_TOKENS_MAX)
    input_tokens = min(input_tokens, max_tokens - output_tokens)
    blocks = -(-input_tokens // block_tokens)
    prefix = prefix[: input_tokens // block_tokens]
    ids = prefix + (-1,) * (blocks - len(prefix))
    return _Row(0, 0, input_tokens, output_tokens, ids)


def _some(stream: entropy.Stream, rows: list[_Row]) -> _Row:
    return rows[stream.below(len(rows))]


def _numbered(row: _Row, *, line: int, at_ps: int, next_id: int) -> _Row:
    old = tuple(block for block in row.hash_ids if block >= 0)
    new = tuple(range(next_id, next_id + len(row.hash_ids) - len(old)))
    return _Row(line, at_ps, row.input_tokens, row.output_tokens, old + new)


def _draw(stream: entropy.Stream, table: tuple[int, ...], unit: int = 1) -> int:
    """One value of the distribution whose evenly spaced quantiles are the table, times ``unit``."""
    place, within = divmod(stream.below((len(table) - 1) << 32), 1 << 32)
    low, high = table[place] * unit, table[place + 1] * unit
    return low + ((high - low) * within >> 32)
