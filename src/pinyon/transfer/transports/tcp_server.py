"""The serving side of TCP: a thread per peer connection that reads and writes registered memory, and nothing else."""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable

from pinyon.transfer import wire
from pinyon.transfer.errors import WireError
from pinyon.transfer.limits import TransferLimits
from pinyon.transfer.request import Opcode
from pinyon.transfer.transports.base import Meter
from pinyon.transfer.transports.memory import MemoryTable, Region
from pinyon.transfer.transports.tcp_stream import DeadlineReached, Stalled, Stream

__all__ = ["TcpServer"]

_log = logging.getLogger(__name__)
_MAINTAIN_S = 1.0
_FIRST_BYTES = wire.FRAME_HEADER_BYTES + wire.DESCRIPTOR_BYTES
_SCRATCH_BYTES = 64 << 10


class Inbound:
    """One accepted connection and its thread."""

    def __init__(self, server: TcpServer, sock: socket.socket) -> None:
        self._server = server
        self._limits = server.limits
        self.stream = Stream(sock, server.limits.stall_s, server.limits.socket_buffer_bytes)
        self.identity: tuple[bytes, int] | None = None
        """Client boot id and connection id, once the handshake is through."""
        self.thread = threading.Thread(target=self._work, name="pinyon-transfer-in", daemon=True)
        self._head = memoryview(bytearray(wire.FRAME_HEADER_BYTES + wire.MAX_FRAME_REQUESTS * wire.DESCRIPTOR_BYTES))
        self._scratch: memoryview | None = None

    def abort(self) -> None:
        self.stream.abort()

    def _work(self) -> None:
        hard = True
        try:
            if self._shake_hands():
                self._serve()
            hard = False  # also after a refusal: a reset could overtake the answer
        except WireError as error:
            self._server.count("protocol_errors")
            _log.info("a transfer connection broke the protocol: %s", error)
        except (OSError, Stalled, DeadlineReached) as error:
            _log.debug("a transfer connection ended: %r", error)
        except Exception:
            _log.exception("a transfer connection ended in a defect")
        finally:
            self.stream.close(hard=hard)
            self._server.ended(self)

    def _shake_hands(self) -> bool:
        deadline = time.monotonic() + self._limits.connect_s
        hello_bytes = self._receive_bytes(wire.HELLO_BYTES, deadline)
        version, hello = wire.parse_hello(hello_bytes)
        secret = self._server.secret
        code = wire.HelloCode.OK
        if version != wire.VERSION:
            code = wire.HelloCode.VERSION
        elif hello.authenticated is not (secret is not None):
            code = wire.HelloCode.AUTH
        elif hello.expected_boot != self._server.boot_id:
            code = wire.HelloCode.STALE
        elif secret is None:
            code = self._server.admit(self, hello)
        ok = code is wire.HelloCode.OK
        reply = wire.pack_hello_reply(
            code,
            self._server.boot_id if ok else bytes(len(self._server.boot_id)),
            secrets.token_bytes(wire.NONCE_BYTES),
            hello_bytes,
            secret if ok else None,
        )
        if code is wire.HelloCode.AUTH:
            self._server.count("auth_failures")
        self.stream.send([reply], deadline)
        if not ok or secret is None:
            return ok
        proof = self._receive_bytes(wire.MAC_BYTES, deadline)
        if wire.verify_client(secret, hello_bytes, reply, proof):
            code = self._server.admit(self, hello)
        else:
            code = wire.HelloCode.AUTH
            self._server.count("auth_failures")
        self.stream.send([wire.pack_accept(code)], deadline)
        return code is wire.HelloCode.OK

    def _receive_bytes(self, count: int, deadline: float) -> bytes:
        data = bytearray(count)
        self.stream.receive([memoryview(data)], deadline)
        return bytes(data)

    def _serve(self) -> None:
        # Every frame has at least one descriptor, so it comes with the header in one system call.
        first = self._head[:_FIRST_BYTES]
        while self.stream.receive_or_idle(first, time.monotonic() + self._limits.idle_s):
            frame = wire.parse_frame(first)
            deadline = time.monotonic() + self._limits.budget_s(frame.payload)
            end = wire.FRAME_HEADER_BYTES + frame.requests * wire.DESCRIPTOR_BYTES
            if frame.requests > 1:
                self.stream.receive([self._head[_FIRST_BYTES:end]], deadline)
            self._serve_frame(frame, wire.parse_descriptors(self._head[wire.FRAME_HEADER_BYTES : end], frame), deadline)

    def _serve_frame(self, frame: wire.Frame, ranges: list[wire.Descriptor], deadline: float) -> None:
        reading = frame.opcode == Opcode.READ
        memory = self._server.memory
        found, refusals, pinned = memory.admit(frame.opcode, ranges, self, self.abort)
        try:
            buffers = self._gather(ranges, found, drain=not reading)
            accepted = frame.payload
            if refusals is not None:
                accepted = sum(part.length for part, region in zip(ranges, found, strict=True) if region is not None)
            if reading:
                self.stream.send([wire.pack_reply(frame, refusals, accepted), *buffers], deadline)
            else:
                self.stream.receive(buffers, deadline)
        finally:
            memory.unpin(pinned, self)
        if not reading:
            self.stream.send([wire.pack_reply(frame, refusals, 0)], deadline)
        self._server.served(frame.opcode, accepted, 0 if refusals is None else len(refusals) - refusals.count(0))

    def _gather(self, ranges: list[wire.Descriptor], found: list[Region | None], *, drain: bool) -> list[memoryview]:
        """The memory of the accepted ranges, neighbours joined; refused ones are skipped, or with ``drain`` stand as
        scratch memory so that the stream stays in step."""
        buffers: list[memoryview] = []
        last: Region | None = None
        start = end = 0
        for (_, offset, length), region in zip(ranges, found, strict=True):
            if region is last and offset == end and region is not None:
                end += length
                continue
            if last is not None:
                buffers.append(last.view[start:end])
            last, start, end = region, offset, offset + length
            if region is None and drain:
                if self._scratch is None:
                    self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
                whole, rest = divmod(length, _SCRATCH_BYTES)
                buffers += [self._scratch] * whole
                if rest:
                    buffers.append(self._scratch[:rest])
        if last is not None:
            buffers.append(last.view[start:end])
        return buffers


