"""A plan file as a list of entries, each a mapping of text to text.

Owns reading the YAML. Does not own what a key means (plan.py). Every scalar stays the text that was
written, so that 0.1 is exactly one tenth and neither ``no`` nor ``1:30`` becomes something else;
repeated keys, anchors and nested values are refused.
"""

from __future__ import annotations

from typing import Any

import yaml

from cmnet.errors import InputError

Entry = dict[str, str]

_FILE_BYTES_MAX = 1 << 20
"""A plan is some kilobytes; a larger file was meant for something else."""


class _TextLoader(yaml.BaseLoader):
    """BaseLoader makes every scalar text; this one also refuses what would be lost silently."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]  # PyYAML's, untyped
            raise yaml.MarkedYAMLError(problem="an alias (write the value out)", problem_mark=mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.value in seen:
                name = repr(key.value) if isinstance(key, yaml.ScalarNode) else "that is no text"
                problem = f"key {name} (each key is a text and comes once)"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def read(file: str) -> str:
    """The text of a plan file. Raises InputError."""
    try:
        with open(file, "rb") as stream:
            content = stream.read(_FILE_BYTES_MAX + 1)
        text = content.decode("utf-8")
    except OSError as error:
        raise _wrong(file, error.strerror, "a plan file that can be read") from None
    except UnicodeDecodeError as error:
        raise _wrong(file, str(error), "text in UTF-8") from None
    if len(content) > _FILE_BYTES_MAX:
        raise _wrong(file, "more than 1 MiB", "a plan, some KiB of YAML")
    return text


def parse(text: str, *, file: str) -> list[Entry]:
    """The entries of a plan's text, in its order. Raises InputError that names fault and key."""
    data = _yaml(text, file)
    if not isinstance(data, list):
        shown = f"a mapping with the keys {', '.join(data)}" if isinstance(data, dict) else data
        raise _wrong(file, shown, "a list of faults: '- {at: ..., target: ..., kind: ...}'")
    for number, entry in enumerate(data, start=1):
        _check_entry(entry, file=file, key=f"fault {number}")
    return data


def _yaml(text: str, file: str) -> Any:
    try:
        return yaml.load(text, Loader=_TextLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        key = f"line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise _wrong(file, error.problem, "well-formed YAML", key=key) from None
    except (yaml.YAMLError, RecursionError) as error:
        raise _wrong(file, str(error).splitlines()[0], "well-formed YAML") from None


def _check_entry(entry: object, *, file: str, key: str) -> None:
    if not isinstance(entry, dict):
        raise _wrong(file, entry, "a mapping with the keys at, target, kind", key=key)
    for name, value in entry.items():
        if not isinstance(value, str):
            raise _wrong(file, value, "one value, not a list or a mapping", key=f"{key}: {name}")


def _wrong(file: str, value: object, expected: str, *, key: str = "") -> InputError:
    return InputError(file=file, key=key, value=value, expected=expected)
