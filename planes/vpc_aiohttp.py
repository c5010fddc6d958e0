"""aiohttp, unmodified, over the VPC plane: the few names it takes from the outside world, replaced.

Owns what a node does to aiohttp before it uses it. Does not own aiohttp's settings: a client passes
``TCPConnector(socket_factory=make_socket)`` itself. What aiohttp reads from outside and what is done:

- the real monotonic clock for idle connections and cached names: the loop's time instead;
- the real date for Date headers and cookies: the loop's time, so that carried bytes repeat as well;
- the global generator to choose which waiter gets a connection: a named stream of the run's seed;
- websocket keys and masks, multipart boundaries: of fixed length and not left; no result sees them.

aiohttp rounds timeouts above 5 s up to whole seconds of the loop's clock (its ``ceil_threshold``); so
these, and only these, depend on the clock's origin.
"""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp.connector
import aiohttp.cookiejar
import aiohttp.helpers

from cmnet.entropy import Stream
from planes.vpc_sockets import make_socket as make_socket


class _Shuffler:
    """The one function that the connector uses of the module ``random``."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def shuffle(self, items: list[Any]) -> None:
        """Fisher and Yates, from the end."""
        for last in range(len(items) - 1, 0, -1):
            other = self._stream.below(last + 1)
            items[last], items[other] = items[other], items[last]


class _Clock:
    """The module ``time`` with a ``time()`` of the loop's."""

    def __init__(self, loop: asyncio.AbstractEventLoop, module: Any) -> None:
        self._module = getattr(module, "_module", module)
        self.time = loop.time

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def prepare_aiohttp(loop: asyncio.AbstractEventLoop, stream: Stream) -> None:
    """Give aiohttp the loop's time and a stream of the run. Once per process, before its use."""
    connector: Any = aiohttp.connector
    connector.monotonic = loop.time
    connector.random = _Shuffler(stream)
    for module in (aiohttp.helpers, aiohttp.cookiejar):
        replaced: Any = module
        replaced.time = _Clock(loop, replaced.time)
