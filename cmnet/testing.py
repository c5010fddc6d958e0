"""For tests: a whole machine in one process (``LocalMachine``), or in real ones (``spawn``).

Owns the in-memory carrier of the former: programs, planes, ports, rules and digests are the real ones;
what is missing is the conductor, the mesh and the processes, so a run takes milliseconds and is exact.
Faults are rules: ``with machine.inject(effect, where): ...``. A failing run says its seed and the
command that shows it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cmnet.chaos import plan as plans
from cmnet.errors import DeadlockError, StallError
from cmnet.fabric import Fabric
from cmnet.launch import agent
from cmnet.launch.run import NodeFault, RunResult, Settings, make_run_folder
from cmnet.launch.supervisor import Supervisor
from cmnet.link.effects import Effect
from cmnet.link.reach import Where
from cmnet.link.rules import Rule, make_rules
from cmnet.messages import Payload
from cmnet.record.digest import Digest, fold
from cmnet.topology.machine import Machine
from cmnet.units import NEVER_PS, format_ps
from cmnet.vtime.loop import VirtualLoop
from cmnet.vtime.stall import STALL_PS, Stall
from cmnet.wire import frames

EVERYWHERE = Where()


class _LocalAgent:
    """What a ``Context`` needs of the process it lives in."""

    def __init__(self, machine: LocalMachine, process: int, assignment: agent.Assignment) -> None:
        self.machine = machine.machine
        self.loop = machine.loop
        self.assignment = assignment
        self.marked_at_ps = 0
        self._outstanding = 0
        self._finished_at_ps = NEVER_PS
        self._local = machine
        self.fabric = Fabric(
            loop=machine.loop,
            machine=machine.machine,
            process=process,
            incarnation=0,
            digest=Digest(),
            rules=make_rules(
                machine.machine, seed=machine.seed, process=process, rules=machine.rules
            ),
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

    @property
    def outstanding(self) -> int:
        return self._outstanding

    @outstanding.setter
    def outstanding(self, pieces: int) -> None:
        change, self._outstanding = pieces - self._outstanding, pieces
        self._local.outstanding_changed(change)

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
        self.outstanding = 0
        self._busy = asyncio.Event()
        self._stall = Stall()
        self.failure: BaseException | None = None
        self._injected = 0
        self._folder = folder
        for inside in ("disk", "statistics"):
            (folder / inside).mkdir(exist_ok=True)
        self._agents = [
            self._make_agent(process, folder, settings or {})
            for process in range(len(machine.processes))
        ]
        self.contexts = [
            agent.Context(one)  # type: ignore[arg-type]  # it has all that a Context touches
            for one in self._agents
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

    def carry(self, peer: int, plane: int, head: bytes, body: bytes, payload: Payload) -> None:
        """The carrier: bytes go through the header's layout, as on a socket."""
        header = frames.HEADER.unpack(head)
        self.contexts[peer].fabric.receive(header, body, bytes(payload))

    def run(self, program: agent.Program) -> str:
        """Run the program on every process until one finishes; returns the digest of all.

        Raises what a program raises; DeadlockError or StallError when work is outstanding and
        nothing happens any more, or nothing is achieved.
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
            if self.outstanding:
                raise
        except* BaseException:
            print(how_to_see_again(self.seed, str(self._folder)))
            raise
        if self.failure is not None:
            raise self.failure
        return fold(self.seed, ((f"{c.name}.0", c.fabric.digest.value()) for c in self.contexts))

    @contextlib.contextmanager
    def inject(self, effect: Effect, where: Where = EVERYWHERE) -> Iterator[None]:
        """A fault rule in every process for as long as the block runs, in virtual time."""
        self._injected += 1
        rule_id = f"injected {self._injected}"
        start_ps = self.loop.now_ps
        for context in self.contexts:
            rule = Rule(
                rule_id=rule_id, owner="test", effect=effect, where=where, start_ps=start_ps
            )
            context.fabric.rules.add(rule)
        try:
            yield
        finally:
            for context in self.contexts:
                context.fabric.rules.remove(rule_id)

    def outstanding_changed(self, change: int) -> None:
        """A program took work on or has done some."""
        self.outstanding += change
        self._stalled()
        if self.outstanding:
            self._busy.set()
        else:
            self._busy.clear()

    def _stalled(self) -> bool:
        return self._stall.due(
            self.loop.now_ps,
            outstanding=self.outstanding,
            marked_ps=lambda: max(one.marked_at_ps for one in self._agents),
        )

    async def _watch(self) -> None:
        """The supervisor's watchdog, in one process. It waits while there is nothing to watch, so
        that a loop without any event is seen to be that."""
        while True:
            await self._busy.wait()
            if self._stalled():
                if self.loop.next_at_ps() == NEVER_PS:
                    raise DeadlockError(f"{self.outstanding} pieces of work are outstanding")
                raise StallError(f"nothing was achieved for {format_ps(STALL_PS)}")
            await self.loop.sleep_until_ps(self._stall.since_ps + STALL_PS + 1)

    async def _one(self, program: agent.Program, context: agent.Context) -> None:
        await program(context)


@contextlib.contextmanager
def spawn(
    machine: Machine,
    program: agent.Program,
    *,
    folder: Path,
    seed: int = 0,
    plan: plans.Plan = plans.NO_FAULTS,
    **settings: Any,
) -> Iterator[RunResult]:
    """Run a program on real processes to its end and give the result; all is down by then.

    If the block raises, the seed, the run folder and the command of the test are printed.
    """
    index_of = {process.name: process.index for process in machine.processes}
    faults = [
        NodeFault(
            at_ps=fault.at_ps,
            kind=fault.kind,
            process=index_of[fault.node],
            sudden=fault.sudden,
        )
        for fault in plan.node_faults
    ]
    supervisor = Supervisor(
        machine=machine,
        program=program,
        settings=Settings(seed=seed, rules=list(plan.rules), node_faults=faults, program=settings),
        folder=make_run_folder(folder, "test"),
    )
    result = supervisor.run()
    try:
        yield result
    except BaseException:
        print(how_to_see_again(seed, result.folder))
        raise


def how_to_see_again(seed: int, folder: str) -> str:
    """For people, when a run of a test went wrong."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").split(" ")[0]
    again = f"python -m pytest '{test}'" if test else "the same program"
    return f"seed {seed}, run folder {folder}; see it again with: {again}"
