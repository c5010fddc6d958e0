"""The running hash of one process's ordered events (design 1.5).

Owns what goes in: deliveries with their charged bytes, drops, and application marks, each with its
instant. Windows, grants, holds, carried bytes and frames never do, so that a digest is equal
at any scale and on any host. A journal, when there is one, gets the same events as text.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt
import xxhash

_DELIVERY = struct.Struct("<BqIIQBQ")
_DELIVERIES = np.dtype(
    [
        ("event", "u1"),
        ("at_ps", "<i8"),
        ("source", "<u4"),
        ("target", "<u4"),
        ("sequence", "<u8"),
        ("kind", "u1"),
        ("charged_bytes", "<u8"),
    ]
)
"""The same bytes as ``_DELIVERY``."""
_DROP = struct.Struct("<BqIIQB")

I64 = npt.NDArray[np.int64]
Write = Callable[[str], object]


class Digest:
    """Folds events in the order in which they happen."""

    __slots__ = ("_add", "_hash", "_pack", "_parts", "_value", "_write")

    def __init__(self, write: Write | None = None) -> None:
        self._hash = xxhash.xxh3_128()
        self._parts: list[bytes] = []
        """Folded when the value is asked for: one update a window instead of one an event."""
        self._add = self._parts.append
        self._value: bytes | None = None
        self._pack = _DELIVERY.pack
        self._write = write

    def delivery(
        self, at_ps: int, source: int, target: int, sequence: int, kind: int, charged_bytes: int
    ) -> None:
        """A message reached its device."""
        self._add(self._pack(1, at_ps, source, target, sequence, kind, charged_bytes))
        if self._write is not None:
            self._write(f"{at_ps} delivery {source} {target} {sequence} {kind} {charged_bytes}\n")

    def deliveries(
        self,
        kind: int,
        *,
        at_ps: I64,
        sources: I64,
        targets: I64,
        sequences: I64,
        charged_bytes: I64,
    ) -> None:
        """Many at once, each array [n]: what ``delivery`` would fold of one after the other."""
        events = np.empty(len(at_ps), _DELIVERIES)
        events["event"], events["kind"] = 1, kind
        events["at_ps"], events["sequence"], events["charged_bytes"] = (
            at_ps,
            sequences,
            charged_bytes,
        )
        events["source"], events["target"] = sources, targets
        self._fold_parts()
        self._hash.update(events.data)
        self._value = None
        if self._write is not None:
            for _, at, source, target, sequence, _, charged in events.tolist():
                self._write(f"{at} delivery {source} {target} {sequence} {kind} {charged}\n")

    def drop(self, at_ps: int, source: int, target: int, sequence: int, kind: int) -> None:
        """A rule dropped a message at its egress."""
        self._add(_DROP.pack(2, at_ps, source, target, sequence, kind))
        if self._write is not None:
            self._write(f"{at_ps} drop {source} {target} {sequence} {kind}\n")

    def mark(self, at_ps: int, text: str) -> None:
        """The application achieved something."""
        self._add(b"\3" + at_ps.to_bytes(8, "little") + text.encode() + b"\0")
        if self._write is not None:
            self._write(f"{at_ps} mark {text}\n")

    def value(self) -> bytes:
        """The digest so far, 16 bytes."""
        self._fold_parts()
        if self._value is None:
            self._value = self._hash.digest()
        return self._value

    def _fold_parts(self) -> None:
        if self._parts:
            self._hash.update(b"".join(self._parts))
            self._parts.clear()
            self._value = None


def fold(seed: int, digests: Iterable[tuple[str, bytes]]) -> str:
    """The run's digest: of its seed, of (process name, digest) in order of process index, of deaths.

    The seed is in it though a run without faults draws nothing: another seed is another run.
    """
    whole = xxhash.xxh3_128(seed.to_bytes(8, "little"))
    for name, digest in digests:
        whole.update(name.encode() + b"\0" + digest)
    return whole.hexdigest()
