"""One fault of a plan: the vocabulary of kinds and their keys.

Owns which kinds there are, which keys each takes, and the way from the texts of an entry to a frozen
fault. Does not own the names of targets (target.py) nor what a link fault does (cmnet.link).

``at`` is an instant of virtual time; ``for`` a length: without it a link fault stays to the end of
the run and a killed node stays dead. ``plane`` (ub, rdma, vpc) restricts a link fault to one plane.
Errors are InputErrors whose key is a key of the entry; the plan adds the file and which fault.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any, Literal

import msgspec

from cmnet import units
from cmnet.chaos import entries, target
from cmnet.errors import InputError
from cmnet.link import effects, rules
from cmnet.link.reach import Where
from cmnet.topology.document import MISSING

NOT_BUILT_YET = ("pause", "slow", "disk_slow", "disk_full", "bit_rot")
NODE_KINDS = ("kill", "restart")
OWNER = "plan"

_FRACTION = re.compile(r"[+-]?(\d{1,30}(\.\d{1,30})?([eE]-?\d{1,2})?|\d{1,30}/[1-9]\d{0,29})")


class NodeFault(msgspec.Struct, frozen=True, kw_only=True, tag="node", forbid_unknown_fields=True):
    """A node is killed, or started anew if it is not running at that instant."""

    fault_id: str
    kind: Literal["kill", "restart"]
    node: str
    at_ps: int
    sudden: bool = False
    """A kill that repeats a death which nobody had planned, see ``launch.NodeFault``."""


Fault = NodeFault | rules.Rule


def parse(
    entry: entries.Entry,
    *,
    fault_id: str,
    machine: target.Names,
    switches: rules.Switches,
    owner: str = OWNER,
) -> tuple[Fault, ...]:
    """The faults of one entry: one, or two for a kill with ``for``. Raises InputError."""
    kind = _kind(entry)
    if kind in NODE_KINDS:
        return _node_faults(entry, fault_id=fault_id, machine=machine)
    start_ps, until_ps = _lease(entry)
    where = _where(entry, _KINDS[kind], machine)
    rule = rules.Rule(
        rule_id=fault_id,
        owner=owner,
        effect=_effect(entry, _KINDS[kind], switches),
        where=where,
        start_ps=start_ps,
        until_ps=until_ps,
    )
    return (rule,)


class _Parameter(msgspec.Struct, frozen=True):
    """A key of the plan, the field of the effect that it sets, and how its text is read."""

    key: str
    field: str
    parse: Callable[[str], int | Fraction]


class _Kind(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of link fault in a plan."""

    effect: Callable[..., effects.Effect]
    parameters: tuple[_Parameter, ...] = ()
    cuts: bool = False
    """Separates two sides, so one side alone means: from all others."""
    one_way: bool = False
    """Takes the key ``one_way``."""
    on_subplane: bool = False


def _fraction(text: str) -> Fraction:
    if _FRACTION.fullmatch(text) is None:
        raise ValueError("an exact number such as 0.05 or 1/20")
    return Fraction(text)


