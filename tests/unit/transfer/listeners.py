"""Servers at ports of their own, in threads, that stand between two engines or in place of one."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Self

from pinyon.transfer import RegionDescriptor, SegmentDescriptor
from pinyon.transfer.links import handshake
from tests.unit.transfer.conftest import GENEROUS_S


class Listener:
    """A server whose ``serve`` treats one link after another, until the end of the context."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        region = RegionDescriptor(bytes(16), "cpu:0", 1 << 20)
        self.segment = SegmentDescriptor("127.0.0.1", self.port, b"b" * 16, (region,))
        """The segment of a process that would listen here."""
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self.listener.accept()
            except OSError:
                return
            self.serve(sock)

    def serve(self, sock: socket.socket) -> None:
        raise NotImplementedError

    def shake_hands(self, sock: socket.socket) -> handshake.Hello:
        """Answers a HELLO like an engine without a secret."""
        hello = sock.recv(handshake.HELLO_BYTES, socket.MSG_WAITALL)
        sock.sendall(handshake.pack_hello_reply(handshake.HelloCode.OK, b"b" * 16, bytes(16), hello, None))
        return handshake.parse_hello(hello)[1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(GENEROUS_S)
        self.listener.close()


class Proxy(Listener):
    """A proxy between two hosts that forwards, changes or cuts as ``treat`` says, one connection at a time."""

    def __init__(self, target: int, treat: Callable[[str, int, bytes], bytes | None]) -> None:
        """Takes ``treat(direction, offset, data)`` with direction "there" or "back"; None cuts the connection."""
        self._target = target
        self._treat = treat
        super().__init__()

    def serve(self, sock: socket.socket) -> None:
        with sock, socket.create_connection(("127.0.0.1", self._target)) as far:
            threads = [
                threading.Thread(target=self._pump, args=args, daemon=True)
                for args in (("there", sock, far), ("back", far, sock))
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(GENEROUS_S)

    def _pump(self, direction: str, source: socket.socket, target: socket.socket) -> None:
        offset = 0
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                treated = self._treat(direction, offset, data)
                if treated is None:
                    break
                target.sendall(treated)
                offset += len(data)
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


class Silent(Listener):
    """A server that shakes hands with all peers and never answers a frame."""

    def __init__(self) -> None:
        self.links: list[socket.socket] = []
        self.got_frame = threading.Event()
        super().__init__()

    def serve(self, sock: socket.socket) -> None:
        self.links.append(sock)
        self.shake_hands(sock)
        if sock.recv(1):
            self.got_frame.set()

    def __exit__(self, *error: object) -> None:
        for sock in self.links:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        super().__exit__(*error)
        for sock in self.links:
            sock.close()


class LyingServer(Listener):
    """A server that shakes hands, then does ``act(sock)`` per connection."""

    def __init__(self, act: Callable[[socket.socket], None]) -> None:
        self.hellos: list[handshake.Hello] = []
        self._act = act
        super().__init__()

    def serve(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(ConnectionError):
            self.hellos.append(self.shake_hands(sock))
            self._act(sock)
