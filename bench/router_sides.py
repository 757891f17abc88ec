"""The routers that are measured beside each other, as processes in front of stub servers of their own."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.peers import peer_python
from launch.process import ServiceProcess

SERVERS = 4
CAPACITY = 1024
"""The requests that a stub takes at once, as our load balancer is told."""
START_S = 60.0
PEERS = {
    "sglang_router": ("sglang-router==0.3.2", "sglang_router"),
    "vllm_router": ("vllm-router==0.1.17", "vllm_router"),
}

LEVELS = {"pinyon": "warning", "sglang_router": "warn", "vllm_router": "warning"}
"""The log levels at which no router writes a line for each request. By default pinyon and sglang-router do."""


@dataclass
class Side:
    """A router, or nothing in between (``pid`` 0). Requests go to ``address``, and ``stubs`` get them."""

    name: str
    address: str
    stubs: list[str]
    pid: int = 0

    def stats(self) -> dict[str, int]:
        """Returns the sums over all of its stubs."""
        total: dict[str, int] = {}
        for stub in self.stubs:
            for name, value in _get(f"http://{stub}/stats").items():
                total[name] = total.get(name, 0) + value
        return total

    def entry(self, number: int) -> str:
        """Returns the address for the client of this number: without a router, the stubs' in turn."""
        return self.address if self.pid else self.stubs[number % len(self.stubs)]

    def resize(self, chunks: int) -> None:
        """Empties the stubs' caches, which hold ``chunks`` from here on."""
        for stub in self.stubs:
            _get(f"http://{stub}/resize/{chunks}")

    def bare(self) -> None:
        """Makes the stubs stop tokenizing for the router."""
        for stub in self.stubs:
            _get(f"http://{stub}/bare")

    def release(self) -> None:
        for stub in self.stubs:
            _get(f"http://{stub}/release")

    @property
    def resident_bytes(self) -> int:
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.loads(answer.read())


@contextlib.contextmanager
def running_stubs(sides: int) -> Iterator[list[list[str]]]:
    """Runs stub servers, and yields the addresses of each side's servers."""
    command = [sys.executable, "-m", "bench.router_stub", str(sides * SERVERS)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        addresses = [f"127.0.0.1:{port}" for port in json.loads(process.stdout.readline())]
        yield [addresses[start : start + SERVERS] for start in range(0, len(addresses), SERVERS)]
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def pinyon_side(stubs: Sequence[str], folder: Path) -> Iterator[Side]:
    arguments = [
        "--upstream", ",".join(f"http://{stub}" for stub in stubs), "--upstream-capacity", str(CAPACITY),
        "--http-listen", "127.0.0.1:0", "--log-level", LEVELS["pinyon"], "--drain-s", "0", "--lame-duck-s", "0",
    ]  # fmt: skip
    process = ServiceProcess("lb", "services.lb", arguments, folder / "lb.log")
    process.spawn()
    try:
        process.wait_ready(time.monotonic() + START_S)
        side = Side("pinyon", process.endpoints["http"], list(stubs), process.pid)
        _until_healthy(f"http://{side.address}/health/ready")
        yield side
    finally:
        process.kill()


@contextlib.contextmanager
def peer_side(name: str, stubs: Sequence[str], folder: Path) -> Iterator[Side]:
    """Runs a peer's router. Raises :class:`bench.peers.PeerUnavailable`."""
    requirement, module = PEERS[name]
    python = peer_python(requirement, module)
    port, metrics = _free_port(), _free_port()
    command = [
        str(python), "-m", f"{module}.launch_router", "--host", "127.0.0.1", "--port", str(port),
        "--prometheus-port", str(metrics), "--policy", "cache_aware", "--log-level", LEVELS[name],
        "--worker-urls", *[f"http://{stub}" for stub in stubs],
    ]  # fmt: skip
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        _until_healthy(f"http://127.0.0.1:{port}/health")
        _until_models(port)
        yield Side(name, f"127.0.0.1:{port}", list(stubs), process.pid)
    finally:
        process.kill()
        process.wait()


def _free_port() -> int:
    """Returns a free port: the routers do not say which one they took."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _until_healthy(url: str, within_s: float = START_S) -> None:
    deadline_s = time.monotonic() + within_s
    while True:
        with contextlib.suppress(OSError):
            if urllib.request.urlopen(url, timeout=2).status == 200:
                return
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"{url} did not answer in {within_s:g} s")
        time.sleep(0.1)


def _until_models(port: int) -> None:
    """Waits until the router serves: its workers join after it says that it is healthy."""
    deadline_s = time.monotonic() + START_S
    body = json.dumps({"model": "stub", "prompt": "x", "max_tokens": 1}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"content-type": "application/json"}
    )
    while True:
        with contextlib.suppress(OSError):
            if urllib.request.urlopen(request, timeout=2).status == 200:
                return
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"the router at {port} served nothing in {START_S:g} s")
        time.sleep(0.2)
