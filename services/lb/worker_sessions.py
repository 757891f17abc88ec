"""The sessions to all decode instances in use: one per address, opened when first needed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from pinyon.api.worker.v1 import worker_pb2
from pinyon.core.avoidance import Avoidance
from pinyon.core.clock import Clock
from pinyon.core.errors import Unavailable
from pinyon.runtime.channel import PLAIN_CHANNELS, Channels
from pinyon.runtime.duplex import FIRST_PAUSE_S, MAX_PAUSE_S
from pinyon.runtime.identity import WORKER, peer_name
from services.lb.worker_session import WorkerSession, WorkerStream

__all__ = ["WorkerSessions"]

SESSIONS_MAX = 4096


class WorkerSessions:
    """``unread_tokens`` bounds what one request's mailbox holds."""

    def __init__(self, unread_tokens: int, clock: Clock = time.monotonic, channels: Channels = PLAIN_CHANNELS) -> None:
        self._unread_tokens = unread_tokens
        self._channels = channels
        self._clock = clock
        self._pauses = Avoidance(first_s=FIRST_PAUSE_S, max_s=MAX_PAUSE_S, max_peers=SESSIONS_MAX)
        self._sessions: dict[str, WorkerSession] = {}
        self._retired: set[WorkerSession] = set()
        """To instances that have restarted or gone: what runs there may end, nothing new begins."""
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._sessions) + len(self._retired)

    @property
    def streams(self) -> int:
        """Requests that an instance works on for us."""
        return sum(session.streams for session in (*self._sessions.values(), *self._retired))

    async def open(
        self, address: str, size_bytes: int, gap_s: float, instance_id: str = ""
    ) -> tuple[WorkerStream, worker_pb2.Submission]:
        """A stream to the instance at ``address``, and the submission to fill in before the next ``await``.

        Waits while more is to be sent there than it takes. With TLS, a new session is one to the instance of that id
        (empty: any worker) or to nobody. Raises :class:`Unavailable`.
        """
        while True:
            session = self._session(address, instance_id)
            if session.has_room:
                return session.open(size_bytes, gap_s)
            await session.room()

    def _session(self, address: str, instance_id: str) -> WorkerSession:
        session = self._sessions.get(address)
        if session is not None and session.ending:  # it says so itself only when all of it has ended
            self._ended(session)
            self._close(session)
            session = None
        if session is None:
            if self._closed or len(self) + len(self._closing) >= SESSIONS_MAX:
                raise Unavailable("no session to the instance can be opened", retry_after_s=1.0)
            if self._pauses.avoids(address, self._clock()):
                raise Unavailable(f"The instance at {address} was not there a moment ago.", retry_after_s=1.0)
            connect = self._channels.to(peer_name(WORKER, instance_id))
            session = WorkerSession(address, self._unread_tokens, self._ended, self._idle, connect)
            self._sessions[address] = session
        return session

    def keep_only(self, addresses: frozenset[str], renewed: Iterable[str] = (), restarted: Iterable[str] = ()) -> None:
        """Let go of sessions to instances that are no longer there; the ``renewed`` may be dialed at once, and to the
        ``restarted`` the present sessions may be to processes that are gone."""
        for address in renewed:
            self._pauses.succeeded(address)
        for address in {*(self._sessions.keys() - addresses), *restarted}:
            session = self._sessions.pop(address, None)
            if session is not None:
                self._retired.add(session)
                self._idle(session)

    def _idle(self, session: WorkerSession) -> None:
        if session in self._retired and not session.streams:
            self._retired.discard(session)
            self._close(session)

    def _close(self, session: WorkerSession) -> None:
        task = asyncio.create_task(session.close(), name=f"close {session.address}")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _ended(self, session: WorkerSession) -> None:
        self._retired.discard(session)
        if self._sessions.get(session.address) is session:
            del self._sessions[session.address]
            if session.spoke:
                self._pauses.succeeded(session.address)
            else:
                self._pauses.failed(session.address, self._clock())

    async def close(self) -> None:
        """End all sessions and wait for them."""
        self._closed = True
        sessions = (*self._sessions.values(), *self._retired)
        await asyncio.gather(*(session.close() for session in sessions), *self._closing)
