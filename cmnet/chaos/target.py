"""The targets of a plan: from names to the processes and devices that they mean.

    node07                      a node: every frame with an end there, also inside it
    node07/npu1/die0            a port (of a die or a CPU)
    node01, node02              any of these
    node01 -> node02            frames from one side to the other
    node01 <-> node02           frames both ways between the two sides
    node01, node02 | node03     the same, as one writes a partition
    plane rdma                  every frame of a plane
    subplane 3                  for subplane_down and l2_down only

A partition or a flap of one side alone cuts it from all others and leaves what is inside it. Owns
this grammar. Errors are InputErrors whose key is the plan's key (target, plane, one_way); the plan
adds file and fault.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

import msgspec

from cmnet.errors import InputError
from cmnet.link.reach import Ends, Where

PLANES = {"ub": 0, "rdma": 1, "vpc": 2}
"""Names of ``cmnet.topology``'s planes in a plan."""

_PLANES_OF_KIND = {"die": ("ub", "rdma"), "cpu": ("ub",)}
"""Which planes have a port at a device; a process has all, one that is no node only VPC."""

_ARROW = re.compile(r"(<->|->|\|)")


class Device(Protocol):
    @property
    def device_id(self) -> int: ...
    @property
    def process(self) -> int: ...
    @property
    def kind(self) -> str: ...


class Process(Protocol):
    @property
    def index(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def is_node(self) -> bool: ...


class Names(Protocol):
    """What a plan needs of the machine: its names."""

    @property
    def processes(self) -> Sequence[Process]: ...

    def device(self, name: str, /) -> Device: ...


class _Place(msgspec.Struct, frozen=True, kw_only=True):
    """What one name means: a process, or one device of it."""

    process: int
    device: int | None
    planes: tuple[str, ...]

    def overlaps(self, other: _Place) -> bool:
        if self.process != other.process:
            return False
        return self.device is None or other.device is None or self.device == other.device


def node(text: str, machine: Names) -> str:
    """The target of kill and restart: the name of one node."""
    for process in machine.processes:
        if process.name == text and process.is_node:
            return text
    raise _wrong("target", text, "the name of one node, such as node07")


def subplane(text: str) -> int:
    """The target of subplane_down and l2_down."""
    match = re.fullmatch(r"subplane\s+(\d{1,4})", text)
    if match is None:
        raise _wrong("target", text, "a sub-plane, such as 'subplane 3'")
    return int(match[1])


def where(
    text: str, machine: Names, *, plane: str | None, cuts: bool, one_way: bool | None
) -> Where:
    """Where a rule acts. ``cuts``: the kind separates (partition, flap); ``one_way``: as written."""
    if plane is not None and plane not in PLANES:
        raise _wrong("plane", plane, f"one of {', '.join(PLANES)}")
    words = text.split()
    if words[:1] == ["plane"]:
        return _whole_plane(text, words[1:], plane=plane, one_way=one_way)
    if words[:1] == ["subplane"]:
        raise _wrong("target", text, "a sub-plane only with kind subplane_down or l2_down")
    sides = [side.strip() for side in _ARROW.split(text)]
    number = None if plane is None else PLANES[plane]
    one = _places(sides[0], machine, plane=plane)
    if len(sides) == 1:
        other = _ends(one, complement=True) if cuts else None
        return Where(plane=number, one=_ends(one), other=other, both_ways=not one_way)
    if len(sides) > 3:
        raise _wrong("target", text, "two sides with one of -> <-> | between them")
    far = _places(sides[2], machine, plane=plane)
    if sides[1] == "|" and any(near.overlaps(place) for near in one for place in far):
        raise _wrong("target", text, "two sides that share nothing")
    both_ways = _both_ways(sides[1], one_way)
    return Where(plane=number, one=_ends(one), other=_ends(far), both_ways=both_ways)


def _whole_plane(text: str, names: list[str], *, plane: str | None, one_way: bool | None) -> Where:
    if len(names) != 1 or names[0] not in PLANES:
        raise _wrong("target", text, f"'plane' and one of {', '.join(PLANES)}")
    if plane is not None:
        raise _wrong("plane", plane, "no such key where the target is a plane")
    if one_way:
        raise _wrong("one_way", "true", "false where the target is a plane")
    return Where(plane=PLANES[names[0]])


def _both_ways(arrow: str, one_way: bool | None) -> bool:
    if arrow == "|":
        return not one_way
    if one_way is not None and one_way != (arrow == "->"):
        right = f"no such key beside {arrow!r}, which says it"
        raise _wrong("one_way", str(one_way).lower(), right)
    return arrow == "<->"


def _places(text: str, machine: Names, *, plane: str | None) -> list[_Place]:
    names = [name.strip() for name in text.split(",")]
    if len(set(names)) < len(names) or "" in names:
        raise _wrong("target", text, "names with commas between them, each once")
    places = [_place(name, machine) for name in names]
    for name, place in zip(names, places):
        if plane is not None and plane not in place.planes:
            right = f"one of the planes that {name} has a port on: {', '.join(place.planes)}"
            raise _wrong("plane", plane, right)
    return places


def _place(name: str, machine: Names) -> _Place:
    for process in machine.processes:
        if process.name == name:
            planes = tuple(PLANES) if process.is_node else ("vpc",)
            return _Place(process=process.index, device=None, planes=planes)
    try:
        device = machine.device(name)
    except InputError as error:
        others = "a node, two sides with -> <-> or |, 'plane rdma', 'subplane 3'"
        raise _wrong("target", name, f"{error.expected}; or {others}") from None
    planes = _PLANES_OF_KIND.get(device.kind, tuple(PLANES))
    return _Place(process=device.process, device=device.device_id, planes=planes)


def _ends(places: list[_Place], *, complement: bool = False) -> Ends:
    return Ends(
        processes=tuple(place.process for place in places if place.device is None),
        devices=tuple(place.device for place in places if place.device is not None),
        complement=complement,
    )


def _wrong(key: str, value: object, expected: str) -> InputError:
    return InputError(file="plan", key=key, value=value, expected=expected)
