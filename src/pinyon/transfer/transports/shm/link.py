"""The check, after the handshake, that both ends of an shm link can read each other's memory."""

from __future__ import annotations

import errno
import os
import socket
import struct

from pinyon.transfer.links.stream import Stream
from pinyon.transfer.transports.shm.cma import PeerMemory
from pinyon.transfer.transports.shm.wire import Seal

_UCRED = struct.Struct("@iII")


class Unreachable(ConnectionError):
    """The peer's memory cannot be read from here; the text says why and what an operator can do."""


def meet(stream: Stream, seal: Seal) -> PeerMemory:
    """Returns the memory of the process at the other end, where ``seal``, its mark of this link, must lie.

    The kernel vouches for the pid (SO_PEERCRED), but it is that of the process which connected or listened. The socket
    may have been handed on since; the pid may now be another process's, or one of another pid namespace. So the process
    with this pid must hold in its memory a value that only the ends of this link know, made from a fresh nonce of each.
    That keeps out a process which knows a value shown to it on an earlier link. The check does not tell apart two
    processes that work together, nor keep out one that may write into the other's memory. Raises Unreachable."""
    pid = _peer_pid(stream)
    if not pid:
        raise Unreachable("the peer is in another pid namespace; let the containers share one")
    memory = PeerMemory(pid)
    try:
        intact = memory.holds([seal])
    except OSError as error:
        if error.errno == errno.EPERM:
            raise Unreachable(
                "the kernel does not let this process read the peer's memory: run both as one user and set "
                "kernel.yama.ptrace_scope to 0, or give this one CAP_SYS_PTRACE"
            ) from None
        name = errno.errorcode.get(error.errno or 0, "error")
        raise Unreachable(f"the peer's memory cannot be read ({name}: {os.strerror(error.errno or 0)})") from None
    if not intact:
        raise Unreachable("the process with the peer's pid is another one; let the containers share a pid namespace")
    return memory


def _peer_pid(stream: Stream) -> int:
    """Returns the pid of the process at the other end, or 0 if it has none in our namespace."""
    data = stream.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return int(_UCRED.unpack(data)[0])
