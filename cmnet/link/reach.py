"""Where a fault rule acts, and whether it reaches a frame.

Owns the shapes that a target can have: a plane, ends, two sets of ends. Does not own their names
(chaos/target.py reads those) nor the sub-planes, which belong to the kinds that take them down.
"""

from __future__ import annotations

import msgspec


class FrameFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What rules can ask about a frame; the same for all frames of a path, so made once."""

    plane: int
    source: int
    target: int
    source_process: int
    target_process: int
    crosses_nodes: bool
    uses_subplanes: bool
    """UB frames through switches: all but those between two dies of one NPU."""


class Ends(msgspec.Struct, frozen=True, kw_only=True):
    """A set of processes and single devices; a frame's end is in it if either lists it.

    ``complement`` makes it the set of all others.
    """

    processes: tuple[int, ...] = ()
    devices: tuple[int, ...] = ()
    complement: bool = False

    def hold(self, *, device: int, process: int) -> bool:
        listed = process in self.processes or device in self.devices
        return listed != self.complement


class Where(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rule acts: frames from one set of ends to the other, on one plane or on all.

    None is anything. ``Where()`` is every frame; ``Where(one=ends, both_ways=True)`` is every frame
    with at least one end there.
    """

    plane: int | None = None
    one: Ends | None = None
    other: Ends | None = None
    both_ways: bool = False

    def reaches(self, facts: FrameFacts) -> bool:
        if self.plane is not None and self.plane != facts.plane:
            return False
        if self._joins(facts, self.one, self.other):
            return True
        return self.both_ways and self._joins(facts, self.other, self.one)

    @staticmethod
    def _joins(facts: FrameFacts, sources: Ends | None, targets: Ends | None) -> bool:
        if sources and not sources.hold(device=facts.source, process=facts.source_process):
            return False
        return not targets or targets.hold(device=facts.target, process=facts.target_process)
