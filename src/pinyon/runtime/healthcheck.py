"""``python -m pinyon.runtime.healthcheck [--tls-dir DIR --name NAME] ADDRESS``: is the server there healthy?

The exit status is 0 if it is, else 1 (misuse: 2). ``HOST:PORT`` asks the gRPC health service about the whole server;
``http://HOST:PORT/PATH`` wants status 200; ``redis://HOST:PORT`` (or ``unix://PATH``) wants an answer to PING. With the
folder of ``pinyon certs``, gRPC and ``https://`` go over TLS with its files; a gRPC server's certificate must say NAME.

For the health checks of containers, so it imports nothing that it does not need: such a probe starts every few seconds.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

__all__ = ["main", "probe"]

TIMEOUT_S = 2.0
_SERVING = b"\x08\x01"  # grpc.health.v1.HealthCheckResponse{status: SERVING}: protobuf is not worth its import here


def _probe_grpc(address: str, timeout_s: float, tls_dir: Path | None, name: str) -> str:
    import grpc

    made = grpc.insecure_channel(address)
    if tls_dir is not None:
        files = ((tls_dir / file).read_bytes() for file in ("ca.crt", "tls.key", "tls.crt"))
        options = (("grpc.ssl_target_name_override", name),)
        made = grpc.secure_channel(address, grpc.ssl_channel_credentials(*files), options)
    with made as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check", lambda message: message, lambda message: message)
        try:
            reply: bytes = check(b"", timeout=timeout_s)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    return "" if reply == _SERVING else "not serving"


def _probe_http(url: str, timeout_s: float, tls_dir: Path | None) -> str:
    import http.client
    import ssl

    parts = urlsplit(url)

    def connect() -> http.client.HTTPConnection:
        if parts.scheme == "http":
            return http.client.HTTPConnection(parts.netloc, timeout=timeout_s)
        trusted = ssl.create_default_context(cafile=None if tls_dir is None else str(tls_dir / "ca.crt"))
        return http.client.HTTPSConnection(parts.netloc, timeout=timeout_s, context=trusted)

    try:
        with contextlib.closing(connect()) as connection:
            connection.request("GET", parts.path or "/")
            status = connection.getresponse().status
    except http.client.HTTPException as error:
        return f"{type(error).__name__}: {error}"
    return "" if status == 200 else f"HTTP status {status}"


def _probe_redis(url: str, timeout_s: float) -> str:
    parts = urlsplit(url)
    with socket.socket(socket.AF_UNIX) if parts.scheme == "unix" else socket.socket() as connection:
        connection.settimeout(timeout_s)
        connection.connect(parts.path if parts.scheme == "unix" else (parts.hostname or "", parts.port or 6379))
        connection.sendall(b"PING\r\n")
        answer = connection.recv(64)
    return "" if answer.startswith(b"+PONG") else f"answered {answer!r}"


def probe(address: str, timeout_s: float = TIMEOUT_S, tls_dir: Path | None = None, name: str = "") -> str:
    """Why the server at ``address`` is not healthy, empty if it is. No step takes longer than ``timeout_s``."""
    try:
        if address.startswith(("http://", "https://")):
            return _probe_http(address, timeout_s, tls_dir)
        if address.startswith(("redis://", "unix://")):
            return _probe_redis(address, timeout_s)
        return _probe_grpc(address, timeout_s, tls_dir, name)
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; see the module."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    tls_dir, name = None, ""
    if len(arguments) == 5 and arguments[:4:2] == ["--tls-dir", "--name"]:
        tls_dir, name = Path(arguments[1]), arguments[3]
        del arguments[:4]
    if len(arguments) != 1 or arguments[0].startswith("-"):
        sys.stderr.write(
            "usage: python -m pinyon.runtime.healthcheck [--tls-dir DIR --name NAME] "
            "HOST:PORT | http[s]://... | redis://... | unix://...\n"
        )
        return 2
    problem = probe(arguments[0], tls_dir=tls_dir, name=name)
    if problem:
        sys.stderr.write(f"{arguments[0]}: {problem}\n")
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
