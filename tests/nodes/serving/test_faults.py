"""Whole runs under link faults: every request ends right or with an error, and always the same."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import pytest

from tests.nodes.serving import broken, local
from tests.nodes.serving.local import Served

pytestmark = pytest.mark.slow

MACHINE = local.mini()
REQUESTS = local.busy_requests()
S = 10**12

PLANS: dict[str, tuple[str, int]] = {
    "loss on VPC": ("[{at: 0 s, target: plane vpc, kind: loss, p: 0.2}]", 8),
    "so much loss on VPC that pings fail": (
        "[{at: 0 s, for: 60 s, target: plane vpc, kind: loss, p: 0.6}]",
        0,
    ),
    "loss on RDMA": ("[{at: 0 s, target: plane rdma, kind: loss, p: 0.3}]", 10),
    "loss on UB": ("[{at: 0 s, for: 20 s, target: plane ub, kind: loss, p: 0.3}]", 5),
    "so much loss on UB that no step succeeds": (
        "[{at: 0 s, for: 100 s, target: plane ub, kind: loss, p: 0.8}]",
        0,
    ),
    "burst loss on RDMA": (
        (
            "[{at: 0 s, target: plane rdma, kind: burst_loss, p_bad: 0.05, p_good: 0.2, "
            "loss_bad: 0.9, loss_good: 0}]"
        ),
        10,
    ),
    "a decode node off UB for a while": (
        "[{at: 2 s, for: 3 s, target: node03, plane: ub, kind: partition}]",
        10,
    ),
    "a decode node off UB when its group forms": (
        "[{at: 0 s, for: 1 s, target: node03, plane: ub, kind: partition}]",
        10,
    ),
    "a decode node off UB for long": (
        "[{at: 2 s, for: 100 s, target: node03, plane: ub, kind: partition}]",
        4,
    ),
    "the leader off UB, one way": (
        "[{at: 2 s, for: 9 s, target: node02, plane: ub, kind: partition, one_way: true}]",
        8,
    ),
    "a decode node off VPC for a while": (
        "[{at: 2 s, for: 5 s, target: node03, plane: vpc, kind: partition}]",
        10,
    ),
    "the leader off VPC: taken as dead, leads on, comes back": (
        "[{at: 2 s, for: 8 s, target: node02, plane: vpc, kind: partition}]",
        8,
    ),
    "the gateway off VPC: everybody seems dead": (
        "[{at: 2 s, for: 12 s, target: gateway, plane: vpc, kind: partition}]",
        8,
    ),
    "a prefill node off VPC from the start": (
        "[{at: 0 s, for: 30 s, target: node00, plane: vpc, kind: partition}]",
        10,
    ),
    "RDMA down for longer than its tries": (
        "[{at: 1 s, for: 4 s, target: plane rdma, kind: loss, p: 1}]",
        9,
    ),
    "RDMA down for ever": ("[{at: 1 s, target: plane rdma, kind: loss, p: 1}]", 1),
    "a node off all planes": ("[{at: 2 s, for: 30 s, target: node03, kind: partition}]", 5),
    "frames corrupt on every plane": (
        (
            "[{at: 0 s, target: plane rdma, kind: corrupt, p: 0.2}, "
            "{at: 0 s, target: plane vpc, kind: corrupt, p: 0.1}, "
            "{at: 0 s, target: plane ub, kind: corrupt, p: 0.1}]"
        ),
        5,
    ),
    "frames doubled on every plane": (
        (
            "[{at: 0 s, target: plane rdma, kind: duplicate, p: 0.5}, "
            "{at: 0 s, target: plane vpc, kind: duplicate, p: 0.5}, "
            "{at: 0 s, target: plane ub, kind: duplicate, p: 0.5}]"
        ),
        10,
    ),
    "delay": (
        (
            "[{at: 0 s, target: plane ub, kind: delay, delay: 100 us}, "
            "{at: 0 s, target: plane vpc, kind: delay, delay: 5 ms}]"
        ),
        10,
    ),
    "jitter": (
        (
            "[{at: 0 s, target: plane ub, kind: jitter, jitter: 20 ms}, "
            "{at: 0 s, target: plane vpc, kind: jitter, jitter: 300 ms}, "
            "{at: 0 s, target: plane rdma, kind: jitter, jitter: 300 ms}]"
        ),
        10,
    ),
    "jitter on UB longer than a step may take": (
        "[{at: 0 s, for: 10 s, target: plane ub, kind: jitter, jitter: 12 s}]",
        5,
    ),
    "a link that flaps": (
        "[{at: 1 s, for: 5 s, target: node03, plane: ub, kind: flap, period: 150 ms, down: 50 ms}]",
        8,
    ),
    "sub-planes down": (
        (
            "[{at: 1 s, for: 2 s, target: subplane 3, kind: subplane_down}, "
            "{at: 2 s, for: 3 s, target: subplane 4, kind: subplane_down}]"
        ),
        10,
    ),
    "a slow die": (
        "[{at: 0 s, target: node03/npu0/die1, kind: rate, factor: 0.01, plane: ub}]",
        10,
    ),
}
"""The plan and how many of ten requests must end well all the same."""


def serve(folder: Path, plan: str, scale: str) -> Served:
    folder.mkdir()
    job = local.job_of(MACHINE, REQUESTS, scale)
    return local.serve(MACHINE, job, folder, rules=broken.rules(plan))


@functools.cache
def ran(name: str) -> Served:
    """The run of a plan, which two tests look at."""
    with tempfile.TemporaryDirectory() as folder:
        return serve(Path(folder, "64"), PLANS[name][0], "64")


@pytest.mark.parametrize("name", PLANS)
def test_every_request_ends_right_or_with_an_error(name: str, tmp_path: Path) -> None:
    """Nothing is lost, nothing is wrong, and neither a repetition nor the scale changes the digest."""
    plan, least_ok = PLANS[name]
    served = ran(name)
    assert sorted(record["index"] for record in served.requests) == list(range(len(REQUESTS)))
    assert served.wrong == 0, served.first
    errors = [record["error"] for record in served.requests if record["status"] != "ok"]
    assert all(errors) and len(errors) <= 10 - least_ok, errors
    assert serve(tmp_path / "full", plan, "full").digest == served.digest


@pytest.mark.parametrize("name", ["a decode node off UB when its group forms", "loss on UB"])
def test_lost_control_messages_cost_seconds_not_minutes(name: str) -> None:
    """Hello, Joined and GiveUp are said again: nobody has to wait for the last resort."""
    assert max(record["ended_ps"] for record in ran(name).requests) < 40 * S


def test_a_node_that_only_seemed_dead_serves_again(tmp_path: Path) -> None:
    """Its way was cut; when it answers a ping sent since, its ranks get requests."""
    requests = [
        *local.busy_requests(4, gap_ps=2 * S),
        *(local.a_request(index, 40 * S, 600, 20, (index, 1)) for index in range(4, 12)),
    ]
    plan = "[{at: 1 s, for: 8 s, target: node03, plane: vpc, kind: partition}]"
    job = local.job_of(MACHINE, requests)
    served = local.serve(MACHINE, job, tmp_path, rules=broken.rules(plan))
    assert [record["status"] for record in served.requests] == ["ok"] * 12
    ranks = {record["rank"] for record in served.requests if record["index"] >= 4}
    assert ranks == set(range(8))


@pytest.mark.soak
@pytest.mark.parametrize("number", range(200))
def test_random_plans_of_link_faults_end_and_repeat(number: int, tmp_path: Path) -> None:
    """Whatever breaks, and however often: bounded, never wrong, and the same again."""
    plan = broken.random_plan(number)
    served = serve(tmp_path / "64", plan, "64")
    assert sorted(record["index"] for record in served.requests) == list(range(len(REQUESTS)))
    assert served.wrong == 0, (plan, served.first)
    assert all(record["error"] or record["status"] == "ok" for record in served.requests)
    assert max(record["ended_ps"] for record in served.requests) < 320 * S, plan
    assert serve(tmp_path / "full", plan, "full").digest == served.digest, plan
