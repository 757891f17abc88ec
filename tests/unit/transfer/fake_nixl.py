"""A fake NIXL: agents of this process read each other's memory by memmove, when and as the test says."""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest

from pinyon.transfer.transports.nixl import agent as nixl_agent

SUCCESS, IN_PROGRESS = "success", "in progress"


class FakeError(Exception):
    """The exception that NIXL's bindings raise."""


class Sync(Enum):
    NIXL_THREAD_SYNC_STRICT = 1


class Request:
    def __init__(self, near: list[tuple[int, int, int]], far: list[tuple[int, int, int]], peer: str) -> None:
        self.near, self.far, self.peer = near, far, peer
        self.posted = self.done = False

    def copy(self) -> None:
        for (to, nbytes, _), (source, _, _) in zip(self.near, self.far, strict=True):
            ctypes.memmove(to, source, nbytes)
        self.done = True


class FakeNixl:
    """All agents of the process, and the faults of their READs."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.numbers = itertools.count(1)
        self.agents: dict[str, Raw] = {}
        self.holds: Callable[[Request], bool] = lambda request: False
        """The test of whether a posted READ is held."""
        self.before: Callable[[Request], None] = lambda request: None
        """The function called when a READ is posted; if it raises :class:`FakeError`, the READ fails."""
        self.served_by_peers = False
        """True if READs end only when the agent that is read from makes progress, as without one-sided copies."""
        self.version = "1.5.1"
        self.held: list[Request] = []

    def let_go(self) -> None:
        with self.lock:
            held, self.held = self.held, []
            for request in held:
                request.copy()

    def names(self) -> SimpleNamespace:
        bindings = SimpleNamespace(
            NIXL_SUCCESS=SUCCESS,
            NIXL_IN_PROG=IN_PROGRESS,
            NIXL_READ="read",
            DRAM_SEG="dram",
            nixlXferDList=lambda memory, pieces: list(pieces),
        )
        api = SimpleNamespace(
            nixl_thread_sync_t=Sync,
            nixl_agent_config=lambda **options: options,
            nixl_agent=lambda name, config: Agent(self, name, config),
        )
        return SimpleNamespace(api=api, bindings=bindings, version=self.version)


class Agent:
    def __init__(self, fake: FakeNixl, name: str, config: dict[str, Any]) -> None:
        assert not config["enable_prog_thread"], "an idle process would spin"
        self.backends = {"UCX": object()}
        self.agent = fake.agents[name] = Raw(fake, name)
        self._name = name

    def register_memory(self, pieces: list[tuple[int, int, int, str]], memory: str, backends: list[str]) -> Any:
        with self.agent.fake.lock:
            ((start, nbytes, _, _),) = pieces
            assert all(start + nbytes <= low or high <= start for low, high in self.agent.memory), "overlap"
            self.agent.memory.append((start, start + nbytes))
            return (start, start + nbytes)

    def deregister_memory(self, registered: Any, backends: list[str]) -> None:
        with self.agent.fake.lock:
            self.agent.memory.remove(registered)

    def get_partial_agent_metadata(self, registered: tuple[int, int], connection: bool, backends: list[str]) -> bytes:
        name = self._name.encode()
        span = b"%d-%d" % registered
        return b"nixlSerDes|Agent" + len(name).to_bytes(8, "little") + name + b"|Fake" + span


class Raw:
    """The interface of NIXL's C++ agent."""

    def __init__(self, fake: FakeNixl, name: str) -> None:
        self.fake, self.name = fake, name
        self.memory: list[tuple[int, int]] = []
        self.known: dict[str, list[tuple[int, int]]] = {}
        self.requests: dict[int, Request] = {}
        self.connects = self.forgets = 0

    def loadRemoteMD(self, metadata: bytes) -> bytes:
        head, _, span = metadata.partition(b"|Fake")
        name = head[len(b"nixlSerDes|Agent") + 8 :]
        try:
            low, high = map(int, span.split(b"-"))
        except ValueError:
            raise FakeError("NIXL_ERR_MISMATCH") from None
        with self.fake.lock:
            self.connects += name.decode() not in self.known
            known = self.known.setdefault(name.decode(), [])
            assert all(high <= start or end <= low or (low, high) == (start, end) for start, end in known), "overlap"
            known.append((low, high))
        return name

    def invalidateRemoteMD(self, name: str) -> None:
        with self.fake.lock:
            self.forgets += 1
            del self.known[name]

    def createXferReq(self, operation: str, near: Any, far: Any, name: str, notice: bytes, backends: Any) -> int:
        with self.fake.lock:
            if name not in self.known:
                raise FakeError("NIXL_ERR_NOT_FOUND")
            for pieces, spans in ((near, self.memory), (far, self.known[name])):
                for at, nbytes, _ in pieces:
                    if not any(low <= at and at + nbytes <= high for low, high in spans):
                        raise FakeError("NIXL_ERR_NOT_FOUND")
            number = next(self.fake.numbers)
            self.requests[number] = Request(near, far, name)
            return number

    def postXferReq(self, number: int, notice: bytes) -> str:
        with self.fake.lock:
            request = self.requests[number]
            request.done = False
            self.fake.before(request)
            if self.fake.holds(request):
                self.fake.held.append(request)
            elif self.fake.served_by_peers:
                self.fake.agents[request.peer].asked().append(request)
            else:
                request.copy()
            return SUCCESS if request.done else IN_PROGRESS

    def getXferStatus(self, number: int) -> str:
        self.getNotifs({}, [])  # progress of ours is progress of the peers' requests too
        return SUCCESS if self.requests[number].done else IN_PROGRESS

    def releaseXferReq(self, number: int) -> None:
        with self.fake.lock:
            del self.requests[number]

    def asked(self) -> list[Request]:
        self._asked: list[Request] = getattr(self, "_asked", [])
        return self._asked

    def getNotifs(self, notices: Any, backends: Any) -> Any:
        with self.fake.lock:
            for request in self.asked():
                request.copy()
            self.asked().clear()
        return notices


@contextmanager
def fake_nixl() -> Iterator[FakeNixl]:
    """Yields a fake in place of the real NIXL, for engines that are made meanwhile."""
    fake = FakeNixl()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nixl_agent, "_nixl", fake.names)
        yield fake
