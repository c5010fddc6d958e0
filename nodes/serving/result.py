"""What became of each request: the lines that the gateway writes and that verifier and report read.

Owns the format of ``requests.jsonl`` and ``serving.json`` in a run's folder. Does not own what is
made of them. Instants are virtual, as the gateway saw them.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from cmnet.errors import InputError
from nodes.model import bodies
from nodes.serving.decoding import PLAIN, Decoding
from nodes.serving.settings import ServingSettings
from nodes.serving.workload import Request, Workload
from nodes.settings import ModelSettings

REQUESTS = "requests.jsonl"
SERVING = "serving.json"


class RequestResult(msgspec.Struct, frozen=True, kw_only=True):
    """One finished or failed request."""

    index: int
    """Of the workload."""
    arrival_ps: int
    input_tokens: int
    output_tokens: int
    status: str
    """"ok" or "error"."""
    error: str = ""
    tries: int = 1
    instance: int = -1
    rank: int = -1
    blocks: int = 0
    """Full blocks of the prompt that were looked up."""
    blocks_hit: int = 0
    first_token_ps: int | None = None
    token_ps: list[int] = []
    """One instant for each output token."""
    tokens: list[int] = []
    seals: list[int] = []
    receipt: int | None = None
    draft_fold: int | None = None
    """Of the MTP layer; None where a run has no drafts."""
    hash_ids: list[int] = []

    def is_answer_to(self, request: Request) -> bool:
        """Whether this is about that request, as the workload has it."""
        return (self.arrival_ps, self.input_tokens, self.output_tokens) == (
            request.arrival_ps,
            request.input_tokens,
            request.output_tokens,
        )


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    """What was to be served and by what, for the verifier, for reports and for a replay."""

    workload: Workload
    trace_sha256: str
    """Of the trace file's content; "" if generated."""
    model: ModelSettings
    body: bodies.Name = "seal"
    """Of the model: ``nodes.model.bodies``."""
    fingerprint: str
    """Of the model."""
    settings: ServingSettings
    decoding: Decoding = PLAIN
    prefill_npus: int
    decode_npus: int
    ep_size: int


def parse(line: bytes) -> RequestResult:
    """A line of ``requests.jsonl``. Raises msgspec.DecodeError."""
    return msgspec.json.decode(line, type=RequestResult)


def read(folder: Path) -> list[RequestResult]:
    """All whole lines of a run, by index of the request. Raises InputError."""
    path = folder / REQUESTS
    data = path.read_bytes() if path.exists() else b""
    lines = data[: data.rfind(b"\n") + 1].splitlines()
    results = []
    for number, line in enumerate(lines, 1):
        try:
            results.append(parse(line))
        except msgspec.DecodeError as error:
            key, expected = f"line {number}", "the result of one request"
            raise InputError(file=str(path), key=key, value=str(error), expected=expected) from None
    return sorted(results, key=lambda result: result.index)


def write_serving(folder: Path, serving: Serving) -> None:
    """Write ``serving.json``."""
    (folder / SERVING).write_bytes(msgspec.json.encode(serving))


def read_serving(folder: Path) -> Serving:
    """``serving.json`` of a run's folder. Raises InputError."""
    path = folder / SERVING
    try:
        return msgspec.json.decode(path.read_bytes(), type=Serving)
    except (OSError, msgspec.DecodeError) as error:
        expected = "what a serving run wrote at its start"
        raise InputError(file=str(path), key="", value=str(error), expected=expected) from None
