"""One digest, and the same number of windows and grants, whatever the host does (design 1.4)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cmnet.launch.supervisor import RunResult
from tests.machine import programs
from tests.machine.conftest import Runner
from tests.rig import machine

pytestmark = [pytest.mark.machine, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = {"end_us": 200}
Numbers = tuple[str, int, int, int]


def numbers(result: RunResult) -> Numbers:
    assert result.error == "" and not result.deaths
    return result.digest, result.windows, result.grants, result.virtual_ps


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Numbers:
    """What the run gives under no special conditions."""
    folder = tmp_path_factory.mktemp("expected")
    return numbers(Runner(folder)(programs.chatter, program=PROGRAM))


@pytest.fixture
def busy() -> Iterator[None]:
    """Two processes that do nothing but take time on the machine's cores."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    yield
    for loop in loops:
        loop.kill()
        loop.wait()


CONDITIONS: list[dict[str, Any]] = [
    {"start_order": "reverse"},
    {"start_order": "random"},
    {"socket_buffer_bytes": 4 << 10},
    {"socket_buffer_bytes": 64 << 10},
    {"journal": True},
]


@pytest.mark.parametrize("condition", CONDITIONS, ids=str)
def test_the_same_run_under_other_conditions(
    run: Runner, expected: Numbers, condition: dict[str, Any]
) -> None:
    assert numbers(run(programs.chatter, program=PROGRAM, **condition)) == expected


@pytest.mark.parametrize("hash_seed", ["0", "1", "random"])
def test_the_same_run_with_another_hash_seed(
    tmp_path: Path, expected: Numbers, hash_seed: str
) -> None:
    """Sets of strings and of tasks change their order; nothing of the run may."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.machine.once", "chatter", str(tmp_path), _settings()],
        cwd=ROOT,
        env=os.environ | {"PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    result = msgspec.json.decode(done.stdout.splitlines()[-1], type=RunResult)
    assert numbers(result) == expected


def _settings() -> str:
    return msgspec.json.encode({"program": PROGRAM}).decode()


def test_the_same_run_beside_busy_loops_and_small_buffers(
    run: Runner, expected: Numbers, busy: None
) -> None:
    result = run(
        programs.chatter, program=PROGRAM, start_order="random", socket_buffer_bytes=4 << 10
    )
    assert numbers(result) == expected


def test_another_seed_is_another_run(run: Runner, expected: Numbers) -> None:
    assert run(programs.chatter, program=PROGRAM, seed=1).digest != expected[0]


def test_journals_fold_to_nothing_else_than_the_digest(run: Runner, expected: Numbers) -> None:
    """Every line of a journal lies at or after the one before it, but for bundles, whose messages
    are written when the last is in; none lies beyond the end."""
    result = run(programs.chatter, program=PROGRAM, journal=True)
    for path in sorted(Path(result.folder, "journal").iterdir()):
        instants = [int(line.split()[0]) for line in path.read_text().splitlines()]
        if not path.name.startswith("gateway"):
            assert len(instants) > 50
        assert all(0 <= at_ps < result.virtual_ps + lookahead_ps() for at_ps in instants)


def lookahead_ps() -> int:
    return machine("mini").lookahead.lookahead_ps
