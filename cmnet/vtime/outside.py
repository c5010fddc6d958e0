"""The calls of a loop that reach the outside world: virtual, through a plane, or refused.

Owns the two lists. uvloop's own transports call round a subclass's overrides and would run at a moment
of the wall clock, so none of them may live in a node (design 1.2). ``network`` of the loop is what a
plane installs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

VIRTUAL = (
    "create_connection create_server getaddrinfo getnameinfo sock_connect sock_accept sock_recv"
    " sock_recv_into sock_sendall sock_recvfrom sock_recvfrom_into sock_sendto sock_sendfile"
).split()
REFUSED = (
    "create_unix_connection create_unix_server create_datagram_endpoint connect_read_pipe"
    " connect_write_pipe connect_accepted_socket subprocess_exec subprocess_shell start_tls sendfile"
    " add_reader remove_reader add_writer remove_writer add_signal_handler remove_signal_handler"
).split()


def override(loop_class: type) -> None:
    """Replace all these calls in a class of loops."""
    for name in VIRTUAL:
        setattr(loop_class, name, _delegate(name))
    for name in REFUSED:
        setattr(loop_class, name, _refuse(name))


def _refuse(name: str) -> Callable[..., Any]:
    def refused(self: Any, *_: Any, **__: Any) -> Any:
        raise RuntimeError(f"loop.{name}() would run on the wall clock; a node has no such thing")

    refused.__name__ = name
    return refused


def _delegate(name: str) -> Callable[..., Any]:
    def delegated(self: Any, *args: Any, **options: Any) -> Any:
        method = getattr(self.network, name, None)
        if method is None:
            raise RuntimeError(f"loop.{name}() needs the VPC plane of a node, which is not there")
        return method(*args, **options)

    delegated.__name__ = name
    return delegated
