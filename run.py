#!/usr/bin/env python3
"""The command line of cmnet: parses and hands over.

Owns the names of commands and options (design 5; tests and users rely on them), the first line on the
screen, the exit status, and the way into the project's own Python. Does not own what a command does.
Exit status: 0 done and verified, 1 ran and something is wrong (the last line is the command that
replays it), 2 bad input (the message names file and key).
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parent
VENV_PYTHON = ROOT / ".venv" / "bin" / "python"
NEEDED = ("typer", "rich", "msgspec", "yaml", "numpy", "uvloop", "xxhash", "lmdb")


def _end_at_once(_: int, __: FrameType | None) -> None:
    """Ctrl-C while the program is still being loaded."""
    os.write(2, b"interrupted before the run began\n")
    os._exit(1)


def _open_standard_streams() -> None:
    """A closed 0, 1 or 2 would be given to the next socket; text that a stream cannot show is escaped."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  (lives as long as the process)
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115  # as stdout
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, _end_at_once)
    _open_standard_streams()
    sys.path[:0] = [str(ROOT)] if str(ROOT) not in sys.path else []

for _name in ("OPENBLAS", "OMP", "MKL", "NUMEXPR", "VECLIB_MAXIMUM"):
    os.environ.setdefault(f"{_name}_NUM_THREADS", "1")  # read when numpy is first imported


