"""The limits: plain sockets, cross-memory copies and memcpy for the same blocks, with nothing around them."""

from __future__ import annotations

import ctypes
import os
import queue
import socket
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from bench.transfer_side import READ, TARGET, WRITE, Block, Initiator, Memory, run

_HEAD = struct.Struct("<cIQQ")
"""The opcode, the blocks that follow in a list (0: one block, described here), offset, length (the list's total)."""
_ITEM = struct.Struct("<QQ")
_DONE = b"done"
_IOV_MAX = 1024


def _option(text: str) -> tuple[int, int]:
    """Parses ``CONNECTIONS,KIB``: the number of connections, and the bytes of each socket's buffers."""
    connections, kib = text.split(",")
    return int(connections), int(kib) << 10


def _tune(sock: socket.socket, buffer_bytes: int) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)


def _send(sock: socket.socket, buffers: list[memoryview]) -> None:
    """Sends buffers in one gathering call; what a signal or IOV_MAX left over goes in further ones."""
    rest = buffers
    while rest:
        rest = _after(rest, sock.sendmsg(rest[:_IOV_MAX]))


def _receive(sock: socket.socket, buffers: list[memoryview]) -> bool:
    """Fills the buffers, and returns False if the peer closed before."""
    rest = buffers
    while rest:
        if len(rest) == 1:
            moved = sock.recv_into(rest[0], 0, socket.MSG_WAITALL)
        else:
            moved = sock.recvmsg_into(rest[:_IOV_MAX], 0, socket.MSG_WAITALL)[0]
        if not moved:
            return False
        rest = _after(rest, moved)
    return True


def _after(buffers: list[memoryview], moved: int) -> list[memoryview]:
    for position, buffer in enumerate(buffers):
        if moved < len(buffer):
            return [buffer[moved:], *buffers[position + 1 :]]
        moved -= len(buffer)
    return []


class SocketsTarget:
    """A target, one thread per connection: header, then payload into place and a short answer, or payload back."""

    def __init__(self, memory: Memory, option: str) -> None:
        self.memory = memory
        self._buffer_bytes = _option(option)[1]
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()

    def address(self) -> dict[str, Any]:
        return {"port": self._listener.getsockname()[1]}

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:  # closed
                return
            _tune(sock, self._buffer_bytes)
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        view = self.memory.view
        head = memoryview(bytearray(_HEAD.size))
        done = [memoryview(_DONE)]
        with sock:
            while _receive(sock, [head]):
                opcode, listed, offset, length = _HEAD.unpack(head)
                if listed:
                    items = memoryview(bytearray(listed * _ITEM.size))
                    _receive(sock, [items])
                    buffers = [view[at : at + size] for at, size in _ITEM.iter_unpack(items)]
                else:
                    buffers = [view[offset : offset + length]]
                if opcode == b"w":
                    _receive(sock, buffers)
                    _send(sock, done)
                else:
                    _send(sock, buffers)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
        self._listener.close()


class SocketsInitiator(Initiator):
    """An initiator that divides a transfer evenly over its connections."""

    def __init__(self, memory: Memory, option: str, address: dict[str, Any]) -> None:
        self.memory = memory
        connections, buffer_bytes = _option(option)
        self._sockets = [socket.create_connection(("127.0.0.1", address["port"])) for _ in range(connections)]
        self._work: list[queue.SimpleQueue[Callable[[], None] | None]] = []
        self._done: queue.SimpleQueue[None] = queue.SimpleQueue()
        for sock in self._sockets:
            _tune(sock, buffer_bytes)
        for _ in self._sockets[1:]:
            work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
            self._work.append(work)
            threading.Thread(target=self._help, args=(work,), daemon=True).start()

    def _help(self, work: queue.SimpleQueue[Callable[[], None] | None]) -> None:
        while (call := work.get()) is not None:
            call()
            self._done.put(None)

    def prepare(self, opcode: str, blocks: Sequence[Block]) -> Callable[[], None]:
        parts = _divided(blocks, len(self._sockets))
        calls = [self._prepare(sock, opcode, part) for sock, part in zip(self._sockets, parts, strict=True)]
        own, others = calls[0], list(zip(self._work, calls[1:], strict=True))
        if not others:
            return own

        def call() -> None:
            for work, other in others:
                work.put(other)
            own()
            for _ in others:
                self._done.get()

        return call

    def _prepare(self, sock: socket.socket, opcode: str, blocks: Sequence[Block]) -> Callable[[], None]:
        view = self.memory.view
        local = [view[here : here + size] for here, _, size in blocks]
        code = opcode[:1].encode()
        if len(blocks) == 1:
            head = _HEAD.pack(code, 0, blocks[0][1], blocks[0][2])
        else:
            head = _HEAD.pack(code, len(blocks), 0, sum(size for *_, size in blocks))
            head += b"".join(_ITEM.pack(there, size) for _, there, size in blocks)
        out = [memoryview(head), *local] if opcode == WRITE else [memoryview(head)]
        into = local if opcode == READ else [memoryview(bytearray(len(_DONE)))]

        def call() -> None:
            _send(sock, out)
            if not _receive(sock, into):
                raise ConnectionResetError

        return call

    def close(self) -> None:
        for work in self._work:
            work.put(None)
        for sock in self._sockets:
            sock.close()


