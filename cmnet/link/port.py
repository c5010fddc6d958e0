"""One direction of a port: a FIFO server with exact busy periods (design 2.1).

Owns the arithmetic of egress and ingress, one message at a time (``port_kernels`` has it for many).
Does not own queues, sockets or the clock: callers pass instants and get instants. Within a busy period
the k-th finish is begin + ceil(bits so far x 10^12 / rate), so rounding never adds up; an idle port, a
changed rate, or an ingress time set by the sender's finish begins a new period.

Kept is where the period really stands: whole picoseconds and a rest in units of 1 / rate ps.
"""

from __future__ import annotations

from cmnet.units import PS_PER_S

State = tuple[int, int, int, int]
"""A server in numbers, in the order in which kernels take it: free, whole, rest, rate."""


class Server:
    """The time line of one FIFO server. ``free_ps`` is when it could serve the next frame."""

    __slots__ = ("_rate_bps", "_rest", "_whole_ps", "free_ps")

    def __init__(self) -> None:
        self.free_ps = 0
        self._whole_ps = 0
        self._rest = 0
        self._rate_bps = 0

    def serve(self, start_ps: int, charged_bytes: int, rate_bps: int) -> int:
        """Serve a frame from ``start_ps`` (at or after ``free_ps``); returns when it is done."""
        rest = charged_bytes * (8 * PS_PER_S)
        if start_ps > self.free_ps or rate_bps != self._rate_bps:
            whole_ps = start_ps
            self._rate_bps = rate_bps
        else:
            whole_ps = self._whole_ps
            rest += self._rest
        whole_ps += rest // rate_bps
        self._rest = rest = rest % rate_bps
        self._whole_ps = whole_ps
        self.free_ps = finish_ps = whole_ps + 1 if rest else whole_ps
        return finish_ps

    def receive(self, first_ps: int, last_ps: int, charged_bytes: int, rate_bps: int) -> int:
        """Serve a cut-through arrival: first byte in at ``first_ps``, last at ``last_ps`` at best.

        Arrivals must come sorted by (first byte, source, sequence). Returns the delivery:
        max(last byte, max(first byte, free) + bytes / rate).
        """
        free_ps = self.free_ps
        start_ps = first_ps if first_ps > free_ps else free_ps
        delivered_ps = self.serve(start_ps, charged_bytes, rate_bps)
        if last_ps > delivered_ps:
            self.free_ps = delivered_ps = last_ps
            self._rate_bps = 0
        return delivered_ps

    @property
    def state(self) -> State:
        """For a kernel that serves many messages, which gives it back changed."""
        return self.free_ps, self._whole_ps, self._rest, self._rate_bps

    @state.setter
    def state(self, state: State) -> None:
        self.free_ps, self._whole_ps, self._rest, self._rate_bps = state
