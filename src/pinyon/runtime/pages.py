"""A few pages over HTTP besides a process's work: metrics, lists of addresses. Not for clients' requests."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from pinyon.core.address import is_loopback, parse_address
from pinyon.core.errors import Unavailable
from pinyon.runtime.logging import get_logger
from pinyon.runtime.security import NO_SECURITY, Security

CONNECTIONS_MAX = 16
TIMEOUT_S = 10.0

_log = get_logger("pages")


class PageServer:
    """A server of a WSGI ``app`` with its own threads, so that a busy event loop is still observed.

    On loopback it is plain HTTP. Elsewhere, with TLS files, it is HTTPS, and with ``ask_clients``, clients need a
    certificate of the cluster. At most ``CONNECTIONS_MAX`` are open at once, each for ``TIMEOUT_S``."""

    def __init__(
        self, name: str, listen: str, app: Callable[..., Any], security: Security = NO_SECURITY, *, ask_clients: bool
    ) -> None:
        """Starts the server; ``name`` is for its thread. Raises :class:`Unavailable` if the port is taken."""
        host, port = parse_address(listen)
        self._tls = None if is_loopback(host) else security.tls
        self._ask_clients = ask_clients
        try:
            self._server = _Server((host, port), self._context())
        except OSError as error:
            raise Unavailable(f"cannot listen on {listen}: {error.strerror or error}") from None
        security.on_renewal(self._renew)
        self._server.set_app(app)
        self._thread = threading.Thread(target=self._server.serve_forever, name=f"pinyon-{name}", daemon=True)
        self._thread.start()
        bound = self._server.server_port
        self.address = f"[{host}]:{bound}" if ":" in host else f"{host}:{bound}"

    def _context(self) -> ssl.SSLContext | None:
        return None if self._tls is None else self._tls.server_context(ask_clients=self._ask_clients)

    def _renew(self) -> None:
        """Makes a new context, as authorities can be added to the present one, but not removed."""
        self._server.context = self._context()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=2)


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], context: ssl.SSLContext | None) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.context = context
        """The TLS context of new connections."""
        self._room = threading.Semaphore(CONNECTIONS_MAX)
        super().__init__(address, _Handler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return self._room.acquire(blocking=False)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        cut: threading.Timer | None = None
        try:
            request.settimeout(TIMEOUT_S)
            if (context := self.context) is not None:
                request = context.wrap_socket(request, server_side=True)
            # The socket's own timeout starts again with each byte.
            cut = threading.Timer(TIMEOUT_S, _cut, (request,))
            cut.daemon = True
            cut.start()
            super().process_request_thread(request, client_address)
        except OSError:  # no TLS, no certificate, too slow
            self.shutdown_request(request)
        finally:
            if cut is not None:
                cut.cancel()
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("an answer to %s failed", client_address, exc_info=True)


def _cut(request: socket.socket) -> None:
    with suppress(OSError):  # already closed
        socket.socket.shutdown(request, socket.SHUT_RDWR)  # below TLS, so that a blocked read ends


class _Handler(WSGIRequestHandler):
    def address_string(self) -> str:
        return str(self.client_address[0])  # without a DNS lookup

    def log_message(self, format: str, *args: object) -> None:
        return
