"""What this machine is, as plain data and as lines: ``run.py topology``.

Owns what is said and in which order. Does not own how it is drawn. Floats appear in texts only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from cmnet import units
from cmnet.topology import schema
from cmnet.topology.machine import Machine, Operation, Path, Plane
from cmnet.topology.quantity import Kind, Number


def describe(machine: Machine) -> dict[str, Any]:
    """Everything about a machine, for JSON: instants in ps, rates in bits per second."""
    return {
        "name": machine.name,
        "about": machine.topology.about,
        "file": machine.file,
        "machine": _composition(machine),
        "roles": _roles(machine),
        "paths": [_path(plane, operation, path) for plane, operation, path in machine.paths()],
        "lookahead": {
            "lookahead_ps": machine.lookahead.lookahead_ps,
            "source": machine.lookahead.source,
        },
        "numbers": [_number(key, number) for key, number in schema.numbers(machine.topology)],
        "kinds": _kinds(machine),
        "sections": sorted([*machine.sections, *machine.raw_sections]),
    }


def lines(machine: Machine) -> list[str]:
    """The same for people, one fact a line."""
    facts = describe(machine)
    text = [f"{facts['name']} ({facts['file']})", *filter(None, [facts["about"]]), ""]
    text += [f"{name.replace('_', ' ')}: {count}" for name, count in facts["machine"].items()]
    text += ["", *_role_lines(machine), ""]
    text += [_path_line(path) for path in facts["paths"]]
    text += ["", f"lookahead: {units.format_ps(machine.lookahead.lookahead_ps)}, set by"]
    text += [f"  {machine.lookahead.source}", ""]
    text += [_number_line(number) for number in facts["numbers"]]
    text += [
        "",
        "numbers by kind: " + ", ".join(f"{n} {kind}" for kind, n in facts["kinds"].items()),
    ]
    return text


def _composition(machine: Machine) -> dict[str, int]:
    return {
        "nodes": machine.nodes_count,
        "npus": machine.nodes_count * machine.npus_per_node,
        "dies": machine.nodes_count * machine.dies_per_node,
        "cpus": machine.nodes_count * machine.cpus_per_node,
        "processes": len(machine.processes),
        "devices": len(machine.devices),
        "subplanes": machine.subplanes,
        "l2_chips": machine.subplanes * machine.l2_chips_per_subplane,
    }


def _roles(machine: Machine) -> dict[str, Any]:
    roles = machine.roles
    return {
        "prefill": [_names(machine, instance) for instance in roles.prefill],
        "decode": _names(machine, roles.decode),
        "decode_dies": len(roles.decode) * machine.dies_per_node,
        "ems": _names(machine, roles.ems),
        "gateway": roles.gateway is not None,
    }


def _names(machine: Machine, nodes: Sequence[int]) -> list[str]:
    return [machine.processes[node].name for node in nodes]


def _role_lines(machine: Machine) -> Iterator[str]:
    roles = machine.roles
    for index, instance in enumerate(roles.prefill):
        yield f"prefill {index}: {_spans(machine, instance)}"
    dies = len(roles.decode) * machine.dies_per_node
    yield f"decode: {_spans(machine, roles.decode)}" + (f" ({dies} dies)" if dies else "")
    yield f"ems: {_spans(machine, roles.ems)}"
    yield f"gateway: {'one process, VPC plane only' if roles.gateway is not None else 'none'}"


def _spans(machine: Machine, nodes: Sequence[int]) -> str:
    """Names with neighbours drawn together: node00..node11, node14."""
    spans: list[list[int]] = []
    for node in sorted(nodes):
        if spans and spans[-1][-1] == node - 1:
            spans[-1].append(node)
        else:
            spans.append([node])
    texts = ("..".join(dict.fromkeys(_names(machine, [span[0], span[-1]]))) for span in spans)
    return ", ".join(texts) or "none"


def _path(plane: Plane, operation: Operation | None, path: Path) -> dict[str, Any]:
    return {
        "plane": plane.name,
        "path": path.key,
        "operation": operation.name.lower() if operation is not None else "any",
        "one_way_ps": path.propagation_ps,
        "completion_ps": path.completion_ps,
        "rate_bps": path.rate_bps,
        "line_rate_bps": path.line_rate_bps,
        "crosses_nodes": path.crosses_nodes,
    }


def _path_line(path: dict[str, Any]) -> str:
    name = path["path"].removeprefix("planes.")
    return (
        f"{name}: one way {units.format_ps(path['one_way_ps'])},"
        f" completion + {units.format_ps(path['completion_ps'])},"
        f" {units.format_rate(path['rate_bps'])} of {units.format_rate(path['line_rate_bps'])}"
        f" ({path['operation']})"
    )


def _number(key: str, number: Number) -> dict[str, Any]:
    return {
        "key": key,
        "value": number.value,
        "kind": number.kind.value,
        "source": number.source,
        "range": None if number.range is None else list(number.range),
    }


def _number_line(number: dict[str, Any]) -> str:
    tried = f", range {number['range'][0]} to {number['range'][1]}" if number["range"] else ""
    return f"{number['key']}: {number['value']} ({number['kind']}: {number['source']}{tried})"


def _kinds(machine: Machine) -> dict[str, int]:
    found = [number.kind for _, number in schema.numbers(machine.topology)]
    return {kind.value: found.count(kind) for kind in Kind}
