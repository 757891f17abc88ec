"""Connections to peers: set up on demand, pooled per peer, capped, closed when idle."""

from __future__ import annotations

import itertools
import secrets
import socket
import threading
import time
from collections import deque

from pinyon.transfer import wire
from pinyon.transfer.errors import WireError
from pinyon.transfer.limits import TransferLimits
from pinyon.transfer.request import Opcode, Reason, TransferStatus
from pinyon.transfer.segment import SegmentDescriptor
from pinyon.transfer.transports.base import Chain, Outcome
from pinyon.transfer.transports.tcp_stream import DeadlineReached, Pulse, Stream

__all__ = ["ConnectRefused", "Connection", "PeerPool", "PoolClosed"]

_connection_ids = itertools.count(1)


class PoolClosed(Exception):
    """The peer was evicted, or the engine is closing."""


class ConnectRefused(Exception):
    """The peer answered the handshake with a no, or could not prove that it knows the secret."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason.name)
        self.reason = reason


_HELLO_REASONS = {
    wire.HelloCode.VERSION: Reason.PROTOCOL,
    wire.HelloCode.STALE: Reason.STALE_SEGMENT,
    wire.HelloCode.AUTH: Reason.UNAUTHENTICATED,
    wire.HelloCode.BUSY: Reason.BUSY,
}


class Connection:
    """One TCP connection, one frame at a time."""

    def __init__(
        self,
        remote: SegmentDescriptor,
        boot_id: bytes,
        secret: bytes | None,
        limits: TransferLimits,
        deadline: float,
        replaces: int = 0,
    ) -> None:
        """Connect and shake hands before ``deadline`` or the connect limit, whichever is first.

        Raises:
            ConnectRefused, WireError, OSError (``TimeoutError`` when nobody answers), Stalled, DeadlineReached
        """
        limit = min(deadline, time.monotonic() + limits.connect_s)
        remaining = limit - time.monotonic()
        if remaining <= 0:
            raise DeadlineReached
        sock = socket.create_connection((remote.host, remote.port), timeout=remaining)
        self.stream = Stream(sock, limits.stall_s, limits.socket_buffer_bytes)
        self.id = next(_connection_ids)
        self.answered = False
        """Did any byte of the present frame's reply arrive?"""
        self._frame_ids = itertools.count(1)
        self._head = memoryview(bytearray(wire.FRAME_HEADER_BYTES))
        try:
            self._shake_hands(remote, boot_id, secret, limit, replaces)
        except BaseException:
            self.stream.close(hard=True)
            raise

    def _shake_hands(
        self, remote: SegmentDescriptor, boot_id: bytes, secret: bytes | None, limit: float, replaces: int
    ) -> None:
        nonce = secrets.token_bytes(wire.NONCE_BYTES)
        hello = wire.pack_hello(wire.Hello(self.id, replaces, boot_id, remote.boot_id, nonce, secret is not None))
        self.stream.send([hello], limit)
        reply_bytes = self._receive_bytes(wire.HELLO_REPLY_BYTES, limit)
        reply = wire.parse_hello_reply(reply_bytes)
        if reply.code is not wire.HelloCode.OK:
            raise ConnectRefused(_HELLO_REASONS[reply.code])
        if reply.server_boot != remote.boot_id:
            raise ConnectRefused(Reason.STALE_SEGMENT)
        if secret is None:
            return
        if not wire.verify_server(secret, hello, reply_bytes):
            raise ConnectRefused(Reason.UNAUTHENTICATED)
        self.stream.send([wire.client_mac(secret, hello, reply_bytes)], limit)
        code = wire.parse_accept(self._receive_bytes(wire.ACCEPT_BYTES, limit))
        if code is not wire.HelloCode.OK:
            raise ConnectRefused(_HELLO_REASONS[code])

    def _receive_bytes(self, count: int, deadline: float) -> bytes:
        data = bytearray(count)
        self.stream.receive([memoryview(data)], deadline)
        return bytes(data)

    def exchange(self, chain: Chain) -> Outcome:
        """One frame there, one answer back. Any exception leaves the connection unusable.

        Raises:
            WireError, OSError, Stalled, DeadlineReached
        """
        deadline = chain.deadline
        slices = chain.slices
        frame_id = next(self._frame_ids)
        self.answered = False
        head = wire.pack_frame(chain.opcode, frame_id, (part[3:] for part in slices), len(slices), chain.nbytes)
        reading = chain.opcode is Opcode.READ
        self.stream.send([head] if reading else [head, *_gather(chain, None)], deadline)
        self.stream.receive([self._head], deadline)
        self.answered = True
        expected = chain.nbytes if reading else 0
        reply = wire.parse_reply(self._head, chain.opcode, len(slices), frame_id, expected)
        refusals = None
        if not reply.all_ok:
            refusals = self._receive_bytes(len(slices), deadline)
            wire.check_refusals(refusals)
        if reading:
            buffers = _gather(chain, refusals)
            if sum(map(len, buffers)) != reply.payload:
                raise WireError("the reply's payload does not fit the accepted ranges")
            self.stream.receive(buffers, deadline)
        return Outcome(TransferStatus.COMPLETED, Reason.NONE, refusals)