def _index(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError("a whole number from 0")
    return int(text)


_P = (_Parameter("p", "probability", _fraction),)
_DURATION = units.parse_duration_ps

_KINDS = {
    "loss": _Kind(effect=effects.Loss, parameters=_P),
    "burst_loss": _Kind(
        effect=effects.BurstLoss,
        parameters=(
            _Parameter("p_bad", "good_to_bad", _fraction),
            _Parameter("p_good", "bad_to_good", _fraction),
            _Parameter("loss_bad", "loss_in_bad", _fraction),
            _Parameter("loss_good", "loss_in_good", _fraction),
        ),
    ),
    "delay": _Kind(effect=effects.Delay, parameters=(_Parameter("delay", "delay_ps", _DURATION),)),
    "jitter": _Kind(
        effect=effects.Jitter, parameters=(_Parameter("jitter", "jitter_ps", _DURATION),)
    ),
    "rate": _Kind(effect=effects.Rate, parameters=(_Parameter("factor", "factor", _fraction),)),
    "partition": _Kind(effect=effects.Partition, cuts=True, one_way=True),
    "flap": _Kind(
        effect=effects.Flap,
        cuts=True,
        parameters=(
            _Parameter("period", "period_ps", _DURATION),
            _Parameter("down", "down_ps", _DURATION),
        ),
    ),
    "corrupt": _Kind(effect=effects.Corrupt, parameters=_P),
    "duplicate": _Kind(effect=effects.Duplicate, parameters=_P),
    "subplane_down": _Kind(effect=effects.SubplaneDown, on_subplane=True),
    "l2_down": _Kind(
        effect=effects.L2Down, on_subplane=True, parameters=(_Parameter("chip", "chip", _index),)
    ),
}


def _kind(entry: entries.Entry) -> str:
    """The kind, once the entry is known to have every key it needs and no other."""
    kind = _required(entry, "kind")
    if kind in NOT_BUILT_YET:
        raise _wrong("kind", kind, f"one of {_all_kinds()}; {kind} is not built yet")
    if kind not in NODE_KINDS and kind not in _KINDS:
        raise _wrong("kind", kind, f"one of {_all_kinds()}")
    allowed = _keys(kind)
    for key in entry:
        if key not in allowed:
            raise _wrong(key, entry[key], f"a key of kind {kind}: {', '.join(allowed)}")
    return kind


def _all_kinds() -> str:
    return ", ".join((*NODE_KINDS, *_KINDS))


def _keys(kind: str) -> tuple[str, ...]:
    if kind in NODE_KINDS:
        return ("at", "for", "target", "kind") if kind == "kill" else ("at", "target", "kind")
    described = _KINDS[kind]
    own = tuple(parameter.key for parameter in described.parameters)
    plane = () if described.on_subplane else ("plane",)
    one_way = ("one_way",) if described.one_way else ()
    return ("at", "for", "target", "kind", *own, *plane, *one_way)


def _node_faults(
    entry: entries.Entry, *, fault_id: str, machine: target.Names
) -> tuple[NodeFault, ...]:
    start_ps, until_ps = _lease(entry)
    node = target.node(_required(entry, "target"), machine)
    kind: Literal["kill", "restart"] = "kill" if entry["kind"] == "kill" else "restart"
    fault = NodeFault(fault_id=fault_id, kind=kind, node=node, at_ps=start_ps)
    if "for" not in entry:
        return (fault,)
    back = NodeFault(fault_id=f"{fault_id}.restart", kind="restart", node=node, at_ps=until_ps)
    return (fault, back)


def _lease(entry: entries.Entry) -> tuple[int, int]:
    start_ps = _value("at", _required(entry, "at"), units.parse_duration_ps)
    if start_ps >= units.NEVER_PS:
        raise _wrong("at", entry["at"], "an instant within 106 days, the longest run")
    if "for" not in entry:
        return start_ps, units.NEVER_PS
    length_ps = _value("for", entry["for"], units.parse_duration_ps)
    if not 0 < length_ps <= units.NEVER_PS - start_ps:
        right = "a duration above 0 that ends within 106 days, the longest run"
        raise _wrong("for", entry["for"], right)
    return start_ps, start_ps + length_ps


def _where(entry: entries.Entry, kind: _Kind, machine: target.Names) -> Where:
    if kind.on_subplane:
        return Where(plane=target.PLANES["ub"])
    return target.where(
        _required(entry, "target"),
        machine,
        plane=entry.get("plane"),
        cuts=kind.cuts,
        one_way=_one_way(entry),
    )


def _effect(entry: entries.Entry, kind: _Kind, switches: rules.Switches) -> effects.Effect:
    fields: dict[str, int | Fraction] = {}
    if kind.on_subplane:
        fields["subplane"] = target.subplane(_required(entry, "target"))
    for parameter in kind.parameters:
        text = _required(entry, parameter.key)
        fields[parameter.field] = _value(parameter.key, text, parameter.parse)
    try:
        effect = kind.effect(**fields)
        switches.check(effect)
    except InputError as error:
        keys = {parameter.field: parameter.key for parameter in kind.parameters}
        key = keys.get(error.key, "target")
        raise _wrong(key, entry[key], error.expected) from None
    return effect


def _one_way(entry: entries.Entry) -> bool | None:
    if "one_way" not in entry:
        return None
    if entry["one_way"] not in ("true", "false"):
        raise _wrong("one_way", entry["one_way"], "true or false")
    return entry["one_way"] == "true"


def _required(entry: entries.Entry, key: str) -> str:
    if not entry.get(key):
        right = "a value for this key"
        if "kind" in entry and (entry["kind"] in _KINDS or entry["kind"] in NODE_KINDS):
            right = f"{right}, which kind {entry['kind']} needs"
        raise _wrong(key, entry.get(key, MISSING), right)
    return entry[key]


def _value(key: str, text: str, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(text)
    except ArithmeticError:
        raise _wrong(key, text, "a number that a run can hold") from None
    except ValueError as error:
        raise _wrong(key, text, str(error)) from None


def _wrong(key: str, value: object, expected: str) -> InputError:
    return InputError(file="plan", key=key, value=value, expected=expected)
