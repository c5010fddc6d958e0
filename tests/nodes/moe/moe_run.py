"""Whole ``moe`` runs in one process, for tests: all nodes on one loop, faults by rules."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from cmnet.link.rules import Rule
from cmnet.testing import LocalMachine
from cmnet.topology.load import load
from cmnet.topology.machine import Machine
from nodes.model import layer_oracle
from nodes.moe import program, result, setup
from nodes.moe.job import MoeJob
from nodes.moe.layer import Touch
from nodes.moe.options import Options
from nodes.moe.result import RankLayer
from nodes.moe.verify import tokens
from nodes.serving.job import EXTENSIONS
from tests.rig import TOPOLOGIES


@functools.cache
def mini() -> Machine:
    """4 nodes of 4 dies."""
    return load(str(TOPOLOGIES / "mini.yaml"), extensions=EXTENSIONS)


def make_job(changes: dict[str, Any] | None = None, **options: Any) -> MoeJob:
    """A job on ``mini``; ``changes`` to it are those that no option makes."""
    asked: dict[str, Any] = {"ep": 8, "batch": 6, "layers": 2, "model": "seal"} | options
    return msgspec.structs.replace(setup.make_job(mini(), Options(**asked)), **(changes or {}))


class Run:
    """What a run left: lines by (step, layer, rank), and its digest."""

    def __init__(
        self,
        job: MoeJob,
        folder: Path,
        *,
        rules: tuple[Rule, ...] = (),
        touch: Touch = program.untouched,
        shared_buffer: bool = False,
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.job = job
        local = LocalMachine(mini(), folder=folder, rules=rules)
        self.digest = local.run(
            program.make_program(mini(), job, touch, shared_buffer=shared_buffer)
        )
        self.loop = local.loop
        self.statistics = [context.on_statistics() for context in local.contexts]
        lines = [line for path in sorted(folder.glob(result.PATTERN)) for line in _lines(path)]
        self.lines = {(line.step, line.layer, line.rank): line for line in lines}
        assert len(self.lines) == len(lines), "a rank wrote a layer twice"

    def late(self) -> int:
        """Operators and ends of layers that nodes knew of too late."""
        known = [each["known_late"] for each in self.statistics if each]
        return sum(of["late"] for each in known for of in each.values())

    def seals(self) -> dict[tuple[int, int, int], list[int]]:
        """The seals of every rank and layer."""
        return {place: result.seals(line).tolist() for place, line in self.lines.items()}

    def errors(self) -> str:
        """All errors of all ranks."""
        return "\n".join(line.error for line in self.lines.values() if line.error)

    def wrong(self) -> tuple[int, int, int]:
        """Tokens (checked, wrong, lost) of all layers."""
        job, checked, wrong = self.job, 0, 0
        seeds, places = tokens(job)
        truth = layer_oracle.make(job.body, job.model, seeds=seeds, places=places, skew=job.skew)
        firsts = np.concatenate([[0], np.cumsum(job.counts)])
        for (_, layer, rank), line in self.lines.items():
            right = truth.seals(layer)[firsts[rank] + result.index(line)]
            checked += len(right)
            wrong += int((right != result.seals(line)).sum())
        passes = max(job.steps, 1 + max(step for step, _, _ in self.lines))
        asked = passes * job.model.carried_layers * sum(job.counts)
        return checked, wrong, asked - checked


def _lines(path: Path) -> list[RankLayer]:
    return [result.decode(line) for line in path.read_bytes().splitlines()]
