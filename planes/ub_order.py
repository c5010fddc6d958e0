"""What a UB initiator remembers: operations that somebody waits for, and the order of flags.

Owns an operation's end (completion, error or silence) and which flags must wait for which writes to be
in the port. Does not own frames (``planes.ub_frames``) nor what the target does (``planes.ub_target``).
"""

from __future__ import annotations

import asyncio
from collections import deque

from cmnet.errors import LinkError, MemoryRangeError, OperationError, PeerDeadError
from cmnet.fabric import Fabric
from cmnet.messages import Route
from cmnet.topology.machine import Operation, Plane
from cmnet.units import PS_PER_S, format_ps
from planes.ub_frames import FLAG, FLAG_BYTES, OK, RANGE

COMPLETION_TIMEOUT_PS = PS_PER_S
"""Without progress for so long after its last frame started, an operation counts its peer as dead.
Assumed (0.1 to 10 s; none is published): far above a queue at an ingress (1 s is 135 GB)."""


class UbPair:
    """What one device sends to another: two routes, and the order of flags after writes."""

    __slots__ = ("_fabric", "_forgiven", "_forgiven_until", "_held", "_open", "reads", "writes")

    def __init__(self, fabric: Fabric, source: int, target: int) -> None:
        self.writes: Route = fabric.route(Plane.UB, Operation.WRITE, source, target)
        self.reads: Route = fabric.route(Plane.UB, Operation.READ, source, target)
        self._fabric = fabric
        self._open: dict[int, None] = {}
        """Writes, by growing number, that are not wholly in the port yet."""
        self._held: deque[tuple[int, bytes, int]] = deque()
        """Flags (number, body, fence) that wait for those before them."""
        self._forgiven = 0
        self._forgiven_until = 0

    def opened(self, number: int) -> None:
        """A write begins that will not be in the port at once."""
        self._open[number] = None

    def closed(self, number: int) -> None:
        """It is wholly in the port, or has failed: flags that waited for it follow."""
        del self._open[number]
        held, still = self._held, self._open
        while held and not (still and next(iter(still)) < held[0][0]):
            _, body, fence = held.popleft()
            self._send_flag(body, fence)

    def flag(self, number: int, body: bytes) -> None:
        """Send a flag, after all writes opened before it are in the port."""
        if self._open:
            self._held.append((number, body, self._forgiven))
        else:
            self._send_flag(body, self._forgiven)

    def _send_flag(self, body: bytes, fence: int) -> None:
        self._fabric.send(self.writes, FLAG, charged_bytes=FLAG_BYTES, body=body, fence=fence)

    def told(self, failure: int) -> None:
        """The program learns now of this failure (as counted by the route)."""
        if failure > self._forgiven_until:
            self._forgiven += 1

    def forgive(self) -> int:
        """All failures count as known from now on; returns how many were not."""
        unknown = self.writes.failures - self._forgiven
        self._forgiven = self._forgiven_until = self.writes.failures
        return unknown


class Waited:
    """One operation that somebody waits for."""

    __slots__ = (
        "_failure",
        "_give_up_ps",
        "_loop",
        "_name",
        "_timer",
        "_what",
        "pair",
        "future",
        "number",
        "progress_ps",
    )

    def __init__(self, fabric: Fabric, number: int, pair: UbPair, what: str) -> None:
        self._loop = fabric.loop
        retry, devices, route = fabric.machine.ub_retry, fabric.machine.devices, pair.writes
        self._give_up_ps = retry.tries * retry.delay_ps
        self._what = what
        self._name = f"{what} from {devices[route.source].name} to {devices[route.target].name}"
        self._failure = 0
        self._timer: asyncio.TimerHandle | None = None
        self.pair = pair
        self.future: asyncio.Future[bytes] = self._loop.create_future()
        self.number = number
        self.progress_ps = 0

    def started(self, sent: bool) -> None:
        """Its last frame left, or one was dropped: the link gives up after its tries."""
        if sent:
            self.progress_ps = self._loop.now_ps
            self._look_again()
        else:
            self._failure = self.pair.writes.failures
            at_ps = self._loop.now_ps + self._give_up_ps
            self._timer = self._loop.call_at_ps(at_ps, self._link_failed)

    def _look_again(self) -> None:
        at_ps = self.progress_ps + COMPLETION_TIMEOUT_PS
        if at_ps > self._loop.now_ps:
            self._timer = self._loop.call_at_ps(at_ps, self._look_again)
        else:
            silent = format_ps(COMPLETION_TIMEOUT_PS)
            self._fail(PeerDeadError(f"{self._name}: no completion in {silent}", definite=False))

    def _link_failed(self) -> None:
        if self._what in WRITING:
            self.pair.told(self._failure)
        self._fail(LinkError(f"{self._name}: the link gave up", definite=True))

    def completed(self, status: int) -> None:
        """The target's answer, when it is not data."""
        if status == OK:
            self.succeed(b"")
        elif status == RANGE:
            what = f"{self._name}: outside of what the target has registered"
            self._fail(MemoryRangeError(what, definite=True))
        else:
            what = f"{self._name}: the link gave up the answer"
            self._fail(LinkError(what, definite=self._what == "read"))

    def succeed(self, data: bytes) -> None:
        """The end that was wished for."""
        if not self.future.done():
            self.future.set_result(data)

    def _fail(self, error: OperationError) -> None:
        if not self.future.done():
            self.future.set_exception(error)

    def close(self) -> None:
        """Nobody waits any more."""
        if self._timer is not None:
            self._timer.cancel()


WRITING = ("write", "message")
"""Operations whose frames travel as writes, before flags."""
