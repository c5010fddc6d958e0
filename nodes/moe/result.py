"""What one rank saw of one layer: the lines that nodes of a ``moe`` run write, and how they are read.

Owns the format of ``moe-<node>.jsonl`` in a run's folder. Does not own what is made of them: the verifier
looks at ``seals``, the report at the rest. Instants are virtual; a rank's operator begins at ``began_ps``
and returns at ``dispatched_ps`` or ``combined_ps``, which are -1 where it never did.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from nodes.model.body import I64, U64
from nodes.moe import rebalancing

PATTERN = "moe-*.jsonl"


class RankLayer(msgspec.Struct, frozen=True, kw_only=True):
    """One rank, one layer of one step. Arrays are bytes of little-endian words, see ``words``."""

    step: int
    layer: int
    rank: int
    tokens: int
    """Tokens that this rank was given."""
    index: bytes = b""
    """int32 [n]: those of its tokens that have all results of this layer and of those before it."""
    seals: bytes = b""
    """uint64 [n]: their seals after the layer."""
    began_ps: int = -1
    """When its dispatch operator began."""
    dispatched_ps: int = -1
    rows: int = 0
    """Rows that its experts got."""
    combine_began_ps: int = -1
    """When its experts were done and its combine operator began."""
    combined_ps: int = -1
    dispatch_flags_ps: bytes = b""
    """int64 [ep_size]: when each source's flag of the dispatch was here; -1 where it never was."""
    combine_flags_ps: bytes = b""
    """int64 [ep_size]: when each expert rank's flag of the combine was here; -1 where it never was."""
    sent_rows: bytes = b""
    """int32 [ep_size]: rows sent to each rank."""
    stage: rebalancing.StageName = ""
    """Of the pass, at this rank."""
    error: str = ""
    """Why it has no result, naming the ranks that were missing."""


def path(folder: Path, node: str) -> Path:
    """The file of one node."""
    return folder / f"moe-{node}.jsonl"


def instants(data: bytes) -> I64:
    """An int64 array of a line."""
    return np.frombuffer(data, dtype="<i8").astype(np.int64)


def index(line: RankLayer) -> I64:
    """Which tokens of the rank have seals [n]."""
    return np.frombuffer(line.index, dtype="<i4").astype(np.int64)


def seals(line: RankLayer) -> U64:
    """The seals [n]."""
    return np.frombuffer(line.seals, dtype="<u8").astype(np.uint64)


def sent_rows(line: RankLayer) -> I64:
    """Rows sent to each rank [ep_size]."""
    return np.frombuffer(line.sent_rows, dtype="<i4").astype(np.int64)


def memory_peak_bytes() -> int:
    """The most memory that this process had for itself: its private pages now, and what it had given
    back since its peak. Pages that it shares with the process it was forked from count there."""
    rollup = _kilobytes("/proc/self/smaps_rollup")
    status = _kilobytes("/proc/self/status")
    given_back = max(status["VmHWM"] - status["VmRSS"], 0)
    return 1024 * (rollup["Private_Clean"] + rollup["Private_Dirty"] + given_back)


def _kilobytes(path: str) -> dict[str, int]:
    """The sizes in a file of /proc."""
    lines = Path(path).read_text(encoding="ascii").splitlines()
    sizes = [line.split() for line in lines if line.endswith(" kB")]
    return {size[0].rstrip(":"): int(size[1]) for size in sizes}


encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder(RankLayer).decode
