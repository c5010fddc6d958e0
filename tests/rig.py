"""A machine's fabrics on one loop, with nothing else: for tests of links.

No program, no conductor, no socket; frames go through their byte layout. ``lines`` of a process are
its journal: what its digest folds, as text.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path

from cmnet import entropy
from cmnet.fabric import Fabric
from cmnet.link.rules import Rule, Rules
from cmnet.messages import Payload
from cmnet.record.digest import Digest
from cmnet.topology.load import load
from cmnet.topology.machine import Machine
from cmnet.units import NEVER_PS
from cmnet.vtime.loop import VirtualLoop
from cmnet.wire import frames

TOPOLOGIES = Path(__file__).resolve().parents[1] / "topologies"


@functools.cache
def machine(name: str) -> Machine:
    """A shipped topology, loaded once."""
    return load(str(TOPOLOGIES / f"{name}.yaml"))


class Rig:
    """Fabrics of all processes. ``carry`` delivers at once, or what replaces it."""

    def __init__(self, name: str = "mini", *, rules: tuple[Rule, ...] = ()) -> None:
        self.machine = copy.copy(machine(name))
        self.loop = VirtualLoop()
        self.frames: list[tuple[int, tuple[int, ...], bytes, bytes]] = []
        """Every frame between processes: (peer, header, body, payload)."""
        self.lines: list[list[str]] = []
        self.fabrics = [self._make_fabric(process, rules) for process in self._processes()]

    def _processes(self) -> range:
        return range(len(self.machine.processes))

    def _make_fabric(self, process: int, rules: tuple[Rule, ...]) -> Fabric:
        table = Rules(lambda name: entropy.stream(1, f"{process}.{name}"))
        for rule in rules:
            table.add(rule)
        lines: list[str] = []
        self.lines.append(lines)
        return Fabric(
            loop=self.loop,
            machine=self.machine,
            process=process,
            incarnation=0,
            digest=Digest(lines.append),
            rules=table,
            carry=self._carry,
        )

    def _carry(self, peer: int, plane: int, head: bytes, body: bytes, payload: Payload) -> None:
        header = frames.HEADER.unpack(head)
        frames.check_lengths(header[0], header[1], header[2])
        assert (header[0], header[1]) == (len(body), len(payload))
        self.frames.append((peer, header, body, bytes(payload)))
        self.fabrics[peer].receive(header, body, bytes(payload))

    def device(self, name: str) -> int:
        return self.machine.device(name).device_id

    def fabric_of(self, device: int) -> Fabric:
        return self.fabrics[self.machine.devices[device].process]

    def at(self, at_ps: int, action: Callable[[], object]) -> None:
        """Do something at an instant."""
        self.loop.call_at_ps(at_ps, action)

    def run(self, until_ps: int = NEVER_PS) -> None:
        assert self.loop.run_until(until_ps)

    def close(self) -> None:
        self.loop.close()

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
