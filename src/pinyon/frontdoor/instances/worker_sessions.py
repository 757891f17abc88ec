"""The sessions to all decode instances in use: one per address, opened when first needed."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import islice

from pinyon.api.worker.v1 import worker_pb2
from pinyon.core.avoidance import Avoidance
from pinyon.core.clock import Clock
from pinyon.core.errors import Cancelled, PinyonError, Unavailable
from pinyon.frontdoor.update_stream import WorkerStream, WorkerStreams
from pinyon.runtime.channel import PLAIN_CHANNELS, Channels
from pinyon.runtime.duplex import FIRST_PAUSE_S, MAX_PAUSE_S, Dialed, Method
from pinyon.runtime.identity import WORKER, peer_name
from pinyon.runtime.logging import get_logger
from pinyon.runtime.outgoing import Outgoing, Pace

SESSIONS_MAX = 4096
DIALS = 16
"""The sessions to watched instances that are opened in one turn of the event loop: each takes it about 0.7 ms."""
EARLY_S = 0.001
"""The step of the event loop's timers, which may be early by one step."""
WRITE_S = 10.0
MESSAGES_MAX = 32
CANCEL_BYTES = 16
ASK_BYTES = 16
METHOD = Method("/pinyon.api.worker.v1.WorkerService/Session", worker_pb2.SessionRequest, worker_pb2.SessionResponse)

_log = get_logger("lb.worker")

OnLoad = Callable[[str, str, worker_pb2.Load, int], None]
"""A callback with address, instance id, load, and how many of our submissions were under way then and are not included
in the load."""


class WorkerSessions:
    """The sessions to instances. ``unread_tokens`` limits the mailbox of one request.

    With ``on_load``, instances are asked to report their load, at most every ``load_interval_s`` seconds. Watched ones
    (:meth:`watch`) report even if nothing was sent to them. The callback ``on_load_lost`` is called when the session to
    an instance that has reported ends, or turns out to lead to a process that has gone. No reports of that instance
    follow until it is back.
    """

    def __init__(
        self,
        unread_tokens: int,
        clock: Clock = time.monotonic,
        channels: Channels = PLAIN_CHANNELS,
        on_load: OnLoad | None = None,
        on_load_lost: Callable[[str, str], None] | None = None,
        load_interval_s: float = 0.1,
    ) -> None:
        self._unread_tokens = unread_tokens
        self._channels = channels
        self._clock = clock
        self._on_load, self._on_load_lost = on_load, on_load_lost
        self._load_interval_s = load_interval_s
        self._pauses = Avoidance(first_s=FIRST_PAUSE_S, max_s=MAX_PAUSE_S, max_peers=SESSIONS_MAX)
        self._sessions: dict[str, WorkerSession] = {}
        self._retired: set[WorkerSession] = set()
        """The sessions to instances that have restarted or gone: their requests may end, no new ones begin."""
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False
        self._watched: dict[str, str] = {}
        """The ids of watched instances, by address."""
        self._silent: dict[str, float] = {}
        """The addresses of watched instances without a session, and when the next may be opened."""
        self._redial: asyncio.TimerHandle | None = None
        self._redial_s = math.inf
        """The time at which the timer is due."""

    def __len__(self) -> int:
        return len(self._sessions) + len(self._retired)

    @property
    def streams(self) -> int:
        """The number of requests that instances work on for us."""
        return sum(len(session.streams) for session in (*self._sessions.values(), *self._retired))

    async def open(
        self, address: str, size_bytes: int, gap_s: float, instance_id: str = ""
    ) -> tuple[WorkerStream, worker_pb2.Submission]:
        """Returns a stream to the instance at ``address``, and the submission to fill in before the next ``await``.

        Waits while the instance does not keep up. With TLS, a new session accepts only the instance of that id (empty:
        any worker). Raises :class:`Unavailable`.
        """
        while True:
            session = self._session(address, instance_id)
            if session.outgoing.has_room:
                return session.open(size_bytes, gap_s)
            await session.outgoing.room()

    def _session(self, address: str, instance_id: str) -> WorkerSession:
        session = self._sessions.get(address)
        if session is not None and session.stream.ending:  # its own end is reported only when all of it has ended
            self._ended(session)
            self._close(session)
            session = None
        if session is None:
            if self._closed or len(self) + len(self._closing) >= SESSIONS_MAX:
                raise Unavailable("no session to the instance can be opened", retry_after_s=1.0)
            if self._pauses.avoids(address, self._clock()):
                raise Unavailable(f"The instance at {address} was not there a moment ago.", retry_after_s=1.0)
            session = self._sessions[address] = WorkerSession(self, address, instance_id)
            self._silent.pop(address, None)
        return session

    def keep_only(self, addresses: frozenset[str], renewed: Iterable[str] = (), restarted: Iterable[str] = ()) -> None:
        """Retires sessions to instances that are not there any more, and to the ``restarted``, as these may be to
        processes that are gone. The ``renewed`` may be dialed at once."""
        for address in self._watched.keys() - addresses:
            del self._watched[address]
            self._silent.pop(address, None)
        for address in {*(self._sessions.keys() - addresses), *restarted}:
            self._retire(address)
        for address in renewed:
            self._pauses.succeeded(address)
            if address in self._silent:
                self._dial_at(address, self._clock())

    def watch(self, instances: Mapping[str, str]) -> None:
        """Keeps a session to each of these instances (ids by address) from now on, and drops unneeded ones to instances
        watched before. A session that ends is reopened after a pause, which grows while the instance does not answer.

        Instances beyond :data:`SESSIONS_MAX` are left out. A watch ends when :meth:`keep_only` drops the instance.
        """
        before, self._watched = self._watched, dict(islice(instances.items(), SESSIONS_MAX))
        for address in before.keys() - self._watched.keys():
            self._silent.pop(address, None)
            session = self._sessions.get(address)
            if session is not None and not session.streams:
                self._retire(address)
        for address, instance_id in self._watched.items():
            session = self._sessions.get(address)
            if session is not None and session.instance_id not in ("", instance_id):
                self._retire(address)
            elif session is not None:
                session.instance_id = instance_id
            elif address not in self._silent:
                self._dial_at(address, self._clock())

    def _dial_at(self, address: str, when_s: float) -> None:
        """Opens a session to a watched instance at ``when_s``, unless there is one then."""
        self._silent[address] = when_s
        if when_s < self._redial_s and not self._closed:
            if self._redial is not None:
                self._redial.cancel()
            self._redial_s = when_s
            delay_s = max(0.0, when_s - self._clock())
            self._redial = asyncio.get_running_loop().call_later(delay_s, self._dial)

    def _dial(self) -> None:
        self._redial, self._redial_s = None, math.inf
        now_s, silent = self._clock(), self._silent
        due = [address for address, when_s in silent.items() if when_s <= now_s + EARLY_S]
        for address in due[:DIALS]:
            try:
                self._session(address, self._watched[address])
            except Unavailable:  # there are too many, or the pause has grown meanwhile
                silent[address] = now_s + max(FIRST_PAUSE_S, self._pauses.left_s(address, now_s))
        if silent:
            next_s = min(silent, key=silent.__getitem__)
            self._dial_at(next_s, silent[next_s])

    def _heard(self, session: WorkerSession, load: worker_pb2.Load) -> None:
        if self._on_load is not None and session.instance_id and self._sessions.get(session.address) is session:
            unseen = max(0, session.streams.opened - load.received)
            self._on_load(session.address, session.instance_id, load, unseen)

    def _gone(self, session: WorkerSession) -> None:
        """Reports that an address has lost its present session, and dials a watched one again."""
        if self._on_load_lost is not None and session.heard and session.instance_id:
            self._on_load_lost(session.address, session.instance_id)
        if session.address in self._watched and not self._closed:
            now_s = self._clock()
            self._dial_at(session.address, now_s + max(FIRST_PAUSE_S, self._pauses.left_s(session.address, now_s)))

    def _retire(self, address: str) -> None:
        session = self._sessions.pop(address, None)
        if session is not None:
            self._retired.add(session)
            self._idle(session)
            self._gone(session)

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
            if session.stream.spoke:
                self._pauses.succeeded(session.address)
            else:
                self._pauses.failed(session.address, self._clock())
            self._gone(session)

    async def close(self) -> None:
        """Ends all sessions and waits for them."""
        self._closed = True
        if self._redial is not None:
            self._redial.cancel()
        sessions = (*self._sessions.values(), *self._retired)
        await asyncio.gather(*(session.close() for session in sessions), *self._closing)


