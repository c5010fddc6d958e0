"""A whole small machine in one loop, with a program for each end: for tests of UB and RDMA."""

from __future__ import annotations

import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from cmnet.launch.agent import Context
from cmnet.link import effects
from cmnet.link.reach import Ends, Where
from cmnet.link.rules import Rule
from cmnet.messages import Payload
from cmnet.testing import LocalMachine
from cmnet.units import NEVER_PS
from tests.rig import machine

US = 10**6
MS = 10**9

Part = Callable[[Context], Awaitable[None]]


class Machine(LocalMachine):
    """``dead`` processes hear nothing; ``frames`` counts what went between processes."""

    def __init__(self, name: str, folder: Path, **more: Any) -> None:
        self.dead: set[int] = set()
        super().__init__(machine(name), folder=folder, **more)

    def carry(self, peer: int, plane: int, head: bytes, body: bytes, payload: Payload) -> None:
        if peer not in self.dead:
            super().carry(peer, plane, head, body, payload)


def run(
    parts: dict[int, Part],
    *,
    name: str = "pair",
    rules: tuple[Rule, ...] = (),
    seed: int = 0,
    dead: tuple[int, ...] = (),
    others: Part | None = None,
) -> str:
    """Run a part in each process named, ``others`` in the rest; all parts must come to their end."""
    ended: set[int] = set()

    async def program(context: Context) -> None:
        part = parts.get(context.process, others)
        if part is not None:
            await part(context)
        ended.add(context.process)
        if ended.issuperset(parts):
            context.finish()

    with tempfile.TemporaryDirectory() as folder:
        local = Machine(name, Path(folder), rules=rules, seed=seed)
        local.dead.update(dead)
        digest = local.run(program)
    assert ended.issuperset(parts), f"of {sorted(parts)} only {sorted(ended)} came to their end"
    return digest


def device(name: str, topology: str = "pair") -> int:
    """A device of a shipped topology."""
    return machine(topology).device(name).device_id


def rule(
    effect: effects.Effect,
    *,
    source: int | None = None,
    target: int | None = None,
    start_ps: int = 0,
    until_ps: int = NEVER_PS,
) -> Rule:
    """A rule on what goes from one device to another, one way."""
    return Rule(
        rule_id=f"rule of {start_ps}",
        owner="test",
        effect=effect,
        where=Where(
            one=None if source is None else Ends(devices=(source,)),
            other=None if target is None else Ends(devices=(target,)),
        ),
        start_ps=start_ps,
        until_ps=until_ps,
    )
