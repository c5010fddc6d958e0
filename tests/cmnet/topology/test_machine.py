"""Numbering, names, look-up, lookahead."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cmnet.errors import InputError
from cmnet.topology import load
from cmnet.topology.machine import Machine, Operation, Plane
from tests.cmnet.topology.conftest import TOPOLOGIES, Write


@functools.cache
def machine_of(name: str) -> Machine:
    return load.load(str(TOPOLOGIES / f"{name}.yaml"))


@pytest.fixture
def mini() -> Machine:
    return machine_of("mini")


@pytest.mark.parametrize(
    ("name", "processes", "devices"),
    [
        ("cloudmatrix384", 49, 48 * (16 + 4 + 1) + 1),
        ("cloudmatrix384-measured", 49, 48 * (16 + 4 + 1) + 1),
        ("mini", 5, 4 * (4 + 1 + 1) + 1),
        ("pair", 2, 2 * (1 + 1 + 1)),
    ],
)
def test_the_shipped_topologies_have_their_devices(name: str, processes: int, devices: int) -> None:
    """Dies, CPUs and one VPC port a node, and the gateway's port."""
    machine = machine_of(name)
    assert machine.name == name
    assert len(machine.processes) == processes
    assert len(machine.devices) == devices


@pytest.mark.parametrize("name", ["cloudmatrix384", "mini", "pair"])
def test_ids_are_dense_and_names_lead_back(name: str) -> None:
    """An id is an index; a name is the only one of its kind."""
    machine = machine_of(name)
    assert [device.device_id for device in machine.devices] == list(range(len(machine.devices)))
    assert [process.index for process in machine.processes] == list(range(len(machine.processes)))
    for device in machine.devices:
        assert machine.device(device.name) is device


def test_devices_come_in_order_of_dies_cpus_node(mini: Machine) -> None:
    """The order that all ids rest on, written out for node 1 and the end."""
    assert [(device.name, device.kind, device.process) for device in mini.devices[6:12]] == [
        ("node01/npu0/die0", "die", 1),
        ("node01/npu0/die1", "die", 1),
        ("node01/npu1/die0", "die", 1),
        ("node01/npu1/die1", "die", 1),
        ("node01/cpu0", "cpu", 1),
        ("node01", "node", 1),
    ]
    last = mini.devices[-1]
    assert (last.name, last.kind, last.process) == ("gateway", "node", 4)


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 47), st.integers(0, 7), st.integers(0, 1), st.integers(0, 3))
def test_ids_follow_from_the_place(node: int, npu: int, die: int, cpu: int) -> None:
    """The arithmetic of ids, apart from the list that the machine keeps."""
    machine = machine_of("cloudmatrix384")
    die_id = machine.device(f"node{node:02}/npu{npu}/die{die}").device_id
    assert die_id == machine.dies(node)[npu * 2 + die] == node * 21 + npu * 2 + die
    assert machine.devices[die_id].npu == npu
    cpu_id = machine.device(f"node{node:02}/cpu{cpu}").device_id
    assert cpu_id == machine.cpus(node)[cpu] == node * 21 + 16 + cpu
    assert machine.device(f"node{node:02}").device_id == machine.vpc_port(node) == node * 21 + 20


@settings(deadline=None, max_examples=100)
@given(st.text(alphabet="node0123/pudieca gtwy-", max_size=20))
def test_a_name_is_known_or_refused(name: str) -> None:
    """Nothing is guessed: near names are only suggested."""
    machine = machine_of("mini")
    if name in [device.name for device in machine.devices]:
        assert machine.device(name).name == name
    else:
        with pytest.raises(InputError):
            machine.device(name)


def test_an_unknown_device_is_refused_with_the_nearest(mini: Machine) -> None:
    """The message shows the form, the last node and the likely meaning."""
    with pytest.raises(InputError) as caught:
        mini.device("node1/npu0/die0")
    assert str(caught.value) == (
        f"{mini.file}: device: 'node1/npu0/die0' is wrong; expected a device such as "
        "node00/npu1/die1, node00/cpu0 or node00, up to node03; did you mean 'node01/npu0/die0'?"
    )


