"""Whole commands as a user types them: small runs of the mini machine in real processes.

Each test starts processes, so all are marked; the trace is tiny, and a run takes about a second.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

import run
from tests.nodes.serving.test_report import KEYS

pytestmark = [pytest.mark.slow, pytest.mark.machine]

ROOT = Path(run.__file__).resolve().parent
MINI = str(ROOT / "topologies" / "mini.yaml")
ROWS = (
    '{"timestamp": 0, "input_length": 1300, "output_length": 4, "hash_ids": [1, 2, 3]}\n'
    f'{{"timestamp": 1, "input_length": 131072, "output_length": 9, "hash_ids": {[*range(256)]}}}\n'
    '{"timestamp": 9000, "input_length": 1100, "output_length": 3, "hash_ids": [1, 2, 9]}\n'
)
TOKENS = 7
"""Of the two rows that the model can serve."""
SHORT_AND_LONG = (
    '{"timestamp": 0, "input_length": 700, "output_length": 2, "hash_ids": [1, 2]}\n'
    '{"timestamp": 2000, "input_length": 1300, "output_length": 200, "hash_ids": [1, 3, 4]}\n'
)
"""The first answer comes long before the end."""


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """In the current folder, which is the test's own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(ROWS)
    return "rows.jsonl"


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "run.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )


def serve(trace: str, *arguments: str, **environment: str) -> dict[str, Any]:
    ended = command("serve", MINI, "--trace", trace, "--json", *arguments, **environment)
    assert ended.returncode == 0, ended.stderr
    report: dict[str, Any] = msgspec.json.decode(ended.stdout)
    return report


class Done(NamedTuple):
    """Two runs that several tests look at, with journals, in one folder: ``one``, and ``other``, which
    was told another rate."""

    folder: Path
    one: dict[str, Any]
    other: dict[str, Any]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    folder = tmp_path_factory.mktemp("done")
    (folder / "rows.jsonl").write_text(ROWS)
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        one = serve("rows.jsonl", "--journal", "--out", "one", PYTHONHASHSEED="0")
        other = serve("rows.jsonl", "--journal", "--out", "other", "--rate", "2")
    return Done(folder, one, other)


def identity(report: dict[str, Any]) -> tuple[str, int, int]:
    return report["digest"], report["windows"], report["grants"]


def test_a_run_ends_with_one_right_object(done: Done) -> None:
    """All keys, every token verified, the long row skipped, prefixes found, and status 0."""
    report = done.one
    assert [key for key in KEYS if key not in report] == []
    assert (report["verified"]["checked"], report["verified"]["wrong"]) == (TOKENS, 0)
    assert (report["requests"]["ok"], report["requests"]["skipped"]) == (2, 1)
    assert report["requests"]["skipped_rows"][0]["line"] == 2
    assert (report["prefix"]["blocks_hit"], report["prefix"]["blocks"]) == (2, 6)
    assert report["deaths"] == report["problems"] == []


def test_a_run_is_the_same_wherever_and_however_it_runs(trace: str, done: Done) -> None:
    """Hash seed, start order, socket buffers and carried bytes decide nothing; the seed does not
    either where the trace is given and nothing is drawn, but it is part of a generated workload."""
    options = ["--start-order", "random", "--socket-buffer", "4KiB"]
    assert identity(serve(trace, *options, PYTHONHASHSEED="1")) == identity(done.one)
    assert serve(trace, "--scale", "full")["digest"] == done.one["digest"]
    assert done.other["digest"] != done.one["digest"]


def test_people_see_the_first_line_at_once_and_tables_at_the_end(trace: str) -> None:
    """On standard output; nothing on standard error when all is well."""
    ended = command("serve", MINI, "--trace", trace, "--out", "here")
    lines = ended.stdout.splitlines()
    assert (ended.returncode, ended.stderr) == (0, "")
    assert lines[0] == f"cmnet: serve {MINI} --trace {trace} --out here"
    assert "verified: 7 tokens and seals of 2 requests, 0 wrong" in lines
    kept = {"disk", "record.json", "requests.jsonl", "serving.json", "statistics", "verified.json"}
    assert kept <= {path.name for path in Path("here").iterdir()}


