"""``link``: what is measured equals the closed form, to the picosecond, on every plane."""

from __future__ import annotations

import tempfile
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cmnet.errors import InputError
from cmnet.link import effects, formula
from cmnet.link.rules import Rule
from cmnet.testing import LocalMachine
from cmnet.topology.machine import Operation, Plane
from planes import measure
from planes.measure_ends import SETTINGS_KEY, Asked, pattern
from tests import closed_form
from tests.planes.two_nodes import MS, US, device, rule
from tests.rig import machine

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
ENDS = {
    "ub": ("node00/npu0/die0", "node01/npu0/die0"),
    "rdma": ("node00/npu0/die0", "node01/npu0/die0"),
    "vpc": ("node00", "node01"),
}
CHUNK = {"ub": MIB, "rdma": 4 * MIB, "vpc": 64 * KIB}
"""As the topology file has them."""


def asking(plane: str, size: int, flows: int = 1, repeat: int = 1, **ends: str) -> Asked:
    source, target = ENDS[plane]
    default = {"source": source, "target": target}
    return Asked(plane=plane, bytes=size, flows=flows, repeat=repeat, **(default | ends))


def measured(asked: Asked, name: str = "pair", rules: tuple[Rule, ...] = ()) -> dict[str, Any]:
    """The result of a measurement with all processes in one loop."""
    measure.check(machine(name), asked)
    with tempfile.TemporaryDirectory() as folder:
        local = LocalMachine(
            machine(name),
            folder=Path(folder),
            settings={SETTINGS_KEY: msgspec.to_builtins(asked)},
            rules=rules,
        )
        local.run(measure.program)
    left = {context.name: context.on_statistics() for context in local.contexts}
    return measure.result(machine(name), asked, left)


def expected(asked: Asked) -> list[int]:
    """The closed form, which knows nothing of cmnet."""
    path = machine("pair").path(
        plane=Plane[asked.plane.upper()],
        operation=Operation.WRITE,
        source=device(asked.source),
        target=device(asked.target),
    )
    return closed_form.deliveries_ps(
        asked.flows,
        asked.bytes,
        chunk_bytes=CHUNK[asked.plane],
        rate_bps=path.rate_bps,
        propagation_ps=path.propagation_ps,
    )


def assert_exact(asked: Asked) -> None:
    result = measured(asked)
    assert result["measured_ps"] == result["formula_ps"] == expected(asked)[-1]
    assert result["difference_ps"] == result["flow_difference_ps_max"] == 0
    assert result["failed"] == result["pieces_wrong"] == 0
    assert result["charged_bytes"] == asked.bytes * asked.flows
    assert all(lone["difference_ps"] == 0 for lone in result["lone"].values())
    assert len(result["lone"]) == {"ub": 4, "rdma": 2, "vpc": 0}[asked.plane]


SIZES = [32, 512, 4 * KIB + 1, 64 * KIB, MIB, 4 * MIB + 3, 64 * MIB, GIB]
FAST_CHUNKS = 1_500
"""Above so many chunks a case is slow."""
MANY_CHUNKS = 50_000
"""Above so many it is left to ``make soak``."""
MOST_CHUNKS = 140_000
"""Above so many a case is left to the one that has the most: 64 GiB on VPC."""


