"""A plan: which faults happen when, as frozen data.

Owns the list: reading a plan file, what a run carries, what its record holds. Does not own what one
entry says (fault.py) nor how faults are brought about. A plan file is a list:

    - {at: 120 ms, for: 2 s, target: node01 -> node02, kind: loss, p: 0.05}
    - {at: 1 s, for: 500 ms, target: node07, kind: kill}
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import msgspec

from cmnet.chaos import entries, fault, target
from cmnet.errors import InputError
from cmnet.link import effects
from cmnet.link.rules import Rule, Switched, Switches


class Machine(target.Names, Switched, Protocol):
    """What a plan needs of the machine: its names, and how many switches it has."""


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Faults in the order of the file. ``kill`` with ``for`` is two: a kill and a restart."""

    faults: tuple[fault.Fault, ...] = ()
    file: str = ""
    text: str = ""

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The link faults, in the order in which they are to be added."""
        return tuple(one for one in self.faults if isinstance(one, Rule))

    @property
    def node_faults(self) -> tuple[fault.NodeFault, ...]:
        """The kills and restarts by instant; at one instant in the order of the plan."""
        faults = (one for one in self.faults if isinstance(one, fault.NodeFault))
        return tuple(sorted(faults, key=lambda one: one.at_ps))

    def with_kills(self, deaths: Iterable[tuple[str, int]]) -> Plan:
        """This plan and a sudden kill for each (node name, instant): how a replay repeats deaths."""
        kills = tuple(
            fault.NodeFault(
                fault_id=f"death{number}", kind="kill", node=node, at_ps=at_ps, sudden=True
            )
            for number, (node, at_ps) in enumerate(deaths, start=len(self.faults) + 1)
        )
        return msgspec.structs.replace(self, faults=self.faults + kills)

    def to_data(self) -> dict[str, Any]:
        """Plain data for a run's record: texts, integers, lists, mappings; nothing is rounded."""
        data: dict[str, Any] = msgspec.to_builtins(self, enc_hook=effects.enc_hook)
        return data

    @staticmethod
    def from_data(data: object, *, file: str = "record") -> Plan:
        """The plan of ``to_data``. Raises InputError that names ``file``."""
        try:
            return msgspec.convert(data, Plan, dec_hook=effects.dec_hook)
        except (msgspec.ValidationError, InputError) as error:
            problem = str(error)
        raise InputError(file=file, key="plan", value=problem, expected="a recorded plan")


NO_FAULTS = Plan()


def load(file: str, machine: Machine) -> Plan:
    """The plan of a file for this machine. Raises InputError that names file, fault and key."""
    return parse(entries.read(file), file=file, machine=machine)


def parse(text: str, *, file: str, machine: Machine) -> Plan:
    """The plan of a text. Raises InputError that names file, fault and key."""
    faults: list[fault.Fault] = []
    switches = Switches.of(machine)
    for number, entry in enumerate(entries.parse(text, file=file), start=1):
        try:
            faults += fault.parse(
                entry, fault_id=f"fault{number}", machine=machine, switches=switches
            )
        except InputError as error:
            key = f"fault {number}: {error.key}"
            right = error.expected
            raise InputError(file=file, key=key, value=error.value, expected=right) from None
    return Plan(faults=tuple(faults), file=file, text=text)
