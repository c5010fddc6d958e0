"""Names, addresses and fake sockets of the VPC plane, and what an event loop asks of a network.

Owns the mapping between process names and addresses, the objects that pass for sockets, and the hooks
with which asyncio and unmodified libraries (aiohttp) reach the plane: ``Network`` is what
``VirtualLoop.network`` points to. Does not own streams (``vpc``). No socket is ever made: the module
``socket`` gives constants and ``gaierror``.

A look-up takes no virtual time: names are known to every process.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
import os
import socket
from collections.abc import Callable
from typing import Any, Protocol

from cmnet.topology.machine import Machine

AddressInfo = tuple[int, int, int, str, tuple[str, int]]
LOCAL_HOSTS = ("localhost", "127.0.0.1")
ANY_HOSTS = (None, "", "0.0.0.0", "::")


class Addresses:
    """Process names and their addresses, 10.0.0.1 for process 0 and so on."""

    def __init__(self, machine: Machine, process: int) -> None:
        self._process = process
        self._names = [process.name for process in machine.processes]
        self._addresses = [_address(index) for index in range(len(self._names))]
        self._by_host = {name: index for index, name in enumerate(self._names)}
        self._by_host |= {address: index for index, address in enumerate(self._addresses)}
        self._by_host |= dict.fromkeys(LOCAL_HOSTS, process)

    def process(self, host: object) -> int:
        """The process behind a name or an address. Raises socket.gaierror."""
        name = host.decode("ascii") if isinstance(host, bytes) else host
        found = self._by_host.get(name.rstrip(".").lower()) if isinstance(name, str) else None
        if found is None:
            raise socket.gaierror(socket.EAI_NONAME, f"no process of this machine is {host!r}")
        return found

    def address(self, process: int) -> str:
        return self._addresses[process]

    def name(self, process: int) -> str:
        return self._names[process]

    def binds(self, host: object) -> bool:
        """True if a server of this process may listen there."""
        return host in ANY_HOSTS or self._by_host.get(str(host)) == self._process

    def info(self, host: object, port: object, family: int, kind: int) -> list[AddressInfo]:
        """getaddrinfo's answer: the one address of a host. Raises socket.gaierror."""
        if family not in (socket.AF_UNSPEC, socket.AF_INET):
            raise socket.gaierror(socket.EAI_FAMILY, "the VPC plane has IPv4 addresses only")
        if kind not in (0, socket.SOCK_STREAM):
            raise socket.gaierror(socket.EAI_SOCKTYPE, "the VPC plane has streams only")
        address = "0.0.0.0" if host in ANY_HOSTS else self._addresses[self.process(host)]
        place = (address, _port(port))
        return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", place)]


def _address(process: int) -> str:
    number = process + 1
    return f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"


def _port(port: object) -> int:
    text = port.decode("ascii") if isinstance(port, bytes) else port
    if text is None:
        return 0
    if not isinstance(text, int) and not (isinstance(text, str) and text.isdecimal()):
        raise socket.gaierror(socket.EAI_SERVICE, f"a port is a number, not {port!r}")
    return int(text)


class FakeSocket:
    """Passes for a stream socket: names of its two ends, options that are kept and change nothing."""

    family = socket.AF_INET
    type = socket.SOCK_STREAM
    proto = socket.IPPROTO_TCP

    def __init__(self, sockname: tuple[str, int] = ("0.0.0.0", 0)) -> None:
        self.transport: Any = None
        self._sockname = sockname
        self._peername: tuple[str, int] | None = None
        self._options: dict[tuple[int, int], Any] = {}

    def connected(self, transport: asyncio.Transport | None) -> None:
        """From now on the socket names the ends of this transport's stream."""
        self.transport = transport
        if transport is not None:
            self._sockname = transport.get_extra_info("sockname")
            self._peername = transport.get_extra_info("peername")

    def named(self, sockname: tuple[str, int], peername: tuple[str, int]) -> FakeSocket:
        self._sockname, self._peername = sockname, peername
        return self

    def getsockname(self) -> tuple[str, int]:
        return self._sockname

    def getpeername(self) -> tuple[str, int]:
        if self._peername is None:
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        return self._peername

    def setsockopt(self, level: int, option: int, value: Any, *_: Any) -> None:
        self._options[level, option] = value

    def getsockopt(self, level: int, option: int, *_: Any) -> Any:
        return self._options.get((level, option), 0)

    def setblocking(self, flag: bool) -> None:
        """Nothing here ever blocks."""

    def settimeout(self, _: float | None) -> None:
        """Nothing here ever blocks."""

    def gettimeout(self) -> float:
        return 0.0

    def fileno(self) -> int:
        return -1

    def bind(self, address: tuple[str, int]) -> None:
        self._sockname = address

    def shutdown(self, how: int) -> None:
        if self.transport is not None and how != socket.SHUT_RD:
            self.transport.write_eof()

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()


