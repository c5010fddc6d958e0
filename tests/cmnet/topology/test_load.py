"""A broken topology is refused, with file, key, value and what would be right."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cmnet.errors import InputError
from cmnet.topology import document, load
from cmnet.topology.machine import Machine
from cmnet.topology.quantity import Count, FieldError
from tests.cmnet.topology.conftest import TOPOLOGIES, Write

UB = "planes.ub"


def number(value: object, **more: object) -> dict[str, object]:
    return {"value": value, "kind": "published", "source": "test", **more}


BROKEN: list[tuple[dict[str, Any], str, str]] = [
    # keys
    ({"nodes": 48}, "nodes", "one of name, about, machine, planes, roles, ems, model, serving"),
    ({"role": {}}, "role", "did you mean 'roles'?"),
    ({"modle": {}}, "modle", "did you mean 'model'?"),
    ({f"{UB}.chunks": 1}, f"{UB}.chunks", "did you mean 'chunk'?"),
    ({f"{UB}.chunk.unit": "B"}, f"{UB}.chunk.unit", "one of value, kind, source, range"),
    ({"name": ...}, "name", "text (in quotes"),
    ({"name": " "}, "name", "a name for this machine"),
    ({"name": 384}, "name", "text (in quotes"),
    ({"machine": ...}, "machine", "a mapping with the keys nodes, npus_per_node"),
    ({"planes": None}, "planes", "a mapping with the keys ub, rdma, vpc"),
    ({"planes.rdma": ...}, "planes.rdma", "a mapping with the keys port_rate, propagation"),
    ({f"{UB}.npu_npu.inter.read": 7}, f"{UB}.npu_npu.inter.read", "the keys rate, latency"),
    ({f"{UB}.chunk": ...}, f"{UB}.chunk", 'a number with its source, {value: "4 MiB", kind:'),
    # numbers
    ({f"{UB}.chunk": "1 MiB"}, f"{UB}.chunk", 'a number with its source, {value: "4 MiB"'),
    ({"machine.nodes": 48}, "machine.nodes", "a number with its source, {value: 8, kind:"),
    ({"machine.nodes.source": ...}, "machine.nodes.source", "text (in quotes"),
    ({"machine.nodes.source": ""}, "machine.nodes.source", "where this number comes from"),
    ({"machine.nodes.kind": "asumed"}, "machine.nodes.kind", "did you mean 'assumed'?"),
    ({"machine.nodes.kind": ...}, "machine.nodes.kind", "one of published, derived, fitted, assu"),
    ({"machine.nodes.range": ...}, "machine.nodes.range", "since kind is assumed"),
    ({"machine.nodes.range": [9, 48]}, "machine.nodes.value", "within its range, 9 to 48"),
    ({"machine.nodes.range": [9]}, "machine.nodes.range", "a list of length 2, got 1"),
    ({"machine.nodes.range": 9}, "machine.nodes.range", "a list"),
    ({"machine.nodes": number("48")}, "machine.nodes.value", "a whole number"),
    ({"machine.nodes": number(4.5)}, "machine.nodes.value", "a whole number"),
    ({"machine.nodes": number(True)}, "machine.nodes.value", "a whole number"),
    ({"machine.nodes": number(None)}, "machine.nodes.value", "a whole number"),
    ({f"{UB}.link_rate": number("28")}, f"{UB}.link_rate.value", "such as '196 GB/s'"),
    ({f"{UB}.link_rate": number(28)}, f"{UB}.link_rate.value", "such as '196 GB/s' (in quotes)"),
    ({f"{UB}.link_rate": number("28 GiB")}, f"{UB}.link_rate.value", "a rate with a unit of B/s"),
    ({f"{UB}.link_rate": number("0 GB/s")}, f"{UB}.link_rate.value", "a rate above 0"),
    ({f"{UB}.link_rate": number("-28 GB/s")}, f"{UB}.link_rate.value", "not negative"),
    ({f"{UB}.chunk": number("1.5 B")}, f"{UB}.chunk.value", "whole number of its smallest unit"),
    ({f"{UB}.chunk": number("1 Mib")}, f"{UB}.chunk.value", "such as '4 MiB'"),
    ({"planes.vpc.propagation": number("10 µs")}, "planes.vpc.propagation.value", "'1.9 us'"),
    ({f"{UB}.engines.sdma.rate_share": number("0.91")}, f"{UB}.engines.sdma.rate_share.value", "%"),
    ({f"{UB}.chunk": number("1e99999999 B")}, f"{UB}.chunk.value", "of ordinary size"),
    ({f"{UB}.chunk": number("1e999 B")}, f"{UB}.chunk.value", "1 B to 1 GiB"),
    # limits
    ({"machine.nodes": number(0)}, "machine.nodes.value", "1 to 1024"),
    ({"machine.nodes": number(-4)}, "machine.nodes.value", "1 to 1024"),
    ({"machine.nodes": number(10**30)}, "machine.nodes.value", "1 to 1024"),
    ({"machine.npus_per_node": number(0)}, "machine.npus_per_node.value", "1 to 64"),
    ({"machine.dies_per_npu": number(9)}, "machine.dies_per_npu.value", "1 to 8"),
    ({"machine.cpus_per_node": number(0)}, "machine.cpus_per_node.value", "1 to 64"),
    ({f"{UB}.chunk": number("0 B")}, f"{UB}.chunk.value", "1 B to 1 GiB"),
    ({f"{UB}.subplanes": number(0)}, f"{UB}.subplanes.value", "1 to 64"),
    ({f"{UB}.retry.tries": number(0)}, f"{UB}.retry.tries.value", "1 to 32"),
    ({"planes.vpc.tries": number(600)}, "planes.vpc.tries.value", "1 to 32"),
    ({f"{UB}.bundle_slice": number("0 us")}, f"{UB}.bundle_slice.value", "1 ns to 1 s"),
    ({f"{UB}.link_rate": number("28 TB/s")}, f"{UB}.link_rate.value", "1 Mbit/s to 10 TB/s"),
    (
        {f"{UB}.npu_npu.inter.read.latency": number("1.9 s")},
        f"{UB}.npu_npu.inter.read.latency.value",
        "1 ns to 1 ms",
    ),
    (
        {f"{UB}.engines.sdma.rate_share": number("0 %")},
        f"{UB}.engines.sdma.rate_share.value",
        "1 % to 100 %",
    ),
    ({"planes.rdma.timeout": number("0 ms")}, "planes.rdma.timeout.value", "1 us to 1 h"),
    # between keys
    (
        {f"{UB}.npu_npu.intra.read.rate": number("197 GB/s")},
        f"{UB}.npu_npu.intra.read.rate.value",
        "at most the line rate, 196 GB/s",
    ),
    (
        {f"{UB}.npu_cpu.inter.write.rate": number("161 GB/s")},
        f"{UB}.npu_cpu.inter.write.rate.value",
        "at most the line rate, 160 GB/s",
    ),
    (
        {f"{UB}.same_npu.rate": number("271 GB/s")},
        f"{UB}.same_npu.rate.value",
        "at most the line rate, 270 GB/s",
    ),
    (
        {f"{UB}.npu_npu.inter.read.latency": number("3123 ps")},
        f"{UB}.npu_npu.inter.read.latency.value",
        "so that propagation is above 0",
    ),
    (
        {f"{UB}.npu_cpu.intra.read.latency": number("3 ns")},
        f"{UB}.npu_cpu.intra.read.latency.value",
        "so that propagation is above 0",
    ),
    (
        {f"{UB}.npu_npu.intra.write.latency": number("0.6 us")},
        f"{UB}.npu_npu.intra.write.latency.value",
        "at least 1.20067 us: propagation + serialization of the write",
    ),
    (
        {f"{UB}.npu_npu.inter.write.latency": number("1900670 ps")},
        f"{UB}.npu_npu.inter.write.latency.value",
        "and 948.439 ns for the acknowledgement's way back",
    ),
    (
        {"planes.rdma.propagation": number("848257 ps")},
        "planes.rdma.propagation.value",
        "at least 848.258 ns, the least one-way time on UB",
    ),
    ({"planes.rdma.propagation": number("0 us")}, "planes.rdma.propagation.value", "1 ps to 1 s"),
    (
        {"planes.vpc.propagation": number("10 ns")},
        "planes.vpc.propagation.value",
        "between nodes (planes.ub.npu_cpu.inter.read)",
    ),
    (
        {f"{UB}.l2_chips_per_subplane": number(3)},
        f"{UB}.l2_chips_per_subplane.value",
        "at least 4, one link up per die",
    ),
    ({f"{UB}.queue_max": number("1 MB")}, f"{UB}.queue_max.value", "at least one chunk, 1 MiB"),
    ({"planes.vpc.window": number("1 KiB")}, "planes.vpc.window.value", "one chunk, 64 KiB"),
    # roles
    ({"roles.decode": ["node04"]}, "roles.decode[0]", "a node of node00 to node03"),
    ({"roles.decode": ["node2"]}, "roles.decode[0]", "a node of node00 to node03"),
    ({"roles.decode": ["gateway"]}, "roles.decode[0]", "a node of node00 to node03"),
    ({"roles.decode": "node02"}, "roles.decode", "a list"),
    ({"roles.decode": [2]}, "roles.decode[0]", "text (in quotes"),
    ({"roles.decode": ["node02", "node02"]}, "roles.decode[1]", "a node not named before"),
    ({"roles.decode": ["node01"]}, "roles.decode[0]", "a node not named before"),
    ({"roles.decode": ["node03..node02"]}, "roles.decode[0]", "first node comes before its last"),
    ({"roles.decode": ["node02.."]}, "roles.decode[0]", "a node of node00 to node03, or a span"),
    ({"roles.ems": ["node00..node03", "node01"]}, "roles.ems[1]", "(node 1 is in roles.ems[0])"),
    ({"roles.prefill": [["node00"], []]}, "roles.prefill[1]", "as many nodes as the first"),
    ({"roles.prefill": [[]]}, "roles.prefill[0]", "at least one"),
    (
        {"roles.prefill": [["node00"], ["node00"]]},
        "roles.prefill[1][0]",
        "a node not named before (node 0 is in roles.prefill[0][0])",
    ),
    ({"roles.prefill": ["node00"]}, "roles.prefill[0]", "a list"),
    ({"roles.gateway": "yes"}, "roles.gateway", "true or false"),
    ({"roles.console": True}, "roles.console", "one of prefill, decode, ems, gateway"),
]


@pytest.mark.parametrize(("changes", "key", "expected"), BROKEN)
def test_a_broken_topology_is_refused(
    changed: Write, changes: dict[str, Any], key: str, expected: str
) -> None:
    """File, whole key and what would be right; nothing is clamped or ignored."""
    file = changed(changes)
    with pytest.raises(InputError) as caught:
        load.load(file)
    assert (caught.value.file, caught.value.key) == (file, key)
    assert expected in caught.value.expected
    assert str(caught.value).startswith(f"{file}: {key}: ")


def test_the_value_is_in_the_message(changed: Write) -> None:
    """As it stands in the file."""
    with pytest.raises(InputError, match=r"machine.nodes.value: 0 is wrong; expected 1 to 1024"):
        load.load(changed({"machine.nodes": number(0)}))


def test_the_unchanged_file_loads(changed: Write) -> None:
    """So the broken ones fail for their change; the values at the limits are fine too."""
    assert load.load(changed({})).nodes_count == 4
    edge = {
        "planes.rdma.propagation": number("848258 ps"),
        f"{UB}.npu_npu.inter.write.latency": number("1900671 ps"),
        f"{UB}.l2_chips_per_subplane": number(4),
        f"{UB}.queue_max": number("1 MiB"),
        f"{UB}.npu_npu.intra.read.rate": number("196 GB/s"),
        "machine.nodes": {"value": 4, "kind": "assumed", "source": "t", "range": [4, 4]},
    }
    assert load.load(changed(edge)).lookahead.lookahead_ps == 848_258


def test_a_machine_s_text_loads_to_the_same_machine(tmp_path: Any) -> None:
    """A run keeps it and a replay loads it, where the base may have changed or gone."""
    mini = load.load(str(TOPOLOGIES / "mini.yaml"))
    kept = tmp_path / "kept.yaml"
    kept.write_text(mini.text, encoding="utf-8")
    again = load.load(str(kept))
    assert again.topology == mini.topology
    assert again.devices == mini.devices


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["0 us", "1e99999999 s", "1e-9 B", "9 %", "node01..node00", "inf GB/s"]),
    st.lists(st.text(max_size=4), max_size=2),
    st.dictionaries(st.sampled_from(["value", "kind", "x"]), st.integers(), max_size=2),
)


@settings(
    deadline=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.data())
def test_any_value_anywhere_loads_or_is_refused(
    mini_data: dict[str, Any], data: st.DataObject
) -> None:
    """No other exception gets out, and each refusal names a key and what would be right."""
    key = data.draw(st.sampled_from(sorted(keys(mini_data))))
    changed = copy.deepcopy(mini_data)
    *above, last = key
    place: Any = changed
    for step in above:
        place = place[step]
    place[last] = data.draw(VALUES)
    read = document.Document(file="t.yaml", text="", data=changed, origins={})
    outcome = loaded_or_refused(read)
    if isinstance(outcome, InputError):
        assert (outcome.file, bool(outcome.key), bool(outcome.expected)) == ("t.yaml", True, True)
    else:
        assert outcome.lookahead.lookahead_ps > 0


def loaded_or_refused(read: document.Document) -> Machine | InputError:
    try:
        return load.build(read, extensions={})
    except InputError as error:
        return error


def keys(data: Any, at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(data, dict):
        for name, value in data.items():
            yield (*at, name)
            yield from keys(value, (*at, name))


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An extension section, as a program on the machine would define it."""

    layers: int = 2
    experts: Count | None = None

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise FieldError("layers", "at least 1")

    def check_machine(self, machine: Machine) -> None:
        dies = len(machine.roles.decode) * machine.dies_per_node
        if self.experts is not None and self.experts.amount % dies:
            raise FieldError("experts.value", f"a multiple of the {dies} decode dies")


