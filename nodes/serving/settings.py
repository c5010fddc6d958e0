"""The ``serving:`` section of a topology: limits, timeouts and retries of the serving system.

Owns the values and what is allowed in them. Does not own how long anything takes (``cost``) nor the
model (``nodes.settings``). No public text gives CloudMatrix-Infer's timeouts, so most are assumed;
they matter only when something breaks.
"""

from __future__ import annotations

import msgspec

from cmnet.topology.quantity import Count, Duration, FieldError, Kind


def _assumed(value: str, source: str, low: str, high: str) -> Duration:
    return Duration(value=value, kind=Kind.ASSUMED, source=source, range=(low, high))


class ServingSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the serving system behaves; every field has a default."""

    decode_sequences_max: Count = Count(
        value=64,
        kind=Kind.PUBLISHED,
        source="arXiv 2506.12708, SLO table: up to 128 sequences per NPU, two dies",
    )
    """Sequences that one decode die works on at a time; more wait for a place."""

    prefill_tokens_max: Count = Count(
        value=8192,
        kind=Kind.PUBLISHED,
        source="arXiv 2506.12708, prefill throughput: 16,384 tokens per NPU and batch, two dies",
    )
    """Prompt tokens per die of one prefill batch; a single longer prompt is a batch of its own."""

    step_timeout: Duration = _assumed(
        "5 s", "60 times the longest published decode step, 84 ms", "1 s", "60 s"
    )
    """A decode rank that waits this long for an exchange gives the step up."""

    step_pause: Duration = _assumed(
        "2 s", "as between two KV transfers; a killed node is known by then", "100 ms", "10 s"
    )
    """Before a step that failed is done again, and a control message that was lost is said again."""

    step_tries: Count = Count(
        value=3,
        kind=Kind.ASSUMED,
        source="as for KV transfers: 3 tries",
        range=(1, 10),
    )
    """Steps that may fail one after the other before their requests are told so."""

    ping_interval: Duration = _assumed("1 s", "a usual heartbeat", "100 ms", "5 s")
    """The gateway asks every instance this often whether it lives."""

    ping_timeout: Duration = _assumed("3 s", "three intervals missed", "300 ms", "15 s")
    """An instance that has not answered for this long is taken as dead."""

    store_timeout: Duration = _assumed(
        "100 ms", "a look-up takes microseconds; the prompt is computed instead", "10 ms", "1 s"
    )
    """Prefill waits this long for the store, then goes on without it."""

    transfer_tries: Count = Count(
        value=3,
        kind=Kind.PUBLISHED,
        source="Ascend's shipping prefill-decode connector: 3 pull retries",
    )
    """Times that KV rows of one request are asked for before the request is started anew."""

    transfer_pause: Duration = Duration(
        value="2 s",
        kind=Kind.PUBLISHED,
        source="Ascend's shipping prefill-decode connector: retries 2 s apart",
    )
    """Between two of those tries."""

    progress_timeout: Duration = _assumed(
        "300 s",
        "longer than any queue of the public traces; half of the stall watchdog",
        "60 s",
        "590 s",
    )
    """A request without a new token for this long begins again or fails: the last resort."""

    return_timeout: Duration = _assumed(
        "30 s", "longer than a process takes to start; a client would wait so long", "1 s", "120 s"
    )
    """A request that no living node could serve waits this long for one to come back."""

    request_tries: Count = Count(
        value=2,
        kind=Kind.ASSUMED,
        source="one more chance on another instance, then the client is told",
        range=(1, 5),
    )
    """Times that the gateway starts a request before it fails with an error."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name).amount < 1:
                raise FieldError(f"{name}.value", "more than 0")
        if self.ping_timeout.amount <= self.ping_interval.amount:
            raise FieldError(
                "ping_timeout.value", f"more than ping_interval, {self.ping_interval.value}"
            )
