"""What goes into a digest, and that every part of it counts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from cmnet.record.digest import Digest


def value(*fold: Callable[[Digest], object]) -> bytes:
    digest = Digest()
    for one in fold:
        one(digest)
    return digest.value()


EVENT = (5, 1, 2, 3, 4, 512)


@pytest.mark.parametrize("index", range(6))
def test_every_field_of_a_delivery_counts(index: int) -> None:
    changed = [*EVENT]
    changed[index] += 1
    assert value(lambda d: d.delivery(*EVENT)) != value(lambda d: d.delivery(*changed))


def test_order_counts_and_kinds_of_events_differ() -> None:
    events: list[Callable[[Digest], object]] = [
        lambda d: d.delivery(*EVENT),
        lambda d: d.drop(*EVENT[:5]),
        lambda d: d.mark(5, "done"),
        lambda d: d.mark(6, "done"),
        lambda d: d.mark(5, "don"),
    ]
    values = {value(first, second) for first in events for second in events}
    assert len(values) == len(events) ** 2


def test_many_deliveries_at_once_are_the_same_ones_singly() -> None:
    messages = [(5, 1, 10, 2, 512), (5, 2, 11, 3, 0), (9, 1, 12, 2, 1 << 40)]

    def singly(digest: Digest) -> None:
        for at_ps, source, sequence, target, charged_bytes in messages:
            digest.delivery(at_ps, source, target, sequence, 4, charged_bytes)

    together: list[str] = []
    alone: list[str] = []
    first, second = Digest(together.append), Digest(alone.append)
    at_ps, sources, sequences, targets, charged_bytes = np.array(messages).T
    for digest in (first, second):
        digest.mark(4, "before")
    first.deliveries(
        4,
        at_ps=at_ps,
        sources=sources,
        targets=targets,
        sequences=sequences,
        charged_bytes=charged_bytes,
    )
    singly(second)
    assert first.value() == second.value()
    assert together == alone and len(alone) == 4
    for digest in (first, second):
        digest.mark(9, "after")
    assert first.value() == second.value()