def test_an_extension_section_is_checked_by_its_struct(changed: Write) -> None:
    """Given, absent (defaults), and not asked for (kept as it is)."""
    file = changed({"model": {"layers": 3}})
    assert load.load(file, extensions={"model": Settings}).sections == {"model": Settings(3)}
    assert load.load(changed({}), extensions={"model": Settings}).sections == {"model": Settings()}
    unchecked = load.load(changed({"model": {"what": [1]}, "ems": 5}))
    assert unchecked.sections == {}
    assert unchecked.raw_sections == {"model": {"what": [1]}, "ems": 5}


BROKEN_EXTENSIONS: list[tuple[object, str, str]] = [
    ({"layer": 3}, "model.layer", "did you mean 'layers'?"),
    ({"layers": "3"}, "model.layers", "a whole number"),
    ({"layers": 0}, "model.layers", "at least 1"),
    ({"experts": 8}, "model.experts", "a number with its source"),
    ({"experts": number(12)}, "model.experts.value", "a multiple of the 8 decode dies"),
    (None, "model", "a mapping with the keys layers, experts"),
    ([], "model", "a mapping with the keys layers, experts"),
]


@pytest.mark.parametrize(("section", "key", "expected"), BROKEN_EXTENSIONS)
def test_a_broken_extension_section_is_refused(
    changed: Write, section: object, key: str, expected: str
) -> None:
    """With the same care as the emulator's own keys."""
    file = changed({"model": section})
    with pytest.raises(InputError) as caught:
        load.load(file, extensions={"model": Settings})
    assert (caught.value.file, caught.value.key) == (file, key)
    assert expected in caught.value.expected


def test_a_preset_s_error_names_the_preset(tmp_path: Any) -> None:
    """A value without its source, which the merge does not borrow from the base."""
    preset = tmp_path / "preset.yaml"
    base = TOPOLOGIES / "mini.yaml"
    preset.write_text(
        f'base: {base}\nname: p\nplanes: {{ub: {{chunk: {{value: "2 MiB"}}}}}}\n', encoding="utf-8"
    )
    with pytest.raises(InputError) as caught:
        load.load(str(preset))
    assert (caught.value.file, caught.value.key) == (str(preset), "planes.ub.chunk.kind")


class Careless(msgspec.Struct, frozen=True):
    layers: int = 2


def test_a_struct_that_would_ignore_slips_is_a_bug() -> None:
    """An extension without forbid_unknown_fields would let a mistyped key pass in silence."""
    with pytest.raises(AssertionError, match="Careless would ignore slips"):
        load.load(str(TOPOLOGIES / "pair.yaml"), extensions={"model": Careless})