def make_socket(_: AddressInfo | None = None) -> Any:
    """For ``aiohttp.TCPConnector(socket_factory=make_socket)``."""
    return FakeSocket()


class Home(Protocol):
    """The part of a ``Vpc`` that the hooks use."""

    addresses: Addresses

    async def connect(self, process: int, port: int) -> Any: ...
    def listen(self, factory: Callable[[], Any], port: int) -> Any: ...


current: contextvars.ContextVar[Home] = contextvars.ContextVar("current")
"""The process in which a callback or a task runs, where several share a loop (tests)."""


class Network:
    """asyncio's calls about names, connections and servers, for the process that asks."""

    def __init__(self) -> None:
        self._homes: list[Home] = []

    def add(self, home: Home) -> None:
        """One more process on this loop; a real node has one."""
        self._homes.append(home)

    def home(self) -> Home:
        """The process that asks."""
        if len(self._homes) == 1:
            return self._homes[0]
        return current.get()

    async def getaddrinfo(
        self,
        host: object,
        port: object,
        *,
        family: int = 0,
        type: int = 0,  # noqa: A002 - asyncio's name
        proto: int = 0,
        flags: int = 0,
    ) -> list[AddressInfo]:
        return self.home().addresses.info(host, port, family, type)

    async def getnameinfo(self, sockaddr: tuple[str, int], flags: int = 0) -> tuple[str, str]:
        addresses = self.home().addresses
        process = addresses.process(sockaddr[0])
        numeric = flags & socket.NI_NUMERICHOST
        host = addresses.address(process) if numeric else addresses.name(process)
        return host, str(sockaddr[1])

    async def sock_connect(self, sock: FakeSocket, address: tuple[str, int]) -> None:
        """Open a stream and leave it in the fake socket until ``create_connection(sock=...)``."""
        home = self.home()
        sock.connected(await home.connect(home.addresses.process(address[0]), address[1]))

    async def create_connection(
        self,
        protocol_factory: Callable[[], Any],
        host: object = None,
        port: object = None,
        *,
        ssl: object = None,
        sock: FakeSocket | None = None,
        **_: Any,
    ) -> tuple[Any, Any]:
        """asyncio's call. TLS is refused; options about real sockets change nothing."""
        _refuse_tls(ssl)
        if sock is None:
            home = self.home()
            transport = await home.connect(home.addresses.process(host), _port(port))
        else:
            transport, sock.transport = sock.transport, None
            if transport is None:
                raise ValueError("the socket is not connected")
        protocol = protocol_factory()
        transport.attach(protocol)
        return transport, protocol

    async def create_server(
        self,
        protocol_factory: Callable[[], Any],
        host: object = None,
        port: object = None,
        *,
        ssl: object = None,
        sock: FakeSocket | None = None,
        start_serving: bool = True,
        **_: Any,
    ) -> Any:
        """asyncio's call. TLS is refused; options about real sockets change nothing."""
        _refuse_tls(ssl)
        if sock is not None:
            host, port = sock.getsockname()
        home = self.home()
        hosts = host if isinstance(host, list | tuple) else [host]
        for one in hosts:
            if not home.addresses.binds(one):
                raise OSError(errno.EADDRNOTAVAIL, f"{one!r} is not an address of this process")
        server = home.listen(protocol_factory, _port(port))
        if start_serving:
            await server.start_serving()
        return server


def _refuse_tls(ssl: object) -> None:
    if ssl:
        raise ValueError("the VPC plane carries no TLS; expected ssl=None")
