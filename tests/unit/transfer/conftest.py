"""Pairs of memories that a transport connects, and peers in processes of their own."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest

from pinyon.transfer import (
    Network,
    Nic,
    Opcode,
    Region,
    SegmentDescriptor,
    TransferEngine,
    TransferLimits,
    TransferRequest,
    Transports,
)
from pinyon.transfer.links.acceptor import Acceptor
from pinyon.transfer.memory.table import MemoryTable
from pinyon.transfer.transports.shm.cma import shm_available
from tests.forks import forked, until_stopped
from tests.segments import segment_of
from tests.unit.transfer.fake_device import fake_device

FAST = TransferLimits(stall_s=1.0, connect_s=2.0, base_deadline_s=5.0)
"""Short limits, for tests that wait only for one of them: a busy machine stops a thread for longer."""
GENEROUS_S = 30.0
"""Far more than any bound under test, far less than a hang."""
PATIENT = TransferLimits(stall_s=4 * GENEROUS_S, connect_s=4 * GENEROUS_S, base_deadline_s=4 * GENEROUS_S)
"""The limits for all other tests: whatever ends within ``GENEROUS_S`` did not end by one of these limits."""


@dataclass
class Pair:
    """An initiator with local memory, and remote memory that the test can inspect."""

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


class Variant(NamedTuple):
    """A way to connect a pair of engines."""

    transports: tuple[str, ...]
    arguments: dict[str, Any] = {}  # noqa: RUF012
    same_process: bool = False
    on_device: str = ""
    """The memories that are a device's: "near", "far", "near far"."""
    ways: dict[str, Any] = {}  # noqa: RUF012
    """Further arguments of ``Transports``, besides the names."""

    def engine(self, limits: TransferLimits) -> TransferEngine:
        return TransferEngine(transports=Transports(self.transports, **self.ways), limits=limits, **self.arguments)

    def skip_if_it_cannot_be(self) -> None:
        if "shm" in self.transports and (reason := shm_available()) is not None:
            pytest.skip(f"shm: {reason}")


RAILS = tuple(Nic(f"rail{index}", "tcp", f"127.0.1.{index}", 0) for index in range(1, 4))

VARIANTS = {
    "local": Variant(("local",), same_process=True),
    "shm": Variant(("shm",)),
    "shm-secret": Variant(("shm",), {"secret": b"cluster secret"}),
    "tcp": Variant(("tcp",)),
    "tcp-secret": Variant(("tcp",), {"secret": b"cluster secret"}),
    "tcp-checksum": Variant(("tcp",), ways={"checksum": "on"}),
    "tcp-nics": Variant(("tcp",), {"network": Network(RAILS)}),
    "local-near-device": Variant(("local",), same_process=True, on_device="near"),
    "local-far-device": Variant(("local",), same_process=True, on_device="far"),
    "tcp-near-device": Variant(("tcp",), on_device="near"),
    "tcp-far-device": Variant(("tcp",), ways={"checksum": "on"}, on_device="far"),
    "tcp-devices": Variant(("tcp",), on_device="near far"),
    "auto-devices": Variant(("local", "shm", "tcp"), on_device="near far"),
    "auto": Variant(("local", "shm", "tcp"), {"secret": b"cluster secret", "network": Network(RAILS)}),
}


@functools.lru_cache(maxsize=1)
def memories(size: int) -> tuple[bytearray, bytearray]:
    """Returns the previous test's memories if they fit: new pages take longer than filling them."""
    return bytearray(size), bytearray(size)


def zeroed(size: int) -> tuple[bytearray, bytearray]:
    near, far = memories(size)
    for memory in (near, far):
        np.frombuffer(memory, np.uint8)[:] = 0
    return near, far


@pytest.fixture(params=list(VARIANTS))
def make_pair(request: pytest.FixtureRequest) -> Iterator[Callable[..., Pair]]:
    """The conformance suite's transports: ``make_pair(size, limits)``. New ones join by an entry of VARIANTS."""
    variant = VARIANTS[request.param]
    variant.skip_if_it_cannot_be()
    engines: list[TransferEngine] = []

    def start(limits: TransferLimits) -> TransferEngine:
        engine = variant.engine(limits)
        engine.start()
        engines.append(engine)
        return engine

    def make(size: int = 1 << 20, limits: TransferLimits = PATIENT) -> Pair:
        engine = start(limits)
        server = engine if variant.same_process else start(limits)
        near, far = zeroed(size)
        local = engine.register_local_memory(driver.tensor(near) if "near" in variant.on_device else near)
        remote = server.register_local_memory(driver.tensor(far) if "far" in variant.on_device else far)
        return Pair(engine, server, near, far, local, remote, server.descriptor())

    with fake_device() as driver:
        yield make
    for engine in engines:
        engine.close()
    assert not driver.pinned


class Peer:
    """An engine in another process, with one region of ``size`` bytes."""

    def __init__(self, size: int, secret: str = "") -> None:
        self._process = forked.driven("tests.unit.transfer.transfer_peer", [str(size), secret])
        self.segment = segment_of(self._process.stdout.readline().decode())
        self.key = self.segment.regions[0].key

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)
        until_stopped(self._process.pid)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        if self._process.poll() is None:
            self.thaw()
            self.kill()
        self._process.stdin.close()
        self._process.stdout.close()


@pytest.fixture
def start_peer() -> Iterator[Callable[..., Peer]]:
    peers: list[Peer] = []

    def start(size: int = 1 << 20, secret: str = "") -> Peer:
        peers.append(Peer(size, secret))
        return peers[-1]

    yield start
    for peer in peers:
        peer.close()


def open_files() -> set[str]:
    """Returns this process's descriptors, each with its file, so that a reused number counts as another file."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, like the descriptor that listed the folder
            found.add(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
    return found


def transfer_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("pinyon-transfer")]


@contextmanager
def nothing_left_behind() -> Iterator[None]:
    """Checks that no file and no thread of an engine is new afterwards; those of before may go meanwhile."""
    files, threads = open_files(), Counter(transfer_threads())
    yield
    eventually(lambda: not open_files() - files, "its files are closed")
    eventually(lambda: not Counter(transfer_threads()) - threads, "its threads have ended")


def eventually(condition: Callable[[], bool], what: str) -> None:
    """Waits for a state that another thread brings about."""
    end = time.monotonic() + GENEROUS_S
    tick = threading.Event()
    while not condition():
        assert time.monotonic() < end, f"never: {what}"
        tick.wait(0.005)


def cut_links(acceptor: Acceptor) -> None:
    """Ends all links of peers, as a process does that has no room for them."""
    for link in list(acceptor._inbound):
        link.abort()
    eventually(lambda: not acceptor.links, "the links have ended")


def users(table: MemoryTable, region: Region) -> int:
    """Returns the number of operations that touch the region now, ours and those of peers."""
    with table._lock:
        return sum(len(each._holders) for each in (region, *table._grants_of.get(region, ())))
