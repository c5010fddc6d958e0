"""Every sort of bad input through the real command line: status 2, and a message that helps.

A message names the file (or option), the key, the value, and what would be right. Nothing may start:
a run that begins in spite of bad input fails the test. ``run.main`` is what the shell calls; a few
cases go through a real shell process as well.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

import run
from nodes.moe import command as moe_command
from nodes.serving import command
from planes import measure

ROOT = Path(run.__file__).resolve().parent
MINI = ROOT / "topologies" / "mini.yaml"
MOONCAKE = '{"timestamp": %s, "input_length": %s, "output_length": %s, "hash_ids": %s}\n'


@pytest.fixture(autouse=True)
def _nothing_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A run that starts is the failure; and runs/ is looked for in an empty folder."""

    def started(*_: object) -> NoReturn:
        raise AssertionError("a run started in spite of bad input")

    monkeypatch.setattr(command, "run", started)
    monkeypatch.setattr(moe_command, "run", started)
    monkeypatch.setattr(measure, "measure", started)
    monkeypatch.chdir(tmp_path)


def refused(capsys: pytest.CaptureFixture[str], arguments: list[str], *parts: str) -> None:
    status = run.main(arguments)
    said = capsys.readouterr().err
    assert status == 2, said
    assert "Traceback" not in said
    assert [part for part in parts if part not in said] == [], said
    assert said.startswith("error: ") or "\nerror: " in said


# --- the command line ----------------------------------------------------------------------------

OPTIONS: list[tuple[list[str], tuple[str, ...]]] = [
    (["--requests", "0"], ("--requests", "'0'", "from 1")),
    (["--requests", "ten"], ("--requests", "'ten'", "a whole number")),
    (["--requests", "1.5"], ("--requests", "'1.5'", "a whole number")),
    (["--requests=-5"], ("--requests", "'-5'", "a whole number")),
    (["--rate", "0"], ("--rate", "'0'", "above 0")),
    (["--rate=-1"], ("--rate", "'-1'", "above 0")),
    (["--rate", "nan"], ("--rate", "'nan'", "such as 2")),
    (["--rate", "1/0"], ("--rate", "'1/0'", "above 0")),
    (["--seed", "-1"], ("--seed", "'-1'", "from 0 to 2^63 - 1")),
    (["--seed", "9223372036854775808"], ("--seed", "9223372036854775808", "2^63 - 1")),
    (["--seed", "0x10"], ("--seed", "'0x10'", "a whole number")),
    (["--scale", "100"], ("--scale", "'100'", "'full' or a multiple of 64")),
    (["--scale", "huge"], ("--scale", "'huge'", "'full'")),
    (["--socket-buffer", "4096"], ("--socket-buffer", "'4096'", "unit", "'4 MiB'")),
    (["--socket-buffer", "1KiB"], ("--socket-buffer", "'1KiB'", "4096")),
    (["--socket-buffer", "4 XiB"], ("--socket-buffer", "'4 XiB'", "KiB")),
    (["--start-order", "sideways"], ("--start-order", "'sideways'", "listed, random, reverse")),
    (["--model", "gpt"], ("--model", "'gpt'", "seal")),
    (["--model", "exactly"], ("--model", "'exactly'", "exact")),
    (["--moe", "modelled"], ("--moe", "'modelled'", "full", "not built yet")),
    (["--scheduler", "locality"], ("--scheduler", "'locality'", "peer", "not built yet")),
    (["--pace", "1"], ("--pace", "'1'", "not built yet")),
    (["--mtp", "2"], ("--mtp", "'2'", "0 or 1")),
    (["--mtp-graphs", "fused"], ("--mtp-graphs", "'fused'", "--mtp 1")),
    (["--accept", "0.5"], ("--accept", "'0.5'", "--mtp 1")),
    (["--mtp", "1", "--accept", "1.5"], ("--accept", "'1.5'")),
    (["--table", "decode"], ("--table", "'decode'", "not built yet")),
    (["--attention", "dp"], ("--attention", "'dp'", "not built yet")),
    (["--eplb", "on"], ("--eplb", "'on'", "not built yet")),
    (["--microbatch", "yes"], ("--microbatch", "'yes'", "on")),
    (["--frobnicate"], ("--frobnicate",)),
    (["--seed"], ("--seed",)),
    (["--out", ""], ("--out", "''", "folder")),
    (["--trace", "nowhere.jsonl"], ("nowhere.jsonl", "No such file", "a trace file")),
    (["--plan", "nowhere.yaml"], ("nowhere.yaml", "No such file", "a plan file")),
]


