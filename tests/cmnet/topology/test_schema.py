"""Keys and limits: no number of a topology is without bounds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from cmnet.topology import schema
from cmnet.topology.quantity import NUMBERS, Number


def number_keys(
    struct: type[msgspec.Struct], prefix: str = ""
) -> Iterator[tuple[str, type[Number]]]:
    for field in msgspec.structs.fields(struct):
        declared: Any = field.type
        if declared in NUMBERS:
            yield prefix + field.name, declared
        elif isinstance(declared, type) and issubclass(declared, msgspec.Struct):
            yield from number_keys(declared, f"{prefix}{field.name}.")


def test_each_number_has_limits_of_its_own_unit() -> None:
    """A new number without limits would accept any slip of zeros or of unit."""
    keys = list(number_keys(schema.Topology))
    assert len(keys) == 60
    for key, sort in keys:
        low, high = schema.limits_of(key)
        assert 0 <= sort.parse(low) < sort.parse(high), key


def test_each_limit_is_the_first_match_of_some_number() -> None:
    """A pattern that never counts is a limit that someone believes in."""
    used = {
        next(
            index for index, (pattern, low, high) in enumerate(schema.LIMITS) if (low, high) == pair
        )
        for pair in (schema.limits_of(key) for key, _ in number_keys(schema.Topology))
    }
    first_of_pair = {
        next(i for i, limit in enumerate(schema.LIMITS) if limit[1:] == (low, high))
        for _, low, high in schema.LIMITS
    }
    assert used == first_of_pair


def test_every_mapping_refuses_unknown_keys_and_is_frozen() -> None:
    """Also those added later."""
    sections: list[type[msgspec.Struct]] = [schema.Topology, *_nested(schema.Topology)]
    assert len(sections) > 10
    for section in sections:
        config = section.__struct_config__
        assert config.frozen, section
        assert config.forbid_unknown_fields, section


def _nested(struct: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    for field in msgspec.structs.fields(struct):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield field.type
            yield from _nested(field.type)
