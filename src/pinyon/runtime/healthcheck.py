"""``python -m pinyon.runtime.healthcheck ADDRESS``: exit status 0 if the server there is healthy, else 1 (misuse: 2).

``HOST:PORT`` asks the gRPC health service about the whole server; ``http://HOST:PORT/PATH`` wants status 200; and
``redis://HOST:PORT`` wants an answer to PING. For the health checks of containers, so it imports nothing that it does
not need: such a probe starts every few seconds.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Sequence
from urllib.parse import urlsplit

__all__ = ["main", "probe"]

TIMEOUT_S = 2.0
_SERVING = b"\x08\x01"  # grpc.health.v1.HealthCheckResponse{status: SERVING}: protobuf is not worth its import here


def _probe_grpc(address: str, timeout_s: float) -> str:
    import grpc

    with grpc.insecure_channel(address) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check", lambda message: message, lambda message: message)
        try:
            reply: bytes = check(b"", timeout=timeout_s)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    return "" if reply == _SERVING else "not serving"


def _probe_http(url: str, timeout_s: float) -> str:
    import http.client

    parts = urlsplit(url)
    try:
        with contextlib.closing(http.client.HTTPConnection(parts.netloc, timeout=timeout_s)) as connection:
            connection.request("GET", parts.path or "/")
            status = connection.getresponse().status
    except http.client.HTTPException as error:
        return f"{type(error).__name__}: {error}"
    return "" if status == 200 else f"HTTP status {status}"


def _probe_redis(url: str, timeout_s: float) -> str:
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname or "", parts.port or 6379), timeout=timeout_s) as connection:
        connection.sendall(b"PING\r\n")
        answer = connection.recv(64)
    return "" if answer.startswith(b"+PONG") else f"answered {answer!r}"


def probe(address: str, timeout_s: float = TIMEOUT_S) -> str:
    """Why the server at ``address`` is not healthy, empty if it is. No step takes longer than ``timeout_s``."""
    try:
        if address.startswith("http://"):
            return _probe_http(address, timeout_s)
        if address.startswith("redis://"):
            return _probe_redis(address, timeout_s)
        return _probe_grpc(address, timeout_s)
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; see the module."""
    arguments = sys.argv[1:] if argv is None else argv
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m pinyon.runtime.healthcheck HOST:PORT | http://... | redis://...\n")
        return 2
    problem = probe(arguments[0])
    if problem:
        sys.stderr.write(f"{arguments[0]}: {problem}\n")
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
