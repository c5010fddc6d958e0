"""Plan files: what each entry means, what is refused and in which words, and the record of a plan."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cmnet.chaos import plan
from cmnet.chaos.fault import NOT_BUILT_YET, NodeFault
from cmnet.errors import InputError
from cmnet.link import effects
from cmnet.link.reach import Ends, Where
from cmnet.link.rules import Rule
from cmnet.units import NEVER_PS

US = 10**6
MS = 10**9
S = 10**12
PLANS = Path(__file__).resolve().parents[2] / "plans"


@dataclass(frozen=True)
class FakeDevice:
    device_id: int
    process: int
    kind: str


@dataclass(frozen=True)
class FakeProcess:
    index: int
    name: str
    is_node: bool


class FakeMachine:
    """Four nodes of two dies and a CPU, and a gateway; ids as the real machine numbers them."""

    def __init__(self) -> None:
        self.subplanes = 7
        self.l2_chips_per_subplane = 16
        nodes = [FakeProcess(index, f"node{index:02}", True) for index in range(4)]
        self._processes = [*nodes, FakeProcess(4, "gateway", False)]
        self._devices: dict[str, FakeDevice] = {}
        for node in nodes:
            for name, kind in (("npu0/die0", "die"), ("npu0/die1", "die"), ("cpu0", "cpu")):
                self._add(f"{node.name}/{name}", node.index, kind)
            self._add(node.name, node.index, "node")
        self._add("gateway", 4, "node")

    def _add(self, name: str, process: int, kind: str) -> None:
        self._devices[name] = FakeDevice(len(self._devices), process, kind)

    @property
    def processes(self) -> Sequence[FakeProcess]:
        return self._processes

    def device(self, name: str, /) -> FakeDevice:
        if name not in self._devices:
            raise InputError(file="fake", key="device", value=name, expected="a device's name")
        return self._devices[name]


MACHINE = FakeMachine()


def parse(text: str) -> plan.Plan:
    return plan.parse(text, file="p.yaml", machine=MACHINE)


def one_rule(text: str) -> Rule:
    (found,) = parse(f"- {{at: 1 s, {text}}}").rules
    return found


def test_a_link_fault_is_a_lease_of_the_plan() -> None:
    found = parse("- {at: 120 ms, for: 2 s, target: node01, kind: loss, p: 0.05}").faults
    assert found == (
        Rule(
            rule_id="fault1",
            owner="plan",
            effect=effects.Loss(probability=Fraction(1, 20)),
            where=Where(one=Ends(processes=(1,)), both_ways=True),
            start_ps=120 * MS,
            until_ps=2120 * MS,
        ),
    )


def test_without_for_a_fault_stays() -> None:
    assert one_rule("target: node01, kind: loss, p: 1").until_ps == NEVER_PS
    assert parse("- {at: 0 s, target: node01, kind: kill}").node_faults == (
        NodeFault(fault_id="fault1", kind="kill", node="node01", at_ps=0),
    )


def test_a_kill_for_a_time_is_a_kill_and_a_restart() -> None:
    text = """
    - {at: 2 s, for: 1 s, target: node03, kind: kill}
    - {at: 1 s, target: node02, kind: restart}
    - {at: 2 s, target: node01, kind: kill}
    """
    found = [(one.at_ps // S, one.kind, one.node) for one in parse(text).node_faults]
    assert found == [
        (1, "restart", "node02"),
        (2, "kill", "node03"),
        (2, "kill", "node01"),
        (3, "restart", "node03"),
    ]
    assert [one.fault_id for one in parse(text).node_faults if one.node == "node03"] == [
        "fault1",
        "fault1.restart",
    ]


@pytest.mark.parametrize(
    ("text", "effect"),
    [
        ("kind: loss, p: 0.05", effects.Loss(probability=Fraction(1, 20))),
        ("kind: loss, p: 1/3", effects.Loss(probability=Fraction(1, 3))),
        ("kind: loss, p: 1e-6", effects.Loss(probability=Fraction(1, 10**6))),
        (
            "kind: loss, p: 0.1234567890123456789",
            effects.Loss(probability=Fraction(1234567890123456789, 10**19)),
        ),
        (
            "kind: burst_loss, p_bad: 0.01, p_good: 0.1, loss_bad: 1, loss_good: 0",
            effects.BurstLoss(
                good_to_bad=Fraction(1, 100),
                bad_to_good=Fraction(1, 10),
                loss_in_bad=Fraction(1),
                loss_in_good=Fraction(0),
            ),
        ),
        ("kind: delay, delay: 3 us", effects.Delay(delay_ps=3 * US)),
        ("kind: jitter, jitter: 500 ns", effects.Jitter(jitter_ps=US // 2)),
        ("kind: rate, factor: 0.25", effects.Rate(factor=Fraction(1, 4))),
        ("kind: rate, factor: 1/2", effects.Rate(factor=Fraction(1, 2))),
        ("kind: partition", effects.Partition()),
        ("kind: flap, period: 1 s, down: 2 ms", effects.Flap(period_ps=S, down_ps=2 * MS)),
        ("kind: corrupt, p: 0", effects.Corrupt(probability=Fraction(0))),
        ("kind: duplicate, p: 1", effects.Duplicate(probability=Fraction(1))),
    ],
)
def test_each_kind_and_its_parameters(text: str, effect: effects.Effect) -> None:
    """Numbers are those of the text, exactly: no float comes between."""
    assert one_rule(f"target: node01, {text}").effect == effect


def test_switches_are_targets_of_their_own_kinds() -> None:
    found = parse(
        """
        - {at: 1 s, target: subplane 3, kind: subplane_down}
        - {at: 1 s, target: subplane 6, kind: l2_down, chip: 15}
        """
    ).rules
    assert [(one.effect, one.where) for one in found] == [
        (effects.SubplaneDown(subplane=3), Where(plane=0)),
        (effects.L2Down(subplane=6, chip=15), Where(plane=0)),
    ]


N0, N1 = Ends(processes=(0,)), Ends(processes=(1,))
N12 = Ends(processes=(1, 2))


def but(processes: tuple[int, ...] = (), devices: tuple[int, ...] = ()) -> Ends:
    return Ends(processes=processes, devices=devices, complement=True)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("node01", Where(one=N1, both_ways=True)),
        ("node01, plane: rdma", Where(plane=1, one=N1, both_ways=True)),
        ('"node01, node02"', Where(one=N12, both_ways=True)),
        ("node01/npu0/die1", Where(one=Ends(devices=(5,)), both_ways=True)),
        ("gateway, plane: vpc", Where(plane=2, one=Ends(processes=(4,)), both_ways=True)),
        ("node00 -> node01", Where(one=N0, other=N1)),
        ("node00->node01", Where(one=N0, other=N1)),
        ("node00 <-> node01", Where(one=N0, other=N1, both_ways=True)),
        ("node00 | node01", Where(one=N0, other=N1, both_ways=True)),
        (
            '"node01,node02 -> node00/cpu0, node03", plane: ub',
            Where(plane=0, one=N12, other=Ends(processes=(3,), devices=(2,))),
        ),
        ("plane ub", Where(plane=0)),
        ("plane rdma", Where(plane=1)),
        ("plane vpc", Where(plane=2)),
    ],
)
def test_each_form_of_target(text: str, where: Where) -> None:
    assert one_rule(f"target: {text}, kind: delay, delay: 1 us").where == where


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("target: node01, kind: partition", Where(one=N1, other=but((1,)), both_ways=True)),
        ("target: node01, kind: partition, one_way: true", Where(one=N1, other=but((1,)))),
        (
            "target: node01, kind: flap, period: 1 s, down: 1 ms",
            Where(one=N1, other=but((1,)), both_ways=True),
        ),
        (
            '"target": "node01/cpu0", kind: partition, plane: ub',
            Where(plane=0, one=Ends(devices=(6,)), other=but(devices=(6,)), both_ways=True),
        ),
        (
            'target: "node01,node02 | node00", kind: partition',
            Where(one=N12, other=N0, both_ways=True),
        ),
        (
            'target: "node01,node02 | node00", kind: partition, one_way: true',
            Where(one=N12, other=N0),
        ),
        ("target: node00 -> node01, kind: partition, one_way: true", Where(one=N0, other=N1)),
        ("target: node00 -> node01, kind: partition", Where(one=N0, other=N1)),
        ("target: plane rdma, kind: partition, one_way: false", Where(plane=1)),
    ],
)
def test_what_a_partition_separates(text: str, where: Where) -> None:
    """One side alone is cut from all others; traffic inside it stays."""
    assert one_rule(text).where == where


REFUSED = {
    "not a list": ("kind: kill", "", "a list of faults"),
    "a list one level too deep": ("faults:\n- {kind: kill}", "", "a list of faults"),
    "empty": ("", "", "a list of faults"),
    "a text": ("kill node01", "", "a list of faults"),
    "not YAML": ("- {at: 1 s", "line 1, column 11", "well-formed YAML"),
    "a tab": ("-\tx: {\n\t]", "line 1, column 2", "well-formed YAML"),
    "an entry that is no mapping": ("- kill", "fault 1", "a mapping with the keys"),
    "a value that is a list": ("- {at: [1 s]}", "fault 1: at", "one value"),
    "a wrong level": ("- {kind: loss, loss: {p: 1}}", "fault 1: loss", "one value"),
    "a key twice": ("- at: 1 s\n  at: 2 s", "line 2, column 3", "well-formed YAML"),
    "a key that is no text": ("- ? [a]\n  : b", "line 1, column 5", "well-formed YAML"),
    "an alias": ("- &a {at: 1 s}\n- *a", "line 2, column 3", "well-formed YAML"),
    "no kind": ("- {at: 1 s, target: node01}", "fault 1: kind", "a value"),
    "an unknown kind": ("- {kind: explode}", "fault 1: kind", "one of kill, restart, loss"),
    "no at": ("- {target: node01, kind: kill}", "fault 1: at", "which kind kill needs"),
    "an empty at": ("- {at: , target: node01, kind: kill}", "fault 1: at", "a value"),
    "no target": ("- {at: 1 s, kind: kill}", "fault 1: target", "which kind kill needs"),
    "no parameter": ("- {at: 1 s, target: node01, kind: loss}", "fault 1: p", "kind loss needs"),
}

LATER = {
    "an unknown key": (
        "target: node01, kind: loss, p: 1, q: 1",
        "q",
        "a key of kind loss: at, for",
    ),
    "another kind's key": ("target: node01, kind: delay, delay: 1 us, p: 1", "p", "kind delay"),
    "a plane for a kill": ("target: node01, kind: kill, plane: ub", "plane", "a key of kind kill"),
    "for on restart": ("target: node01, kind: restart, for: 1 s", "for", "a key of kind restart"),
    "one_way on loss": ("target: node01, kind: loss, p: 1, one_way: true", "one_way", "kind loss"),
    "a plane for a switch": ("target: subplane 1, kind: subplane_down, plane: ub", "plane", "key"),
    "for without a unit": ("target: node01, kind: kill, for: 2", "for", "a unit of ps, ns"),
    "for that is true": ("target: node01, kind: kill, for: true", "for", "a unit of ps, ns"),
    "for of nothing": ("target: node01, kind: kill, for: 0 s", "for", "a duration above 0"),
    "for below 0": ("target: node01, kind: kill, for: -1 s", "for", "not negative"),
    "for beyond a run": ("target: node01, kind: kill, for: 2600 h", "for", "106 days"),
    "a kill of a die": ("target: node01/npu0/die0, kind: kill", "target", "the name of one node"),
    "a kill of the gateway": ("target: gateway, kind: kill", "target", "the name of one node"),
    "a kill of two": ('target: "node01,node02", kind: kill', "target", "the name of one node"),
    "a restart of nobody": ("target: node99, kind: restart", "target", "the name of one node"),
    "an unknown name": ("target: node99, kind: loss, p: 1", "target", "a device's name"),
    "an unknown far end": ("target: node01 -> x, kind: loss, p: 1", "target", "a device's name"),
    "a name twice": ('target: "node01, node01", kind: loss, p: 1', "target", "each once"),
    "a comma too many": ('target: "node01,", kind: loss, p: 1', "target", "each once"),
    "no far end": ("target: node01 ->, kind: loss, p: 1", "target", "each once"),
    "three sides": ("target: node01 | node02 | node03, kind: partition", "target", "two sides"),
    "sides that share a node": ("target: node01 | node01, kind: partition", "target", "nothing"),
    "sides that share a die": (
        "target: node01/npu0/die0 | node01, kind: partition",
        "target",
        "two sides that share nothing",
    ),
    "an unknown plane": ("target: plane x, kind: loss, p: 1", "target", "one of ub, rdma, vpc"),
    "an unknown plane key": ("target: node01, kind: loss, p: 1, plane: x", "plane", "one of ub"),
    "two planes": ("target: plane ub, kind: loss, p: 1, plane: ub", "plane", "no such key"),
    "a CPU on RDMA": ("target: node01/cpu0, kind: loss, p: 1, plane: rdma", "plane", "on: ub"),
    "a die on VPC": ("target: node01/npu0/die0, kind: loss, p: 1, plane: vpc", "plane", "ub, rdma"),
    "the gateway on UB": ("target: gateway, kind: loss, p: 1, plane: ub", "plane", "on: vpc"),
    "loss on a sub-plane": ("target: subplane 3, kind: loss, p: 1", "target", "only with kind"),
    "a node that is a sub-plane": ("target: node01, kind: subplane_down", "target", "sub-plane"),
    "no such sub-plane": ("target: subplane 7, kind: subplane_down", "target", "from 0 to 6"),
    "no such chip": ("target: subplane 1, kind: l2_down, chip: 16", "chip", "from 0 to 15"),
    "a chip below 0": ("target: subplane 1, kind: l2_down, chip: -1", "chip", "whole number"),
    "a p above 1": ("target: node01, kind: loss, p: 1.5", "p", "from 0 to 1"),
    "a p below 0": ("target: node01, kind: corrupt, p: -0.1", "p", "from 0 to 1"),
    "a p in percent": ("target: node01, kind: loss, p: 5 %", "p", "such as 0.05 or 1/20"),
    "a p that is true": ("target: node01, kind: loss, p: true", "p", "such as 0.05 or 1/20"),
    "a p over 0": ("target: node01, kind: loss, p: 1/0", "p", "such as 0.05 or 1/20"),
    "a p of no end": ("target: node01, kind: loss, p: 1e999999999", "p", "such as 0.05"),
    "a factor of 0": ("target: node01, kind: rate, factor: 0", "factor", "use kind partition"),
    "a factor below 0": ("target: node01, kind: rate, factor: -1", "factor", "above 0"),
    "a delay without a unit": ("target: node01, kind: delay, delay: 3", "delay", "a unit of ps"),
    "a jitter below 0": ("target: node01, kind: jitter, jitter: -1 us", "jitter", "not negative"),
    "half a picosecond": ("target: node01, kind: delay, delay: 0.5 ps", "delay", "whole number"),
    "a flap that is down too long": (
        "target: node01, kind: flap, period: 1 ms, down: 2 ms",
        "down",
        "at most the period",
    ),
    "one_way that is no truth": (
        "target: node01, kind: partition, one_way: 1",
        "one_way",
        "true or",
    ),
    "one_way against <->": (
        "target: node01 <-> node02, kind: partition, one_way: true",
        "one_way",
        "no such key beside '<->'",
    ),
    "one_way against ->": (
        "target: node01 -> node02, kind: partition, one_way: false",
        "one_way",
        "no such key beside '->'",
    ),
    "one_way on a plane": ("target: plane ub, kind: partition, one_way: true", "one_way", "false"),
}
"""Refused as the third fault of a plan: at 1 s, after two that are right."""

RIGHT = """
- {at: 0 s, target: node00, kind: kill}
- {at: 0 s, target: node00, kind: restart}
"""

REFUSED |= {
    name: (f"{RIGHT}- {{at: 1 s, {text}}}", f"fault 3: {key}", expected)
    for name, (text, key, expected) in LATER.items()
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_is_refused_by_name(name: str) -> None:
    """The message has file, fault, key, value and what would be right; nothing is ignored."""
    text, key, expected = REFUSED[name]
    with pytest.raises(InputError) as caught:
        parse(text)
    assert (caught.value.file, caught.value.key) == ("p.yaml", key)
    assert expected in caught.value.expected


@pytest.mark.parametrize(
    "at", ["1", "1.5", "true", "null", "-1 s", "1 day", "3000 h", "1e9999999 s"]
)
def test_an_instant_is_a_text_with_its_unit(at: str) -> None:
    with pytest.raises(InputError) as caught:
        parse(f"- {{at: {at}, target: node01, kind: kill}}")
    assert (caught.value.key, caught.value.value) == ("fault 1: at", at)


@pytest.mark.parametrize("kind", NOT_BUILT_YET)
def test_kinds_of_later_parts_say_so(kind: str) -> None:
    with pytest.raises(InputError, match=f"fault 1: kind: '{kind}' is wrong.*not built yet"):
        parse(f"- {{at: 1 s, target: node01, kind: {kind}, factor: 2}}")


def test_a_message_in_full() -> None:
    with pytest.raises(InputError) as caught:
        parse("- {at: 1 s, target: node01, kind: loss, p: 5 %}")
    assert str(caught.value) == (
        "p.yaml: fault 1: p: '5 %' is wrong; expected an exact number such as 0.05 or 1/20"
    )


def test_a_small_machine_has_its_own_switches() -> None:
    text = "- {at: 1 s, target: subplane 1, kind: subplane_down}"
    few = FakeMachine()
    few.subplanes = few.l2_chips_per_subplane = 1
    with pytest.raises(InputError, match="'subplane 1' is wrong; expected a number from 0 to 0"):
        plan.parse(text, file="p.yaml", machine=few)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"- \xff")
    (tmp_path / "huge.yaml").write_bytes(b"#" * (1 << 21))
    for name in ("missing.yaml", "binary.yaml", "huge.yaml", ""):
        with pytest.raises(InputError) as caught:
            plan.load(str(tmp_path / name), MACHINE)
        assert caught.value.file == str(tmp_path / name)


@pytest.mark.parametrize("path", sorted(PLANS.glob("*.yaml")), ids=lambda path: path.name)
def test_the_example_plans_are_plans(path: Path) -> None:
    found = plan.load(str(path), MACHINE)
    assert found.faults
    assert found.text == path.read_text(encoding="utf-8")


def test_there_are_example_plans() -> None:
    assert len(list(PLANS.glob("*.yaml"))) >= 5


def test_an_empty_list_is_a_plan_without_faults() -> None:
    assert parse("[]").faults == plan.NO_FAULTS.faults == ()


def test_deaths_are_added_as_kills() -> None:
    """How a replay repeats processes that died by themselves; twice on one plan is no clash."""
    replayed = parse("- {at: 1 s, target: node01, kind: kill}").with_kills([("node02", 5)])
    again = replayed.with_kills([("node03", 7)])
    assert [(one.at_ps, one.node, one.kind) for one in again.node_faults] == [
        (5, "node02", "kill"),
        (7, "node03", "kill"),
        (S, "node01", "kill"),
    ]
    assert len({one.fault_id for one in again.node_faults}) == 3
    assert plan.NO_FAULTS.with_kills([]) == plan.NO_FAULTS


@pytest.mark.parametrize("path", sorted(PLANS.glob("*.yaml")), ids=lambda path: path.name)
def test_a_record_holds_a_plan_exactly(path: Path) -> None:
    """Through JSON text and back: every integer, every fraction, every order."""
    found = plan.load(str(path), MACHINE).with_kills([("node01", NEVER_PS - 1)])
    assert plan.Plan.from_data(json.loads(json.dumps(found.to_data()))) == found


@settings(deadline=None, max_examples=50)
@given(st.fractions(0, 1), st.integers(0, NEVER_PS - 1))
def test_a_record_holds_any_number_exactly(probability: Fraction, start_ps: int) -> None:
    rule = Rule(
        rule_id="a",
        owner="b",
        effect=effects.Loss(probability=probability),
        start_ps=start_ps,
    )
    found = plan.Plan(faults=(rule,))
    assert plan.Plan.from_data(json.loads(json.dumps(found.to_data()))) == found


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        {"faults": [{}]},
        {"faults": [{"type": "node", "fault_id": "a", "kind": "explode", "node": "b", "at_ps": 1}]},
        {"faults": [], "more": 1},
        {"faults": [{"type": "rule", "rule_id": "a", "owner": "b", "effect": {"kind": "loss"}}]},
        {
            "faults": [
                {
                    "type": "rule",
                    "rule_id": "a",
                    "owner": "b",
                    "effect": {"kind": "loss", "probability": "2"},
                }
            ]
        },
        {
            "faults": [
                {
                    "type": "rule",
                    "rule_id": "a",
                    "owner": "b",
                    "effect": {"kind": "loss", "probability": 0.5},
                }
            ]
        },
        {
            "faults": [
                {
                    "type": "rule",
                    "rule_id": "a",
                    "owner": "b",
                    "effect": {"kind": "loss", "probability": "1/0"},
                }
            ]
        },
    ],
)
def test_a_spoilt_record_is_refused(data: object) -> None:
    with pytest.raises(InputError, match=r"^record\.json: plan: "):
        plan.Plan.from_data(data, file="record.json")
