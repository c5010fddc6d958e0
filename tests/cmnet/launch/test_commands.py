"""``topology``: what it prints, for people and for programs."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from cmnet.launch import commands
from cmnet.record.screen import Screen
from cmnet.topology.load import load
from cmnet.topology.machine import Machine


@pytest.fixture(scope="module")
def machine() -> Machine:
    return load(str(Path(__file__).resolve().parents[3] / "topologies" / "mini.yaml"))


def test_a_topology_is_told_to_people(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    """Roles, one-way times, what sets the lookahead, and the source of each number."""
    assert commands.topology(machine, Screen(json=False), check=False) == 0
    told = capsys.readouterr().out
    for words in ("decode: node02..node03", "one way 948.439 ns", "lookahead: ", "N17: measured"):
        assert words in told


def test_a_topology_is_one_object_for_programs(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same facts, exact."""
    assert commands.topology(machine, Screen(json=True), check=False) == 0
    told = capsys.readouterr()
    found = msgspec.json.decode(told.out)
    assert found["lookahead"]["lookahead_ps"] == machine.lookahead.lookahead_ps
    assert found["machine"]["nodes"] == 4


def test_a_check_is_one_line(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    """For scripts that only want to know; the status says it too."""
    assert commands.topology(machine, Screen(json=False), check=True) == 0
    assert capsys.readouterr().out == f"{machine.file}: right (mini)\n"
