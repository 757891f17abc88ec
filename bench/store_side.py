"""One side of the store benchmark: a process that starts a store's servers, is its client, and says what it took.

All sides run this same loop, so they are timed alike. A peer's process runs in the peer's own environment, with NumPy
and without pinyon. Commands come as JSON lines on stdin and are answered on stdout."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from bench.store_memory import Item, ObjectMemory

PUT, GET, EXISTS = "put", "get", "exists"
POOL_BYTES = 768 << 20
"""The memory of a store: three times what one row puts."""
START_S = 20.0

_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG, _CLONE_NEWUSER, _CLONE_NEWNET, _SIOCSIFFLAGS, _IFF_UP = 1, 0x10000000, 0x40000000, 0x8914, 1


class Store(Protocol):
    """A client of a store, with one connection of its own to each server."""

    def name(self, number: int) -> Any:
        """Returns the key of object ``number`` as this store wants it."""
        ...

    async def put(self, items: Sequence[Item], size: int) -> None:
        """Stores the objects, which lie in the source; raises unless all are stored."""
        ...

    async def get(self, items: Sequence[Item], size: int) -> None:
        """Reads the objects, whose places are in the landing; raises unless all arrive."""
        ...

    async def exists(self, keys: Sequence[Any]) -> Sequence[bool]:
        """Returns which of the keys the store has."""
        ...

    async def remove(self, keys: Sequence[Any]) -> None: ...

    async def settle(self, items: Sequence[Item], size: int) -> None:
        """Waits until the objects that were put can be read by anybody."""
        ...

    def land(self, items: Sequence[Item], size: int) -> None:
        """Writes to the landing what the last get returned, where the store's client has memory of its own."""
        ...

    def facts(self) -> dict[str, Any]: ...

    async def close(self) -> None: ...


class Servers(Protocol):
    """The server processes of a store."""

    address: dict[str, Any]
    """The JSON value by which clients reach them."""
    pids: dict[str, int]

    def close(self) -> None: ...


class Connector(Protocol):
    """The maker of clients in one process."""

    async def connect(self, *, many: bool = False) -> Store:
        """Returns a new client. ``many``: it is one of hundreds that are used at once."""
        ...

    async def close(self) -> None: ...


StartServers = Callable[[str, Path], Servers]
"""A function of the side's option and the folder for logs."""
MakeConnector = Callable[[dict[str, Any], ObjectMemory, str], Connector]
"""A function of the address, the memory and the side's option."""


def cpu_s(pids: Sequence[int]) -> float:
    """Returns user and system time of these processes so far, all threads, also those that ended."""
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)  # as clock_getcpuclockid(3) makes it


def own_network() -> bool:
    """Gives this process and its children a network with nothing but a loopback interface; returns whether it did.

    Some servers listen on all interfaces, whatever they are told."""
    if _libc.unshare(_CLONE_NEWNET) and _libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET):
        return False
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", _IFF_UP))
    return True


def end_with(parent: int) -> None:
    """Ends this process with the one that started it."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the starting process is gone")


def private_stdout() -> Callable[[dict[str, Any]], None]:
    """Keeps stdout for the answers of the returned function: all other output goes to stderr from here on."""
    stream = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(value: dict[str, Any]) -> None:
        stream.write(json.dumps(value) + "\n")
        stream.flush()

    return answer


def start_server(command: Sequence[str], log: Path, **pipes: Any) -> subprocess.Popen[bytes]:
    """Starts a server, whose output goes to ``log``, and which ends with this process."""
    parent = os.getpid()
    with log.open("ab") as output:
        streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output, **pipes}
        return subprocess.Popen(command, preexec_fn=lambda: end_with(parent), **streams)


def end_server(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    """Waits until something listens there. Raises ``RuntimeError`` if the process ends or takes too long."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError as error:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"a server did not start: {error}") from None
        time.sleep(0.02)
