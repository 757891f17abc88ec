"""The sessions to all decode instances in use: one per address, opened when first needed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
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
"""The sessions to watched instances that are opened per turn of the event loop: each takes about 0.7 ms."""
DIAL_S = 0.02
"""The time between two turns in which sessions are opened."""
LOAD_INTERVAL_S = 0.1
WRITE_S = 10.0
MESSAGES_MAX = 32
CANCEL_BYTES = 16
ASK_BYTES = 16
METHOD = Method("/pinyon.api.worker.v1.WorkerService/Session", worker_pb2.SessionRequest, worker_pb2.SessionResponse)

_log = get_logger("lb.worker")

OnLoad = Callable[[str, worker_pb2.Load, int], None]
"""A callback with an instance's address, its load, and how many of our submissions the load does not include because
they were under way then."""


class WorkerSessions:
    """The sessions to instances. ``unread_tokens`` limits the mailbox of one request.

    Instances are asked to report their load to ``on_load``, at most every :data:`LOAD_INTERVAL_S`. Watched ones report
    even if nothing was sent to them. When the session to an instance that has reported ends, or turns out to lead to a
    process that has gone, ``on_load_lost`` gets its address. No reports of that instance follow until it is back."""

    def __init__(
        self,
        unread_tokens: int,
        on_load: OnLoad,
        on_load_lost: Callable[[str], None],
        clock: Clock = time.monotonic,
        channels: Channels = PLAIN_CHANNELS,
    ) -> None:
        self.unread_tokens, self.channels = unread_tokens, channels
        self._clock = clock
        self._on_load, self._on_load_lost = on_load, on_load_lost
        self._pauses = Avoidance(first_s=FIRST_PAUSE_S, max_s=MAX_PAUSE_S, max_peers=SESSIONS_MAX)
        self._open: set[WorkerSession] = set()
        """All sessions that have not ended."""
        self._sessions: dict[str, WorkerSession] = {}
        """The sessions in which requests may begin, by address. All other sessions are retired, as their instances have
        restarted or gone: requests in them may only end."""
        self._closed = False
        self._watched: dict[str, str] = {}
        """The ids of watched instances, by address."""
        self._silent: dict[str, float] = {}
        """The addresses of watched instances without a session, each with the time when one may be opened."""
        self._dials = False
        """True while there are such addresses, and :meth:`_dial` is called again and again."""

    def __len__(self) -> int:
        return len(self._open)

    @property
    def streams(self) -> int:
        """The number of requests that instances work on for us."""
        return sum(len(session.streams) for session in self._open)

    async def open(
        self, address: str, instance_id: str, size_bytes: int, gap_s: float
    ) -> tuple[WorkerStream, worker_pb2.Submission]:
        """Returns a stream to the instance at ``address``, and the submission to fill in before the next ``await``.

        Waits while the instance does not keep up. With TLS, a new session accepts only the instance of that id. Raises
        :class:`Unavailable`."""
        while True:
            session = self._session(address, instance_id)
            if session.outgoing.has_room:
                return session.open(size_bytes, gap_s)
            await session.outgoing.room()

    def _session(self, address: str, instance_id: str) -> WorkerSession:
        session = self._sessions.get(address)
        if session is not None and session.stream.ending:  # its own end is reported only when all of it has ended
            self._gone(session)
            session = None
        if session is None:
            if self._closed or len(self._open) >= SESSIONS_MAX:
                raise Unavailable("no session to the instance can be opened", retry_after_s=1.0)
            if self._pauses.avoids(address, self._clock()):
                raise Unavailable(f"The instance at {address} was not there a moment ago.", retry_after_s=1.0)
            session = self._sessions[address] = WorkerSession(self, address, instance_id)
            self._open.add(session)
            self._silent.pop(address, None)
        return session

    def keep(
        self, known: Mapping[str, str], *, watch: bool, renewed: Collection[str] = (), restarted: Collection[str] = ()
    ) -> None:
        """Retires the sessions to all but the ``known`` instances (ids by address), and to the addresses that
        ``restarted``, as these may be to processes that are gone. The ``renewed`` addresses may be dialed at once.

        If ``watch``, keeps a session to each known instance from now on, up to :data:`SESSIONS_MAX`. A session that
        ends is reopened after a pause, which grows while the instance does not answer."""
        watched = known if watch else {address: known[address] for address in self._watched if address in known}
        self._watched = dict(islice(watched.items(), SESSIONS_MAX))
        self._silent = {address: due_s for address, due_s in self._silent.items() if address in self._watched}
        for address, session in list(self._sessions.items()):
            if address in restarted or session.instance_id != known.get(address):
                self._lose(session)
                self._idle(session)
        for address in renewed:
            self._pauses.succeeded(address)
        for address in self._watched:
            if address not in self._sessions and (address in renewed or address not in self._silent):
                self._dial_at(address, self._clock())

    def _dial_at(self, address: str, when_s: float) -> None:
        """Opens a session to a watched instance at ``when_s``, unless there is one by then."""
        self._silent[address] = when_s
        if not self._dials:
            self._dials = True
            asyncio.get_running_loop().call_soon(self._dial)

    def _dial_later(self, address: str) -> None:
        """Opens a session to a watched instance after its pause."""
        now_s = self._clock()
        self._dial_at(address, now_s + max(FIRST_PAUSE_S, self._pauses.left_s(address, now_s)))

    def _dial(self) -> None:
        now_s = self._clock()
        due = [address for address, when_s in self._silent.items() if when_s <= now_s]
        for address in due[:DIALS]:
            try:
                self._session(address, self._watched[address])
            except Unavailable:  # there are too many sessions, or the pause has grown meanwhile
                self._dial_later(address)
        self._dials = bool(self._silent) and not self._closed
        if self._dials:  # sessions that are due are opened without a pause, a few in each turn of the loop
            asyncio.get_running_loop().call_later(0.0 if len(due) > DIALS else DIAL_S, self._dial)

    def _heard(self, session: WorkerSession, load: worker_pb2.Load) -> None:
        if self._sessions.get(session.address) is session:
            self._on_load(session.address, load, max(0, session.streams.opened - load.received))

    def _gone(self, session: WorkerSession) -> None:
        """Notes that an address has lost a session, the present or an earlier one. If the instance has said nothing,
        the address is avoided for a while."""
        if self._sessions.get(session.address) is session:
            if session.stream.spoke:
                self._pauses.succeeded(session.address)
            else:
                self._pauses.failed(session.address, self._clock())
            self._lose(session)

    def _lose(self, session: WorkerSession) -> None:
        """Reports that an address has lost its present session, and opens a new one if the instance is watched."""
        address = session.address
        del self._sessions[address]
        if session.heard:
            self._on_load_lost(address)
        if address in self._watched and not self._closed:
            self._dial_later(address)

    def _idle(self, session: WorkerSession) -> None:
        """Closes a session without requests if it is retired."""
        if not session.streams and self._sessions.get(session.address) is not session:
            session.close()

    def _ended(self, session: WorkerSession) -> None:
        self._open.discard(session)
        self._gone(session)

    async def close(self) -> None:
        """Ends all sessions and waits for them."""
        self._closed = True
        for session in self._open:
            session.close()
        await asyncio.gather(*[session.task for session in self._open], return_exceptions=True)


class WorkerSession:
    """One long-lived stream to a decode instance; the submissions of one event-loop turn travel in one message. The
    session opens its stream at once. When the stream breaks, the session ends and is replaced by a new one."""

    def __init__(self, owner: WorkerSessions, address: str, instance_id: str) -> None:
        self._owner = owner
        self.address, self.instance_id = address, instance_id
        self.streams = WorkerStreams(owner.unread_tokens, self._cancel, lambda: owner._idle(self))
        self.heard = False
        """True once the instance has reported its load."""
        connect = owner.channels.sessions_to(peer_name(WORKER, instance_id))
        self.stream = Dialed(address, METHOD, WRITE_S, connect)
        pace = Pace(lambda: len(self.streams), time.monotonic)
        self.outgoing: Outgoing[worker_pb2.SessionRequest] = Outgoing(worker_pb2.SessionRequest, pace, MESSAGES_MAX)
        """The outgoing messages. There is room while the instance accepts them; the session ends if it has accepted
        none for ``WRITE_S``."""
        self.outgoing.message(ASK_BYTES).load_interval_ms = round(LOAD_INTERVAL_S * 1e3)
        self.task = asyncio.create_task(self._run(), name=f"worker-session {address}")

    def open(self, size_bytes: int, gap_s: float) -> tuple[WorkerStream, worker_pb2.Submission]:
        """Returns a stream and its submission, to fill in before the event loop turns and the message may be sent."""
        stream = self.streams.open(gap_s)
        return stream, self.outgoing.message(size_bytes).submissions.add(stream_id=stream.stream_id)

    def _cancel(self, stream_id: int) -> None:
        if not self.stream.ending:  # an ended session has dropped all its requests anyway
            self.outgoing.message(CANCEL_BYTES).cancel_stream_ids.append(stream_id)

    def close(self) -> None:
        """Ends the session; its requests fail as if the instance had gone."""
        self.stream.end(Cancelled("closed"))

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