def _gather(chain: Chain, refusals: bytes | None) -> list[memoryview]:
    """The chain's local memory in order, neighbours joined, without the refused slices."""
    buffers: list[memoryview] = []
    key, start, end = b"", 0, 0
    for position, (_, local, offset, _, _, length) in enumerate(chain.slices):
        if refusals is not None and refusals[position]:
            continue
        if offset == end and local == key:
            end += length
            continue
        if end:
            buffers.append(chain.regions[key].view[start:end])
        key, start, end = local, offset, offset + length
    if end:
        buffers.append(chain.regions[key].view[start:end])
    return buffers


class PeerPool:
    """Connections to one peer: at most ``connections_per_peer``, made when needed, most recently used first."""

    def __init__(self, remote: SegmentDescriptor, boot_id: bytes, secret: bytes | None, limits: TransferLimits) -> None:
        self._remote = remote
        self._boot_id = boot_id
        self._secret = secret
        self._limits = limits
        self._changed = threading.Condition()
        self._idle: deque[tuple[Connection, float]] = deque()  # with the time of release; oldest left
        self._open = 0
        self._closed = False
        self.last_used = time.monotonic()
        self.pulse = Pulse()

    def acquire(self, deadline: float, replaces: int = 0) -> Connection:
        """A connection nobody else uses. Give it back by ``release`` or ``discard``.

        ``replaces`` asks for a new one that fences off the old connection with this id at the peer.

        Raises:
            What :class:`Connection` raises; DeadlineReached while all are in use; PoolClosed.
        """
        with self._changed:
            while True:
                if self._closed:
                    raise PoolClosed
                self.last_used = time.monotonic()
                if self._idle and not replaces:
                    return self._idle.pop()[0]
                if self._open < self._limits.connections_per_peer:
                    self._open += 1
                    break
                if self._idle:  # room for the replacement: the oldest idle one goes
                    self._idle.popleft()[0].stream.close(hard=False)
                    break
                remaining = deadline - self.last_used
                if remaining <= 0:
                    raise DeadlineReached
                self._changed.wait(remaining)
        try:
            connection = Connection(self._remote, self._boot_id, self._secret, self._limits, deadline, replaces)
        except BaseException:
            self._forget_one()
            raise
        # Only now: a frozen process's kernel accepts connections and takes a HELLO too, which is no sign of life.
        connection.stream.pulse = self.pulse
        return connection

    @property
    def silent_s(self) -> float:
        """Seconds since bytes last moved between us and the peer, on any connection."""
        return time.monotonic() - self.pulse.at

    def release(self, connection: Connection) -> None:
        with self._changed:
            if not self._closed:
                self._idle.append((connection, time.monotonic()))
                self._changed.notify()
                return
        self.discard(connection)

    def discard(self, connection: Connection) -> None:
        """Close a connection that broke; bytes it has not sent are dropped."""
        connection.stream.close(hard=True)
        self._forget_one()

    def _forget_one(self) -> None:
        with self._changed:
            self._open -= 1
            self._changed.notify()

    @property
    def open_connections(self) -> int:
        return self._open

    def close_idle(self, idle_s: float) -> None:
        """Close connections unused for ``idle_s`` seconds; 0 closes all that are not in use."""
        with self._changed:
            oldest_kept = time.monotonic() - idle_s
            while self._idle and self._idle[0][1] <= oldest_kept:
                self._idle.popleft()[0].stream.close(hard=False)
                self._open -= 1
                self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.close_idle(0.0)
