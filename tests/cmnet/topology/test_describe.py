"""What ``run.py topology`` says."""

from __future__ import annotations

import json

from cmnet.topology import describe, load
from tests.cmnet.topology.conftest import TOPOLOGIES


def test_the_description_is_json_with_every_number_and_its_source() -> None:
    """60 numbers of the file; the paths and the lookahead that follow from them."""
    machine = load.load(str(TOPOLOGIES / "cloudmatrix384.yaml"))
    facts = describe.describe(machine)
    assert json.loads(json.dumps(facts)) == facts
    assert facts["machine"] == {
        "nodes": 48,
        "npus": 384,
        "dies": 768,
        "cpus": 192,
        "processes": 49,
        "devices": 1009,
        "subplanes": 7,
        "l2_chips": 112,
    }
    assert facts["roles"]["decode_dies"] == 320
    assert facts["roles"]["prefill"][5] == ["node10", "node11"]
    assert facts["lookahead"]["lookahead_ps"] == 848_258
    assert len(facts["numbers"]) == 60
    assert all(number["kind"] and number["source"] for number in facts["numbers"])
    assert sum(facts["kinds"].values()) == 60
    assert len(facts["paths"]) == 16


def test_lines_show_roles_one_way_times_and_what_sets_the_lookahead() -> None:
    """One fact a line."""
    machine = load.load(str(TOPOLOGIES / "mini.yaml"))
    lines = describe.lines(machine)
    assert lines[0] == f"mini ({machine.file})"
    for line in (
        "nodes: 4",
        "prefill 1: node01",
        "decode: node02..node03 (8 dies)",
        "ems: node00..node03",
        "gateway: one process, VPC plane only",
        "vpc: one way 10 us, completion + 10 us, 50 GB/s of 50 GB/s (any)",
        "lookahead: 848.258 ns, set by",
        "  planes.ub.npu_cpu.inter.read: one way 848.258 ns",
        "planes.rdma.tries: 7 (assumed: verbs: the most that retry_cnt holds, range 1 to 7)",
    ):
        assert line in lines
    assert sum(line.startswith("planes.") for line in lines) == 55


def test_a_machine_without_roles_says_none() -> None:
    """pair has neither roles nor a gateway."""
    lines = describe.lines(load.load(str(TOPOLOGIES / "pair.yaml")))
    assert {"decode: none", "ems: none", "gateway: none"} <= set(lines)
