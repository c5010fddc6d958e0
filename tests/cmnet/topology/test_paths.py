"""Propagation from measured latencies, against figures worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cmnet.topology import load, paths
from cmnet.topology.machine import Machine, Operation, Plane
from cmnet.topology.quantity import Duration, Kind, Rate
from cmnet.topology.schema import Effective, Operations
from tests.cmnet.topology.conftest import TOPOLOGIES

GB_PER_S = 8 * 10**9

# Row, read rate GB/s, write rate GB/s, and by hand from the printed latencies of 512 B:
#   512 B at 167 GB/s = 3065.9 -> 3066 ps; (1,200,000 - 3066) / 2 = 598,467 exactly
#   512 B at 137 GB/s = 3737.2 -> 3738 ps; 1,300,000 - 598,467 - 3738 = 697,795
#   512 B at 164 GB/s = 3121.95 -> 3122 ps; (1,900,000 - 3122) / 2 = 948,439 exactly
#   512 B at 135 GB/s = 3792.6 -> 3793 ps; 2,100,000 - 948,439 - 3793 = 1,147,768
#   512 B at 151 GB/s = 3390.7 -> 3391 ps; (1,000,000 - 3391) / 2 = 498,304 and 1 left
#   512 B at 110 GB/s = 4654.5 -> 4655 ps; 1,100,000 - 498,304 - 4655 = 597,041
#   512 B at 147 GB/s = 3482.99 -> 3483 ps; (1,700,000 - 3483) / 2 = 848,258 and 1 left
#   512 B at 107 GB/s = 4785.05 -> 4786 ps; 1,900,000 - 848,258 - 4786 = 1,046,956
BY_HAND = [
    ("node00/npu0/die0", "node00/npu1/die0", 598_467, 0, 697_795, 167, 137, 196),
    ("node00/npu0/die0", "node01/npu1/die0", 948_439, 0, 1_147_768, 164, 135, 196),
    ("node00/npu0/die0", "node00/cpu0", 498_304, 1, 597_041, 151, 110, 160),
    ("node00/cpu0", "node00/npu7/die1", 498_304, 1, 597_041, 151, 110, 160),
    ("node00/npu0/die0", "node47/cpu3", 848_258, 1, 1_046_956, 147, 107, 160),
    ("node00/cpu0", "node00/cpu1", 498_304, 1, 597_041, 151, 110, 160),
    ("node00/cpu0", "node01/cpu0", 848_258, 1, 1_046_956, 147, 107, 160),
    ("node00/npu0/die0", "node00/npu0/die1", 200_000, 0, 200_000, 210, 210, 270),
]


@pytest.fixture(scope="module")
def machine() -> Machine:
    return load.load(str(TOPOLOGIES / "cloudmatrix384.yaml"))


@pytest.mark.parametrize(
    ("source", "target", "one_way", "read_rest", "write_completion", "read", "write", "line"),
    BY_HAND,
)
def test_ub_paths_are_table_1(
    machine: Machine,
    source: str,
    target: str,
    one_way: int,
    read_rest: int,
    write_completion: int,
    read: int,
    write: int,
    line: int,
) -> None:
    """One propagation for both operations; each its own rate and completion."""
    ends = {
        "source": machine.device(source).device_id,
        "target": machine.device(target).device_id,
    }
    reading = machine.path(plane=Plane.UB, operation=Operation.READ, **ends)
    writing = machine.path(plane=Plane.UB, operation=Operation.WRITE, **ends)
    assert reading.propagation_ps == writing.propagation_ps == one_way
    assert (reading.completion_ps, writing.completion_ps) == (read_rest, write_completion)
    assert (reading.rate_bps, writing.rate_bps) == (read * GB_PER_S, write * GB_PER_S)
    assert reading.line_rate_bps == writing.line_rate_bps == line * GB_PER_S
    assert reading.crosses_nodes == (source[:6] != target[:6])
    assert reading.in_package == (line == 270)


def test_rdma_and_vpc_are_the_assumed_figures(machine: Machine) -> None:
    """2 us at 200 Gbit/s a die, 10 us at 400 Gbit/s a node; an acknowledgement takes as long."""
    dies = machine.dies(0)[0], machine.dies(1)[0]
    rdma = machine.path(plane=Plane.RDMA, operation=Operation.WRITE, source=dies[0], target=dies[1])
    assert (rdma.propagation_ps, rdma.completion_ps) == (2_000_000, 2_000_000)
    assert (rdma.rate_bps, rdma.line_rate_bps) == (200 * 10**9, 200 * 10**9)
    nodes = machine.vpc_port(0), machine.vpc_port(48)
    vpc = machine.path(plane=Plane.VPC, operation=Operation.WRITE, source=nodes[0], target=nodes[1])
    assert (vpc.propagation_ps, vpc.completion_ps) == (10_000_000, 10_000_000)
    assert vpc.rate_bps == 400 * 10**9
    assert rdma.crosses_nodes
    assert vpc.crosses_nodes


def rate(gigabytes: int) -> Rate:
    return Rate(value=f"{gigabytes} GB/s", kind=Kind.PUBLISHED, source="drawn")


def duration(length_ps: int) -> Duration:
    return Duration(value=f"{length_ps} ps", kind=Kind.PUBLISHED, source="drawn")


@settings(deadline=None, max_examples=200)
@given(
    st.integers(1, 1000),
    st.integers(1, 1000),
    st.integers(600_000, 10**7),
    st.integers(0, 10**7),
    st.integers(1, 4096),
)
def test_a_lone_small_operation_takes_exactly_its_latency(
    read_rate: int, write_rate: int, read_ps: int, write_ps: int, latency_bytes: int
) -> None:
    """Read: there, back with the data, the rest. Write: there with the data, the acknowledgement."""
    row = Operations(
        read=Effective(rate=rate(read_rate), latency=duration(read_ps)),
        write=Effective(rate=rate(write_rate), latency=duration(write_ps)),
    )
    one_way, read_rest, write_completion = paths.split_latency(row, latency_bytes)
    read_wire = -(-latency_bytes * 1000 // read_rate)  # 1 GB/s is 1000 ps a byte
    write_wire = -(-latency_bytes * 1000 // write_rate)
    assert 2 * one_way + read_wire + read_rest == read_ps
    assert one_way + write_wire + write_completion == write_ps
    assert read_rest in (0, 1)
