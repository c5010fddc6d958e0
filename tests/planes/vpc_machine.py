"""Small machines whose processes have a VPC plane, for its tests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from cmnet.launch.agent import Context
from cmnet.link.rules import Rule
from cmnet.testing import LocalMachine
from cmnet.topology import load
from cmnet.topology.machine import Machine, Plane
from planes.vpc import Vpc

TOPOLOGIES = Path(__file__).resolve().parents[2] / "topologies"
US, MS, S = 10**6, 10**9, 10**12
PROPAGATION_PS = 10 * US
RATE_BPS = 400 * 10**9
START_PS = 1 * MS
"""When clients begin: servers listen from 0."""

Part = Callable[[Context, Vpc], Awaitable[None]]


def machine(folder: Path, name: str = "pair", **vpc: str) -> Machine:
    """A shipped topology with some values of its VPC plane replaced."""
    if not vpc:
        return load.load(str(TOPOLOGIES / f"{name}.yaml"))
    lines = [f"base: {TOPOLOGIES}/{name}.yaml", f"name: {name}", "planes:", "  vpc:"]
    for key, value in vpc.items():
        lines.append(f'    {key}: {{value: "{value}", kind: derived, source: test}}')
    file = folder / "changed.yaml"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return load.load(str(file))


def run(
    folder: Path,
    client: Part,
    server: Part,
    *,
    on: Machine | None = None,
    rules: tuple[Rule, ...] = (),
    seed: int = 0,
    origin_ps: int = 0,
) -> str:
    """Process 0 is the client and begins at START_PS, all others are servers; returns the digest.

    The run ends when the client is done.
    """

    async def program(context: Context) -> None:
        vpc = Vpc(context)
        try:
            if context.process:
                await server(context, vpc)
                await context.loop.create_future()
            else:
                await context.loop.sleep_until_ps(START_PS)
                await client(context, vpc)
                context.finish()
        finally:
            vpc.close()

    local = LocalMachine(
        on or machine(folder), folder=folder, rules=rules, seed=seed, origin_ps=origin_ps
    )
    return local.run(program)


def chunk_bytes(on: Machine) -> int:
    return on.chunk_bytes[Plane.VPC]