def cases() -> list[Any]:
    found = []
    for plane, chunk in CHUNK.items():
        for flows in (1, 10, 100, 1000):
            for size in SIZES:
                chunks = flows * -(-size // chunk)
                if flows * size > 64 * GIB or chunks > MOST_CHUNKS:
                    continue
                marks = [pytest.mark.slow] if chunks > FAST_CHUNKS or flows == 1000 else []
                marks += [pytest.mark.soak] if chunks > MANY_CHUNKS else []
                found.append(pytest.param(plane, flows, size, marks=marks))
    return found


@pytest.mark.parametrize(("plane", "flows", "size"), cases())
def test_delivery_is_the_closed_form(plane: str, flows: int, size: int) -> None:
    """Acceptance: difference 0 for every flow, on every plane, for 1 to 1000 flows, 32 B to 1 GiB."""
    assert_exact(asking(plane, size, flows))


@pytest.mark.soak
def test_the_most_that_may_be_asked_is_exact() -> None:
    """64 GiB in a round: a million chunks on VPC."""
    assert_exact(asking("vpc", GIB, 64))


@pytest.mark.parametrize("plane", CHUNK)
def test_rounds_are_alike(plane: str) -> None:
    """A round begins on idle ports: each takes exactly as long as the first."""
    result = measured(asking(plane, CHUNK[plane] + 1, flows=3, repeat=4))
    assert result["rounds_ps"] == [result["formula_ps"]] * 4
    assert result["charged_bytes"] == 12 * (CHUNK[plane] + 1)


@pytest.mark.parametrize(
    ("plane", "source", "target"),
    [
        ("ub", "node00/npu0/die0", "node00/npu0/die1"),
        ("ub", "node00/npu0/die0", "node00/npu1/die0"),
        ("ub", "node02/cpu0", "node01/npu1/die1"),
        ("ub", "node03/cpu0", "node01/cpu0"),
        ("rdma", "node00/npu0/die0", "node00/npu1/die1"),
        ("vpc", "node03", "gateway"),
    ],
)
def test_every_sort_of_path_is_exact(plane: str, source: str, target: str) -> None:
    """Also within a node, where both ends are one process."""
    asked = asking(plane, 2 * CHUNK[plane] + 5, flows=4, source=source, target=target)
    result = measured(asked, "mini")
    assert result["flow_difference_ps_max"] == 0
    assert all(lone["difference_ps"] == 0 for lone in result["lone"].values())


def test_the_small_operations_complete_at_the_printed_latencies() -> None:
    """512 B, as Table 1 has them."""
    lone = measured(asking("ub", MIB))["lone"]
    assert (lone["read_small"]["measured_ps"], lone["read_small"]["printed_ps"]) == (1_900_000,) * 2
    assert (lone["write_small"]["measured_ps"], lone["write_small"]["printed_ps"]) == (
        2_100_000,
    ) * 2
    assert lone["read"]["printed_ps"] is None


@pytest.mark.parametrize("plane", CHUNK)
def test_what_a_rule_does_shows_as_the_difference(plane: str) -> None:
    """A delay is the difference itself; the formula stays that of the idle machine."""
    late = rule(effects.Delay(delay_ps=3 * US), source=device(ENDS[plane][0]))
    result = measured(asking(plane, CHUNK[plane] * 2, flows=2), rules=(late,))
    assert result["difference_ps"] == result["flow_difference_ps_max"] == 3 * US


def test_half_the_rate_takes_twice_the_serialization() -> None:
    """And goodput says so."""
    half = rule(effects.Rate(factor=Fraction(1, 2)))
    whole, slowed = measured(asking("rdma", GIB)), measured(asking("rdma", GIB), rules=(half,))
    serialization_ps = closed_form.serialization_ps(GIB, whole["rate_bps"])
    assert slowed["difference_ps"] == serialization_ps
    assert abs(whole["goodput_bps"] / slowed["goodput_bps"] - 2) < 0.001


@pytest.mark.parametrize("plane", CHUNK)
def test_flows_that_fail_are_counted_and_end(plane: str) -> None:
    """A path that is cut for good: the measurement ends and says what failed."""
    cut = rule(effects.Partition(), source=device(ENDS[plane][0]), start_ps=2 * MS)
    size = 100 * CHUNK[plane] if plane != "vpc" else 10_000 * CHUNK[plane]
    result = measured(asking(plane, size, flows=10), rules=(cut,))
    assert result["measured_ps"] is None
    assert result["difference_ps"] is None
    assert result["failed"] >= 10
    assert result["errors"]


def test_the_product_s_formula_is_the_test_s() -> None:
    """Two pieces of code, written apart, over many shapes."""
    for flows in (1, 2, 7):
        for size in range(1, 40):
            for chunk in (1, 3, 8, 64):
                values: dict[str, int] = {"rate_bps": 7 * 10**9, "propagation_ps": 11}
                assert formula.deliveries_ps(
                    flows, size, chunk_bytes=chunk, **values
                ) == closed_form.deliveries_ps(flows, size, chunk_bytes=chunk, **values)


VPC = {"source": "node00", "target": "node01"}


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"plane": "ethernet"}, ["--plane", "ethernet", "ub"]),
        ({"source": "node00/npu0/die7"}, ["node00/npu0/die7", "did you mean"]),
        ({"target": "node00/npu0/die0"}, ["two devices that differ"]),
        ({"target": "node01"}, ["node01", "dies or CPUs"]),
        ({"plane": "rdma", "target": "node01/cpu0"}, ["node01/cpu0", "two dies"]),
        ({"plane": "vpc"}, ["two nodes"]),
        ({"flows": 0}, ["--flows", "0", "1 to"]),
        ({"flows": 100_001}, ["--flows", "100001", "100000"]),
        ({"repeat": 0}, ["--repeat", "0", "1 to"]),
        ({"bytes": 0}, ["--bytes", "0 B", "1 B to"]),
        ({"plane": "vpc", "bytes": 9 * GIB + 1, **VPC}, ["--bytes", "9663676417 B", "KiB"]),
        (
            {"flows": 1000, "bytes": 65 * MIB + GIB},
            ["--bytes", "--flows 1000", "64 GiB", "68719476"],
        ),
    ],
)
def test_what_cannot_be_measured_is_refused(wrong: dict[str, Any], named: list[str]) -> None:
    """The message names the option or device, its value and what is right."""
    source, target = ENDS["ub"]
    given: dict[str, Any] = {"plane": "ub", "source": source, "target": target, "bytes": 32}
    with pytest.raises(InputError) as caught:
        measure.check(machine("pair"), Asked(**(given | wrong)))
    assert [word for word in named if word not in str(caught.value)] == []


def test_streams_that_lose_frames_come_through() -> None:
    """VPC retransmits: late, but all of it, and right."""
    lossy = rule(effects.Loss(probability=Fraction(1, 50)), source=device(ENDS["vpc"][0]))
    result = measured(asking("vpc", 10 * MIB, flows=3), rules=(lossy,))
    assert result["difference_ps"] > 100 * MS
    assert result["failed"] == result["pieces_wrong"] == 0


def test_every_chunk_carries_its_own_pattern() -> None:
    """64 B a chunk, fewer for a tiny flow."""
    assert len(pattern(3 * MIB, MIB)) == 3 * 64
    assert pattern(3 * MIB, MIB)[64:128] == b"\1\0\0\0\0\0\0\0" * 8
    assert len(pattern(5, MIB)) == 5


@pytest.mark.machine
@pytest.mark.slow
@pytest.mark.parametrize("plane", CHUNK)
def test_real_processes_measure_the_same(plane: str) -> None:
    """Every process a real one, frames on real sockets: the same numbers."""
    asked = asking(plane, 2 * CHUNK[plane] + 1, flows=20, repeat=2)
    with tempfile.TemporaryDirectory() as folder:
        for inside in ("disk", "journal", "statistics", "stacks"):
            (Path(folder) / inside).mkdir()
        result = measure.measure(machine("pair"), asked, folder=Path(folder))
    local = measured(asked)
    assert {key: result[key] for key in local} == local
    assert result["flow_difference_ps_max"] == 0
