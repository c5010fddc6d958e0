"""For tests: a whole machine in one process and one loop, without sockets (real processes: ``spawn``).

Owns the in-memory carrier. Programs, planes, ports, rules and digests are the real ones; what is
missing is the conductor, the mesh and the processes, so a run takes milliseconds and is exact.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from cmnet import entropy
from cmnet.errors import DeadlockError, StallError
from cmnet.fabric import Fabric
from cmnet.launch import agent
from cmnet.link.rules import Rule, Rules, Switches
from cmnet.messages import Payload
from cmnet.record.digest import Digest, fold
from cmnet.topology.machine import Machine
from cmnet.units import NEVER_PS, PS_PER_S, format_ps
from cmnet.vtime.loop import VirtualLoop
from cmnet.wire import frames

STALL_PS = 600 * PS_PER_S
"""Design 1.7, as in the supervisor."""


class _LocalAgent:
    """What a ``Context`` needs of the process it lives in."""

    def __init__(self, machine: LocalMachine, process: int, assignment: agent.Assignment) -> None:
        self.machine = machine.machine
        self.loop = machine.loop
        self.assignment = assignment
        self.marked_at_ps = 0
        self.outstanding = 0
        self._finished_at_ps = NEVER_PS
        self._local = machine
        self.fabric = Fabric(
            loop=machine.loop,
            machine=machine.machine,
            process=process,
            incarnation=0,
            digest=Digest(),
            rules=machine.make_rules(process),
            carry=machine.carry,
        )
        self.fabric.window = 1

    @property
    def finished_at_ps(self) -> int:
        return self._finished_at_ps

    @finished_at_ps.setter
    def finished_at_ps(self, at_ps: int) -> None:
        self._finished_at_ps = at_ps
        self._local.finished.set()

    def fail(self, error: BaseException) -> None:
        """A task of a program raised."""
        self._local.failure = self._local.failure or error
        self._local.finished.set()


class LocalMachine:
    """All processes of a machine in one loop. ``run`` ends when a program says ``finish``."""

    def __init__(
        self,
        machine: Machine,
        *,
        folder: Path,
        seed: int = 0,
        rules: tuple[Rule, ...] = (),
        settings: dict[str, Any] | None = None,
        origin_ps: int = 0,
    ) -> None:
        self.machine = machine
        self.seed = seed
        self.rules = rules
        self.loop = VirtualLoop(origin_ps=origin_ps)
        self.finished = asyncio.Event()
        self.failure: BaseException | None = None
        for inside in ("disk", "statistics"):
            (folder / inside).mkdir(exist_ok=True)
        self.contexts = [
            agent.Context(self._make_agent(process, folder, settings or {}))  # type: ignore[arg-type]  # it has all that a Context touches
            for process in range(len(machine.processes))
        ]

    def _make_agent(self, process: int, folder: Path, settings: dict[str, Any]) -> _LocalAgent:
        assignment = agent.Assignment(
            process=process,
            incarnation=0,
            start_ps=0,
            seed=self.seed,
            token=b"",
            addresses=[],
            socket_buffer_bytes=0,
            run_folder=str(folder),
            journal=False,
            rules=[],
            settings=settings,
        )
        return _LocalAgent(self, process, assignment)

    def make_rules(self, process: int) -> Rules:
        """The rule table of one process."""
        rules = Rules(
            lambda name: entropy.stream(self.seed, f"process {process}.{name}"),
            switches=Switches(
                subplanes=self.machine.subplanes,
                chips_per_subplane=self.machine.l2_chips_per_subplane,
            ),
        )
        for rule in self.rules:
            rules.add(rule)
        return rules

    def carry(self, peer: int, plane: int, head: bytes, body: bytes, payload: Payload) -> None:
        """The carrier: bytes go through the header's layout, as on a socket."""
        header = frames.HEADER.unpack(head)
        self.contexts[peer].fabric.receive(header, body, bytes(payload))

    def run(self, program: agent.Program) -> str:
        """Run the program on every process until one finishes; returns the digest of all.

        Raises what a program raises, and DeadlockError when nothing happens any more.
        """

        async def main() -> None:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._one(program, c)) for c in self.contexts]
                watch = group.create_task(self._watch())
                await self.finished.wait()
                watch.cancel()
                for task in tasks:
                    task.cancel()

        try:
            with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
                runner.run(main())
        except* DeadlockError:
            outstanding = sum(c._agent.outstanding for c in self.contexts)
            if outstanding:
                raise
        if self.failure is not None:
            raise self.failure
        return fold(self.seed, ((f"{c.name}.0", c.fabric.digest.value()) for c in self.contexts))

    async def _watch(self) -> None:
        """The stall watchdog of the supervisor, in one process."""
        while True:
            await self.loop.sleep_ps(STALL_PS)
            marked_ps = max(context._agent.marked_at_ps for context in self.contexts)
            if self.loop.now_ps - marked_ps >= STALL_PS:
                raise StallError(f"nothing was achieved for {format_ps(STALL_PS)}")

    async def _one(self, program: agent.Program, context: agent.Context) -> None:
        await program(context)
