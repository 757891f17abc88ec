"""Cross-memory attach: another process's memory read with one copy, by ``process_vm_readv(2)`` (Linux 3.2).

The kernel allows it where it would allow ptrace (ptrace(2), PTRACE_MODE_ATTACH_REALCREDS). That takes the same user and
no restriction by Yama or seccomp, or CAP_SYS_PTRACE. The other process must also have a pid in this namespace."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import socket
import struct
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from pinyon.transfer.links.stream import Stream
from pinyon.transfer.transports.shm.wire import SEAL_BYTES, Seal

PIECE_BYTES = 4 << 20
"""The bytes that one call copies at most: under a millisecond or two, so that aborts and deadlines are seen in time."""
IOV_MAX = 1024
"""The ranges of one system call at most: the kernel's UIO_MAXIOV."""

FETCH_BYTES = 64 << 10
"""The largest range that comes by way of a buffer of ours: the second copy is cheaper than a second system call."""

Move = tuple[int, int, int]
"""A copy ``(to, from, length)``: an address here, an address there, and bytes."""

_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1).value
_MEMBARRIER_CMD_GLOBAL = 1
_MEMBARRIER_CALLS = {"aarch64": 283, "riscv64": 283, "ppc64le": 365, "s390x": 356}
_UCRED = struct.Struct("@iII")
_STORES_IN_ORDER = ("x86_64", "AMD64")

_libc = ctypes.CDLL(None, use_errno=True)
_readv = getattr(_libc, "process_vm_readv", None)
if _readv is not None:
    # Addresses are plain integers, so that no ctypes object is made per call, let alone per range.
    _readv.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong)
    _readv.restype = ctypes.c_ssize_t


def shm_available() -> str | None:
    """Returns why this process cannot use cross-memory attach at all, or None if it can.

    Whether it may read a given peer's memory shows only with that peer."""
    if sys.platform != "linux" or _readv is None:
        return "this system has no process_vm_readv"
    seal = array("Q", [1, 2])
    try:
        intact = PeerMemory(os.getpid()).holds([Seal(seal.buffer_info()[0], seal.tobytes())])
        fence()
    except OSError as error:
        return f"{error.strerror} is refused here ({errno.errorcode.get(error.errno or 0, error.errno)})"
    return None if intact else "process_vm_readv does not read what is there"


def allow_any_reader() -> bool:
    """Lets any process of the same user read this one's memory although Yama's ptrace_scope is 1 (PR_SET_PTRACER).

    The transport never calls this: it also opens the process to debuggers of that user, which is the operator's choice.
    Returns False if there is no Yama here, so that nothing was needed or changed."""
    return bool(_libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(_PR_SET_PTRACER_ANY), 0, 0, 0) == 0)


def fence() -> None:
    """Orders this thread's earlier stores before all later stores in this process.

    Readers that load in the opposite order rely on it. x86 keeps stores in order, and loads in order, by itself.
    Elsewhere membarrier(2) makes every running thread of the machine pass a barrier, which costs milliseconds here and
    nothing on the readers' side. Raises OSError if this machine needs membarrier and its kernel refuses it."""
    machine = platform.machine()
    if machine in _STORES_IN_ORDER:
        return
    number = _MEMBARRIER_CALLS.get(machine)
    if number is None or _libc.syscall(ctypes.c_long(number), _MEMBARRIER_CMD_GLOBAL, 0, 0) != 0:
        raise OSError(ctypes.get_errno() if number else errno.ENOSYS, "membarrier")