def test_roles_of_the_evaluation() -> None:
    """12 nodes in 6 instances, 20 nodes of 320 dies, all 48 in the pool, one gateway."""
    machine = machine_of("cloudmatrix384")
    assert machine.roles.prefill == ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11))
    assert machine.roles.decode == tuple(range(12, 32))
    assert len(machine.roles.decode) * machine.dies_per_node == 320
    assert machine.roles.ems == tuple(range(48))
    assert machine.roles.gateway == 48
    assert machine.processes[0].roles == ("prefill", "ems")
    assert machine.processes[31].roles == ("decode", "ems")
    assert machine.processes[47].roles == ("ems",)
    assert machine.processes[48].roles == ("gateway",)
    assert not machine.processes[48].is_node


def test_roles_of_the_small_ones(mini: Machine) -> None:
    """mini has every role; pair has none."""
    assert mini.roles.prefill == ((0,), (1,))
    assert (mini.roles.decode, mini.roles.ems, mini.roles.gateway) == ((2, 3), (0, 1, 2, 3), 4)
    pair = machine_of("pair").roles
    assert (pair.prefill, pair.decode, pair.ems, pair.gateway) == ((), (), (), None)


def test_planes_have_their_sizes() -> None:
    """Chunks and queues of the evaluation; a queue holds one collective of a die, 16.5 MB."""
    machine = machine_of("cloudmatrix384")
    kib = 1024
    assert machine.chunk_bytes == {0: 1024 * kib, 1: 4096 * kib, 2: 64 * kib}
    assert machine.queue_bytes_max == {0: 65536 * kib, 1: 65536 * kib, 2: 16384 * kib}
    assert machine.queue_bytes_max[Plane.UB] > 128 * 9 * 14_336
    assert machine.bundle_slice_ps == 10**9
    assert (machine.subplanes, machine.l2_chips_per_subplane) == (7, 16)
    assert machine.hbm_bytes_per_die == 64 * 10**9


def test_engines_and_retries() -> None:
    """SDMA starts 5 us late and is 9 % slower; the retries of design 2.3."""
    machine = machine_of("cloudmatrix384")
    aiv, sdma = machine.engines["aiv"], machine.engines["sdma"]
    assert (aiv.start_ps, aiv.rate_bps(1_080_000_000_000)) == (0, 1_080_000_000_000)
    assert (sdma.start_ps, sdma.rate_bps(1_080_000_000_000)) == (5_000_000, 982_800_000_000)
    assert (machine.ub_retry.tries, machine.ub_retry.delay_ps) == (3, 1_000_000)
    rdma, vpc = machine.rdma_retry, machine.vpc_retry
    assert (rdma.tries, rdma.timeout_ps, rdma.acknowledge_chunks) == (7, 67 * 10**9, 16)
    assert (vpc.tries, vpc.timeout_ps, vpc.window_bytes) == (6, 200 * 10**9, 4 * 1024 * 1024)


def test_the_lookahead_is_the_least_ub_propagation_between_nodes() -> None:
    """NPU-CPU across nodes, 848,258 ps; the file's key is named."""
    lookahead = machine_of("cloudmatrix384").lookahead
    assert lookahead.lookahead_ps == 848_258
    assert "planes.ub.npu_cpu.inter.read" in lookahead.source


def test_the_measured_preset_changes_only_what_it_says() -> None:
    """N16 and N17 slow NPU-NPU across nodes; CPUs, and so the lookahead, stay."""
    paper, measured = machine_of("cloudmatrix384"), machine_of("cloudmatrix384-measured")
    ends = {"source": paper.dies(0)[0], "target": paper.dies(1)[0]}
    read = measured.path(plane=Plane.UB, operation=Operation.READ, **ends)
    # 512 B at 150 GB/s = 3413.3 -> 3414 ps; (2,500,000 - 3414) / 2 = 1,248,293
    assert (read.propagation_ps, read.completion_ps) == (1_248_293, 0)
    assert measured.lookahead == paper.lookahead
    changed = {
        new.key
        for (_, _, new), (_, _, old) in zip(measured.paths(), paper.paths(), strict=True)
        if new != old
    }
    rows = [
        f"planes.ub.npu_npu.{span}.{word}"
        for span in ("intra", "inter")
        for word in ("read", "write")
    ]
    assert changed == set(rows)


