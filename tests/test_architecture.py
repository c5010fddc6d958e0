"""The shape of the code, as a test: layers, pure modules, owners of side effects, lengths, docstrings.

The tables below are the architecture. To change it, change a table, with the reason in the commit.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cmnet import errors

Rule = Callable[[str], list[str]]

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("cmnet", "planes", "nodes")
FUNCTION_LINES_MAX = 70
MODULE_LINES_MAX = 500

MUST_NOT_IMPORT = {"cmnet": ("planes", "nodes"), "planes": ("nodes",), "nodes": ()}
"""Imports point down only."""

SIDE_EFFECTS = (
    "asyncio",
    "uvloop",
    "socket",
    "selectors",
    "time",
    "threading",
    "subprocess",
    "lmdb",
    "select",
    "signal",
    "ctypes",
)
PURE = (
    "cmnet/units.py",
    "cmnet/errors.py",
    "cmnet/entropy.py",
    "cmnet/link/",
    "cmnet/topology/",
    "cmnet/chaos/plan.py",
    "cmnet/launch/closing.py",
    "cmnet/vtime/agenda.py",
    "cmnet/vtime/horizon.py",
    "cmnet/vtime/stall.py",
    "cmnet/vtime/window.py",
    "cmnet/wire/control.py",
    "cmnet/wire/frames.py",
    "cmnet/wire/pool.py",
    "nodes/constants.py",
    "nodes/ems/device.py",
    "nodes/ems/placement.py",
    "nodes/ems/record.py",
    "nodes/kv/groups.py",
    "nodes/model/",
    "nodes/moe/arrivals.py",
    "nodes/moe/buffers.py",
    "nodes/moe/detector.py",
    "nodes/moe/eplb.py",
    "nodes/moe/kernels.py",
    "nodes/moe/layout.py",
    "nodes/moe/moving.py",
    "nodes/moe/operators.py",
    "nodes/moe/placement.py",
    "nodes/moe/published.py",
    "nodes/moe/rebalancing.py",
    "nodes/moe/refill.py",
    "nodes/moe/sending.py",
    "nodes/moe/sweep.py",
    "nodes/moe/table.py",
    "nodes/moe/waits.py",
    "nodes/serving/cost.py",
    "nodes/serving/decoding.py",
    "nodes/serving/percentiles.py",
    "nodes/serving/sequences.py",
    "nodes/serving/settings.py",
    "nodes/serving/timeline.py",
    "nodes/serving/workload.py",
    "nodes/settings.py",
    "planes/vpc_halves.py",
    "planes/vpc_stream.py",
)
"""Data in, data out; the caller brings the time. They import nothing of SIDE_EFFECTS."""

OWNERS = {
    "lmdb": ("nodes/ems/",),
    "socket": ("cmnet/launch/", "cmnet/vtime/", "cmnet/wire/", "planes/vpc_sockets.py"),
    "select": ("cmnet/launch/", "cmnet/wire/"),
    "ctypes": ("cmnet/launch/deathsig.py",),
    "selectors": (),
    "uvloop": ("cmnet/launch/", "cmnet/vtime/"),
    "aiohttp": ("cmnet/console/", "nodes/serving/", "planes/vpc_aiohttp.py"),
    "time": ("cmnet/launch/", "cmnet/record/", "cmnet/vtime/"),
    "threading": ("cmnet/launch/", "cmnet/vtime/", "nodes/ems/engine.py"),
    "subprocess": ("cmnet/launch/",),
    "signal": ("cmnet/launch/", "cmnet/vtime/"),
    "multiprocessing": (),
    "random": (),
    "secrets": ("cmnet/launch/",),
    "pickle": (),
}
"""Who alone may import a module with side effects: a file, or a folder that ends in /."""

BUILTINS = {
    "hash": (),
    "id": (),
    "eval": (),
    "exec": (),
    "print": ("cmnet/record/", "cmnet/launch/", "cmnet/testing.py"),
}
"""Who alone may call a builtin: results would depend on a process's addresses or hash seed."""


def sources() -> list[str]:
    paths = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return sorted(str(path.relative_to(ROOT)) for path in paths)


@functools.cache
def tree(source: str) -> ast.Module:
    return ast.parse((ROOT / source).read_text(encoding="utf-8"), source)


