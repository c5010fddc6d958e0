"""Prefill instances of two nodes: rows are handed over to the second one, which may fail alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from cmnet.chaos import plan as plans
from cmnet.errors import InputError
from cmnet.topology import load
from cmnet.topology.machine import Machine
from nodes.kv.groups import Groups
from nodes.serving import command
from nodes.serving.job import EXTENSIONS
from nodes.serving.options import Options
from tests.nodes.serving import local

TOPOLOGY = f"""
base: {local.TOPOLOGIES}/mini.yaml
name: pairs
machine:
  nodes: {{value: 6, kind: assumed, source: "for tests", range: [2, 48]}}
roles:
  prefill: [[node00, node01]]
  decode: [node02..node05]
  ems: [node00..node05]
"""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    file = tmp_path_factory.mktemp("topology") / "pairs.yaml"
    file.write_text(TOPOLOGY, encoding="utf-8")
    return load.load(str(file), extensions=EXTENSIONS)


def test_half_of_the_rows_come_from_the_second_node(machine: Machine) -> None:
    """Ranks 8 to 15 belong to groups of its dies: the runs below do hand over."""
    groups = Groups(prefill_tp_size=8, decode_dp_size=16)
    dies = [die for node in (0, 1) for die in machine.dies(node)]
    homes = [dies[groups.prefill_tp_rank(decode_dp_rank=rank)] for rank in range(16)]
    assert [machine.devices[die].process for die in homes] == [0] * 8 + [1] * 8


PLANS = {
    "nothing breaks": ("[]", 10),
    "handovers are lost": ("[{at: 0 s, target: node01, plane: ub, kind: loss, p: 0.7}]", 10),
    "the second node is off UB for a while": (
        "[{at: 0 s, for: 4 s, target: node01, plane: ub, kind: partition}]",
        8,
    ),
    "the second node is off RDMA": (
        "[{at: 0 s, target: node01, plane: rdma, kind: loss, p: 1}]",
        1,
    ),
    "the second node is off VPC: the whole instance is as dead": (
        "[{at: 1 s, for: 12 s, target: node01, plane: vpc, kind: partition}]",
        8,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_rows_that_are_handed_over_arrive_or_their_request_is_tried_again(
    machine: Machine, name: str, tmp_path: Path
) -> None:
    """All at once, so that ranks of both halves are used."""
    plan, least_ok = PLANS[name]
    rules = plans.parse(plan, file="test", machine=machine).rules
    requests = local.busy_requests(12, gap_ps=10**10)
    served = local.serve(machine, local.job_of(machine, requests), tmp_path, rules=rules)
    assert len(served.requests) == 12 and served.wrong == 0
    assert max(record["rank"] for record in served.requests) >= 8
    errors = [record["error"] for record in served.requests if record["status"] != "ok"]
    assert all(errors) and len(errors) <= 12 - least_ok, errors


def test_an_instance_that_the_decode_group_cannot_be_shared_out_to_is_refused(
    tmp_path: Path,
) -> None:
    """Before a run, with the key; not by a prefill node that fails in it."""
    file = tmp_path / "odd.yaml"
    file.write_text(TOPOLOGY.replace("node02..node05", "node02..node04"), encoding="utf-8")
    odd = load.load(str(file), extensions=EXTENSIONS)
    expected = r"roles.prefill\[0\]: '2 nodes' is wrong; expected a divisor of the 3 decode nodes"
    with pytest.raises(InputError, match=expected):
        command.prepare(odd, plans.NO_FAULTS, Options(), [])
