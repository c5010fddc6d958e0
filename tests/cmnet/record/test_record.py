"""Records of runs: what is written is what is read, and a run is found by path or name."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from cmnet.errors import InputError
from cmnet.record import record
from cmnet.record.record import Death, Outcome, Record
from cmnet.topology import load

TOPOLOGIES = Path(__file__).resolve().parents[3] / "topologies"


def make() -> Record:
    machine = load.load(str(TOPOLOGIES / "mini.yaml"))
    return Record(
        command="serve",
        command_line=["serve", "--seed", "7"],
        topology_file=machine.file,
        topology_text=machine.text,
        seed=7,
        plan={},
        options={"rate": "1/3"},
    )


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """A replay knows a run by its record alone."""
    death = Death(node="node03", at_ps=2**62, planned=False)
    ended = msgspec.structs.replace(make(), outcome=Outcome(digest="ab", deaths=[death]))
    record.write(tmp_path, ended)
    assert record.read(tmp_path) == ended
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]


def test_the_machine_of_a_record_is_the_one_that_ran(tmp_path: Path) -> None:
    """The text holds what the bases said, so that a change of any file changes no replay."""
    machine = record.machine(make())
    again = load.load(str(TOPOLOGIES / "mini.yaml"))
    assert machine.devices == again.devices
    assert machine.paths() == again.paths()


def test_a_run_is_found_by_path_and_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names are those of folders in runs/, as reports print them."""
    monkeypatch.chdir(tmp_path)
    folder = Path("runs/one")
    folder.mkdir(parents=True)
    record.write(folder, make())
    assert record.find("one") == record.find("runs/one") == folder
    with pytest.raises(InputError, match="the last is one"):
        record.find("two")
    with pytest.raises(InputError):
        record.find("")


def test_a_record_of_another_format_is_refused(tmp_path: Path) -> None:
    """It may mean something else."""
    record.write(tmp_path, msgspec.structs.replace(make(), format=99))
    with pytest.raises(InputError, match="format: 99"):
        record.read(tmp_path)


def test_a_claimed_folder_has_what_a_run_needs(tmp_path: Path) -> None:
    """New, or there and empty; never one with something in it."""
    for folder in (tmp_path / "a" / "b", tmp_path / "c"):
        assert record.claim(folder) == folder
        assert sorted(path.name for path in folder.iterdir()) == sorted(record.INSIDE)
        with pytest.raises(InputError, match="an empty folder"):
            record.claim(folder)


def test_runs_end_alike_by_digest_and_kind_of_end() -> None:
    """Wall times never count; an error without a digest is compared by its code."""
    one = Outcome(digest="a", wall_s=1.0)
    assert one.ended_like(Outcome(digest="a", wall_s=2.0, windows=3))
    assert not one.ended_like(Outcome(digest="b"))
    assert not Outcome(error_code="SPIN").ended_like(Outcome())


def test_what_was_told_differently_is_named() -> None:
    """The first question about two runs that differ."""
    other = msgspec.structs.replace(make(), seed=8, command_line=["serve"])
    assert record.differences(make(), make()) == []
    assert record.differences(make(), other) == ["seed"]


@pytest.mark.parametrize("data", [b"", b'{"a', b"junk", b'{"a": "\xff"}', b"[]", None])
def test_a_damaged_file_of_a_run_is_named(tmp_path: Path, data: bytes | None) -> None:
    path = tmp_path / "counts.json"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(InputError, match=r"counts\.json.*what was counted"):
        record.decoded(path, dict[str, int], expected="what was counted")
