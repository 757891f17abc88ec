"""Host a's side of the transport alone, without an engine, and host b as a process."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from pinyon.transfer import Opcode, Region, SegmentDescriptor, TransferLimits
from pinyon.transfer.chains.chain import Chain, ChainOutcome
from pinyon.transfer.chains.slicing import ChainPlan, Slice
from pinyon.transfer.links.context import EngineContext
from pinyon.transfer.memory.region import Access
from pinyon.transfer.memory.table import MemoryTable
from pinyon.transfer.transports.rdma.transport import RdmaTransport
from pinyon.transfer.types.nic import Path
from tests.rdma.inside import rdma_peer
from tests.rdma.inside.rdma_nics import rdma_nic

SECRET = b"cluster secret"
LIMITS = TransferLimits(stall_s=15.0, connect_s=30.0, base_deadline_s=60.0)
"""Limits long enough for an emulated processor."""
GENEROUS_S = 60.0
"""Seconds far above any bound under test, far below a hang."""
RAIL_0, RAIL_1 = Path("rdma", "rxe_a0", "rxe_b0"), Path("rdma", "rxe_a1", "rxe_b1")

Move = tuple[bytes, int, bytes, int, int]
"""The local key and offset, the remote key and offset, and the number of bytes."""


class HostA:
    """An initiator on rxe_a0 and rxe_a1."""

    def __init__(self, limits: TransferLimits = LIMITS, secret: bytes | None = SECRET) -> None:
        self.memory = MemoryTable()
        nics = {nic.name: nic for nic in (rdma_nic("a0"), rdma_nic("a1"))}
        self.transport = RdmaTransport(EngineContext(secrets.token_bytes(16), self.memory, limits, secret), nics)
        self.chains: list[Chain] = []

    def register(self, buffer: bytearray) -> Region:
        return self.memory.register(buffer, "cpu:0", Access.NONE)

    def chain(self, remote: SegmentDescriptor, opcode: Opcode, moves: Sequence[Move]) -> Chain:
        slices = [Slice(index, *move) for index, move in enumerate(moves)]
        regions = {key: region for key, *_ in moves if (region := self.memory.get(key)) is not None}
        plan = ChainPlan(remote, opcode, slices, sum(move[4] for move in moves))
        return Chain(plan, regions, time.monotonic() + GENEROUS_S, lambda chain, outcome: None)

    def run(
        self, remote: SegmentDescriptor, opcode: Opcode, moves: Sequence[Move], path: Path = RAIL_0, fence: int = 0
    ) -> ChainOutcome:
        chain = self.chain(remote, opcode, moves)
        chain.fence = fence
        return self.transport.run(chain, path)

    def close(self) -> None:
        self.transport.close()


class Running:
    """A chain that runs in its own thread."""

    def __init__(self, host: HostA, chain: Chain, path: Path = RAIL_0) -> None:
        self.chain = chain
        self.outcome: ChainOutcome | None = None
        self.took_s = 0.0

        def work() -> None:
            began = time.monotonic()
            self.outcome = host.transport.run(chain, path)
            self.took_s = time.monotonic() - began

        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()

    def wait(self) -> ChainOutcome:
        self._thread.join(GENEROUS_S)
        assert self.outcome is not None, "the transport hangs"
        return self.outcome


class HostB:
    def __init__(self, size: int, secret: bytes = SECRET) -> None:
        self._process, self._connection = rdma_peer.spare()
        self._connection.send((size, secret))
        self.segment: SegmentDescriptor
        self.keys: list[bytes]
        """The keys of a region open for READ and WRITE, of one for READ only, and of one that is not open."""
        self.segment, self.keys = self._read()

    def _read(self) -> Any:
        assert self._connection.poll(GENEROUS_S), "host b hangs"
        return self._connection.recv()

    def ask(self, command: str, number: int) -> str:
        self._connection.send((command, number))
        answer: str = self._read()
        return answer

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._pid, os.WSTOPPED | os.WNOWAIT)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.join(GENEROUS_S)

    def close(self) -> None:
        if self._process.is_alive():
            self.thaw()
            self._connection.send(None)
            self._process.join(GENEROUS_S)
        self.kill()

    @property
    def _pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def _signal(self, number: int) -> None:
        os.kill(self._pid, number)


def resources(*, of_b: bool = False) -> dict[str, int]:
    """Counts host a's resources and b's queue pairs; ``of_b`` adds b's protection domains and registrations."""
    shown = subprocess.run(["rdma", "-j", "resource", "show"], capture_output=True, check=True, timeout=60, text=True)
    total: Counter[str] = Counter()
    for device in json.loads(shown.stdout):
        there = ("qp", "pd", "mr") if of_b else ("qp",)
        wanted = ("pd", "cq", "qp", "mr", "ctx") if device["ifname"].startswith("rxe_a") else there
        total.update({kind: device[kind] for kind in wanted})
    return dict(total)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))
