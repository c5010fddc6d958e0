"""Loading a topology: file to Machine, or an InputError that says what would be right.

Owns the translation of every error into file, dotted key, value and expectation. Opens one file and
its bases, resolves nothing else. Nothing is clamped or ignored: unknown keys are refused, with the
nearest known one.
"""

from __future__ import annotations

import difflib
import enum
import re
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from cmnet.topology import document, schema
from cmnet.topology.document import Document
from cmnet.topology.machine import Machine
from cmnet.topology.quantity import Count, FieldError, Quantity

_AT = re.compile(r"(?P<what>.*?)(?: - at `\$(?P<path>.*)`)?", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_ABSENT = re.compile(r"Object missing required field `(.*)`")
_INVALID = re.compile(r"Invalid enum value '?(.*?)'?", re.DOTALL)
_MISMATCH = re.compile(r"Expected `[^`]*`, got `[^`]*`")
_STEP = re.compile(r"([^.\[\]]+)|\[(\d+|\.\.\.)\]")
_WORDS = {
    "str": "text (in quotes, if it looks like a number)",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
}
_T = TypeVar("_T", bound=msgspec.Struct)


def load(path: str, *, extensions: Mapping[str, type[msgspec.Struct]] | None = None) -> Machine:
    """Read, check and number a topology. Raises InputError.

    ``extensions`` gives the struct of each further section that the caller knows; an absent section
    gets the struct's defaults. Such a struct may have ``check_machine(machine)``, which is called
    last and raises FieldError. Sections of other known names stay unchecked, in ``raw_sections``.
    """
    return build(document.read(path), extensions=extensions or {})


def build(read: Document, *, extensions: Mapping[str, type[msgspec.Struct]]) -> Machine:
    """``load`` for data already read."""
    names = {*schema.EXTENSION_SECTIONS, *extensions}
    own = {key: value for key, value in read.data.items() if key not in names}
    topology = _convert(read, own, schema.Topology, "", known=tuple(sorted(names)))
    try:
        machine = Machine(topology, file=read.file, text=read.text)
    except FieldError as error:
        raise read.error(error.field, error.expected) from None
    for name in sorted(names & {*read.data, *extensions}):
        _extend(machine, read, name, extensions.get(name))
    return machine


def _extend(
    machine: Machine, read: Document, name: str, struct: type[msgspec.Struct] | None
) -> None:
    if struct is None:
        machine.raw_sections[name] = read.data[name]
        return
    assert struct.__struct_config__.forbid_unknown_fields, f"{struct.__name__} would ignore slips"
    section = _convert(read, read.data.get(name, {}), struct, name)
    machine.sections[name] = section
    check_machine = getattr(section, "check_machine", None)
    if check_machine is None:
        return
    try:
        check_machine(machine)
    except FieldError as error:
        raise read.error(f"{name}.{error.field}", error.expected) from None


def _convert(
    read: Document, data: object, struct: type[_T], prefix: str, known: tuple[str, ...] = ()
) -> _T:
    try:
        return msgspec.convert(data, struct)
    except msgspec.ValidationError as error:
        key, expected = _explain(error, struct, known if not prefix else ())
        raise read.error(".".join(filter(None, (prefix, key))), expected) from None


def _explain(
    error: msgspec.ValidationError, struct: type[msgspec.Struct], known: tuple[str, ...]
) -> tuple[str, str]:
    """Key (relative to ``struct``) and what would be right there."""
    match = _AT.fullmatch(str(error))
    assert match is not None
    what, path = match["what"], (match["path"] or "").lstrip(".")
    if isinstance(cause := error.__cause__, FieldError):
        return _join(path, cause.field), cause.expected
    if isinstance(cause, ValueError):
        return path, str(cause)
    if (unknown := _UNKNOWN.fullmatch(what)) is not None:
        names = (*_field_names(_type_at(struct, path)), *(known if not path else ()))
        return _join(path, unknown[1]), _one_of(names, unknown[1])
    if (absent := _ABSENT.fullmatch(what)) is not None:
        path = _join(path, absent[1])
        return path, _describe(struct, path)
    if (invalid := _INVALID.fullmatch(what)) is not None:
        return path, _one_of([str(member.value) for member in _type_at(struct, path)], invalid[1])
    if what.startswith("Expected `array` of length") or _MISMATCH.fullmatch(what) is None:
        return path, what.removeprefix("Expected ").replace("`array`", "a list")
    return path, _describe(struct, path)


def _join(path: str, field: str) -> str:
    return f"{path}.{field}" if path else field


def _one_of(names: Iterable[str], given: str) -> str:
    close = difflib.get_close_matches(given, names, n=1)
    text = f"one of {', '.join(names)}"
    return f"{text}; did you mean {close[0]!r}?" if close else text


def _field_names(struct: Any) -> list[str]:
    return [field.encode_name for field in msgspec.structs.fields(struct)]


def _type_at(struct: type[msgspec.Struct], path: str) -> Any:
    """The declared type at a path that msgspec reports; None where it cannot be told."""
    found: Any = struct
    for name, index in _STEP.findall(path):
        found = _without_none(found)
        if not index and isinstance(found, type) and issubclass(found, msgspec.Struct):
            fields = {field.encode_name: field.type for field in msgspec.structs.fields(found)}
            found = fields.get(name)
        else:
            inner = [each for each in typing.get_args(found) if each is not Ellipsis]
            found = inner[-1] if inner else None
    return _without_none(found)


def _without_none(declared: Any) -> Any:
    while hasattr(declared, "__metadata__"):
        declared = declared.__origin__
    if isinstance(declared, types.UnionType) or typing.get_origin(declared) is typing.Union:
        inner = [each for each in typing.get_args(declared) if each is not type(None)]
        return inner[0] if len(inner) == 1 else None
    return declared


def _describe(struct: type[msgspec.Struct], path: str) -> str:
    """What is right at a path, in words."""
    parent, _, name = path.rpartition(".")
    above = _type_at(struct, parent)
    if name == "value" and isinstance(above, type) and issubclass(above, Quantity):
        return _unit_words(above)
    declared = _type_at(struct, path)
    if not isinstance(declared, type):
        return "a list" if typing.get_origin(declared) in (list, tuple) else "another value"
    if issubclass(declared, (Quantity, Count)):
        example = declared.example
        shown = f'"{example}"' if isinstance(example, str) else str(example)
        return f'a number with its source, {{value: {shown}, kind: published, source: "..."}}'
    if issubclass(declared, msgspec.Struct):
        return f"a mapping with the keys {', '.join(_field_names(declared))}"
    if issubclass(declared, enum.Enum):
        return f"one of {', '.join(str(member.value) for member in declared)}"
    return _WORDS.get(declared.__name__, declared.__name__)


def _unit_words(quantity: type[Quantity]) -> str:
    try:
        quantity.parse("")
    except ValueError as error:
        return f"{error} (in quotes)"
    raise AssertionError("a quantity without a unit")
