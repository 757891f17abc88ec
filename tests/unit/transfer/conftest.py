"""Pairs of memories that a transport connects, and peers in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pinyon.transfer import Opcode, Region, SegmentDescriptor, TransferEngine, TransferLimits, TransferRequest

FAST = TransferLimits(stall_s=1.0, connect_s=2.0, base_deadline_s=5.0)
"""Short limits for the tests that wait for them."""
GENEROUS_S = 20.0
"""Far more than any bound under test, far less than a hang."""


@dataclass
class Pair:
    """An initiator with local memory, and remote memory that the test can look into."""

    engine: TransferEngine
    server: TransferEngine
    near: bytearray
    far: bytearray
    local: Region
    remote: Region
    segment: SegmentDescriptor

    def request(self, opcode: Opcode, local_offset: int, remote_offset: int, length: int) -> TransferRequest:
        return TransferRequest(
            opcode, self.local.key, local_offset, self.segment, self.remote.key, remote_offset, length
        )


@pytest.fixture(params=["tcp", "tcp-secret", "local"])
def make_pair(request: pytest.FixtureRequest) -> Iterator[Callable[..., Pair]]:
    """The conformance suite's transports: ``make_pair(size, limits)``. A new transport joins by a parameter here."""
    engines: list[TransferEngine] = []

    def make(size: int = 1 << 20, limits: TransferLimits | None = None) -> Pair:
        secret = b"cluster secret" if request.param == "tcp-secret" else None
        engine = TransferEngine(limits=limits, secret=secret)
        engine.start()
        engines.append(engine)
        server = engine
        if request.param != "local":
            server = TransferEngine(limits=limits, secret=secret)
            server.start()
            engines.append(server)
        near, far = bytearray(size), bytearray(size)
        local, remote = engine.register_local_memory(near), server.register_local_memory(far)
        return Pair(engine, server, near, far, local, remote, server.descriptor())

    yield make
    for engine in engines:
        engine.close()


class Peer:
    """An engine in another process, with one region of ``size`` bytes."""

    def __init__(self, size: int, secret: str = "") -> None:
        script = Path(__file__).with_name("transfer_peer.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script), str(size), secret],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.segment = SegmentDescriptor.from_dict(json.loads(self._process.stdout.readline()))
        self.key = self.segment.regions[0].key

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)
        # Stopped once every thread is: wait until the kernel says so.
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        if self._process.poll() is None:
            self.thaw()
            self.kill()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


@pytest.fixture
def start_peer() -> Iterator[Callable[..., Peer]]:
    peers: list[Peer] = []

    def start(size: int = 1 << 20, secret: str = "") -> Peer:
        peers.append(Peer(size, secret))
        return peers[-1]

    yield start
    for peer in peers:
        peer.close()


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def transfer_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("pinyon-transfer")]


def eventually(condition: Callable[[], bool], what: str) -> None:
    """Wait for a state that another thread brings about."""
    end = time.monotonic() + GENEROUS_S
    tick = threading.Event()
    while not condition():
        assert time.monotonic() < end, f"never: {what}"
        tick.wait(0.005)
