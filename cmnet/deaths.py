"""A peer's death, for what is on its way from there to this process (design 1.8).

Owns which of it never happened, and the list of the rest. Does not own what planes do about messages
that can no longer become whole: they are told by ``Fabric.on_forgotten``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from cmnet.burst_arrivals import BurstArrivals
from cmnet.messages import Arrival, IngressPort
from cmnet.vtime.agenda import Agenda

Forgotten = Callable[[set[int], list[Arrival]], None]
"""(a dead peer's devices, those of its single messages that still come, in no order)"""


def forget(
    agenda: Agenda,
    ports: Iterable[IngressPort],
    bursts: BurstArrivals,
    *,
    devices: set[int],
    window: int,
    deliver: Callable[[Any], None],
    deliver_flags: Callable[[Any], None],
) -> list[Arrival]:
    """Take out what these devices sent in this window or later, rows of bursts included, unless settled;
    returns the single messages of theirs that stay. Those that are no event wait at a port, rows among
    the arrivals of bursts, all others in the agenda."""
    coming: list[Arrival] = []

    def unwanted(item: Any) -> bool:
        return bool(item.window >= window and item.source in devices)

    def event_unwanted(event: Any) -> bool:
        run, item = event[4], event[5]
        if run != deliver:
            return bool(run == deliver_flags) and unwanted(item)
        if item.source in devices and item.window < window:
            coming.append(item)
        return unwanted(item)

    for port in ports:
        port.discard(unwanted)
        coming += [one for one in port.quiet_ones() if one.source in devices]
    bursts.discard(unwanted)
    agenda.discard(event_unwanted)
    return coming
