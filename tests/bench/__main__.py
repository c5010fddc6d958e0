"""`make bench`: the table of acceptance 6. Each pair is measured in turn in the same run.

    python -m tests.bench [--json] [--rounds N] [word ...]

Words choose rows by their beginning (small, bulk, grants, launch, idle, sizes, memory, exchange).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from tests.bench import mesh_only, moe, programs, raw, runs

NODES = 48
HOUR_PS = 3600 * 10**12
BUFFER_BYTES = 4 << 20
"""Both sides ask for it; the kernel may give less (net.core.wmem_max)."""


@dataclass(frozen=True)
class Row:
    """One line of the table; ``values`` are the rounds behind the median."""

    what: str
    measured: float
    unit: str
    goal: str
    met: bool
    beside: str = ""
    values: tuple[float, ...] = ()


@dataclass(frozen=True)
class Goal:
    """At least or at most a number."""

    at_least: float | None = None
    at_most: float | None = None

    def met(self, value: float) -> bool:
        low, high = self.at_least, self.at_most
        return (low is None or value >= low) and (high is None or value <= high)

    def text(self, unit: str) -> str:
        sign, value = ("<=", self.at_most) if self.at_least is None else (">=", self.at_least)
        return f"{sign} {value:,g} {unit}".strip()


def row(what: str, values: list[float], unit: str, goal: Goal, beside: str = "") -> Row:
    """A row of the median of some rounds."""
    measured = statistics.median(values)
    return Row(what, measured, unit, goal.text(unit), goal.met(measured), beside, tuple(values))


def ratio_row(
    what: str, ours: list[float], theirs: list[float], unit: str, goal: Goal, note: str = ""
) -> Row:
    """Ours over theirs, round by round, and the medians of both beside it."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    beside = f"{statistics.median(ours):,.3g} against {statistics.median(theirs):,.3g} {unit}"
    return row(what, ratios, "x", goal, beside + note)


class Side:
    """One side of a comparison: its rates, and its CPU time per unit, which load disturbs less."""

    def __init__(self, units: float) -> None:
        self.units = units
        self.rates: list[float] = []
        self.cpu_us: list[float] = []

    def add(self, *, wall_s: float, cpu_s: float, units: float) -> None:
        self.rates.append(units / wall_s / self.units)
        self.cpu_us.append(1e6 * cpu_s / units)

    def add_run(self, measured: runs.Measured, units: float) -> None:
        self.add(wall_s=measured.result.wall_s, cpu_s=measured.cpu_s, units=units)

    def against(self, other: Side, what: str, unit: str, goal: Goal) -> Row:
        ours, theirs = statistics.median(self.cpu_us), statistics.median(other.cpu_us)
        note = f"; CPU {ours:,.3g} against {theirs:,.3g} us each"
        return ratio_row(what, self.rates, other.rates, unit, goal, note)


def small(rounds: int) -> Iterator[Row]:
    """200 B all-to-all of 48 processes."""
    pairs, size = NODES * (NODES - 1), 200
    plain, mesh, bare, task = (Side(1000) for _ in range(4))
    for _ in range(rounds):
        spent = raw.all_to_all(count=NODES, rounds=200, message_bytes=size)
        plain.add(wall_s=spent.wall_s, cpu_s=spent.cpu_s, units=200 * pairs)
        spent = mesh_only.all_to_all(
            count=NODES, rounds=200, message_bytes=size, buffer_bytes=BUFFER_BYTES
        )
        mesh.add(wall_s=spent.wall_s, cpu_s=spent.cpu_s, units=200 * pairs)
        bare.add_run(runs.run(programs.all_to_all, rounds=100, payload_bytes=size), 100 * pairs)
        task.add_run(runs.run(programs.all_to_all_tasks, rounds=80, payload_bytes=size), 80 * pairs)
    unit = "thousand frames/s"
    wire, full = Goal(at_least=0.6), Goal(at_least=0.4)
    yield mesh.against(plain, "small frames, bare handler, mesh alone", unit, wire)
    yield bare.against(plain, "small frames, bare handler, ports", unit, wire)
    yield task.against(plain, "small frames, body, ports, task", unit, full)


def bulk(rounds: int) -> Iterator[Row]:
    """1 MiB all-to-all of 20 processes, equal socket buffers."""
    count, turns, size = 20, 10, 1 << 20
    messages = turns * count * (count - 1)
    plain, ours = Side(1e9 / size), Side(1e9 / size)
    for _ in range(rounds):
        spent = raw.all_to_all(
            count=count, rounds=turns, message_bytes=size, buffer_bytes=BUFFER_BYTES
        )
        plain.add(wall_s=spent.wall_s, cpu_s=spent.cpu_s, units=messages)
        measured = runs.run(programs.all_to_all, nodes=count, rounds=turns, payload_bytes=size)
        ours.add_run(measured, messages)
    yield ours.against(plain, "bulk, 1 MiB, 20 nodes", "GB/s", Goal(at_least=0.9))