class TcpServer:
    """Listens, accepts up to ``max_inbound`` connections, and can cut off a peer."""

    def __init__(
        self,
        memory: MemoryTable,
        limits: TransferLimits,
        boot_id: bytes,
        secret: bytes | None,
        meter: Meter,
        maintain: Callable[[], None],
    ) -> None:
        self.memory = memory
        self.limits = limits
        self.boot_id = boot_id
        self.secret = secret
        self._meter = meter
        self._maintain = maintain
        self._lock = threading.Lock()
        self._inbound: set[Inbound] = set()
        self._by_identity: dict[tuple[bytes, int], Inbound] = {}
        self._closing = threading.Event()
        self._listener: socket.socket | None = None
        self._acceptor: threading.Thread | None = None

    def listen(self, host: str, port: int) -> int:
        """Bind, start accepting; the port that was bound.

        Raises:
            OSError: the address cannot be had.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=128)
        listener.settimeout(_MAINTAIN_S)
        self._listener = listener
        self._acceptor = threading.Thread(
            target=self._accept, args=(listener,), name="pinyon-transfer-accept", daemon=True
        )
        self._acceptor.start()
        return int(listener.getsockname()[1])

    def _accept(self, listener: socket.socket) -> None:
        while not self._closing.is_set():
            try:
                sock, _ = listener.accept()
            except TimeoutError:
                self._tick()
                continue
            except OSError as error:  # out of file descriptors, or a peer that left the queue
                if not self._closing.wait(0.05):
                    _log.warning("cannot accept a transfer connection: %s", error)
                self._tick()
                continue
            self._start(sock)
            self._tick()

    def _tick(self) -> None:
        try:
            self._maintain()
        except Exception:
            _log.exception("maintenance of the transfer pools failed")

    def _start(self, sock: socket.socket) -> None:
        with self._lock:
            if not self._closing.is_set() and len(self._inbound) < self.limits.max_inbound:
                inbound = None
                try:
                    inbound = Inbound(self, sock)
                    self._inbound.add(inbound)
                    inbound.thread.start()
                    return
                except (OSError, RuntimeError) as error:
                    _log.warning("cannot serve a transfer connection: %s", error)
                    if inbound is not None:
                        self._inbound.discard(inbound)
        with contextlib.suppress(OSError):
            sock.setblocking(False)
            sock.send(wire.pack_hello_reply(wire.HelloCode.BUSY, bytes(16), bytes(16), b"", None))
        sock.close()

    def admit(self, inbound: Inbound, hello: wire.Hello) -> wire.HelloCode:
        """Enter a connection whose handshake is through, after the one it replaces has ended."""
        if hello.replaces:
            with self._lock:
                replaced = self._by_identity.get((hello.client_boot, hello.replaces))
            if replaced is not None and not _end([replaced], self.limits.stall_s):
                return wire.HelloCode.BUSY
        identity = (hello.client_boot, hello.connection_id)
        with self._lock:
            if self._closing.is_set() or identity in self._by_identity:
                return wire.HelloCode.BUSY
            inbound.identity = identity
            self._by_identity[identity] = inbound
        return wire.HelloCode.OK

    def ended(self, inbound: Inbound) -> None:
        with self._lock:
            self._inbound.discard(inbound)
            if inbound.identity is not None:
                self._by_identity.pop(inbound.identity, None)

    def drop(self, client_boot: bytes) -> bool:
        """End all connections of that peer. True: nothing it sent before can reach memory any more."""
        with self._lock:
            victims = [one for identity, one in self._by_identity.items() if identity[0] == client_boot]
        return _end(victims, max(self.limits.stall_s, 5.0))

    def count(self, counter: str) -> None:
        with self._meter.lock:
            setattr(self._meter, counter, getattr(self._meter, counter) + 1)

    def served(self, opcode: int, nbytes: int, refused: int) -> None:
        with self._meter.lock:
            self._meter.served(opcode, nbytes, refused)

    @property
    def connections(self) -> int:
        return len(self._inbound)

    def close(self) -> None:
        with self._lock:
            self._closing.set()
            inbound = list(self._inbound)
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes the acceptor
        if self._acceptor is not None:
            self._acceptor.join(10.0)
        if self._listener is not None:
            self._listener.close()
        _end(inbound, 10.0)


def _end(connections: list[Inbound], timeout_s: float) -> bool:
    """Abort connections and wait for their threads; True when all are gone."""
    deadline = time.monotonic() + timeout_s
    for connection in connections:
        connection.abort()
    for connection in connections:
        connection.thread.join(max(0.0, deadline - time.monotonic()))
    return not any(connection.thread.is_alive() for connection in connections)