@pytest.mark.parametrize(("arguments", "parts"), OPTIONS, ids=lambda value: " ".join(value)[:40])
def test_a_bad_option_of_serve_is_refused(
    arguments: list[str], parts: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """Options name themselves, the value, and what would be right; none is clamped or ignored."""
    refused(capsys, ["serve", str(MINI), *arguments], *parts)


COMMANDS: list[tuple[list[str], tuple[str, ...]]] = [
    (["sevre"], ("sevre",)),
    (["topologies/mini.yaml"], ("topologies/mini.yaml",)),
    (["serve", "a.yaml", "b.yaml"], ("b.yaml",)),
    (["replay"], ("RUN",)),
    (["replay", "yesterday"], ("RUN", "'yesterday'", "the folder of a run")),
    (["report", "yesterday"], ("RUN", "'yesterday'", "there is none")),
    (["diff", "one"], ("RUN",)),
    (["diff", "one", "other"], ("RUN", "'one'")),
    (["chaos", "--seeds", "3"], ("'chaos'", "not built yet")),
    (["fault", "RUN", "ls"], ("'fault'", "not built yet")),
    (["--pace", "2"], ("--pace", "not built yet")),
    (["topology", "nowhere.yaml"], ("nowhere.yaml", "No such file", "a topology file")),
    (["topology", "."], ("Is a directory", "a topology file")),
    (["topology", "--checks"], ("--checks",)),
]


@pytest.mark.parametrize(("arguments", "parts"), COMMANDS, ids=lambda value: " ".join(value)[:40])
def test_a_bad_command_is_refused(
    arguments: list[str], parts: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """Unknown names, missing and superfluous arguments, and parts that do not exist yet."""
    refused(capsys, arguments, *parts)


MOES: list[tuple[list[str], tuple[str, ...]]] = [
    (["--ep", "0"], ("--ep", "'0'", "from 1 to 768")),
    (["--ep", "17"], ("--ep", "17", "at most 16", "mini.yaml")),
    (["--ep", "9"], ("--ep", "9 with --redundant 0", "replicas that can: 5, 14")),
    (
        ["--ep", "8", "--redundant", "4"],
        ("--ep", "8 with --redundant 4", "replicas that can: 0, 8"),
    ),
    (["--batch", "513"], ("--batch", "'513'", "from 1 to 512")),
    (["--layers", "0"], ("--layers", "'0'", "from 1 to 58")),
    (["--ep", "8", "--layers", "58"], ("--layers", "58", "84.29 GB", "machine.hbm_per_die")),
    (["--skew", "hot:900:3"], ("--skew", "'hot:900:3'", "'hot:K:X'")),
    (["--skew", "balanced", "--model", "seal"], ("--skew", "'balanced'", "--model seal")),
    (["--algo", "fast"], ("--algo", "'fast'", "fused or unfused")),
    (["--engine", "cpu"], ("--engine", "'cpu'", "aiv or sdma")),
    (["--eplb", "perfect"], ("--eplb", "'perfect'", "on or off")),
    (["--scale", "100"], ("--scale", "'100'", "'full' or a multiple of 64")),
    (["--counts", "97"], ("--counts", "'97'", "at most --batch 96")),
    (["--counts", "96"], ("--counts", "'96'", "each of 8 ranks")),
    (["--seed", "-1"], ("--seed", "'-1'", "from 0 to 2^63 - 1")),
    (["--plan", "nowhere.yaml"], ("nowhere.yaml", "No such file", "a plan file")),
    (["--out", ""], ("--out", "''", "folder")),
    (["--table", "--ep", "8"], ("--ep", "'8'", "it left out")),
    (["--table", "--eplb", "on"], ("--eplb", "'on'", "it left out")),
    (["--frobnicate"], ("--frobnicate",)),
]


@pytest.mark.parametrize(("arguments", "parts"), MOES, ids=lambda value: " ".join(value)[:40])
def test_a_bad_option_of_moe_is_refused(
    arguments: list[str], parts: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """As of serve; the group, its experts and its memory must fit the machine."""
    refused(capsys, ["moe", str(MINI), *arguments], *parts)


def test_a_table_of_a_machine_that_has_no_room_for_its_smallest_run_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before there is a folder of the run."""
    pair = str(MINI.with_name("pair.yaml"))
    refused(capsys, ["moe", pair, "--table"], "--table", "pair.yaml", "at least 8 dies, not 2")
    assert not Path("runs").exists()


DIE, CPU, NODE = "node00/npu1/die1", "node01/cpu0", "node02"
LINKS: list[tuple[list[str], tuple[str, ...]]] = [
    (["ip", DIE, "node01/npu0/die0", "1MiB"], ("--plane", "'ip'", "ub, rdma, vpc")),
    (["ub", "node09/npu0/die0", DIE, "1MiB"], ("--src", "node09/npu0/die0", "a device such as")),
    (["ub", DIE, "node00/npu1/die2", "1MiB"], ("--dst", "node00/npu1/die2", "did you mean")),
    (["ub", DIE, DIE, "1MiB"], ("path on UB", DIE, "two devices that differ")),
    (["rdma", DIE, CPU, "1MiB"], ("path on RDMA", CPU, "two dies")),
    (["vpc", DIE, NODE, "1MiB"], ("path on VPC", NODE, "two nodes")),
    (["ub", DIE, CPU, "1000"], ("--bytes", "'1000'", "unit")),
    (["ub", DIE, CPU, "0B"], ("--bytes", "from 1")),
    (["ub", DIE, CPU, "65GiB"], ("--bytes", "at most 64 GiB")),
    (["ub", DIE, CPU, "1B", "--flows", "0"], ("--flows", "'0'", "from 1")),
    (["ub", DIE, CPU, "1B", "--repeat", "x"], ("--repeat", "'x'", "a whole number")),
    (["ub", DIE, CPU, "1B", "--plan", "nowhere.yaml"], ("nowhere.yaml", "a plan file")),
]


@pytest.mark.parametrize(("arguments", "parts"), LINKS, ids=lambda value: " ".join(value)[:40])
def test_a_bad_link_is_refused(
    arguments: list[str], parts: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """A device that is not there, a plane that does not join two, a size that is none."""
    plane, source, target, size, *more = arguments
    ends = ["--plane", plane, "--src", source, "--dst", target, "--bytes", size]
    refused(capsys, ["link", str(MINI), *ends, *more], *parts)


def test_a_plan_of_link_has_link_faults_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is served, so a killed node would only hang the measurement."""
    (tmp_path / "kill.plan").write_text("- {at: 1 s, target: node01, kind: kill}\n")
    ends = ["--plane", "ub", "--src", DIE, "--dst", CPU, "--bytes", "1B", "--plan", "kill.plan"]
    refused(capsys, ["link", str(MINI), *ends], "kill.plan", "'kill'", "link faults only")


@pytest.mark.parametrize("command", ["serve", "moe", "link"])
def test_a_plan_names_switches_of_this_machine(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sub-plane 6 is there in a machine of seven, not in one of five."""
    few = "subplanes: {value: 5, kind: assumed, source: test, range: [5, 5]}"
    fast = "link_rate: {value: 45 GB/s, kind: assumed, source: test, range: [45 GB/s, 45 GB/s]}"
    text = f"base: {MINI}\nname: few\nplanes: {{ub: {{{few}, {fast}}}}}\n"
    (tmp_path / "few.yaml").write_text(text)
    plan = "- {at: 1 us, for: 1 s, target: subplane 6, kind: subplane_down}\n"
    (tmp_path / "down.plan").write_text(plan)
    ends = ["--plane", "ub", "--src", DIE, "--dst", CPU, "--bytes", "1B"]
    more = ends if command == "link" else []
    arguments = [command, "few.yaml", *more, "--plan", "down.plan"]
    refused(capsys, arguments, "down.plan", "'subplane 6'", "from 0 to 4")


# --- topologies ----------------------------------------------------------------------------------

TOPOLOGIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "empty": ("", ("an empty file", "a mapping")),
    "list": ("- 1\n- 2\n", ("[1, 2]", "a mapping with the keys")),
    "no YAML": ("a: [1, 2\n", ("line 2", "well-formed YAML")),
    "tab": ("a:\n\t- 1\n", ("line 2", "well-formed YAML")),
    "repeated key": ("name: a\nname: b\n", ("line 2", "'name' given twice")),
    "anchor": ("name: &x a\nabout: *x\n", ("anchor",)),
    "no machine": ("name: a\n", ("machine", "(missing)")),
    "base nowhere": ("base: nowhere.yaml\n", ("base", "nowhere.yaml", "an existing file")),
    "base itself": ("base: bad.yaml\n", ("base", "bad.yaml", "not based on this one")),
    "unknown key": ("base: MINI\nplane: {}\n", ("plane", "planes")),
    "unknown key inside": (
        "base: MINI\nplanes: {ub: {subplane: 7}}\n",
        ("planes.ub.subplane", "did you mean 'subplanes'"),
    ),
    "no unit": (
        "base: MINI\nplanes: {vpc: {propagation: {value: 10, kind: derived, source: x}}}\n",
        ("planes.vpc.propagation.value", "10", "unit", "in quotes"),
    ),
    "wrong unit": (
        "base: MINI\nplanes: {ub: {link_rate: {value: 28 us, kind: derived, source: x}}}\n",
        ("planes.ub.link_rate.value", "28 us", "GB/s"),
    ),
    "no source": (
        "base: MINI\nplanes: {ub: {link_rate: {value: 28 GB/s, kind: derived}}}\n",
        ("planes.ub.link_rate.source", "missing"),
    ),
    "wrong kind": (
        "base: MINI\nmachine: {nodes: {value: 4, kind: guessed, source: x}}\n",
        ("machine.nodes.kind", "'guessed'", "published, derived, fitted, assumed"),
    ),
    "assumed without range": (
        "base: MINI\nmachine: {nodes: {value: 4, kind: assumed, source: x}}\n",
        ("machine.nodes", "range"),
    ),
    "no nodes": (
        "base: MINI\nmachine: {nodes: {value: 0, kind: derived, source: x}}\n",
        ("machine.nodes", "0"),
    ),
    "role of no node": ("base: MINI\nroles: {decode: [node09]}\n", ("roles.decode", "node09")),
    "no propagation": (
        "base: MINI\nplanes: {vpc: {propagation: {value: 0 us, kind: derived, source: x}}}\n",
        ("planes.vpc.propagation",),
    ),
    "no carried layer": ("base: MINI\nmodel: {carried_layers: 0}\n", ("model.carried_layers", "0")),
    "tokens per row": (
        "base: MINI\nmodel: {tokens_per_carried: 100}\n",
        ("model.tokens_per_carried", "100", "a divisor of block_tokens = 512"),
    ),
    "unknown model key": ("base: MINI\nmodel: {width: 7}\n", ("model.width", "7")),
    "serving timeout": (
        "base: MINI\nserving: {ping_timeout: {value: 1 s, kind: derived, source: x}}\n",
        ("serving.ping_timeout", "1 s", "more than ping_interval"),
    ),
    "serving text": ("base: MINI\nserving: {request_tries: 2}\n", ("serving.request_tries", "2")),
}


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_a_bad_topology_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message names the file that holds the key, the dotted key, its value, what is right."""
    text, parts = TOPOLOGIES[name]
    (tmp_path / "bad.yaml").write_text(text.replace("MINI", str(MINI)), encoding="utf-8")
    refused(capsys, ["serve", "bad.yaml"], "bad.yaml", *parts)


def test_a_topology_that_is_no_text_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bytes that are no UTF-8 come from files that were meant for something else."""
    (tmp_path / "bad.yaml").write_bytes(b"name: \xff\n")
    refused(capsys, ["topology", "bad.yaml"], "bad.yaml", "0xff", "UTF-8")


def test_a_machine_without_roles_cannot_serve(capsys: pytest.CaptureFixture[str]) -> None:
    """pair.yaml is right, but nobody is there to serve."""
    pair = str(ROOT / "topologies" / "pair.yaml")
    refused(capsys, ["serve", pair], "pair.yaml", "roles.prefill", "to serve")


# --- traces --------------------------------------------------------------------------------------

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
TRACES: dict[str, tuple[str, tuple[str, ...]]] = {
    "empty": ("", ("an empty file", "a trace")),
    "no format": ("hello\n", ("line 1", "'hello'", "Mooncake JSONL", "Azure header")),
    "header only": (AZURE, ("no rows", "at least one request")),
    "no JSON": (MOONCAKE % (0, 5, 5, [0]) + "{oops\n", ("line 2", "{oops", "JSON object")),
    "missing key": ('{"timestamp": 0}\n', ("line 1: input_length", "timestamp, input_length")),
    "further key": (
        '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [0], "x": 1}\n',
        ("line 1: x", "only timestamp"),
    ),
    "text for number": (
        MOONCAKE % (0, '"5"', 5, [0]),
        ("line 1: input_length", "'5'", "1 or more"),
    ),
    "no output": (MOONCAKE % (0, 5, 0, [0]), ("line 1: output_length", "0", "1 or more")),
    "too few blocks": (MOONCAKE % (0, 513, 5, [0]), ("line 1: hash_ids", "1 block ids", "2: one")),
    "negative block": (MOONCAKE % (0, 5, 5, [-1]), ("line 1: hash_ids[0]", "-1", "2^62")),
    "back in time": (
        MOONCAKE % (9, 5, 5, [0]) + MOONCAKE % (8, 5, 5, [0]),
        ("line 2: timestamp", "not before that of line 1"),
    ),
    "two fields": (AZURE + "2023-11-16 18:17:03.97,48\n", ("line 2", "three fields")),
    "no instant": (AZURE + "yesterday,48,10\n", ("line 2: TIMESTAMP", "'yesterday'", "2023-11-16")),
    "day 32": (AZURE + "2023-11-32 18:17:03,48,10\n", ("line 2: TIMESTAMP", "2023-11-32")),
    "no tokens": (AZURE + "2023-11-16 18:17:03,-4,10\n", ("line 2: ContextTokens", "'-4'")),
}


@pytest.mark.parametrize("name", TRACES)
def test_a_bad_trace_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message names the line and the field."""
    text, parts = TRACES[name]
    (tmp_path / "bad.trace").write_text(text, encoding="utf-8")
    refused(capsys, ["serve", str(MINI), "--trace", "bad.trace"], "bad.trace", *parts)


# --- plans ---------------------------------------------------------------------------------------

PLANS: dict[str, tuple[str, tuple[str, ...]]] = {
    "no list": ("at: 1 s\n", ("a mapping with the keys at", "a list of faults")),
    "no YAML": ("- {at: 1 s\n", ("line 2", "well-formed YAML")),
    "no instant": ("- {target: node01, kind: kill}\n", ("fault 1: at", "missing")),
    "no unit": ("- {at: 5, target: node01, kind: kill}\n", ("fault 1: at", "'5'", "unit")),
    "no such kind": (
        "- {at: 1 s, target: node01, kind: explode}\n",
        ("fault 1: kind", "'explode'"),
    ),
    "not built": ("- {at: 1 s, target: node01, kind: pause}\n", ("'pause'", "not built yet")),
    "no such node": ("- {at: 1 s, target: node99, kind: kill}\n", ("fault 1: target", "'node99'")),
    "kill a die": (
        "- {at: 1 s, target: node01/npu0/die0, kind: kill}\n",
        ("fault 1: target", "node01/npu0/die0"),
    ),
    "chance above 1": (
        "- {at: 1 s, target: node01, kind: loss, p: 1.5}\n",
        ("fault 1: p", "'1.5'"),
    ),
    "unknown key": (
        "- {at: 1 s, target: node01, kind: kill, why: anger}\n",
        ("fault 1: why", "'anger'"),
    ),
    "second fault": (
        "- {at: 1 s, target: node01, kind: kill}\n- {at: 1 s, target: node01, kind: loss}\n",
        ("fault 2: p", "missing"),
    ),
    "no such sub-plane": (
        "- {at: 1 s, target: subplane 7, kind: subplane_down}\n",
        ("fault 1: target", "7"),
    ),
    "no such plane": ("- {at: 1 s, target: plane ip, kind: loss, p: 0.1}\n", ("fault 1", "ip")),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_bad_plan_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message names which fault of the list, and its key."""
    text, parts = PLANS[name]
    (tmp_path / "bad.plan").write_text(text, encoding="utf-8")
    refused(capsys, ["serve", str(MINI), "--plan", "bad.plan"], "bad.plan", *parts)


# --- folders -------------------------------------------------------------------------------------


def _full(folder: Path) -> None:
    folder.mkdir()
    (folder / "precious").write_text("data")


def _file(folder: Path) -> None:
    folder.write_text("data")


@pytest.mark.parametrize(
    ("make", "part"), [(_full, "an empty folder"), (_file, "a folder that can be written")]
)
def test_an_out_that_would_overwrite_is_refused(
    make: Callable[[Path], None], part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run never mixes with what is there."""
    make(tmp_path / "there")
    refused(capsys, ["serve", str(MINI), "--out", "there"], "--out", "there", part)


LINK_RECORD = (
    '{"command": "link", "command_line": [], "topology_file": "", "topology_text": "", "seed": 0,'
    ' "plan": {}, "options": {}}'
)
RECORDS = {
    "cut": ('{"command": "ser', ("record.json", "a whole record")),
    "empty": ("{}", ("record.json", "command", "a whole record")),
    "of another command": (
        LINK_RECORD,
        ("record.json", "'link'", "serve or moe"),
    ),
}


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("what", ["replay", "report"])
def test_a_broken_record_is_refused(
    name: str, what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also for runs that are named by their name in runs/."""
    text, parts = RECORDS[name]
    folder = tmp_path / "runs" / "one"
    folder.mkdir(parents=True)
    (folder / "record.json").write_text(text)
    refused(capsys, [what, "one"], *parts)


# --- through a shell -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", str(MINI), "--rate", "0"],
        ["topology", "nowhere.yaml"],
        ["moe", "--ep", "9"],
        ["ems"],
        ["--seed", "x"],
    ],
)
def test_a_real_process_says_the_same(arguments: list[str], tmp_path: Path) -> None:
    """Status 2, nothing on standard output but the first line, no traceback."""
    ended = subprocess.run(
        [sys.executable, str(ROOT / "run.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: ")
    assert "Traceback" not in ended.stderr
    assert len(ended.stdout.splitlines()) <= 1
