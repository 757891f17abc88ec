"""The sessions to all decode instances in use: one per address, opened when first needed."""

from __future__ import annotations

import asyncio

from pinyon.api.worker.v1 import worker_pb2
from pinyon.core.errors import Unavailable
from services.lb.worker_session import WorkerSession, WorkerStream

__all__ = ["WorkerSessions"]

SESSIONS_MAX = 4096


class WorkerSessions:
    """``unread_tokens`` bounds what one request's mailbox holds."""

    def __init__(self, unread_tokens: int) -> None:
        self._unread_tokens = unread_tokens
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
        if session is None:
            if self._closed or len(self._sessions) >= SESSIONS_MAX:
                raise Unavailable("no session to the instance can be opened")
            session = WorkerSession(address, self._unread_tokens, self._ended)
            self._sessions[address] = session
        return session.open(size_bytes, gap_s)

    def keep_only(self, addresses: frozenset[str]) -> None:
        """Close idle sessions to instances that are no longer there."""
        for address, session in list(self._sessions.items()):
            if address not in addresses and not session.streams:
                del self._sessions[address]
                task = asyncio.create_task(session.close(), name=f"close {address}")
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)

    def _ended(self, session: WorkerSession) -> None:
        if self._sessions.get(session.address) is session:
            del self._sessions[session.address]

    async def close(self) -> None:
        """End all sessions and wait for them."""
        self._closed = True
        sessions = list(self._sessions.values())
        await asyncio.gather(*(session.close() for session in sessions), *self._closing)