def test_a_report_is_printed_again(done: Done, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the folder alone."""
    monkeypatch.chdir(done.folder)
    again = command("report", "one", "--json")
    assert again.returncode == 0
    assert msgspec.json.decode(again.stdout) == done.one


def test_a_replay_has_the_same_digest(trace: str, tmp_path: Path) -> None:
    """Of a run with a death and a restart in its plan; another digest would be status 1, and the last
    line is what repeats it."""
    Path("plan.yaml").write_text("- {at: 1 s, for: 1 s, target: node02, kind: kill}\n")
    report = serve(trace, "--plan", "plan.yaml", "--out", "here", "--journal")
    assert [death["node"] for death in report["deaths"]] == ["node02"]
    again = command("replay", "here", "--json")
    assert again.returncode == 0, again.stderr
    repeated = msgspec.json.decode(again.stdout)
    assert (repeated["same"], repeated["digest"]) == (True, report["digest"])
    assert command("diff", "here", repeated["run"]).returncode == 0

    path = Path("here/record.json")
    path.write_text(path.read_text().replace(report["digest"], "0" * 32))
    other = command("replay", "here")
    assert other.returncode == 1
    assert "another digest than recorded" in other.stdout
    last = shlex.split(other.stdout.splitlines()[-1])
    assert last[:3] == ["python", str(ROOT / "run.py"), "replay"]
    assert command(*last[2:]).returncode == 0


def test_a_replay_of_a_trace_that_changed_is_refused(
    done: Done, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be another run."""
    monkeypatch.chdir(done.folder)
    Path("rows.jsonl").write_text(ROWS + "\n")
    ended = command("replay", "one")
    Path("rows.jsonl").write_text(ROWS)
    assert ended.returncode == 2
    assert "rows.jsonl: 'another content' is wrong" in ended.stderr


def test_diff_names_the_first_event_that_differs(
    done: Done, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And says by which of the two things they were told it may be."""
    monkeypatch.chdir(done.folder)
    ended = command("diff", "one", "other")
    assert ended.returncode == 1
    lines = ended.stdout.splitlines()
    assert lines[0] == "the runs were told different things: options"
    assert lines[1].startswith("first difference: event ")
    assert lines[-1] == "python run.py diff one other"


def started(trace: str, *arguments: str) -> subprocess.Popen[str]:
    """A long run, once it has begun to answer."""
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "run.py"), "serve", MINI, "--out", "here", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline_s = time.monotonic() + 60
    answers = Path("here/requests.jsonl")
    while not (answers.exists() and answers.stat().st_size):
        assert time.monotonic() < deadline_s and process.poll() is None
        time.sleep(0.02)
    return process


def members(session: int) -> list[int]:
    """Processes of a session that still run."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] not in "ZX":
                found.append(int(folder.name))
    return found


def test_an_interrupt_gives_a_report_of_what_was_done(trace: str) -> None:
    """Status 1, what was answered is verified, the replay's command is last, nothing stays."""
    process = started(trace)
    process.send_signal(signal.SIGINT)
    told, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (1, "")
    lines = told.splitlines()
    assert "WRONG: interrupted: this is what was done so far" in lines
    assert any(line.startswith("verified: ") and line.endswith(" 0 wrong") for line in lines)
    assert lines[-1] == f"python {ROOT / 'run.py'} replay here"
    assert members(process.pid) == []


def test_nothing_outlives_a_killed_supervisor(trace: str) -> None:
    """Nodes, zygote and verifier end within two seconds, and the run says later that it has no end."""
    process = started(trace)
    assert len(members(process.pid)) > 5
    process.kill()
    process.communicate(timeout=60)
    deadline_s = time.monotonic() + 2
    while left := members(process.pid):
        assert time.monotonic() < deadline_s, left
        time.sleep(0.02)
    ended = command("report", "here")
    assert ended.returncode == 1
    assert "WRONG: the run has no end: its supervisor was ended" in ended.stdout


def test_a_node_killed_from_outside_is_named_and_replays(trace: str) -> None:
    """The others finish right, and the record repeats the death to the same digest."""
    Path(trace).write_text(SHORT_AND_LONG)
    process = started(trace, "--trace", trace)
    mine = process.pid
    nodes = sorted(pid for pid in members(mine) if mine not in (pid, parent(pid)))
    os.kill(nodes[2], signal.SIGKILL)  # the zygote's children, in the order of their index
    told, _ = process.communicate(timeout=120)
    assert "node02 died by itself at " in told
    again = command("replay", "here", "--json")
    assert msgspec.json.decode(again.stdout)["same"] is True, again.stderr


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_link_prints_measured_and_formula(trace: str) -> None:
    """Equal, to the picosecond."""
    ends = ["--src", "node00/npu0/die0", "--dst", "node01/npu0/die0"]
    ended = command(
        "link", str(ROOT / "topologies" / "pair.yaml"), "--plane", "ub", *ends, "--bytes", "1MiB",
        "--flows", "3", "--json"
    )  # fmt: skip  # one line a thing
    assert ended.returncode == 0, ended.stderr
    found = msgspec.json.decode(ended.stdout)
    assert found["difference_ps"] == found["measured_ps"] - found["formula_ps"] == 0
    assert found["measured_ps"] > 0


MOE = ["moe", MINI, "--ep", "8", "--batch", "20", "--layers", "2"]


def moe(*arguments: str, **environment: str) -> dict[str, Any]:
    ended = command(*MOE, "--json", *arguments, **environment)
    assert ended.returncode == 0, ended.stderr
    report: dict[str, Any] = msgspec.json.decode(ended.stdout)
    return report


@pytest.fixture(scope="module")
def exchanged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of a run of ``moe`` that two tests look at."""
    return moe("--out", str(tmp_path_factory.mktemp("moe") / "run"), PYTHONHASHSEED="0")


def test_moe_ends_with_one_right_object(trace: str, exchanged: dict[str, Any]) -> None:
    """All keys, every token of every layer verified, with either model and at any scale; the first line
    says what runs, and carried bytes decide nothing."""
    report = exchanged
    assert [key for key in KEYS if key not in report] == []
    assert (report["verified"]["checked"], report["verified"]["wrong"]) == (8 * 20 * 2, 0)
    assert report["problems"] == report["errors"] == []
    assert identity(moe("--scale", "full")) == identity(report)
    assert moe("--model", "seal")["verified"] == report["verified"]


def test_moe_is_the_same_however_it_runs(trace: str, exchanged: dict[str, Any]) -> None:
    """As serve; and without verification, which it then says."""
    options = ["--start-order", "random", "--socket-buffer", "4KiB", "--no-verify"]
    other = moe(*options, PYTHONHASHSEED="1")
    assert identity(other) == identity(exchanged)
    assert (other["verified"]["checked"], other["verified"]["asked"]) == (0, False)


def test_moe_is_reported_again_and_replayed(trace: str) -> None:
    """By the commands that serve has; ranks that have no tokens take part."""
    report = moe("--out", "here", "--counts", "20,0x6,7")
    assert report["verified"]["checked"] == 27 * 2
    again = command("report", "here", "--json")
    assert (again.returncode, msgspec.json.decode(again.stdout)) == (0, report)
    repeated = command("replay", "here", "--json")
    assert repeated.returncode == 0, repeated.stderr
    found = msgspec.json.decode(repeated.stdout)
    assert (found["same"], identity(found)) == (True, identity(report))


def test_moe_names_what_a_death_took(trace: str) -> None:
    """Right tokens or a named error; then the run's own plan explains them, and the status is 0."""
    Path("plan.yaml").write_text("- {at: 900 us, target: node03, kind: kill}\n")
    report = moe("--plan", "plan.yaml")
    assert [death["node"] for death in report["deaths"]] == ["node03"]
    verified = report["verified"]
    assert verified["wrong"] == 0
    assert verified["failed"] + verified["missing_results"] > 0
    assert report["errors"]


def test_the_table_of_moe_is_made_of_runs(trace: str) -> None:
    """Two fit on the mini machine; every token of both is verified."""
    ended = command("moe", MINI, "--table", "--json")
    assert ended.returncode == 0, ended.stderr
    found = msgspec.json.decode(ended.stdout)
    assert [row["ep_size"] for row in found["rows"]] == [8, 16]
    assert (found["verified"]["checked"], found["verified"]["wrong"]) == (24 * 128, 0)
    assert len({run["digest"] for run in found["runs"]}) == 2


def test_without_packages_it_says_what_to_do(tmp_path: Path) -> None:
    """A fresh clone: no venv, nothing installed."""
    shutil.copy(ROOT / "run.py", tmp_path)
    ended = subprocess.run(
        [sys.executable, "-S", "-E", str(tmp_path / "run.py")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 2
    assert ended.stderr.endswith("say: make venv\n")
