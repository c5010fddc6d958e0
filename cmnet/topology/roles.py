"""Roles: which node does what.

Owns the reading of node names and spans (``node00..node11``) into indices. Does not own what a role
means: the emulator only hands the names on, apart from the gateway, which is a process of its own.
"""

from __future__ import annotations

import msgspec

from cmnet.topology.quantity import FieldError
from cmnet.topology.schema import RolesSection


class Roles(msgspec.Struct, frozen=True, kw_only=True):
    """Who does what, by process index."""

    prefill: tuple[tuple[int, ...], ...]
    """Nodes of each instance."""
    decode: tuple[int, ...]
    ems: tuple[int, ...]
    gateway: int | None


def resolve(section: RolesSection, names: list[str]) -> Roles:
    """Roles by node index. Raises FieldError for a name that is no node, or a node named twice."""
    index_of = {name: index for index, name in enumerate(names)}
    taken: dict[int, str] = {}
    prefill = tuple(
        _span(entries, f"roles.prefill[{instance}]", index_of, taken)
        for instance, entries in enumerate(section.prefill)
    )
    decode = _span(section.decode, "roles.decode", index_of, taken)
    ems = _span(section.ems, "roles.ems", index_of, {})
    for instance, nodes in enumerate(prefill):
        if len(nodes) != len(prefill[0]) or not nodes:
            expected = f"as many nodes as the first instance ({len(prefill[0])}), at least one"
            raise FieldError(f"roles.prefill[{instance}]", expected)
    gateway = len(names) if section.gateway else None
    return Roles(prefill=prefill, decode=decode, ems=ems, gateway=gateway)


def _span(
    entries: tuple[str, ...], key: str, index_of: dict[str, int], taken: dict[int, str]
) -> tuple[int, ...]:
    """Indices of the entries; ``taken`` collects which key named which node."""
    found: list[int] = []
    for place, entry in enumerate(entries):
        at = f"{key}[{place}]"
        for node in _entry(entry, at, index_of):
            if node in taken:
                expected = f"a node not named before (node {node} is in {taken[node]})"
                raise FieldError(at, expected)
            taken[node] = at
            found.append(node)
    return tuple(found)


def _entry(entry: str, at: str, index_of: dict[str, int]) -> range:
    first, dots, last = (part.strip() for part in entry.partition(".."))
    for name in (first, last if dots else first):
        if name not in index_of:
            names = list(index_of)
            expected = f"a node of {names[0]} to {names[-1]}, or a span of them (first..last)"
            raise FieldError(at, expected)
    low, high = index_of[first], index_of[last if dots else first]
    if high < low:
        raise FieldError(at, "a span whose first node comes before its last")
    return range(low, high + 1)