def grants(rounds: int) -> Iterator[Row]:
    """Grants per wall second; sparse: about six of 48 nodes in a window, half of them get a frame."""
    sparse: list[float] = []
    everyone: list[float] = []
    chain: list[float] = []
    for _ in range(rounds):
        sparse.append(
            runs.run(programs.sparse, mean_ps=12_000_000, until_ps=4 * 10**9).grants_per_s
        )
        everyone.append(runs.run(programs.everyone, rounds=1500).grants_per_s)
        chain.append(runs.run(programs.chain, rounds=8000).grants_per_s)
    yield row("grants, sparse traffic", sparse, "/s", Goal(at_least=25_000))
    yield row("grants, all nodes in each window", everyone, "/s", Goal(at_least=45_000))
    yield row("grants, one ping-pong chain", chain, "/s", Goal(at_least=12_000))


def launch(rounds: int) -> Iterator[Row]:
    """48 nodes from the fork to ready."""
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(rounds):
        theirs.append(runs.bare_pythons_s(NODES))
        ours.append(runs.run(programs.idle, every_ps=0, until_ps=1).result.launch_s)
    yield ratio_row("48 nodes ready / bare pythons", ours, theirs, "s", Goal(at_most=0.2))
    yield row("48 nodes ready", ours, "s", Goal(at_most=0.6))


def idle(rounds: int) -> Iterator[Row]:
    """A virtual hour of 48 nodes."""
    without: list[float] = []
    with_timers: list[float] = []
    for _ in range(rounds):
        without.append(runs.run(programs.idle, every_ps=0, until_ps=HOUR_PS).result.wall_s)
        every_ps = 10 * 10**12
        result = runs.run(programs.idle, every_ps=every_ps, until_ps=HOUR_PS).result
        with_timers.append(result.wall_s)
    yield row("idle hour, no timers", without, "s", Goal(at_most=0.2))
    yield row("idle hour, a timer per node per 10 s", with_timers, "s", Goal(at_most=2))


def sizes(rounds: int) -> Iterator[Row]:
    """Wall time per message at several numbers of nodes."""
    sizes_nodes = (12, 24, 48, 96)
    spread: list[float] = []
    walls_us: dict[int, list[float]] = {nodes: [] for nodes in sizes_nodes}
    for _ in range(rounds):
        for nodes in sizes_nodes:
            pairs = nodes * (nodes - 1)
            turns = 150_000 // pairs
            result = runs.run(
                programs.all_to_all, nodes=nodes, rounds=turns, payload_bytes=200
            ).result
            walls_us[nodes].append(1e6 * result.wall_s / (turns * pairs))
        last = [values[-1] for values in walls_us.values()]
        spread.append(max(last) / min(last))
    beside = ", ".join(f"{n}: {statistics.median(v):.1f} us" for n, v in walls_us.items())
    yield row("wall per message, dearest / cheapest size", spread, "x", Goal(at_most=1.4), beside)


def memory(_: int) -> Iterator[Row]:
    """Private memory of a node after a run."""
    measured = runs.run(programs.all_to_all, rounds=20, payload_bytes=200)
    values = [each / 1e6 for each in measured.private_bytes]
    most = max(values)
    yield row("private memory, largest node", [most], "MB", Goal(at_most=40))


def exchange(rounds: int) -> Iterator[Row]:
    """A layer of dispatch, experts and combine at EP320, and the bytes of it on plain sockets."""
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(rounds):
        report = moe.run()
        ours.append(report["wall_s"] / moe.LAYERS)
        message_bytes = moe.carried_bytes(report) // (moe.LAYERS * moe.PAIRS)
        spent = raw.all_to_all(
            count=20, rounds=10, message_bytes=message_bytes, buffer_bytes=BUFFER_BYTES
        )
        theirs.append(spent.wall_s / 10)
    yield row("moe, EP320 batch 96, a layer and its oracle", ours, "s", Goal(at_most=0.5))
    yield ratio_row("  the same / its bytes on plain sockets", ours, theirs, "s", Goal(at_most=20))
    full = moe.run(layers=1, scale="full")
    yield row("moe, the same at full scale", [full["wall_s"]], "s", Goal(at_most=10))


TABLE: tuple[Callable[[int], Iterator[Row]], ...] = (
    small,
    bulk,
    grants,
    launch,
    idle,
    sizes,
    memory,
    exchange,
)


def show(each: Row) -> None:
    """One line, as soon as it is measured."""
    low, high = min(each.values), max(each.values)
    spread = f"{low:,.3g}..{high:,.3g}" if low < high else ""
    met = "met" if each.met else "MISSED"
    print(
        f"{each.what:44} {each.measured:>10,.3g} {each.unit:4} {spread:>18}"
        f"  goal {each.goal:14} {met:7} {each.beside}".rstrip(),
        flush=True,
    )


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench")
    parser.add_argument("words", nargs="*")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rows: list[Row] = []
    if not options.json:
        print(f"load {os.getloadavg()[0]:.1f} before, {os.cpu_count()} cores; median, range, goal")
    for measure in TABLE:
        if options.words and measure.__name__ not in options.words:
            continue
        for each in measure(options.rounds):
            rows.append(each)
            if not options.json:
                show(each)
    if options.json:
        print(json.dumps([asdict(each) for each in rows], indent=1))


if __name__ == "__main__":
    main()
