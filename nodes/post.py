"""Typed messages between the parts of the serving system, over any plane.

Owns their encoding, and calls that end in an answer or an error. Does not own how bytes travel: each
plane has a *carrier* (``nodes.carriers``). A message that is lost with its receiver is lost; whoever
needs an answer uses ``call``.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import msgspec

from cmnet.errors import PeerDeadError
from cmnet.messages import Payload
from cmnet.topology.machine import Plane
from cmnet.units import format_ps
from cmnet.vtime.loop import VirtualLoop

M = TypeVar("M", bound=msgspec.Struct)
Handler = Callable[[Any, bytes, int], None]
"""(message, payload, source device)"""
Reply = Callable[[msgspec.Struct, bytes, int], None]
"""(message, payload, charged bytes): what a server of calls does once."""
Server = Callable[[Any, bytes, Reply], None]
"""(message, payload, reply)"""


class Carrier(Protocol):
    """Carries messages between devices on one plane, whole, once, or not at all.

    RDMA and VPC keep the order of each pair; on UB a message of more than a chunk may be overtaken
    by later ones. A plane may lack one of the two ways to send.
    """

    def on_message(self, handler: Callable[[int, int, bytes, bytes], None]) -> None:
        """Call ``handler(source, target, body, payload)`` at the delivery of each message."""


class Sender(Carrier, Protocol):
    """A carrier that sends and forgets."""

    def send(
        self, source: int, target: int, body: bytes, payload: Payload, charged_bytes: int
    ) -> None:
        """Begin to send; waits for nobody."""


class Completer(Carrier, Protocol):
    """A carrier that knows what has arrived."""

    async def complete(
        self, source: int, target: int, body: bytes, payload: Payload, charged_bytes: int
    ) -> None:
        """Send; returns when it is known to be there. Raises OperationError."""


class Teller(Sender, Protocol):
    """A sender that says afterwards what may not have arrived."""

    def on_lost(self, handler: Callable[[bytes], None]) -> None:
        """Call ``handler(body)`` for each message that is not known to have arrived."""


class Post:
    """All messages of one process. ``types`` are all that it may receive (tagged structs).

    ``first_call`` differs from one incarnation of a process to the next: a late answer to a call
    of the old one is no answer to a call of the new one.
    """

    def __init__(
        self,
        loop: VirtualLoop,
        carriers: dict[Plane, Any],
        types: tuple[type[msgspec.Struct], ...],
        *,
        first_call: int = 0,
    ) -> None:
        self._loop = loop
        self._carriers: dict[Plane, Any] = carriers
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode: Callable[[bytes], tuple[int, Any]] = msgspec.msgpack.Decoder(
            tuple[int, functools.reduce(operator.or_, types)]  # type: ignore[misc]  # made at run time
        ).decode
        self._handlers: dict[type, Handler] = {}
        self._servers: dict[type, Server] = {}
        self._answers: dict[int, Any] = {}
        self._calls = first_call
        for plane, carrier in carriers.items():
            carrier.on_message(functools.partial(self._arrived, plane))

    def on(self, kind: type[M], handler: Callable[[M, bytes, int], None]) -> None:
        """Call ``handler(message, payload, source device)`` for messages of this type."""
        assert kind not in self._handlers and kind not in self._servers
        self._handlers[kind] = handler

    def serve(self, kind: type[M], server: Callable[[M, bytes, Reply], None]) -> None:
        """Answer calls of this type: ``server`` calls ``reply`` once, now or later."""
        assert kind not in self._handlers and kind not in self._servers
        self._servers[kind] = server

    def send(
        self,
        plane: Plane,
        source: int,
        target: int,
        message: msgspec.Struct,
        *,
        payload: Payload = b"",
        charged_bytes: int = 0,
    ) -> None:
        """Send a message; ``charged_bytes`` 0 means the bytes of its encoding and payload."""
        self._carry(plane, source, target, 0, message, payload, charged_bytes)

    async def complete(
        self,
        plane: Plane,
        source: int,
        target: int,
        message: msgspec.Struct,
        *,
        payload: Payload = b"",
        charged_bytes: int = 0,
    ) -> None:
        """As ``send``, but returns when the message is known to be there. Raises OperationError."""
        body = self._encode((0, message))
        charged_bytes = charged_bytes or len(body) + len(payload)
        carrier: Completer = self._carriers[plane]
        await carrier.complete(source, target, body, payload, charged_bytes)

    def on_lost(self, plane: Plane, handler: Callable[[Any], None]) -> None:
        """Call ``handler(message)`` for each of ours that is not known to have arrived (VPC only)."""
        carrier: Teller = self._carriers[plane]
        carrier.on_lost(lambda body: handler(self._decode(body)[1]))

    def deliver(self, message: msgspec.Struct) -> None:
        """Handle a message of this process to itself."""
        self._handlers[type(message)](message, b"", -1)

    async def call(
        self,
        plane: Plane,
        source: int,
        target: int,
        message: msgspec.Struct,
        *,
        timeout_ps: int,
        payload: Payload = b"",
        charged_bytes: int = 0,
    ) -> tuple[Any, bytes]:
        """Send a message and wait for its answer. Raises PeerDeadError at the timeout."""
        self._calls += 1
        number = self._calls
        future = self._answers[number] = self._loop.create_future()
        timer = self._loop.call_at_ps(
            self._loop.now_ps + timeout_ps, self._gave_up, future, type(message), timeout_ps
        )
        try:
            self._carry(plane, source, target, number, message, payload, charged_bytes)
            answer: tuple[Any, bytes] = await future
            return answer
        finally:
            timer.cancel()
            del self._answers[number]

    def _gave_up(self, future: Any, kind: type, timeout_ps: int) -> None:
        if not future.done():
            what = f"no answer to {kind.__name__} in {format_ps(timeout_ps)}"
            future.set_exception(PeerDeadError(what, definite=False))

    def _carry(
        self,
        plane: Plane,
        source: int,
        target: int,
        number: int,
        message: msgspec.Struct,
        payload: Payload,
        charged_bytes: int,
    ) -> None:
        body = self._encode((number, message))
        charged_bytes = charged_bytes or len(body) + len(payload)
        carrier: Sender = self._carriers[plane]
        carrier.send(source, target, body, payload, charged_bytes)

    def _arrived(self, plane: Plane, source: int, target: int, body: bytes, payload: bytes) -> None:
        number, message = self._decode(body)
        if number < 0:
            future = self._answers.get(-number)
            if future is not None and not future.done():
                future.set_result((message, payload))
        elif number:
            reply = functools.partial(self._reply, plane, target, source, number)
            self._servers[type(message)](message, payload, reply)
        else:
            self._handlers[type(message)](message, payload, source)

    def _reply(
        self,
        plane: Plane,
        source: int,
        target: int,
        number: int,
        message: msgspec.Struct,
        payload: bytes,
        charged_bytes: int,
    ) -> None:
        self._carry(plane, source, target, -number, message, payload, charged_bytes)