class WorkerSession:
    """One long-lived stream to a decode instance; the submissions of one event-loop turn travel in one message. It
    opens its stream at once. When that breaks, the session ends and is replaced by a new one."""

    def __init__(self, owner: WorkerSessions, address: str, instance_id: str) -> None:
        """Opens the stream; ``instance_id`` is empty if it is unknown."""
        self._owner = owner
        self.address, self.instance_id = address, instance_id
        self.streams = WorkerStreams(owner._unread_tokens, self._cancel, lambda: owner._idle(self))
        self.heard = False
        """True once the instance has reported its load."""
        connect = owner._channels.sessions_to(peer_name(WORKER, instance_id))
        self.stream = Dialed(address, METHOD, WRITE_S, connect)
        pace = Pace(lambda: len(self.streams), time.monotonic)
        self.outgoing: Outgoing[worker_pb2.SessionRequest] = Outgoing(worker_pb2.SessionRequest, pace, MESSAGES_MAX)
        """The outgoing messages. There is room while the instance takes them; the session ends when it has taken none
        for ``WRITE_S``."""
        if owner._on_load is not None:
            self.outgoing.message(ASK_BYTES).load_interval_ms = max(1, round(owner._load_interval_s * 1e3))
        self._task = asyncio.create_task(self._run(), name=f"worker-session {address}")

    def open(self, size_bytes: int, gap_s: float) -> tuple[WorkerStream, worker_pb2.Submission]:
        """Returns a stream and its submission, to fill in before the event loop turns and the message may be sent."""
        stream = self.streams.open(gap_s)
        return stream, self.outgoing.message(size_bytes).submissions.add(stream_id=stream.stream_id)

    def _cancel(self, stream_id: int) -> None:
        if not self.stream.ending:  # an ended session has dropped all its requests anyway
            self.outgoing.message(CANCEL_BYTES).cancel_stream_ids.append(stream_id)

    async def close(self) -> None:
        """Ends the session; its requests fail as if the instance had gone."""
        self.stream.end(Cancelled("closed"))
        await asyncio.wait({self._task})

    # -- the stream

    async def _run(self) -> None:
        reason = "the stream ended"
        try:
            self.outgoing.by(self.stream)
            await self.stream.run(self._take, self.outgoing)
        except PinyonError as error:
            reason = error.grpc_code
        finally:
            self.outgoing.close()
            self._owner._ended(self)
            gone = Unavailable(f"The instance at {self.address} went away.")
            if count := self.streams.end(gone, self.stream.connected):
                _log.warning("lost the instance at %s: %s", self.address, reason, extra={"requests": count})

    def _take(self, message: worker_pb2.SessionResponse) -> None:
        self.streams.take(message.updates)
        if message.HasField("load"):
            self.heard = True
            self._owner._heard(self, message.load)
