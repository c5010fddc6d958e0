"""Topology files as plain data: strict YAML, and presets as differences.

Owns reading one file and its ``base`` chain, and remembers which file each key came from, so that
an error can name it. Does not own what the keys mean. The YAML is a strict subset, because a
topology must not mean something else than it says: repeated keys, anchors, and YAML 1.1's surprises
(``010`` is eight, ``1:30`` is ninety, ``no`` is false) are refused or plain text.

``base: other.yaml`` (relative to the file that says it) starts from another file: mappings are
merged key by key, everything else is replaced. A number is replaced whole, so that a new value
never keeps an old source.
"""

from __future__ import annotations

import os
import re
from collections.abc import Hashable
from typing import Any

import msgspec
import yaml

from cmnet.errors import InputError

Key = tuple[str | int, ...]
_STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]")
_FILE_BYTES_MAX = 1 << 20
"""A topology is some kilobytes; a larger file was meant for something else."""


class Shown:
    """A value in an error message that is no literal: what is missing, or too long to print."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


MISSING = Shown("(missing)")


def parse_key(key: str) -> Key:
    """Steps of a dotted key.

    >>> parse_key("roles.prefill[0][1]")
    ('roles', 'prefill', 0, 1)
    """
    return tuple(name or int(index) for name, index in _STEP.findall(key))


class Document(msgspec.Struct, frozen=True):
    """Merged data of a file and its bases."""

    file: str
    text: str
    data: dict[str, Any]
    origins: dict[Key, str]

    def error(self, key: str, expected: str, value: object = None) -> InputError:
        """The InputError for a key; ``value`` is looked up unless given."""
        shown = self._value(key) if value is None else value
        if len(repr(shown)) > 80:
            shown = Shown(f"{repr(shown)[:76]} ...")
        return InputError(file=self._file_of(key), key=key, value=shown, expected=expected)

    def _value(self, key: str) -> object:
        value: Any = self.data
        for step in parse_key(key):
            try:
                value = value[step]
            except (KeyError, IndexError, TypeError):
                return MISSING
        return value

    def _file_of(self, key: str) -> str:
        steps = parse_key(key)
        for length in range(len(steps), 0, -1):
            if steps[:length] in self.origins:
                return self.origins[steps[:length]]
        return self.file


def read(file: str) -> Document:
    """Read a file and what it is based on. Raises InputError."""
    return _read(file, above=())


def _read(file: str, *, above: tuple[str, ...]) -> Document:
    text = _text(file)
    data = parse(file, text)
    if "base" not in data:
        return Document(file=file, text=text, data=data, origins=_origins(data, file))
    base = _base(file, data.pop("base"), above=(*above, os.path.realpath(file)))
    merged = _merge(base.data, data)
    dump = yaml.safe_dump(merged, sort_keys=False, allow_unicode=True, width=100)
    given = base.origins | _origins(data, file)
    origins = {key: given[key] for key in _origins(merged, file)}
    return Document(file=file, text=dump, data=merged, origins=origins)


def _base(file: str, base: object, *, above: tuple[str, ...]) -> Document:
    if not isinstance(base, str) or not base:
        raise InputError(file=file, key="base", value=base, expected="the name of another file")
    path = os.path.join(os.path.dirname(file), base)
    if not os.path.isfile(path):
        expected = f"an existing file, relative to {file}"
        raise InputError(file=file, key="base", value=base, expected=expected)
    if os.path.realpath(path) in above:
        raise InputError(file=file, key="base", value=base, expected="a file not based on this one")
    return _read(path, above=above)


def _text(file: str) -> str:
    try:
        with open(file, "rb") as stream:
            content = stream.read(_FILE_BYTES_MAX + 1)
    except (OSError, ValueError) as error:
        reason = Shown(getattr(error, "strerror", None) or str(error))
        expected = "a topology file that can be read"
        raise InputError(file=file, key="", value=reason, expected=expected) from None
    if len(content) > _FILE_BYTES_MAX:
        size = Shown("a file of more than 1 MiB")
        raise InputError(file=file, key="", value=size, expected="a topology, some KiB of YAML")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        at = Shown(f"byte 0x{content[error.start]:02x} at offset {error.start}")
        raise InputError(file=file, key="", value=at, expected="text in UTF-8") from None


def parse(file: str, text: str) -> dict[str, Any]:
    """The mapping that a text holds; ``file`` is named in errors. Raises InputError."""
    try:
        data = yaml.load(text, Loader=_StrictLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = Shown(error.problem or "not YAML")
        raise InputError(file=file, key=where, value=problem, expected="well-formed YAML") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        problem = Shown(str(error).splitlines()[0])
        raise InputError(file=file, key="", value=problem, expected="well-formed YAML") from None
    if isinstance(data, dict):
        return data
    found = Shown("an empty file") if data is None else data
    expected = "a mapping with the keys name, machine, planes, roles"
    raise InputError(file=file, key="", value=found, expected=expected)


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict)
        number = both and ("value" in value or "value" in base[key])
        merged[key] = _merge(base[key], value) if both and not number else value
    return merged


def _origins(data: Any, file: str, at: Key = ()) -> dict[Key, str]:
    """Which keys this file gives: every mapping, list and leaf."""
    origins: dict[Key, str] = {at: file} if at else {}
    if isinstance(data, dict):
        for key, value in data.items():
            origins |= _origins(value, file, (*at, key))
    return origins


class _StrictLoader(yaml.SafeLoader):
    """PyYAML's safe loader without anchors, repeated keys and YAML 1.1's implicit types."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()  # type: ignore[no-untyped-call]  # PyYAML's, untyped
        if getattr(event, "anchor", None) is not None:
            problem = "an anchor or alias, which a topology must write out"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if key_node.tag != "tag:yaml.org,2002:str":
                problem = "a key that is no text"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key_node.start_mark)
            if key_node.value in seen:
                problem = f"the key {key_node.value!r} given twice"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key_node.start_mark)
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


_IMPLICIT = (
    ("bool", r"true|false", "tf"),
    ("int", r"-?(?:0|[1-9][0-9]*)", "-0123456789"),
    ("float", r"-?(?:0|[1-9][0-9]*)\.[0-9]+(?:[eE][-+]?[0-9]+)?", "-0123456789"),
    ("null", r"~|null", "~n"),
)
_StrictLoader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in _IMPLICIT:
    _StrictLoader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), list(_first)
    )
_StrictLoader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"\Z"), [""])