def test_paths_are_looked_up_once(mini: Machine) -> None:
    """The hot path: the same object again; plain integers do as well."""
    first = mini.path(plane=Plane.UB, operation=Operation.READ, source=0, target=6)
    assert mini.path(plane=Plane.UB, operation=Operation.READ, source=0, target=6) is first
    assert mini.path(plane=0, operation=1, source=1, target=6) is first  # type: ignore[arg-type]  # plain ints do
    other = mini.path(plane=Plane.UB, operation=Operation.READ, source=0, target=7)
    assert other is first  # one object a row of the table


@pytest.mark.parametrize("name", ["mini", "pair"])
def test_every_pair_has_a_path_or_is_refused(name: str) -> None:
    """UB joins dies and CPUs, RDMA dies, VPC nodes; symmetric; nothing to itself."""
    machine = machine_of(name)
    joined = {Plane.UB: {"die", "cpu"}, Plane.RDMA: {"die"}, Plane.VPC: {"node"}}
    for plane in Plane:
        for source in machine.devices:
            for target in machine.devices:
                fits = {source.kind, target.kind} <= joined[plane] and source is not target
                assert _joins(machine, plane, source.device_id, target.device_id) == fits


def _joins(machine: Machine, plane: Plane, source: int, target: int) -> bool:
    for operation in Operation:
        try:
            there = machine.path(plane=plane, operation=operation, source=source, target=target)
        except InputError:
            return False
        back = machine.path(plane=plane, operation=operation, source=target, target=source)
        assert there is back
        ends = machine.devices[source], machine.devices[target]
        assert there.crosses_nodes == (ends[0].process != ends[1].process)
        if there.crosses_nodes:
            assert there.propagation_ps >= machine.lookahead.lookahead_ps
    return True


REFUSED_PATHS = [
    (Plane.UB, "node00", "node01", "two dies or CPUs, which this plane joins"),
    (Plane.UB, "node00/cpu0", "gateway", "two dies or CPUs, which this plane joins"),
    (Plane.UB, "node00/cpu0", "node00/cpu0", "two devices that differ"),
    (Plane.RDMA, "node00/npu0/die0", "node01/cpu0", "two dies, which this plane joins"),
    (Plane.VPC, "node00/npu0/die0", "node01", "two nodes (or a node and the gateway)"),
    (Plane.VPC, "node00", "node00", "two devices that differ"),
]


@pytest.mark.parametrize(("plane", "source", "target", "expected"), REFUSED_PATHS)
def test_a_plane_that_does_not_join_them_is_refused(
    mini: Machine, plane: Plane, source: str, target: str, expected: str
) -> None:
    """Names both ends and the plane."""
    with pytest.raises(InputError) as caught:
        mini.path(
            plane=plane,
            operation=Operation.WRITE,
            source=mini.device(source).device_id,
            target=mini.device(target).device_id,
        )
    assert expected in caught.value.expected
    assert caught.value.value == f"{source} to {target}"
    assert caught.value.key == f"path on {plane.name}"


def number(value: object) -> dict[str, object]:
    return {"value": value, "kind": "published", "source": "test"}


def test_one_node_with_a_gateway_looks_ahead_by_the_vpc(changed: Write) -> None:
    """UB between nodes is in the file but joins no two processes then."""
    changes = {
        "machine.nodes": number(1),
        "roles": {"ems": ["node00"], "gateway": True},
    }
    assert load.load(changed(changes)).lookahead.lookahead_ps == 10_000_000


def test_a_lone_process_runs_in_windows_of_a_second(changed: Write) -> None:
    """Nothing crosses, so any lookahead is right."""
    lookahead = load.load(changed({"machine.nodes": number(1), "roles": {}})).lookahead
    assert lookahead.lookahead_ps == 10**12
    assert "one process only" in lookahead.source


def test_many_nodes_get_longer_names(changed: Write) -> None:
    """Names sort as their indices do."""
    machine = load.load(changed({"machine.nodes": number(101), "roles": {}}))
    names = [process.name for process in machine.processes]
    assert names[0] == "node000"
    assert names[100] == "node100"
    assert names == sorted(names)
