"""How the serving system's messages travel on each plane."""

from __future__ import annotations

from collections.abc import Callable

from cmnet.fabric import Fabric
from cmnet.messages import Arrival, Payload
from cmnet.topology.machine import Operation, Plane

KIND_BASE = 64


class FrameCarrier:
    """Plain frames of one plane: chunk by chunk, the last one carrying the message."""

    def __init__(self, fabric: Fabric, plane: Plane) -> None:
        self._fabric = fabric
        self._plane = plane
        self._kind = KIND_BASE + plane
        self._chunk_bytes = fabric.machine.chunk_bytes[plane]
        fabric.bind(self._kind, self._arrived)

    def on_message(self, handler: Callable[[int, int, bytes, bytes], None]) -> None:
        self._handler = handler

    def send(
        self, source: int, target: int, body: bytes, payload: Payload, charged_bytes: int
    ) -> None:
        route = self._fabric.route(self._plane, Operation.WRITE, source, target)

        def next_chunk(left_bytes: int) -> None:
            if left_bytes <= self._chunk_bytes:
                self._fabric.send(
                    route, self._kind, charged_bytes=left_bytes, body=body, payload=payload
                )
            else:
                self._fabric.send(
                    route,
                    self._kind,
                    charged_bytes=self._chunk_bytes,
                    started=lambda _: next_chunk(left_bytes - self._chunk_bytes),
                )

        next_chunk(charged_bytes)

    def _arrived(self, arrival: Arrival) -> None:
        if arrival.body:
            self._handler(arrival.source, arrival.target, arrival.body, bytes(arrival.payload))