def imported(source: str) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything imported, also inside functions and under TYPE_CHECKING."""
    for node in ast.walk(tree(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def listed(source: str, entries: tuple[str, ...]) -> bool:
    return any(
        source == entry or (entry[-1] == "/" and source.startswith(entry)) for entry in entries
    )


def layer_violations(source: str) -> list[str]:
    banned = MUST_NOT_IMPORT[source.split("/")[0]]
    return [
        f"{source}:{line}: {name}"
        for line, name in imported(source)
        if name.split(".")[0] in banned
    ]


def purity_violations(source: str) -> list[str]:
    if not listed(source, PURE):
        return []
    found = imported(source)
    return [
        f"{source}:{line}: {name}" for line, name in found if name.split(".")[0] in SIDE_EFFECTS
    ]


def owner_violations(source: str) -> list[str]:
    return [
        f"{source}:{line}: {name}"
        for line, name in imported(source)
        if not listed(source, OWNERS.get(name.split(".")[0], (source,)))
    ]


def builtin_violations(source: str) -> list[str]:
    return [
        f"{source}:{node.lineno}: {node.func.id}()"
        for node in ast.walk(tree(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if not listed(source, BUILTINS.get(node.func.id, (source,)))
    ]


def length_violations(source: str) -> list[str]:
    lines = len((ROOT / source).read_text(encoding="utf-8").splitlines())
    found = [f"{source}: {lines} lines"] if lines > MODULE_LINES_MAX else []
    for node in ast.walk(tree(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            lines = node.end_lineno - node.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                found.append(f"{source}:{node.lineno}: {node.name} has {lines} lines")
    return found


def docstring_violations(source: str) -> list[str]:
    return [] if ast.get_docstring(tree(source)) else [source]


RULES: dict[str, Rule] = {
    "layer_violations": layer_violations,
    "purity_violations": purity_violations,
    "owner_violations": owner_violations,
    "builtin_violations": builtin_violations,
    "length_violations": length_violations,
    "docstring_violations": docstring_violations,
}


@pytest.mark.parametrize("name", RULES)
def test_no_module_breaks_the_rule(name: str) -> None:
    """The whole tree, so that a new file is held to the rules without being listed anywhere."""
    assert [violation for source in sources() for violation in RULES[name](source)] == []


BAD = {
    "layer_violations": ("cmnet/x.py", "def f():\n    import nodes.kv"),
    "purity_violations": ("cmnet/link/x.py", "from time import monotonic"),
    "owner_violations": ("planes/x.py", "import lmdb"),
    "builtin_violations": ("nodes/x.py", "hash('a')"),
    "length_violations": ("nodes/x.py", "def f():\n" + "    pass\n" * FUNCTION_LINES_MAX),
    "docstring_violations": ("nodes/x.py", "import os"),
}


@pytest.mark.parametrize("name", RULES)
def test_the_rule_sees_a_module_that_breaks_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rule can fail: it is given a module that breaks it and nothing else."""
    source, text = BAD[name]
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    tree.cache_clear()
    (tmp_path / source).parent.mkdir(parents=True)
    (tmp_path / source).write_text(text, encoding="utf-8")
    try:
        assert len(RULES[name](source)) == 1
    finally:
        tree.cache_clear()


def test_the_tables_name_what_is_there() -> None:
    """An entry for a file that was moved guards nothing; a module that calls itself pure is listed."""
    entries = {*PURE, *(path for paths in (*OWNERS.values(), *BUILTINS.values()) for path in paths)}
    entries -= {"cmnet/console/"}  # the console's owner of aiohttp, before there is a console
    assert [entry for entry in sorted(entries) if not (ROOT / entry).exists()] == []
    called = [s for s in sources() if "Pure." in (ast.get_docstring(tree(s)) or "")]
    assert [source for source in called if not source.startswith(PURE)] == []


def test_every_error_has_a_code_of_its_own_and_a_place_in_the_drawing() -> None:
    """Codes are printed and looked up: two classes with one code, or one that nobody described, mislead."""
    classes = [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, errors.CmnetError)
    ]
    assert len({cls.code for cls in classes}) == len(classes)
    assert errors.__doc__ is not None
    assert [cls.__name__ for cls in classes if cls.__name__ not in errors.__doc__] == []
