"""How runs end that do not simply finish: watchdogs, failures, Ctrl-C, a killed supervisor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from cmnet.launch import agent
from cmnet.launch.supervisor import NodeFault, RunResult, Supervisor
from cmnet.vtime import loop
from tests.machine import programs
from tests.machine.conftest import Runner, lives, wait_for
from tests.rig import machine

pytestmark = [pytest.mark.machine, pytest.mark.slow]

US = 1_000_000
ROOT = Path(__file__).resolve().parents[2]


def test_a_program_that_ends_ends_the_run(run: Runner) -> None:
    result = run(programs.quiet)
    assert (result.error, result.deaths) == ("", [])
    assert sorted(path.name for path in Path(result.folder, "statistics").iterdir()) == [
        "gateway.json",
        "node00.json",
        "node01.json",
        "node02.json",
        "node03.json",
    ]


@pytest.mark.parametrize(
    ("program", "limit"),
    [(programs.spins, loop.SPIN_LIMIT), (programs.spins_on_timers, 100_000)],
    ids=["spins", "spins_on_timers"],
)
def test_a_node_that_spins_ends_the_run_with_its_name_and_place(
    run: Runner, program: object, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the limit as it is, and at another."""
    monkeypatch.setattr(loop, "SPIN_LIMIT", limit)
    result = run(program)  # type: ignore[arg-type]  # from a table
    assert result.error_code == "SPIN"
    assert f"{limit} callbacks" in result.error
    assert "node01" in result.error and "5 us" in result.error
    assert "spins: program in" in result.detail or "spins: spins_on_timers" in result.detail
    assert "programs.py" in result.detail


def test_a_node_that_is_silent_ends_the_run_with_its_stack(run: Runner) -> None:
    result = run(programs.silent, silent_timeout_s=1.0)
    assert result.error_code == "SILENT"
    assert "node01" in result.error
    assert "stuck_here" in result.detail


def test_a_deadlock_says_who_waits_for_what(run: Runner) -> None:
    result = run(programs.waits_for_ever)
    assert result.error_code == "DEADLOCK"
    assert "5 pieces of work" in result.error
    for name in ("node00", "node03", "gateway"):
        assert f"{name}: program in an_answer at programs.py:" in result.detail
    assert ", called by waits_for_ever at programs.py:" in result.detail


def test_seldom_work_is_no_stall(run: Runner) -> None:
    result = run(programs.seldom_works)
    assert (result.error, result.virtual_ps) == ("", 3000 * 10**12)


def test_a_stall_is_seen_at_the_same_virtual_instant_in_every_run(run: Runner) -> None:
    """At once, not when a watch on the wall clock looks; and it says who waits for what."""
    result = run(programs.achieves_nothing)
    assert result.error_code == "STALL"
    assert "gateway: program in" in result.detail
    lookahead_ps = machine("mini").lookahead.lookahead_ps
    assert result.virtual_ps == 601 * 10**12 + lookahead_ps


