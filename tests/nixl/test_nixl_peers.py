"""READs by the real NIXL from other processes, and hostile metadata handed to NIXL.

The peers are frozen, killed, started again, take keys back and return their memory to the system.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Container, Iterator
from pathlib import Path

import pytest

from pinyon.transfer import (
    Opcode,
    Reason,
    TransferEngine,
    TransferRequest,
    TransferResult,
    TransferStatus,
    Transports,
)
from pinyon.transfer.paths.reach import NIXL
from pinyon.transfer.transports.nixl import transport as nixl_transport
from pinyon.transfer.transports.nixl.agent import MOST_CONNECTIONS, NixlAgent, NixlError
from pinyon.transfer.transports.shm.cma import shm_available
from tests.forks import until_stopped
from tests.nixl.conftest import FETCHED
from tests.nixl.nixl_peer import PATTERN
from tests.segments import segment_of
from tests.unit.transfer.conftest import GENEROUS_S, PATIENT, eventually

ROOT = Path(__file__).resolve().parents[2]
ONLY_THROUGH_THE_PEER = "self,posix,sysv,tcp"
"""The UCX transports allowed: none by which one process reads another's memory by itself."""


class Peer:
    def __init__(self, **environment: str) -> None:
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT), str(FETCHED)])
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.nixl.nixl_peer"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        descriptor, key, kept = json.loads(self.process.stdout.readline())
        self.segment = segment_of(descriptor)
        self.key, self.kept = bytes.fromhex(key), bytes.fromhex(kept)

    def ask(self, what: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)
        if number is signal.SIGSTOP:
            until_stopped(self.process.pid)

    def close(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


@pytest.fixture
def start_peer() -> Iterator[Callable[..., Peer]]:
    peers: list[Peer] = []

    def start(**environment: str) -> Peer:
        peers.append(Peer(**environment))
        return peers[-1]

    yield start
    for peer in peers:
        peer.close()


@pytest.fixture
def engine() -> Iterator[TransferEngine]:
    if (reason := shm_available()) is not None:
        pytest.skip(f"no process may read another's memory: {reason}")
    with TransferEngine(transports=Transports(("tcp",), nixl="prefer"), limits=PATIENT) as engine:
        engine.near = engine.register_local_memory(bytearray(1 << 20))  # type: ignore[attr-defined]
        yield engine


def read(engine: TransferEngine, peer: Peer, nbytes: int = 4096, key: bytes | None = None) -> TransferResult:
    local = engine.near.key  # type: ignore[attr-defined]
    return engine.transfer([TransferRequest(Opcode.READ, local, 0, peer.segment, key or peer.key, 0, nbytes)])[0]


def ways(engine: TransferEngine) -> set[str]:
    return {one.path.transport for one in engine.stats().paths if one.chains}


def test_a_frozen_peer_is_read_all_the_same(engine: TransferEngine, start_peer: Callable[..., Peer]) -> None:
    peer = start_peer()
    assert read(engine, peer).ok
    peer.signal(signal.SIGSTOP)
    assert read(engine, peer).ok
    assert bytes(engine.near.view[:4096]) == (PATTERN * 17)[:4096]  # type: ignore[attr-defined]
    assert ways(engine) == {"nixl"}


def test_a_dead_peer_is_noticed_and_its_successor_is_another(
    engine: TransferEngine, start_peer: Callable[..., Peer]
) -> None:
    peer = start_peer()
    assert read(engine, peer).ok
    peer.process.kill()
    peer.process.wait()
    assert read(engine, peer).status is TransferStatus.FAILED, "it did not wait for a limit"
    again = start_peer()
    assert read(engine, again).ok
    assert ways(engine) == {"nixl"}


def test_what_is_taken_back_is_refused_and_lands_nowhere(
    engine: TransferEngine, start_peer: Callable[..., Peer]
) -> None:
    peer = start_peer()
    assert read(engine, peer).ok
    assert peer.ask("revoke") == "done"
    engine.near.view[:] = bytes(1 << 20)  # type: ignore[attr-defined]
    assert read(engine, peer).reason is Reason.UNKNOWN_REGION
    assert not any(engine.near.view)  # type: ignore[attr-defined]


def test_memory_that_is_gone_costs_neither_process(engine: TransferEngine, start_peer: Callable[..., Peer]) -> None:
    peer = start_peer()
    assert read(engine, peer).ok
    assert peer.ask("unmap") == "done"
    for nbytes in (4096, 1 << 20):
        assert read(engine, peer, nbytes).reason is Reason.UNKNOWN_REGION
    assert read(engine, peer, 1000, peer.kept).ok
    assert peer.process.poll() is None


def test_a_peer_that_must_serve_its_reads_is_read_by_tcp(
    engine: TransferEngine, start_peer: Callable[..., Peer]
) -> None:
    peer = start_peer(UCX_TLS=ONLY_THROUGH_THE_PEER)
    for _ in range(3):
        assert read(engine, peer).ok
    assert ways(engine) == {"tcp"}
    engine._peers.transports["nixl"].maintain(time.monotonic())  # the abandoned read ends late and writes nothing
    assert read(engine, peer).ok


def sockets(pid: int) -> int:
    folder = Path(f"/proc/{pid}/fd")
    count = 0
    for name in os.listdir(folder):
        try:
            count += os.readlink(folder / name).startswith("socket:")
        except FileNotFoundError:  # closed meanwhile
            continue
    return count


class Sockets:
    """The number of sockets that the two processes have opened since its construction."""

    def __init__(self, *pids: int) -> None:
        self.pids = pids
        self.before = [sockets(pid) for pid in pids]

    def eventually_at_most(self, more: int) -> None:
        def few() -> bool:
            return all(sockets(pid) <= count + more for pid, count in zip(self.pids, self.before, strict=True))

        eventually(few, f"{more} more than {self.before}; there are {[sockets(pid) for pid in self.pids]}")


def test_ended_links_and_changed_memory_leave_no_socket_behind(
    engine: TransferEngine, start_peer: Callable[..., Peer]
) -> None:
    """UCX keeps its sockets while both processes live."""
    peer = start_peer()
    nixl = engine._peers.transports["nixl"]
    assert read(engine, peer, 1000, peer.kept).ok
    both = Sockets(os.getpid(), peer.process.pid)
    for _ in range(20):
        nixl.maintain(time.monotonic() + 2 * PATIENT.idle_s)
        assert nixl.endpoints == 0
        assert read(engine, peer, 1000, bytes.fromhex(peer.ask("again 0"))).ok
    both.eventually_at_most(0)
    for start in range(1, MOST_CONNECTIONS + 5):
        assert read(engine, peer, 900, bytes.fromhex(peer.ask(f"again {start}"))).ok
        assert engine.near.view[:900] == (PATTERN * 4)[start : start + 900]  # type: ignore[attr-defined]
    assert ways(engine) == {"nixl", "tcp"}, "more connections than there may be"
    both.eventually_at_most(MOST_CONNECTIONS)  # one NIXL connection exists already, and one by tcp


def test_no_socket_is_left_behind_by_proofs_that_fail(
    engine: TransferEngine, start_peer: Callable[..., Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_transport, "PROOF_S", 0.05)
    monkeypatch.setattr("pinyon.transfer.transports.nixl.agent.MOST_FAILED_PROOFS", 100)
    peer = start_peer(UCX_TLS=ONLY_THROUGH_THE_PEER)
    nixl = engine._peers.transports["nixl"]

    def probe() -> bool:
        eventually(lambda: nixl.maintain(time.monotonic()) or not nixl._agent._strays, "what was given up has come")
        return nixl.probe(peer.segment, NIXL, time.monotonic() + GENEROUS_S)

    assert not probe()
    both = Sockets(os.getpid(), peer.process.pid)
    assert not any(probe() for _ in range(4))
    both.eventually_at_most(1)  # UCX connects in both directions


def inheritable_sockets(pid: int) -> dict[str, int]:
    """Returns a process's inheritable sockets by unique names, with the port at its own end (0: none)."""
    ports = {line[9]: int(line[1].split(":")[1], 16) for line in tcp_sockets(pid)}
    found = {}
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            what = os.readlink(f"/proc/{pid}/fd/{name}")
            flags = Path(f"/proc/{pid}/fdinfo/{name}").read_text().split("flags:")[1].split()[0]
        except FileNotFoundError:  # closed meanwhile
            continue
        if what.startswith("socket:") and not int(flags, 8) & os.O_CLOEXEC:
            found[what] = ports.get(what.removeprefix("socket:[").removesuffix("]"), 0)
    return found


def tcp_sockets(pid: int) -> list[list[str]]:
    tables = (Path(f"/proc/{pid}/net/{table}") for table in ("tcp", "tcp6"))
    return [line.split() for table in tables if table.exists() for line in table.read_text().splitlines()[1:]]


def listening_ports(pid: int) -> set[int]:
    """Returns the listening ports in the process's network namespace."""
    return {int(line[1].split(":")[1], 16) for line in tcp_sockets(pid) if line[3] == "0A"}


def inherited_since(pid: int, before: Container[str]) -> list[str]:
    """Returns the new inheritable sockets, but for one that the peer may open at any time (docs/design/transfer.md)."""
    listening = listening_ports(pid)
    new = {what: port for what, port in inheritable_sockets(pid).items() if what not in before}
    accepted = [what for what, port in new.items() if port in listening]
    return [what for what in new if what not in accepted] + accepted[1:]


@pytest.fixture
def left_by_others() -> dict[str, int]:
    """The sockets that peers of other tests opened to this process."""
    return inheritable_sockets(os.getpid())


def test_programs_that_a_process_starts_inherit_none_of_it(
    left_by_others: dict[str, int], engine: TransferEngine, start_peer: Callable[..., Peer]
) -> None:
    peer = start_peer()
    assert read(engine, peer).ok
    assert not inherited_since(os.getpid(), left_by_others)
    assert not inherited_since(peer.process.pid, ())
    assert not [name for name in os.environ if name.startswith(("UCX_", "NIXL_"))]


def test_an_idle_process_does_not_spin(engine: TransferEngine, start_peer: Callable[..., Peer]) -> None:
    peer = start_peer()
    assert read(engine, peer).ok
    spent_s = min(float(peer.ask("idle")) for _ in range(3))
    assert spent_s < 0.1, "a progress thread takes a fifth of a core (measured): ten times this limit's share"


def test_metadata_that_is_cut_or_none_is_refused_by_nixl_itself() -> None:
    """NIXL must check the rest of a peer's metadata, and does not check all of it (docs/design/transfer.md)."""
    name = "ab" * 16
    agent, other, third = NixlAgent("cd" * 16), NixlAgent(name), NixlAgent("12" * 16)
    try:
        buffer = other.new_buffer(4096)
        whole = other.metadata(buffer.registered, connection=True)
        head = whole[: whole.index(b"|") + whole[whole.index(b"|") + 1 :].index(b"|") + 2]
        rng = random.Random(1)
        for broken in (
            *(whole[:size] for size in range(len(head), len(whole) - 1, 7)),
            *(head + rng.randbytes(size) for size in range(0, 400, 7)),
        ):
            with pytest.raises(NixlError):
                agent.meet(name, broken)
        with pytest.raises(NixlError, match="another's"):
            third.meet("ef" * 16, whole)
        third.meet(name, whole)
    finally:
        for each in (agent, other, third):
            each.close()