def _enter_venv() -> None:
    """Go on in the project's own Python where this one lacks what is needed."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if not missing and sys.version_info >= (3, 11):
        return
    inside = Path(sys.prefix).resolve() == VENV_PYTHON.parent.parent.resolve()
    if VENV_PYTHON.exists() and not inside:
        sys.stdout.flush()
        arguments = [str(VENV_PYTHON), str(Path(__file__).resolve()), *sys.argv[1:]]
        os.execv(str(VENV_PYTHON), arguments)
    what = ", ".join(missing) or "Python 3.11"
    print(f"cmnet: {what} missing here; say: make venv", file=sys.stderr)
    raise SystemExit(2)


_enter_venv()

from typing import Annotated, Any  # noqa: E402  (only now is it certain that the rest can be imported)

import typer  # noqa: E402  # as typing
from typer.exceptions import TyperException  # noqa: E402  # as typing

from cmnet.errors import CmnetError, InputError  # noqa: E402  # as typing


def _default_topology() -> str:
    try:
        here = Path.cwd() == ROOT
    except FileNotFoundError:  # a working directory that was deleted
        here = False
    return os.path.join("" if here else ROOT, "topologies/cloudmatrix384.yaml")


TOPOLOGY = _default_topology()
NOT_BUILT = ("ems", "up", "ps", "down", "clock", "fault", "chaos", "console", "story")
INTERRUPTED = 130
"""What typer makes of a KeyboardInterrupt; a run itself takes the signal and ends with a report."""
SLOW_TO_START = ("serve", "moe", "link", "replay")

_arguments: list[str] = []
"""Of this run of the command line, for the record."""

app = typer.Typer(
    name="run.py",
    help="cmnet: a CloudMatrix384 supernode in software, in exact virtual time.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Topology = Annotated[str, typer.Argument(metavar="TOPOLOGY", show_default=False)]
Json = Annotated[
    bool, typer.Option("--json", help="One JSON object on stdout, the rest on stderr.")
]
Plan = Annotated[str | None, typer.Option(metavar="FILE", help="Faults and their instants (YAML).")]
Run = Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, or its name in runs/.")]
Seed = Annotated[
    str, typer.Option(metavar="N", help="Decides random draws: faults, arrivals, coins.")
]


def _option(metavar: str, text: str) -> Any:
    return typer.Option(metavar=metavar, help=text)


def _hidden(metavar: str, text: str) -> Any:
    return typer.Option(metavar=metavar, help=text, hidden=True)


def _later(metavar: str) -> Any:
    """An option of a part that is not built yet: known by name, refused by value."""
    return typer.Option(metavar=metavar, help="Not built yet.", hidden=True)


@app.command()
def serve(
    topology: Topology = TOPOLOGY,
    trace: Annotated[
        str | None, _option("FILE", "Mooncake JSONL or Azure CSV; generated if left out.")
    ] = None,
    requests: Annotated[
        str | None, _option("N", "First N rows of the trace (all), or N generated (40).")
    ] = None,
    rate: Annotated[str, _option("X", "Arrivals X times as fast.")] = "1",
    plan: Plan = None,
    seed: Seed = "0",
    scale: Annotated[str, _option("S", "Carried bytes of a token vector, or 'full'.")] = "64",
    model: Annotated[str, _option("NAME", "exact, or seal: the transport's half of it.")] = "exact",
    moe: Annotated[str, _option("NAME", "full: every message moves.")] = "full",
    start_order: Annotated[str, _option("ORDER", "listed, random or reverse.")] = "listed",
    socket_buffer: Annotated[str, _option("SIZE", "The kernel's, of each socket.")] = "4MiB",
    journal: Annotated[
        bool, typer.Option("--journal", help="Keep every event (for diff).")
    ] = False,
    out: Annotated[str | None, _option("DIR", "The run's folder: new or empty.")] = None,
    json: Json = False,
    pace: Annotated[str | None, _later("X")] = None,
    scheduler: Annotated[str, _option("NAME", "peer: the least loaded.")] = "peer",
    cache_plane: Annotated[str | None, _later("PLANE")] = None,
    kv: Annotated[str | None, _later("WAY")] = None,
    attention: Annotated[str | None, _later("NAME")] = None,
    eplb: Annotated[str | None, _later("WAY")] = None,
    microbatch: Annotated[
        str, _option("on|off", "Attention of one half of a batch beside the experts of the other.")
    ] = "off",
    mtp: Annotated[str, _option("K", "Drafts that a decode step verifies: 0 or 1.")] = "0",
    accept: Annotated[str | None, _option("P", "How many drafts are right, 0 to 1 (0.7).")] = None,
    mtp_graphs: Annotated[
        str | None, _option("WAY", "fused, or naive: a launch bubble for each graph of a step.")
    ] = None,
    table: Annotated[str | None, _later("NAME")] = None,
) -> int:
    """Serve a trace and check every token (the default)."""
    from nodes.serving import command, options

    given = {name: value for name, value in locals().items() if name in options.NAMES}
    later = {name: value for name, value in locals().items() if name in options.LATER}
    options.refuse_later(later)
    asked = options.parse(given)
    return command.serve(asked, topology=topology, json=json, command_line=_arguments)


@app.command()
def moe(
    topology: Topology = TOPOLOGY,
    *,
    ep: Annotated[str | None, _option("N", "Ranks, one a die (all dies that decode).")] = None,
    batch: Annotated[str | None, _option("N", "Tokens per die and call (96).")] = None,
    layers: Annotated[str | None, _option("N", "MoE layers, one after the other (1).")] = None,
    table: Annotated[
        bool,
        typer.Option("--table", help="EP 8 to 256, and batch 4 to 128, beside published ones."),
    ] = False,
    algo: Annotated[str, _option("NAME", "fused, or unfused: three exchanges.")] = "fused",
    engine: Annotated[str, _option("NAME", "aiv: the cores write; or sdma.")] = "aiv",
    skew: Annotated[
        str, _option("SKEW", "uniform, balanced, zipf:S or hot:K:X (K experts, X times the mean).")
    ] = "uniform",
    eplb: Annotated[str, _option("on|off", "Replicas by load, placed between two steps.")] = "off",
    redundant: Annotated[str | None, _option("N", "Slots for replicas of experts.")] = None,
    model: Annotated[
        str | None, _option("NAME", "exact; or seal, as in the table: uniformly random routing.")
    ] = None,
    plan: Plan = None,
    seed: Seed = "0",
    scale: Annotated[str, _option("S", "Carried bytes of a token vector, or 'full'.")] = "64",
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="No oracle: for measuring the run alone.")
    ] = False,
    isolated: Annotated[
        bool,
        typer.Option(
            "--isolated", help="All ranks begin each operator at one instant.", hidden=True
        ),
    ] = False,
    counts: Annotated[str | None, _hidden("N[xR],...", "Tokens of each rank.")] = None,
    start_order: Annotated[str, _option("ORDER", "listed, random or reverse.")] = "listed",
    socket_buffer: Annotated[str, _option("SIZE", "The kernel's, of each socket.")] = "4MiB",
    journal: Annotated[
        bool, typer.Option("--journal", help="Keep every event (for diff).")
    ] = False,
    out: Annotated[str | None, _option("DIR", "The run's folder: new or empty.")] = None,
    json: Json = False,
) -> int:
    """Dispatch and combine alone: measure them, and check every token (--table: beside the paper)."""
    given = dict(locals())
    from nodes.moe import options

    asked = options.parse({name: given[name] for name in options.NAMES})
    from nodes.moe import command

    return command.moe(asked, topology=topology, json=json, command_line=_arguments)


@app.command()
def link(
    topology: Topology = TOPOLOGY,
    *,
    plane: Annotated[str, _option("PLANE", "ub, rdma or vpc.")],
    src: Annotated[str, _option("DEVICE", "node03/npu2/die1, node03/cpu0 or node03.")],
    dst: Annotated[str, _option("DEVICE", "The other end.")],
    bytes: Annotated[str, _option("SIZE", "Of each transfer.")],  # noqa: A002  (the option's name)
    flows: Annotated[str, _option("N", "At the same time.")] = "1",
    repeat: Annotated[str, _option("N", "One after the other.")] = "1",
    plan: Plan = None,
    json: Json = False,
) -> int:
    """Measure a path beside its closed form, to the picosecond."""
    from planes import link as command

    asked = command.parse(
        plane=plane, source=src, target=dst, size=bytes, flows=flows, repeat=repeat
    )
    return command.link(topology, asked, plan_file=plan, json=json, command_line=_arguments)


@app.command()
def topology(
    topology: Topology = TOPOLOGY,
    check: Annotated[bool, typer.Option("--check", help="Only say whether it is right.")] = False,
    json: Json = False,
) -> int:
    """What this machine is, and where its numbers come from."""
    from cmnet.launch import commands
    from cmnet.record.screen import Screen
    from cmnet.topology.load import load
    from nodes.serving.job import EXTENSIONS

    machine = load(topology, extensions=EXTENSIONS)
    return commands.topology(machine, Screen(json=json), check=check)


@app.command()
def replay(run: Run, json: Json = False) -> int:
    """Repeat a recorded run, deaths included, and compare digests."""
    from nodes import again

    return again.replay(run, json=json)


@app.command()
def report(run: Run, json: Json = False) -> int:
    """Print the report of a run again."""
    from nodes import again

    return again.report(run, json=json)


@app.command()
def diff(
    first: Annotated[str, typer.Argument(metavar="RUN")],
    second: Annotated[str, typer.Argument(metavar="RUN")],
    json: Json = False,
) -> int:
    """Name the first event that differs between two journals."""
    from cmnet.launch import commands
    from cmnet.record.screen import Screen

    return commands.diff(first, second, Screen(json=json))


def _refuse(name: str) -> None:
    @app.command(
        name,
        hidden=True,
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )
    def refused() -> int:
        raise InputError(file="run.py", key="", value=name, expected=f"{_names()}: not built yet")


def _names() -> str:
    return "one of serve, moe, link, topology, replay, report, diff"


for _command in NOT_BUILT:
    _refuse(_command)


def _first_line(arguments: list[str]) -> None:
    """Something on the screen before the imports that take time."""
    if arguments[0] in SLOW_TO_START and not {"-h", "--help"} & set(arguments):
        stream = sys.stderr if "--json" in arguments else sys.stdout
        print(f"cmnet: {' '.join(arguments)}", file=stream, flush=True)


def main(arguments: list[str]) -> int:
    """Run one command; returns the exit status."""
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help")):
        arguments = ["serve", *arguments]
    _arguments[:] = arguments
    try:
        _first_line(arguments)
        status = app(arguments, prog_name="run.py", standalone_mode=False)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except TyperException as error:
        print(f"error: {error.format_message()}", file=sys.stderr)
        return 2
    except CmnetError as error:
        print(f"error: {error.code}: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        status = INTERRUPTED
    if status == INTERRUPTED:
        print("interrupted before the run began or after it ended", file=sys.stderr)
        return 1
    return int(status or 0)


def _say_all() -> int:
    """Flush stdout; 1 if what was printed could not be written (a full disk, a closed pipe)."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _status = main(sys.argv[1:])
    raise SystemExit(_say_all() or _status)
