"""The serving system on the mini machine, all processes in one loop."""

from __future__ import annotations

import functools
import itertools
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from cmnet.entropy import stream
from cmnet.topology.quantity import Count, Kind
from nodes.model import bodies, tamper
from nodes.moe.layer import Touch
from nodes.serving.workload import Request
from tests.nodes.serving import local
from tests.nodes.serving.local import Served

SECOND_PS = 10**12


def requests() -> list[Request]:
    """Two with a common prefix of two blocks, far enough apart that the store holds it; a short one;
    one with a single token; and two at once."""
    return [
        local.a_request(0, 0, 1400, 7, (1, 2, 3)),
        local.a_request(1, 5 * SECOND_PS, 1300, 5, (1, 2, 4)),
        local.a_request(2, 5 * SECOND_PS, 20, 1, (5,)),
        local.a_request(3, 6 * SECOND_PS, 600, 9, (6, 7)),
        local.a_request(4, 6 * SECOND_PS, 1100, 4, (1, 2, 8)),
    ]


def requests_for_faults() -> list[Request]:
    """Two pairs: the second pair finds prefixes of the first in the store and decodes together."""
    return [
        local.a_request(0, 0, 1400, 3, (1, 2, 3)),
        local.a_request(1, 0, 1100, 3, (6, 7, 8)),
        local.a_request(2, 5 * SECOND_PS, 1300, 5, (1, 2, 4)),
        local.a_request(3, 5 * SECOND_PS, 1200, 5, (6, 7, 9)),
    ]


@functools.cache
def plain() -> Served:
    """The run of those requests, which several tests look at."""
    machine = local.mini()
    with tempfile.TemporaryDirectory() as folder:
        return local.serve(machine, local.job_of(machine, requests()), Path(folder))


def test_every_token_and_seal_is_the_oracles() -> None:
    """Prefill, store, transfer, dispatch and combine lose nothing and mix nothing up."""
    assert (plain().checked, plain().wrong) == (7 + 5 + 1 + 9 + 4, 0)
    assert [r["status"] for r in plain().requests] == ["ok"] * 5


def test_a_prefix_in_the_store_is_used() -> None:
    """The second and the last request begin with blocks that the first one stored."""
    hits = {r["index"]: (r["blocks_hit"], r["blocks"]) for r in plain().requests}
    assert hits == {0: (0, 3), 1: (2, 3), 2: (0, 1), 3: (0, 2), 4: (2, 3)}


def test_the_digest_is_of_the_run_and_its_timing(tmp_path: Path) -> None:
    """Same run, same digest; another workload, another digest; and the scale changes nothing."""
    machine = local.mini()
    digests = [plain().digest]
    for number, (wanted, scale) in enumerate(
        [(requests(), "64"), (requests(), "full"), (requests()[:-1], "64")]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        served = local.serve(machine, local.job_of(machine, wanted, scale), folder)
        assert served.wrong == 0
        digests.append(served.digest)
    assert digests[0] == digests[1] == digests[2] != digests[3]


def test_times_are_in_order() -> None:
    """No token comes before its request, nor before the token before it."""
    for record in plain().requests:
        times = [record["arrival_ps"], record["first_token_ps"], *record["token_ps"][1:]]
        assert all(earlier < later for earlier, later in itertools.pairwise(times))
        assert record["token_ps"][0] == record["first_token_ps"]


STORE_KINDS = {
    "stale store block": ("blocks", tamper.stale),
    "store blocks exchanged": ("blocks", tamper.swap),
    "store block bit flipped": ("blocks", tamper.flip_bit),
}
"""Faults on the way from the store, beside those that need no store."""

PLACES = [5, pytest.param(20, marks=pytest.mark.soak)]
"""How many random places of a run each fault is tried at; the draws of the few begin the many's."""


def of_routed_experts(touch: Touch) -> Touch:
    """A wrong expert is another routed one: the store of experts refuses numbers beyond."""

    def masked(part: str, items: Any) -> Any:
        if part != "experts":
            return touch(part, items)
        routed = items < 255
        changed = items.copy()
        changed[routed] = touch(part, items[routed])
        return changed

    return masked


@pytest.mark.slow
@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("body", ["seal", "exact"])
@pytest.mark.parametrize("kind", sorted(tamper.KINDS | STORE_KINDS))
def test_a_fault_of_transport_is_seen(
    kind: str, body: bodies.Name, places: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kind of lost, doubled, exchanged or changed message, at random places of a run."""
    monkeypatch.setattr(tamper, "KINDS", tamper.KINDS | STORE_KINDS)
    machine = local.mini()
    job = local.job_of(machine, requests_for_faults(), body=body)
    draws = stream(1, f"faults.{kind}")
    few = kind in STORE_KINDS or tamper.KINDS[kind][0] in ("seeds", "rows")
    seen = done = 0
    for attempt in range(3 * places):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        fault = tamper.Tamper(kind, passes=draws.below(2 if few else 15), draw=draws.below)
        served = local.serve(machine, job, folder, touch=of_routed_experts(fault.touch))
        failed = any(record["status"] != "ok" for record in served.requests)
        done += fault.done  # not where the drawn pass does not come
        seen += fault.done and (served.wrong > 0 or failed)
        if done == places:
            break
    assert (done, seen) == (places, places)


def test_an_untouched_run_has_nothing_to_see(tmp_path: Path) -> None:
    """A hook that copies but changes nothing is not reported: the test above can fail."""
    machine = local.mini()
    served = local.serve(
        machine, local.job_of(machine, requests()), tmp_path, touch=lambda _, items: np.array(items)
    )
    assert served.wrong == 0


def test_more_requests_than_decode_places_wait_for_one(tmp_path: Path) -> None:
    """One place a rank and three requests for each: their KV waits at the rank, nobody is refused."""
    machine = local.mini()
    arrivals = [local.a_request(index, 0, 200, 6, (index,)) for index in range(24)]
    job = local.job_of(machine, arrivals)
    one = Count(value=1, kind=Kind.PUBLISHED, source="for this test")
    serving = msgspec.structs.replace(job.serving, decode_sequences_max=one)
    served = local.serve(machine, msgspec.structs.replace(job, serving=serving), tmp_path)
    assert [record["tries"] for record in served.requests] == [1] * 24
    assert (served.checked, served.wrong) == (24 * 6, 0)
    ended: dict[int, list[int]] = {}
    for record in served.requests:
        ended.setdefault(record["rank"], []).append(record["ended_ps"])
    assert all(first < second < third for first, second, third in map(sorted, ended.values()))