def _divided(blocks: Sequence[Block], parts: int) -> list[list[Block]]:
    """Returns even parts of the list, or of its one block."""
    if len(blocks) == 1:
        here, there, size = blocks[0]
        step = size // parts
        return [[(here + start, there + start, step)] for start in range(0, step * parts, step)]
    step = len(blocks) // parts
    return [list(blocks[start : start + step]) for start in range(0, step * parts, step)]


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_PTRACER, _PR_SET_PTRACER_ANY = 0x59616D61, ctypes.c_ulong(-1)


class CrossMemoryTarget:
    """A target that only has its memory, and lets any process of the user access it."""

    def __init__(self, memory: Memory, option: str) -> None:
        self.memory = memory
        _libc.prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)  # an error where Yama is off: nothing to allow

    def address(self) -> dict[str, Any]:
        return {"pid": os.getpid(), "base": self.memory.address}

    def close(self) -> None:
        pass


class CrossMemoryInitiator(Initiator):
    """An initiator by process_vm_readv(2) and process_vm_writev(2), one call per transfer."""

    def __init__(self, memory: Memory, option: str, address: dict[str, Any]) -> None:
        self.memory = memory
        self._pid: int = address["pid"]
        self._base: int = address["base"]

    def prepare(self, opcode: str, blocks: Sequence[Block]) -> Callable[[], None]:
        function = _libc.process_vm_readv if opcode == READ else _libc.process_vm_writev
        function.restype = ctypes.c_ssize_t
        count = len(blocks)
        local = (_Iovec * count)(*[_Iovec(self.memory.address + here, size) for here, _, size in blocks])
        remote = (_Iovec * count)(*[_Iovec(self._base + there, size) for _, there, size in blocks])
        nbytes = sum(size for *_, size in blocks)
        arguments = (ctypes.c_int(self._pid), local, ctypes.c_ulong(count), remote, ctypes.c_ulong(count))

        def call() -> None:
            if function(*arguments, ctypes.c_ulong(0)) != nbytes:
                raise OSError(ctypes.get_errno(), "process_vm")

        return call

    def close(self) -> None:
        pass


class MemcpyInitiator(Initiator):
    """An initiator by memmove(3) between two memories of one process, one call per block."""

    def __init__(self, memory: Memory, option: str, address: dict[str, Any]) -> None:
        self.memory = memory
        self.other = Memory(memory.nbytes)

    def others(self) -> dict[str, Memory]:
        return {TARGET: self.other}

    def prepare(self, opcode: str, blocks: Sequence[Block]) -> Callable[[], None]:
        mine, other = self.memory.address, self.other.address
        if opcode == WRITE:
            moves = [(other + there, mine + here, size) for here, there, size in blocks]
        else:
            moves = [(mine + here, other + there, size) for here, there, size in blocks]
        move = ctypes.memmove

        def call() -> None:
            for to, source, size in moves:
                move(to, source, size)

        return call

    def close(self) -> None:
        pass


if __name__ == "__main__":
    if sys.argv[3] == "process_vm":
        run(CrossMemoryTarget, CrossMemoryInitiator)
    elif sys.argv[3] == "memcpy":
        run(None, MemcpyInitiator)
    else:
        run(SocketsTarget, SocketsInitiator)
