"""Ports of this machine: those that a suite needs, their holders, free ports and held ports."""

from __future__ import annotations

import errno
import os
import pwd
import shlex
import socket
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from pinyon.core.address import parse_address
from pinyon.core.errors import InvalidArgument, Unavailable

COMMAND_CHARS = 120
_ANY = ("0.0.0.0", "::")
_LISTEN = "0A"
"""The state of a listening socket in ``/proc/net/tcp``."""


@dataclass(frozen=True, slots=True)
class Port:
    """A port on which a suite is to listen. ``option`` is the option that chooses it; 0 takes a free port."""

    what: str
    option: str
    host: str
    port: int


class HeldPorts(ExitStack):
    """Free ports that stay ours while nothing listens there, before a process starts and while it is dead.

    ``take`` any number, then ``close``. Each port is bound by a socket that never listens. The system then gives the
    port neither to a server that asks for any port nor to an outgoing connection. A server that asks for this port by
    number can listen there, again and again."""

    def take(self, host: str) -> int:
        """Takes a free port of ``host``, an address or a name of this machine. Raises ``OSError``."""
        address = host.strip("[]")
        held = self.enter_context(socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET))
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # servers that listen there set it as well
        held.bind((address, 0))
        return int(held.getsockname()[1])


class HeldPort(ExitStack):
    """A port on all addresses of a host. Until ``close`` only this user's ``SO_REUSEPORT`` listeners can use it."""

    def __init__(self, listen: str) -> None:
        """Binds the port; 0 takes a free one. Raises :class:`Unavailable` if anything listens there already."""
        super().__init__()
        host, port = parse_address(listen)
        try:
            found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, _, _, _, address in dict.fromkeys(found):
                port = self._hold(family, str(address[0]), port)
        except OSError as error:
            self.close()
            raise Unavailable(f"cannot listen on {listen}: {error.strerror or error}") from None
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def _hold(self, family: int, host: str, port: int) -> int:
        held = self.enter_context(socket.socket(family, socket.SOCK_STREAM))
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        held.bind((host, port))
        # SO_REUSEPORT is set only after binding: set before, the socket would join others that already listen there
        # with it.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # With SO_REUSEADDR, two parents that do not listen could both bind this port.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        return int(held.getsockname()[1])


def port_faults(ports: Iterable[Port]) -> list[str]:
    """Returns a sentence for the first fault of each option's ports: who has the port, and what to do."""
    faults: dict[str, str] = {}
    wanted: dict[int, Port] = {}
    for one in ports:
        if not one.port or one.option in faults:
            continue
        if not 0 < one.port < 1 << 16:
            why = "is none"
        elif (first := wanted.setdefault(one.port, one)) is not one:
            why = f"is wanted for {first.what}, too"
        elif (number := _refused(one.host, one.port)) == errno.EADDRINUSE:
            by = holder(one.port, one.host)
            why = f"is taken{f' by {by}' if by else ''}"
        elif number:
            why = f"cannot be had on {one.host}: {os.strerror(number)}"
        else:
            continue
        faults[one.option] = f"port {one.port} for {one.what} {why}; {one.option} N takes another one, 0 a free one"
    return list(faults.values())


def next_port(host: str, after: int, taken: set[int]) -> int:
    """Returns the first free port above ``after`` that is not in ``taken``, and adds it there.

    An ``after`` of 0, for a free port by the system's choice, gives 0. Raises :class:`InvalidArgument` if there is
    none."""
    if not after:
        return 0
    for port in range(after + 1, 1 << 16):
        if port not in taken and is_free(host, port):
            taken.add(port)
            return port
    raise InvalidArgument(f"no port after {after} is free; 0 takes any", field="lbs")


def is_free(host: str, port: int) -> bool:
    """Returns whether a server could listen there now."""
    return not _refused(host, port)


def _refused(host: str, port: int) -> int:
    """Returns the errno of binding there, or 0; names that do not resolve are left to the services to report."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
    except OSError:
        return 0
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            return error.errno or 0
    return 0


def holder(port: int, host: str = "") -> str:
    """Returns a port's listener as far as ``/proc`` says: process and command, or the user; empty if none.

    A listener on the address ``host`` is preferred, then one on all addresses."""
    tables = ("/proc/net/tcp", "/proc/net/tcp6")
    found = [each for table in tables for each in _listeners(table) if each[0] == port]
    for _, _, inode, user in sorted(found, key=lambda each: (each[1] != host.strip("[]"), each[1] not in _ANY)):
        return _process_with(inode) or f"a process of user {_user(user)}"
    return ""


def _listeners(table: str) -> Iterator[tuple[int, str, str, int]]:
    """Yields port, address, inode and user id of each listening socket."""
    try:
        lines = Path(table).read_text().splitlines()[1:]
    except OSError:
        return
    for line in lines:
        fields = line.split()
        if len(fields) > 9 and fields[3] == _LISTEN:
            address, _, port = fields[1].rpartition(":")
            yield int(port, 16), _address(address), fields[9], int(fields[7])


def _address(text: str) -> str:
    """Returns the address that ``text`` has as words in hexadecimal, each in the machine's byte order."""
    words = [int(text[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(text), 8)]
    return socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, b"".join(words))


def _process_with(inode: str) -> str:
    """Returns the process that has this socket open; empty for other users' processes, whose files are not readable."""
    wanted = f"socket:[{inode}]"
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        try:
            if any(os.readlink(f"/proc/{entry}/fd/{fd}") == wanted for fd in os.listdir(f"/proc/{entry}/fd")):
                words = Path(f"/proc/{entry}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
                command = shlex.join(word.decode(errors="replace") for word in words)
                return f"pid {entry} ({command[:COMMAND_CHARS]}{'…' * (len(command) > COMMAND_CHARS)})"
        except OSError:  # it has ended, or belongs to another user
            continue
    return ""


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)
