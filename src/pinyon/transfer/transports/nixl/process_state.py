"""Limits on what NIXL and UCX would change for the whole process and for its children."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

_RDMA_DEVICES = Path("/sys/class/infiniband")
_DESCRIPTORS = "/proc/self/fd"
_environment = threading.RLock()


@contextlib.contextmanager
def ucx_environment(*, loopback: bool = False) -> Iterator[None]:
    """Sets the variables that NIXL and UCX read when loaded and when an agent is made; restores them afterwards.

    With ``loopback``, only processes of this host are to reach us. Variables that the user has set stay."""
    wanted = {"NIXL_LOG_LEVEL": "FATAL", "UCX_LOG_LEVEL": "fatal"}  # we report failures; peers could fill a log
    if not any(_RDMA_DEVICES.glob("*")):
        # InfiniBand is of no use here. The wheel's libnl beside the system's, which libibverbs brings, ends the process
        # at its exit with a segmentation fault (1.5.1).
        wanted["UCX_MODULES"] = "^ib"
    if loopback:
        wanted["UCX_NET_DEVICES"] = "lo"
    with _environment:
        ours = {name: value for name, value in wanted.items() if name not in os.environ}
        os.environ.update(ours)
        try:
            yield
        finally:
            for name in ours:
                os.environ.pop(name, None)


@contextlib.contextmanager
def closed_on_exec(*, only_tcp: bool = False) -> Iterator[None]:
    """Keeps descriptors that appear meanwhile from being inherited by programs that this process starts.

    UCX does not see to that for its own descriptors. It cannot be told which are UCX's, so all are kept back that
    appear meanwhile; Python's are not inherited anyway. With ``only_tcp``, only TCP sockets count."""
    before = _inheritable()
    try:
        yield
    finally:
        for descriptor in _inheritable() - before:
            with contextlib.suppress(OSError):  # closed since
                if not only_tcp or _is_tcp(descriptor):
                    os.set_inheritable(descriptor, False)


def _inheritable() -> set[int]:
    found: set[int] = set()
    with contextlib.suppress(OSError):  # no descriptor left to list with
        for name in os.listdir(_DESCRIPTORS):
            with contextlib.suppress(OSError):  # closed since, as the descriptor of this listing
                if os.get_inheritable(int(name)):
                    found.add(int(name))
    return found


def _is_tcp(descriptor: int) -> bool:
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        return False
    with socket.socket(fileno=os.dup(descriptor)) as copy:
        return copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM
