"""Commands that need no program: ``topology``.

Owns what they do; ``run.py`` owns their options. A command returns the exit status and raises
InputError for what is wrong with its input.
"""

from __future__ import annotations

from cmnet.record.screen import Screen
from cmnet.topology import describe
from cmnet.topology.machine import Machine


def topology(machine: Machine, screen: Screen, *, check: bool) -> int:
    """``run.py topology``: what this machine is; with ``check`` one line that it is right."""
    if check:
        screen.line(f"{machine.file}: right ({machine.name})")
    else:
        for line in [] if screen.json else describe.lines(machine):
            screen.line(line)
    screen.result(describe.describe(machine))
    return 0
