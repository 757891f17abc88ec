"""The command ``python -m pinyon.runtime.healthcheck [--tls-dir DIR --name NAME] ADDRESS``: is the server healthy?

The exit status is 0 if it is, else 1 (misuse: 2). ``HOST:PORT`` asks the gRPC health service about the whole server.
``http://HOST:PORT/PATH`` wants status 200; ``redis://HOST:PORT`` (or ``unix://PATH``) wants an answer to PING. With the
folder of ``pinyon certs``, gRPC and ``https://`` go over TLS with its files; a gRPC server's certificate must say NAME.

Containers' health checks start it every few seconds, so it imports only what it needs."""

from __future__ import annotations

import contextlib
import io
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from pinyon.runtime.http2 import wire

TIMEOUT_S = 2.0
_SERVING = b"\0\0\0\0\x02\x08\x01"
"""The message grpc.health.v1.HealthCheckResponse{status: SERVING} as gRPC frames it.

Importing grpc and protobuf would take three quarters of the probe's time."""
_FRAMES_MAX = 64


def _probe_grpc(address: str, timeout_s: float, tls_dir: Path | None, name: str) -> str:
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(socket.create_connection((host, int(port)), timeout_s))
        if tls_dir is not None:
            import ssl

            context = ssl.create_default_context(cafile=str(tls_dir / "ca.crt"))
            context.load_cert_chain(tls_dir / "tls.crt", tls_dir / "tls.key")
            context.set_alpn_protocols(["h2"])
            connection = stack.enter_context(context.wrap_socket(connection, server_hostname=name))
        connection.sendall(_question(address, tls_dir is not None))
        answer = _answer(stack.enter_context(connection.makefile("rb")))
    return {_SERVING: "", b"": "no answer from its health service"}.get(answer, "not serving")


def _question(address: str, tls: bool) -> bytes:
    """Returns all bytes that the client sends on an HTTP/2 connection (RFC 9113) for one call with an empty request."""
    fields = b"\x83" + (b"\x87" if tls else b"\x86")  # :method POST, :scheme (RFC 7541, appendix A)
    for key, value in (
        (b"\x04", b"/grpc.health.v1.Health/Check"),
        (b"\x01", address.encode()[:120]),  # :authority
        (b"\x0f\x10", b"application/grpc"),  # content-type
        (b"\x00\x02te", b"trailers"),
    ):
        fields += key + bytes((len(value),)) + value
    head = wire.frame(wire.HEADERS, wire.END_HEADERS, 1, fields)
    return wire.PREFACE + wire.settings({}) + head + wire.frame(wire.DATA, wire.END_STREAM, 1, bytes(5))


def _answer(frames: io.BufferedReader) -> bytes:
    """Returns the reply's bytes from DATA frames; empty if the call or the connection ends without any."""
    data = b""
    for _ in range(_FRAMES_MAX):
        head = frames.read(9)
        if len(head) < 9 or int.from_bytes(head[:3], "big") > wire.DEFAULT_FRAME:
            break
        payload, kind, flags = frames.read(int.from_bytes(head[:3], "big")), head[3], head[4]
        if kind == wire.DATA:
            data += payload
        if kind in (wire.RST_STREAM, wire.GOAWAY) or (kind in (wire.DATA, wire.HEADERS) and flags & wire.END_STREAM):
            break
    return data


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


def _unreadable(tls_dir: Path, names: Sequence[str]) -> str:
    """Returns which file cannot be read and how it is made, or an empty text; errors of ``ssl`` name no file."""
    for name in names:
        try:
            (tls_dir / name).open("rb").close()
        except OSError as error:
            return f"--tls-dir: cannot read {tls_dir / name}: {error.strerror} (`pinyon certs` makes the files)"
    return ""


def probe(address: str, timeout_s: float = TIMEOUT_S, tls_dir: Path | None = None, name: str = "") -> str:
    """Returns why the server at ``address`` is not healthy, empty if it is. No step takes longer than ``timeout_s``."""
    web = address.startswith(("http://", "https://"))
    if tls_dir is not None and (said := _unreadable(tls_dir, ("ca.crt",) if web else ("ca.crt", "tls.crt", "tls.key"))):
        return said
    try:
        if web:
            return _probe_http(address, timeout_s, tls_dir)
        if address.startswith(("redis://", "unix://")):
            return _probe_redis(address, timeout_s)
        return _probe_grpc(address, timeout_s, tls_dir, name)
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line, see the module, and returns the exit status."""
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
