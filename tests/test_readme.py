"""What the README says is so: its commands run, its examples work, its tables are those of the code.

A fence's info string says what is done with the block. ``sh run``: run, in the order of the text and in
one folder; an unmarked block right after it shows lines of its output. ``sh parse``: long, so the
command line is read and everything before the run is done. ``sh``: targets of make. ``yaml plan``,
``yaml topology``, ``python test``: taken as such.
"""

from __future__ import annotations

import inspect
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, NoReturn

import pytest

import run
from cmnet import errors
from cmnet.chaos import fault, plan
from cmnet.topology.load import load
from cmnet.topology.quantity import Kind
from nodes.constants import CONSTANTS
from nodes.serving import command, options
from nodes.serving.job import EXTENSIONS
from tests.rig import machine

ROOT = Path(run.__file__).resolve().parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^```(.*)\n((?:.*\n)*?)```$", re.MULTILINE)
MINI = str(ROOT / "topologies" / "mini.yaml")
ROW = '{"timestamp": 0, "input_length": 700, "output_length": 2, "hash_ids": [1, 2]}\n'
INSIDE = ("cmnet/", "nodes/", "planes/", "tests/", "topologies/")
COMMON_KEYS = {"at", "for", "target", "kind"}


def blocks(info: str) -> list[str]:
    """The fenced blocks with this info string."""
    return [match[2] for match in FENCE.finditer(TEXT) if match[1] == info]


def runnable() -> list[tuple[str, list[str]]]:
    """(commands, lines that their output must have) of each ``sh run`` block."""
    found = []
    for match in FENCE.finditer(TEXT):
        if match[1] == "sh run":
            after = FENCE.match(TEXT, match.end() + 2)
            shown = after[2].splitlines() if after is not None and not after[1] else []
            found.append((match[2], shown))
    return found


def words() -> set[str]:
    """Everything in backquotes outside of blocks."""
    return set(re.findall(r"`([^`]+)`", FENCE.sub("", TEXT)))


def rows(heading: str) -> list[list[str]]:
    """The cells of the table whose header begins so, without backquotes."""
    lines = TEXT.partition(f"\n| {heading} |")[2].splitlines()[2:]
    table = []
    for line in lines:
        if not line.startswith("|"):
            break
        table.append([cell.strip() for cell in line[1:-1].replace("`", "").split("|")])
    assert table, f"no table {heading!r}"
    return table


def quoted_after(start: str) -> list[str]:
    """The words in backquotes from ``start`` to the end of its sentence."""
    text = TEXT.partition(start)[2]
    assert text, start
    return re.findall(r"`([^`]+)`", re.split(r"\.\s|\.$|\n\n", text, maxsplit=1)[0])