class PeerMemory:
    """The memory of another process, to be read by one thread at a time."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        # Whole pages of its own: beginning in the middle of one costs the kernel up to a sixth more.
        scratch = mmap.mmap(-1, FETCH_BYTES + SEAL_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._scratch_view = memoryview(scratch)
        self._scratch_address = ctypes.addressof(ctypes.c_char.from_buffer(scratch))
        # One range and its seal, there and here, are reused: changing an array costs less than making one.
        self._one_there = array("Q", (0, 0, 0, SEAL_BYTES))
        self._one_here = array("Q", (self._scratch_address, 0))
        self._one_there_address = self._one_there.buffer_info()[0]
        self._one_here_address = self._one_here.buffer_info()[0]

    def holds(self, seals: Sequence[Seal]) -> bool:
        """Returns whether all of these seals are intact, and all in the same process.

        Raises OSError if the process is gone (ESRCH) or may not be read (EPERM)."""
        for start in range(0, len(seals), IOV_MAX):
            some = seals[start : start + IOV_MAX]
            found = array("Q", bytes(len(some) * SEAL_BYTES))
            there = array("Q", [number for seal in some for number in (seal.address, SEAL_BYTES)])
            here = array("Q", (found.buffer_info()[0], len(some) * SEAL_BYTES))
            if not self._read(here, there, len(some) * SEAL_BYTES):
                return False
            if found.tobytes() != b"".join([seal.value for seal in some]):
                return False
        return True

    def fetch_one(self, address: int, nbytes: int, seal: Seal) -> memoryview | None:
        """Returns a range of up to ``FETCH_BYTES``, valid until the next call; None if it or its seal is not intact.

        The seal is loaded after the range (see ``_copy_piece``). Raises OSError if the process is gone or may not be
        read."""
        there, here, size = self._one_there, self._one_here, nbytes + SEAL_BYTES
        there[0], there[1], there[2], here[1] = address, nbytes, seal[0], size
        moved = _readv(self.pid, self._one_here_address, 1, self._one_there_address, 2, 0)  # type: ignore[misc]
        if moved != size:
            self._failed(moved)
            return None
        scratch = self._scratch_view
        return scratch[:nbytes] if scratch[nbytes:size] == seal[1] else None

    def copy(self, moves: Sequence[Move], nbytes: int, seal: Seal, before_each: Callable[[], None]) -> bool:
        """Copies ``moves`` (``nbytes`` together) in order, a few MiB per system call; each call reads ``seal`` last.

        Returns whether all of it was there, and the seal intact after the last byte of each call. If not, any part of
        the destination may have been written. ``before_each`` is called before each piece, and what it raises passes
        through. Raises OSError if the process is gone or may not be read."""
        if len(moves) < IOV_MAX and nbytes <= PIECE_BYTES:
            before_each()
            return self._copy_piece(moves, nbytes, seal)
        for piece, size in _pieces(moves, PIECE_BYTES):
            before_each()
            if not self._copy_piece(piece, size, seal):
                return False
        return True

    def _copy_piece(self, moves: Sequence[Move], nbytes: int, seal: Seal) -> bool:
        # The kernel takes a call's ranges in order, and the task's memory (its mm) once per call. So the seal, as the
        # last range, is read after the data and from the same address space. Another process with the same pid, or the
        # same one after exec, would not have the random bytes there.
        if len(moves) == 1:
            to, source, length = moves[0]
            here = array("Q", (to, length, self._scratch_address, SEAL_BYTES))
            there = array("Q", (source, length, seal.address, SEAL_BYTES))
        else:
            tos, sources, lengths = zip(*moves, strict=True)
            here = array("Q", chain.from_iterable(zip(tos, lengths, strict=True)))
            here.extend((self._scratch_address, SEAL_BYTES))
            there = array("Q", chain.from_iterable(zip(sources, lengths, strict=True)))
            there.extend((seal.address, SEAL_BYTES))
        return self._read(here, there, nbytes + SEAL_BYTES) and self._scratch_view[:SEAL_BYTES] == seal.value

    def _read(self, here: array[int], there: array[int], nbytes: int) -> bool:
        """Reads ``nbytes``. Returns False if some of the memory there (or here) is not mapped."""
        assert _readv is not None
        here_at, here_count = here.buffer_info()
        there_at, there_count = there.buffer_info()
        moved = _readv(self.pid, here_at, here_count // 2, there_at, there_count // 2, 0)
        if moved != nbytes:
            self._failed(moved)
        return bool(moved == nbytes)

    @staticmethod
    def _failed(moved: int) -> None:
        """Raises OSError for a failed call, unless some of the memory there (or here) is just not mapped."""
        if moved >= 0:  # the kernel stops short only where it meets memory that cannot be read
            return
        code = ctypes.get_errno()
        if code != errno.EFAULT:
            raise OSError(code, "process_vm_readv")


def _pieces(moves: Sequence[Move], most: int) -> Iterator[tuple[list[Move], int]]:
    """Yields pieces of the moves and their sizes: at most ``most`` bytes, and one range per call left for the seal."""
    piece: list[Move] = []
    size = 0
    for to, source, length in moves:
        while length:
            part = min(length, most - size)
            piece.append((to, source, part))
            size += part
            to, source, length = to + part, source + part, length - part
            if size == most or len(piece) == IOV_MAX - 1:
                yield piece, size
                piece, size = [], 0
    if piece:
        yield piece, size


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
