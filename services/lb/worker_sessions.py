"""The sessions to all decode instances in use: one per address, opened when first needed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from pinyon.api.worker.v1 import worker_pb2
from pinyon.core.avoidance import Avoidance
from pinyon.core.clock import Clock
from pinyon.core.errors import Unavailable
from pinyon.runtime.duplex import FIRST_PAUSE_S, MAX_PAUSE_S
from services.lb.worker_session import WorkerSession, WorkerStream

__all__ = ["WorkerSessions"]

SESSIONS_MAX = 4096


class WorkerSessions:
    """``unread_tokens`` bounds what one request's mailbox holds."""

    def __init__(self, unread_tokens: int, clock: Clock = time.monotonic) -> None:
        self._unread_tokens = unread_tokens
        self._clock = clock
        self._pauses = Avoidance(first_s=FIRST_PAUSE_S, max_s=MAX_PAUSE_S)
        self._sessions: dict[str, WorkerSession] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def streams(self) -> int:
        """Requests that an instance works on for us."""
        return sum(session.streams for session in self._sessions.values())

    def open(self, address: str, size_bytes: int, gap_s: float) -> tuple[WorkerStream, worker_pb2.Submission]:
        """As :meth:`WorkerSession.open`, for the instance at ``address``. Raises :class:`Unavailable`."""
        session = self._sessions.get(address)
        if session is not None and session.ending:  # it says so itself only when all of it has ended
            self._ended(session)
            self._close(session)
            session = None
        if session is None:
            if self._closed or len(self._sessions) + len(self._closing) >= SESSIONS_MAX:
                raise Unavailable("no session to the instance can be opened")
            if self._pauses.avoids(address, self._clock()):
                raise Unavailable(f"The instance at {address} was not there a moment ago.")
            session = WorkerSession(address, self._unread_tokens, self._ended)
            self._sessions[address] = session
        return session.open(size_bytes, gap_s)

    def keep_only(self, addresses: frozenset[str], renewed: Iterable[str] = ()) -> None:
        """Close idle sessions to instances that are no longer there; the ``renewed`` may be dialed at once."""
        for address in renewed:
            self._pauses.succeeded(address)
        for address, session in list(self._sessions.items()):
            if address not in addresses and not session.streams:
                del self._sessions[address]
                self._close(session)

    def _close(self, session: WorkerSession) -> None:
        task = asyncio.create_task(session.close(), name=f"close {session.address}")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _ended(self, session: WorkerSession) -> None:
        if self._sessions.get(session.address) is session:
            del self._sessions[session.address]
            if session.spoke:
                self._pauses.succeeded(session.address)
            else:
                self._pauses.failed(session.address, self._clock())

    async def close(self) -> None:
        """End all sessions and wait for them."""
        self._closed = True
        sessions = list(self._sessions.values())
        await asyncio.gather(*(session.close() for session in sessions), *self._closing)
