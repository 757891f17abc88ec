"""Pairs of memories that a transport connects, and peers in processes of their own."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import pytest

from launch.process import ROOT
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
from pinyon.transfer.links import handshake
from pinyon.transfer.links.acceptor import Acceptor
from pinyon.transfer.links.handshake import HelloCode
from pinyon.transfer.memory.table import MemoryTable
from pinyon.transfer.transports.shm.cma import shm_available
from tests.forks import Driven, forked
from tests.segments import segment_of
from tests.unit.transfer.fake_device import fake_device

FAST = TransferLimits(stall_s=1.0, connect_s=2.0, base_deadline_s=5.0)
"""Short limits, for tests that wait only for one of them: a busy machine stops a thread for longer."""
GENEROUS_S = 30.0
"""Far more than any bound under test, far less than a hang."""
PATIENT = TransferLimits(stall_s=4 * GENEROUS_S, connect_s=4 * GENEROUS_S, base_deadline_s=4 * GENEROUS_S)
"""The limits for all other tests: whatever ends within ``GENEROUS_S`` did not end by one of these limits."""


class _Closes(Protocol):
    def close(self) -> object: ...


Made = TypeVar("Made", bound=_Closes)


def all_closed(make: Callable[..., Made]) -> Iterator[Callable[..., Made]]:
    """Yields a function that does what ``make`` does, and closes afterwards all that it made: for fixtures."""
    made: list[Made] = []

    def recorded(*args: Any, **named: Any) -> Made:
        made.append(make(*args, **named))
        return made[-1]

    yield recorded
    for one in made:
        one.close()


def start_engine(**arguments: Any) -> TransferEngine:
    engine = TransferEngine(**arguments)
    engine.start()
    return engine


@pytest.fixture
def started() -> Iterator[Callable[..., TransferEngine]]:
    """Starts engines, which are closed at the end."""
    yield from all_closed(start_engine)


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

    @classmethod
    def of(cls, engine: TransferEngine, server: TransferEngine, near: bytearray, far: bytearray) -> Pair:
        local, remote = engine.register_local_memory(near), server.register_local_memory(far)
        return cls(engine, server, near, far, local, remote, server.descriptor())

    def request(self, opcode: Opcode, local_offset: int, remote_offset: int, length: int) -> TransferRequest:
        return TransferRequest(
            opcode, self.local.key, local_offset, self.segment, self.remote.key, remote_offset, length
        )

    def warm(self) -> None:
        """Opens the short way, and lets shm learn where the far region lies."""
        for opcode in (Opcode.READ, Opcode.WRITE) * 2:
            assert self.engine.transfer([self.request(opcode, 0, 0, 64)])[0].ok

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keeps the initiator waiting, by holding the lock of the server's table of access rights."""
        with self.server._memory._lock:
            yield


def went_short(engine: TransferEngine) -> int:
    return sum(one.short for one in engine.stats().paths)


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
    engines = contextlib.ExitStack()

    def make(size: int = 1 << 20, limits: TransferLimits = PATIENT) -> Pair:
        engine = engines.enter_context(variant.engine(limits))
        server = engine if variant.same_process else engines.enter_context(variant.engine(limits))
        near, far = zeroed(size)
        local = engine.register_local_memory(driver.tensor(near) if "near" in variant.on_device else near)
        remote = server.register_local_memory(driver.tensor(far) if "far" in variant.on_device else far)
        return Pair(engine, server, near, far, local, remote, server.descriptor())

    with fake_device() as driver:
        yield make
    engines.close()
    assert not driver.pinned


class Peer(Driven):
    """A process that serves one region of ``size`` bytes and prints its segment: by default one with an engine."""

    module = "tests.unit.transfer.transfer_peer"

    def __init__(self, size: int, secret: str = "", under: Sequence[str] = ()) -> None:
        """Starts the process ``under`` a command that runs commands, if one is given."""
        arguments = [str(size), secret]
        if under:
            command = [*under, sys.executable, "-m", self.module, *arguments]
            self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        else:
            self._process = forked.driven(self.module, arguments)
        self.segment = segment_of(self.answer())
        self.key = self.segment.regions[0].key

    def answer(self) -> Any:
        return self._process.stdout.readline().decode()


@pytest.fixture
def start_peer() -> Iterator[Callable[..., Peer]]:
    yield from all_closed(Peer)


@contextmanager
def raw_link(
    segment: SegmentDescriptor, link_id: int = 1, *, code: HelloCode = HelloCode.OK
) -> Iterator[socket.socket]:
    """Yields a tcp link to an engine without a secret that is set up by hand, and that is answered with ``code``."""
    with socket.create_connection((segment.host, segment.port), timeout=GENEROUS_S) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hello = handshake.Hello(link_id, 0, bytes(16), segment.boot_id, bytes(16), False, handshake.Service.TCP)
        sock.sendall(handshake.pack_hello(hello))
        reply = sock.recv(handshake.HELLO_REPLY_BYTES, socket.MSG_WAITALL)
        assert handshake.parse_hello_reply(reply)[0] is code
        yield sock


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