def test_an_error_before_a_process_is_ready_is_told(
    run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What went wrong, with its stack, and not only that it ended."""

    def prepare_process(run_folder: str, name: str) -> None:
        if name.startswith("node02"):
            raise PermissionError(f"no stacks for {name}")

    monkeypatch.setattr(agent, "prepare_process", prepare_process)
    result = run(programs.quiet)
    assert result.error.startswith("node02 failed at 0")
    assert "PermissionError: no stacks for node02.0" in result.error
    assert "in prepare_process" in result.detail


def test_a_process_that_reads_nothing_is_told_of_and_ends_the_run(run: Runner) -> None:
    """Its control socket fills; the conductor does not wait for it, nor fall."""

    def interfere(supervisor: Supervisor) -> None:
        wait_for(lambda: hasattr(supervisor, "horizon") and supervisor.horizon.window > 20)
        os.kill(supervisor.pids[2], signal.SIGSTOP)
        for _ in range(200):
            supervisor._loop.call_soon_threadsafe(
                lambda: supervisor.conductor.tell(2, "why", filling="x" * 60_000)
            )

    result = run(programs.lively, interfere=interfere)
    assert result.error_code == "SILENT" and "node02 does not read" in result.error


def test_a_restart_comes_though_nobody_lives(run: Runner) -> None:
    """And every fault before it, of which there may be many."""
    faults = [NodeFault(kind="kill", process=process, at_ps=10 * US) for process in (0, 1)]
    faults += [NodeFault(kind="kill", process=1, at_ps=11 * US + n) for n in range(2000)]
    faults += [NodeFault(kind="restart", process=0, at_ps=20 * US)]
    result = run(programs.ends_when_back, topology="pair", node_faults=faults)
    assert (result.error, result.virtual_ps, result.not_reached) == ("", 20 * US, [])
    assert len(result.deaths) == 2


def test_a_deadlock_waits_for_what_the_plan_still_does(run: Runner) -> None:
    """A restart may set it going again, so it is one only after the plan's last fault."""
    late = NodeFault(kind="kill", process=3, at_ps=10**12)
    result = run(programs.waits_for_ever, node_faults=[late])
    assert result.error_code == "DEADLOCK"
    assert "4 pieces of work" in result.error and result.virtual_ps == 10**12


@pytest.mark.parametrize(
    ("program", "words"),
    [(programs.raises, "ValueError"), (programs.raises_in_a_handler, "ZeroDivisionError")],
)
def test_a_program_that_raises_ends_the_run_with_its_error_and_stack(
    run: Runner, program: object, words: str
) -> None:
    """Also if the error's text is longer than a control packet and no valid Unicode."""
    result = run(program)  # type: ignore[arg-type]  # from a table
    assert result.error.startswith("node01 failed at 5") or words == "ZeroDivisionError"
    assert "programs.py" in result.detail or words == "ValueError"
    assert result.error_code == "BUG"


def test_of_many_failures_the_first_in_virtual_time_is_told(run: Runner) -> None:
    """Not the first that the conductor happened to read."""
    for start_order in ("listed", "reverse"):
        result = run(programs.all_raise, topology="mini", start_order=start_order)
        assert (
            result.error.startswith("gateway failed at") and "ValueError: gateway" in result.error
        )


def test_what_the_program_is_told_may_be_large(run: Runner) -> None:
    """A workload of thousands of requests: larger than any packet of a socket."""
    told = {"end_us": 5, "requests": list(range(400_000))}
    assert run(programs.chatter, program=told).error == ""


def test_ctrl_c_ends_after_the_window_with_a_result(run: Runner) -> None:
    def interfere(supervisor: Supervisor) -> None:
        wait_for(lambda: hasattr(supervisor, "horizon") and supervisor.horizon.window > 50)
        os.kill(os.getpid(), signal.SIGINT)

    result = run(programs.lively, interfere=interfere)
    assert result.interrupted and result.error == ""
    assert result.digest and result.virtual_ps > 0
    assert len(list(Path(result.folder, "statistics").iterdir())) == 5


def test_ctrl_c_at_a_kill_of_the_plan_still_ends(run: Runner) -> None:
    """A plan with a fault in every window: whichever window is the last one, none follows."""
    plan = [NodeFault(kind="restart", process=0, at_ps=n * 10**8) for n in range(1, 20_000)]

    def interfere(supervisor: Supervisor) -> None:
        wait_for(lambda: hasattr(supervisor, "horizon") and supervisor.horizon.window > 50)
        os.kill(os.getpid(), signal.SIGINT)

    result = run(programs.lively, interfere=interfere, node_faults=plan)
    assert result.interrupted and len(result.not_reached) > 10_000


def test_the_second_ctrl_c_does_not_wait_for_a_node_that_does_not_answer(run: Runner) -> None:
    def interfere(supervisor: Supervisor) -> None:
        wait_for(lambda: hasattr(supervisor, "horizon") and supervisor.horizon.horizon_ps > 5 * US)
        os.kill(os.getpid(), signal.SIGINT)
        wait_for(lambda: supervisor.result.interrupted)
        os.kill(os.getpid(), signal.SIGINT)

    result = run(programs.silent, interfere=interfere)
    assert result.interrupted and result.error == ""


def test_a_node_that_is_stopped_counts_as_silent_and_is_taken_down(run: Runner) -> None:
    def interfere(supervisor: Supervisor) -> None:
        wait_for(lambda: hasattr(supervisor, "horizon") and supervisor.horizon.window > 20)
        os.kill(supervisor.pids[2], signal.SIGSTOP)

    result = run(programs.lively, interfere=interfere, silent_timeout_s=1.0)
    assert result.error_code == "SILENT" and "node02 is silent" in result.error


def test_a_node_that_dies_while_the_run_is_closed_harms_nothing(run: Runner) -> None:
    result = run(programs.dies_when_asked)
    assert result.error == "" and [death.name for death in result.deaths] == ["node01"]
    assert result.digest == run(programs.quiet).digest


def test_the_death_of_a_process_that_is_no_node_ends_the_run(run: Runner) -> None:
    result = run(programs.gateway_dies)
    assert result.error_code == "NODE_FAILED" and result.error == "gateway ended by itself"


def test_a_temporary_folder_with_a_long_name_is_no_obstacle(
    run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(tempfile, "tempdir", str(long))
        assert run(programs.quiet).error == ""


class Started:
    """A run in a process of its own, up and running."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.machine.once", "lively", str(folder)],
            cwd=ROOT,
            env=os.environ | {"TMPDIR": str(folder)},
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        words = self.process.stdout.readline().split()
        assert words[0] == "up"
        self.pids = [int(word) for word in words[1:]]

    def ended(self) -> bool:
        return not any(lives(pid) for pid in self.pids)


@pytest.fixture
def started() -> Iterator[Started]:
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        run = Started(Path(folder))
        yield run
        run.process.kill()
        run.process.communicate()
        wait_for(run.ended)
        assert [name for name in os.listdir(folder) if name.startswith("cmnet-")] == []


def test_everything_ends_within_two_seconds_of_a_killed_supervisor(started: Started) -> None:
    assert len(started.pids) == 6 and not started.ended()
    started.process.kill()
    wait_for(started.ended, seconds=2.0)


def test_sigterm_and_ctrl_c_of_the_terminal_give_a_result(started: Started) -> None:
    """The terminal sends SIGINT to the whole group: nodes and zygote ignore it."""
    os.killpg(started.process.pid, signal.SIGINT)
    out, _ = started.process.communicate(timeout=20)
    result = msgspec.json.decode(out.splitlines()[-1], type=RunResult)
    assert result.interrupted and result.error == "" and result.deaths == []
    assert not psutil.pid_exists(started.process.pid) or not lives(started.process.pid)