# --- what runs -----------------------------------------------------------------------------------


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a user has: the project's files here, ``python`` on the path, an own ``runs/``."""
    for name in ("run.py", "topologies", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return tmp_path


@pytest.mark.slow
@pytest.mark.machine
def test_the_commands_run_and_print_what_is_shown(workspace: Path) -> None:
    """All with status 0. What is shown is exact, so it holds on any machine."""
    assert sum(bool(shown) for _, shown in runnable()) == 2
    for commands, shown in runnable():
        ended = subprocess.run(
            ["bash", "-euc", commands], capture_output=True, text=True, timeout=240
        )
        assert ended.returncode == 0, f"{commands}\n{ended.stdout}\n{ended.stderr}"
        said = [line.strip() for line in ended.stdout.splitlines()]
        assert [line for line in shown if line.strip() not in said] == [], ended.stdout


@pytest.mark.soak
@pytest.mark.machine
def test_a_whole_run_prints_what_is_shown() -> None:
    """Every line but the wall times of the first. Where this fails, paste anew."""
    (block,) = [text for text in blocks("") if text.startswith("topologies/cloudmatrix384.yaml")]
    ended = subprocess.run(
        [sys.executable, "run.py"], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    first, *shown = block.splitlines()
    assert first.partition(" virtual in ")[0] in ended.stdout
    said = {line.strip() for line in ended.stdout.splitlines()} | {"..."}
    assert [line for line in shown if line.strip() not in said] == [], ended.stdout


def test_the_long_commands_are_read_up_to_the_run(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trace's name in the text stands for a file that the user has."""

    class Started(Exception):
        pass

    def started(*_: object) -> NoReturn:
        raise Started

    monkeypatch.setattr(command, "run", started)
    for line in "".join(blocks("sh parse")).splitlines():
        first, script, *arguments = shlex.split(line)
        assert (first, script) == ("python", "run.py")
        Path(arguments[arguments.index("--trace") + 1]).write_text(ROW)
        with pytest.raises(Started):
            run.main(arguments)


def test_the_targets_of_make_exist() -> None:
    lines = [line.split("#")[0].split() for line in "".join(blocks("sh")).splitlines()]
    targets = {word for make, word in lines if make == "make"} | set(quoted_after("`make`: "))
    made = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert made is not None
    assert targets == set(made[1].split())


def test_the_example_test_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both of its tests, from the project's folder as one would type it there."""
    (example,) = blocks("python test")
    monkeypatch.chdir(ROOT)
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(example, "README.md", "exec", dont_inherit=True), names)
    found = [value for name, value in names.items() if name.startswith("test_")]
    assert len(found) == 2
    for number, test in enumerate(found):
        folder = tmp_path / str(number)
        folder.mkdir()
        test(folder)


def test_the_example_plan_and_all_plans_named_are_right() -> None:
    """On the smallest machine with every role; and no plan in the folder is left unnamed."""
    (example,) = blocks("yaml plan")
    assert len(plan.parse(example, file="README.md", machine=machine("mini")).faults) == 4
    named = {word for word in words() if word.startswith("tests/plans/") and word[-1] != "/"}
    assert named == {f"tests/plans/{path.name}" for path in (ROOT / "tests/plans").glob("*.yaml")}
    for name in named:
        assert plan.load(str(ROOT / name), machine("mini")).faults


def test_the_example_topology_changes_what_it_says(workspace: Path) -> None:
    """And nothing else of what it is based on."""
    (example,) = blocks("yaml topology")
    Path("far.yaml").write_text(example)
    far, mini = (load(file, extensions=EXTENSIONS) for file in ("far.yaml", MINI))
    assert far.sections["model"] != mini.sections["model"]
    assert far.sections["serving"] != mini.sections["serving"]
    paths = {path.key: path for _, _, path in far.paths()}
    before = {path.key: path for _, _, path in mini.paths()}
    assert [key for key in paths if paths[key] != before[key]] == ["planes.rdma"]


# --- tables and lists ----------------------------------------------------------------------------


def kinds_of_error() -> dict[str, type[errors.CmnetError]]:
    classes = [each for each in vars(errors).values() if inspect.isclass(each)]
    return {each.code: each for each in classes if issubclass(each, errors.CmnetError)}


def test_the_table_of_errors_is_the_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Codes, classes, and the status with which the command line ends on each."""
    classes = kinds_of_error()
    table = rows("code")
    expected = [(code, kind.__name__) for code, kind in classes.items() if code != "CMNET"]
    assert [(code, name) for code, name, _, _ in table] == expected

    for code, _, _, status in table:

        def raises(*_: object, code: str = code, **__: object) -> NoReturn:
            raise classes[code].__new__(classes[code])

        monkeypatch.setattr(run, "app", raises)
        assert run.main(["report", "x"]) == int(status), code
    capsys.readouterr()


def test_the_table_of_faults_is_the_vocabulary_of_plans() -> None:
    """Every kind, with the keys that it takes beside those of all."""
    table = {kind: set(keys.split()) for kind, keys, _ in rows("kind")}
    known = (*fault.NODE_KINDS, *fault._KINDS)
    assert list(table) == list(known)
    assert table == {kind: set(fault._keys(kind)) - COMMON_KEYS for kind in known}
    assert set(quoted_after("Refused, not built yet: ")) == set(fault.NOT_BUILT_YET)


def test_the_commands_and_options_are_those_of_run_py() -> None:
    """What exists, and what is refused by name."""
    known = {
        (each.name or getattr(each.callback, "__name__", "")): each.hidden
        for each in run.app.registered_commands
    }
    table = [cell.split()[0] for cell, _ in rows("command")]
    assert table == [name for name, hidden in known.items() if not hidden]
    refused = quoted_after("refused with status 2: ")
    assert {word for word in refused if word[0] != "-"} == set(run.NOT_BUILT)
    assert {word for word in refused if word[0] == "-"} == set(map(flag, options.LATER))
    assert set(quoted_after("Options of `serve`: ")) == {*map(flag, options.NAMES), "--json"}


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def test_every_kind_of_number_is_explained() -> None:
    """And how many are fitted, and the lookahead."""
    listed = ", ".join(kind.value for kind in Kind).capitalize()
    assert f"**{listed}.**" in TEXT
    fitted = sum(constant.kind is Kind.FITTED for constant in CONSTANTS)
    assert f"({fitted} numbers, listed in each report)" in " ".join(TEXT.split())
    assert f"({machine('cloudmatrix384').lookahead.lookahead_ps:,} ps here)" in TEXT


# --- files ---------------------------------------------------------------------------------------


def test_every_file_named_exists() -> None:
    """In the text and in the map of the code; and the map leaves no package out."""
    (block,) = [text for text in blocks("") if text.startswith("run.py ")]
    mapped = {line.split()[0] for line in block.splitlines()}
    named = {word for word in words() if word.startswith(INSIDE) and " " not in word}
    assert [name for name in sorted(named | mapped) if not (ROOT / name).exists()] == []
    packages = {
        f"{path.parent.relative_to(ROOT)}/"
        for part in ("cmnet", "planes", "nodes")
        for path in (ROOT / part).rglob("__init__.py")
    }
    assert packages <= mapped


def test_the_changelog_begins_with_this_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == version
