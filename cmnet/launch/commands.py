"""Commands that need no program: ``topology`` and ``diff``.

Owns what they do; ``run.py`` owns their options. A command returns the exit status and raises
InputError for what is wrong with its input.
"""

from __future__ import annotations

import shlex

import msgspec

from cmnet.record import journal
from cmnet.record import record as records
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


def diff(first: str, second: str, screen: Screen) -> int:
    """``run.py diff``: the first event that differs between two runs; 1 if there is one."""
    folders = [records.find(name) for name in (first, second)]
    found = [records.read(folder) for folder in folders]
    difference = journal.first_difference(*folders)
    told = records.differences(*found)
    for part in told:
        screen.line(f"the runs were told different things: {part}")
    devices = [device.name for device in records.machine(found[0]).devices]
    facts = {"told_differently": told, "same": difference is None, "difference": None}
    if difference is None:
        screen.line(f"no event differs in {journal.events_count(folders[0])} events")
    else:
        screen.line(f"first difference: event {difference.number} of {difference.process}")
        screen.line(f"  {first}: {journal.in_words(difference.first, devices)}")
        screen.line(f"  {second}: {journal.in_words(difference.second, devices)}")
        facts["difference"] = msgspec.to_builtins(difference)
    screen.result(facts)
    if difference is not None:
        screen.line(shlex.join(["python", "run.py", "diff", first, second]))
    return int(difference is not None)
