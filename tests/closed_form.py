"""The timing of design 2.1 in closed form: what a measurement on the emulated machine must equal.

Imports nothing of cmnet, simulates nothing: plain integers, one formula per question, so that it can
be checked by hand. Times are picoseconds, sizes bytes, rates bits per second.

Why the formula is this short. All flows post at one instant, in flow order, on an idle pair of ports.
A flow keeps one chunk in the port and queues its next behind what waits when that one starts. So when
chunk j of flow f starts, the queue holds chunk j of flows f+1.. and chunk j+1 of flows ..f-1, and
chunk j+1 of f goes behind them: the port serves chunk 0 of every flow, then chunk 1 of every flow, and
so on, without a gap. The whole is one busy period, so a frame ends when the bits up to its own have
passed: ceil(bits so far x 10^12 / rate). Ingress is cut-through at the same rate and its first byte
comes one propagation later, so its busy period is the same one, shifted by the propagation.
"""

from __future__ import annotations

from collections.abc import Sequence

PS_PER_S = 10**12


def serialization_ps(size: int, rate_bps: int) -> int:
    """A lone frame, or a lone flow of any number of chunks: ceil(bits x 10^12 / rate)."""
    return -(-8 * size * PS_PER_S // rate_bps)


def deliveries_ps(
    flows: int, size: int, *, chunk_bytes: int, rate_bps: int, propagation_ps: int
) -> list[int]:
    """When the last byte of each of the equal flows is in, counted from the instant of the post.

    Before the last chunk of flow f pass all chunks but the last of every flow, and the last chunks of
    flows 0 to f.
    """
    last = size - (_chunks(size, chunk_bytes) - 1) * chunk_bytes
    return [
        propagation_ps + serialization_ps(flows * (size - last) + (flow + 1) * last, rate_bps)
        for flow in range(flows)
    ]


def uneven_deliveries_ps(
    sizes: Sequence[int], *, chunk_bytes: int, rate_bps: int, propagation_ps: int
) -> list[int]:
    """As ``deliveries_ps`` for flows of different sizes.

    Before the end of a flow of c chunks have passed: c chunks (or all it has) of every flow up to it,
    and c - 1 chunks (or all it has) of every flow after it.
    """
    delivered = []
    for flow, size in enumerate(sizes):
        chunks = _chunks(size, chunk_bytes)
        until_it = sum(min(other, chunks * chunk_bytes) for other in sizes[: flow + 1])
        after_it = sum(min(other, (chunks - 1) * chunk_bytes) for other in sizes[flow + 1 :])
        delivered.append(propagation_ps + serialization_ps(until_it + after_it, rate_bps))
    return delivered


def _chunks(size: int, chunk_bytes: int) -> int:
    return max(1, -(-size // chunk_bytes))


def ub_propagation_ps(read_latency_ps: int, read_rate_bps: int) -> int:
    """One way, such that a lone 512 B read completes at the printed latency (design 2.3).

    The request has 0 charged bytes: latency = 2 x propagation + serialization of 512 B; an odd
    picosecond is left over and waited by the reader.
    """
    return (read_latency_ps - serialization_ps(512, read_rate_bps)) // 2


def read_completion_ps(size: int, *, latency_ps: int, rate_bps: int) -> int:
    """A lone UB read by AIV-direct: at 512 B exactly the printed latency."""
    return latency_ps + serialization_ps(size, rate_bps) - serialization_ps(512, rate_bps)


def read_completions_ps(
    flows: int, size: int, *, chunk_bytes: int, rate_bps: int, latency_ps: int
) -> list[int]:
    """Flows of UB reads posted at one instant: requests arrive in order, the data are bulk flows."""
    there_and_back_ps = latency_ps - serialization_ps(512, rate_bps)
    return deliveries_ps(
        flows,
        size,
        chunk_bytes=chunk_bytes,
        rate_bps=rate_bps,
        propagation_ps=there_and_back_ps,
    )


def write_visible_ps(size: int, *, propagation_ps: int, rate_bps: int) -> int:
    """A lone write on any plane: visible at propagation + serialization."""
    return propagation_ps + serialization_ps(size, rate_bps)


def write_completion_ps(size: int, *, latency_ps: int, rate_bps: int) -> int:
    """A lone UB write by AIV-direct: at 512 B exactly the printed latency of the write."""
    return latency_ps + serialization_ps(size, rate_bps) - serialization_ps(512, rate_bps)


def rdma_write_completion_ps(size: int, *, propagation_ps: int, rate_bps: int) -> int:
    """A lone message of a queue pair: delivered, then one acknowledgement, which no port serves."""
    return 2 * propagation_ps + serialization_ps(size, rate_bps)


def rdma_read_completion_ps(size: int, *, propagation_ps: int, rate_bps: int) -> int:
    """A lone read of a queue pair: a request of 0 charged bytes, then the data."""
    return 2 * propagation_ps + serialization_ps(size, rate_bps)


def vpc_delivery_ps(size: int, *, propagation_ps: int, rate_bps: int) -> int:
    """Bytes on an open VPC connection within its window, until the last is in."""
    return propagation_ps + serialization_ps(size, rate_bps)


def incast_deliveries_ps(arrivals: Sequence[tuple[int, int, int]], *, rate_bps: int) -> list[int]:
    """Arrivals at one ingress, each (first byte, last byte at best, size), sorted by first byte.

    For services that are whole picoseconds (bits x 10^12 divisible by the rate):
    d_i = max(c_i, d_(i-1) + s_i) with c_i = max(last_i, first_i + s_i).
    """
    delivered: list[int] = []
    for first_ps, last_ps, size in arrivals:
        service_ps, rest = divmod(8 * size * PS_PER_S, rate_bps)
        assert rest == 0
        alone_ps = max(last_ps, first_ps + service_ps)
        before_ps = delivered[-1] if delivered else 0
        delivered.append(max(alone_ps, before_ps + service_ps))
    return delivered
