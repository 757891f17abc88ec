"""The decode instance's side of remote prefill: one long-lived PrefillSession per prefill instance.

The peer writes into our pool by a key that opens the target blocks of one prefill. When the prefill's result has come,
or the session has ended, the key is revoked, so that no late write can land: the prefill is *settled*. Only then does
its owner get the result, and only then may other requests read or use the blocks."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from pinyon.api.worker.v1 import worker_pb2
from pinyon.core.avoidance import Avoidance
from pinyon.core.errors import PinyonError, ResourceExhausted, Unavailable, error_from_code
from pinyon.messages.error import error_from_proto
from pinyon.messages.orders import hello_to_proto
from pinyon.messages.segment import region_to_proto
from pinyon.runtime.duplex import FIRST_PAUSE_S, MAX_PAUSE_S, Dialed, Method
from pinyon.runtime.identity import WORKER, peer_name
from pinyon.runtime.logging import get_logger
from pinyon.runtime.outgoing import FRAME_BYTES, MESSAGE_BYTES, Outgoing, Pace
from pinyon.transfer import Access, Grant, TransferError
from services.worker.instance.parts import Parts

MAX_SESSIONS = 1024
"""A limit above the number of instances that a conductor takes by default."""
IDLE_S = 60.0
"""The time in s after which a session without a prompt ends; it ends sooner when other sessions need its place."""
CANCEL_BYTES = 16
WRITE_S = 10.0
METHOD = Method(
    "/pinyon.api.worker.v1.WorkerService/PrefillSession",
    worker_pb2.PrefillSessionRequest,
    worker_pb2.PrefillSessionResponse,
)

_log = get_logger("prefill-peers")


class RemotePrefill:
    """One prompt at a prefill instance; ``grant`` opens its target blocks (None: it has none)."""

    def __init__(self, session: _PeerSession, stream_id: int, grant: Grant | None) -> None:
        loop = asyncio.get_running_loop()
        self.session = session
        self.stream_id = stream_id
        self.grant = grant
        self.ending = False
        """True once its result has come, or its session has ended."""
        self.result: asyncio.Future[worker_pb2.PrefillResult] = loop.create_future()
        """The result or the error: the peer's own, or the session's, as :meth:`_PeerSession._named` gives it."""
        self.settled: asyncio.Future[None] = loop.create_future()
        """Done when no peer writes to the target any more. An error means that this could not be ensured."""

    def fail(self, error: PinyonError) -> None:
        if not self.result.done():
            self.result.set_exception(error)
            self.result.exception()  # an aborted owner does not look


class PrefillPeers:
    """Sessions by address, at most ``limit``. ``close`` ends all of them."""

    def __init__(self, parts: Parts, limit: int = MAX_SESSIONS) -> None:
        self.parts = parts
        self._limit = limit
        self._sessions: OrderedDict[str, _PeerSession] = OrderedDict()  # the most recently used one at the end
        self._idle_timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._pauses = Avoidance(first_s=FIRST_PAUSE_S, max_s=MAX_PAUSE_S)

    @property
    def sessions(self) -> int:
        return len(self._sessions)

    @property
    def in_flight(self) -> int:
        """Prefills elsewhere that are not settled."""
        return sum(len(session.streams) for session in list(self._sessions.values()))

    def start(self, instance_id: str, address: str, start: worker_pb2.PrefillStart) -> RemotePrefill:
        """Asks for a prompt; sets the stream id and the target region of ``start``.

        Raises :class:`ResourceExhausted` for too many sessions with prompts, unsent requests or open keys, and
        :class:`Unavailable` if nobody was there a moment ago."""
        session = self._sessions.get(address)
        if session is not None and session.stream.ending:
            self.forget(session)
            session = None
        if session is None:
            if self._pauses.avoids(address, self.parts.clock()):
                raise Unavailable(f"prefill instance {instance_id} was not there", field="prefill_instance")
            self._make_room()
            session = _PeerSession(self, instance_id, address)
            self._sessions[address] = session
            task = asyncio.create_task(session.run(), name="prefill-peer")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            self._arm()
        self._sessions.move_to_end(address)
        return session.start(start)

    def _make_room(self) -> None:
        """Makes room for one more session, by ending the least recently used one without prompts."""
        if len(self._sessions) >= self._limit:
            idle = next((session for session in self._sessions.values() if not session.streams), None)
            if idle is None:
                raise ResourceExhausted(f"prompts are at {self._limit} prefill instances", field="prefill_instance")
            self.forget(idle)
            idle.end("its place is needed")
        if len(self._tasks) >= 2 * self._limit:  # sessions that are ending wait for their last writes
            raise ResourceExhausted("too many sessions are ending", field="prefill_instance")

    def drop_idle(self) -> None:
        """Ends the sessions that were not used for :data:`IDLE_S`."""
        since_s = self.parts.clock() - IDLE_S
        for session in [each for each in self._sessions.values() if not each.streams and each.used_s <= since_s]:
            self.forget(session)
            session.end("nothing to do")

    def _arm(self) -> None:
        if self._idle_timer is None:
            self._idle_timer = asyncio.get_running_loop().call_later(IDLE_S / 2, self._look)

    def _look(self) -> None:
        self._idle_timer = None
        self.drop_idle()
        if self._sessions:
            self._arm()

    async def settle(self, remote: RemotePrefill) -> None:
        """Waits until the target's memory is ours alone, and cancels the prefill if it runs. Bounded.

        Raises :class:`TransferError` if that could not be achieved: the memory must not be used again."""
        if not remote.settled.done():
            if not remote.result.done():
                remote.session.cancel(remote.stream_id)
            settle_s = self.parts.limits.settle_s
            await asyncio.wait((remote.settled,), timeout=settle_s)
            if not remote.settled.done():
                remote.session.end(f"{remote.session.instance_id} did not answer a cancel")
                await asyncio.wait((remote.settled,), timeout=settle_s)
            if not remote.settled.done():
                raise TransferError(f"the key of {remote.session.instance_id} was not revoked in {settle_s:g} s")
        remote.settled.result()

    def forget(self, session: _PeerSession) -> None:
        if self._sessions.get(session.address) is session:
            del self._sessions[session.address]
            if session.stream.spoke:
                self._pauses.succeeded(session.address)
            else:
                self._pauses.failed(session.address, self.parts.clock())

    async def close(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        for session in list(self._sessions.values()):
            session.end("the decode instance is stopping")
        if self._tasks:
            await asyncio.wait(set(self._tasks))


class _PeerSession:
    def __init__(self, peers: PrefillPeers, instance_id: str, address: str) -> None:
        self.instance_id = instance_id
        self.address = address
        self.streams: dict[int, RemotePrefill] = {}
        self._peers = peers
        connect = peers.parts.channels.sessions_to(peer_name(WORKER, instance_id))
        self.stream = Dialed(address, METHOD, WRITE_S, connect)
        self._unsent_max = 2 * peers.parts.limits.max_requests + 16
        """The limit of unsent requests and cancels together."""
        pace = Pace(lambda: 0, peers.parts.clock)  # nothing waits for the pace
        self._outgoing: Outgoing[worker_pb2.PrefillSessionRequest]
        self._outgoing = Outgoing(worker_pb2.PrefillSessionRequest, pace, self._unsent_max)
        self._outgoing.by(self.stream)
        hello = hello_to_proto(peers.parts.served, peers.parts.transfer.descriptor([]))
        self._outgoing.message(MESSAGE_BYTES).hello.CopyFrom(hello)  # it goes alone
        self._next_id = 1
        self._endings: set[asyncio.Task[None]] = set()
        self.used_s = peers.parts.clock()
        """The time of the session's beginning, or of its last prompt's end."""

    # -- for the owner of a request

    def start(self, start: worker_pb2.PrefillStart) -> RemotePrefill:
        parts = self._peers.parts
        start.stream_id = self._next_id
        grant = None
        if start.target_offsets_bytes:
            ranges = [(offset, parts.served.layout.block_bytes) for offset in start.target_offsets_bytes]
            lifetime_s = start.timeout_ms / 1000 + parts.limits.settle_s
            grant = parts.transfer.grant(parts.region, ranges, Access.WRITE, lifetime_s=lifetime_s)
            start.target_region.CopyFrom(region_to_proto(grant.descriptor()))
        try:
            self._message(start.ByteSize() + FRAME_BYTES).starts.append(start)
        except BaseException:
            if grant is not None:
                parts.transfer.revoke_now(grant)  # no peer knows of it
            raise
        self._next_id += 1
        remote = self.streams[start.stream_id] = RemotePrefill(self, start.stream_id, grant)
        return remote

    def cancel(self, stream_id: int) -> None:
        try:
            self._message(CANCEL_BYTES).cancel_stream_ids.append(stream_id)
        except PinyonError:
            self.end("cancels cannot be delivered")

    def _message(self, size_bytes: int) -> worker_pb2.PrefillSessionRequest:
        if self._outgoing.closed:
            raise Unavailable(f"prefill instance {self.instance_id} is gone", field="prefill_instance")
        unsent = [len(each.starts) + len(each.cancel_stream_ids) for each in self._outgoing.messages]
        if sum(unsent) >= self._unsent_max:
            raise ResourceExhausted(f"outbox is full ({self._unsent_max} items)")
        return self._outgoing.message(size_bytes)

    def end(self, reason: str) -> None:
        """Breaks the session: its prefills fail, their keys are revoked."""
        self.stream.end(Unavailable(reason))

    # -- life

    async def run(self) -> None:
        error: PinyonError = Unavailable(f"prefill instance {self.instance_id} is gone", field="prefill_instance")
        try:
            await self.stream.run(self._take, self._outgoing)
        except PinyonError as failure:
            _log.info("session with %s ends: %s", self.address, failure)
            error = self._named(failure)
        except Exception:
            _log.exception("session with %s failed", self.address)
        finally:
            self.stream.end()
            self._peers.forget(self)
            self._outgoing.close()
            for remote in list(self.streams.values()):
                if not remote.ending:
                    remote.fail(error)
                    self._end(remote, None)
            if self._endings:
                await asyncio.wait(set(self._endings))

    def _end(self, remote: RemotePrefill, result: worker_pb2.PrefillResult | None) -> None:
        """Revokes the peer's key, then passes on the result, if any, and settles: now, if nothing is being written."""
        remote.ending = True
        if remote.grant is None or self._peers.parts.transfer.revoke_now(remote.grant):
            self._over(remote, result)
            return
        ending = asyncio.create_task(self._shut_out(remote, remote.grant, result), name="prefill-end")
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)

    async def _shut_out(self, remote: RemotePrefill, grant: Grant, result: worker_pb2.PrefillResult | None) -> None:
        failure: TransferError | None = None
        try:
            await self._peers.parts.transfer.revoke_async(grant)
        except Exception as error:  # waiters must learn of any failure
            _log.error("a peer's writes cannot be stopped: its target blocks stay unused", exc_info=error)
            failure = error if isinstance(error, TransferError) else TransferError("the key was not revoked")
        self._over(remote, result, failure)

    def _over(
        self, remote: RemotePrefill, result: worker_pb2.PrefillResult | None, failure: TransferError | None = None
    ) -> None:
        self.streams.pop(remote.stream_id, None)
        self.used_s = self._peers.parts.clock()
        if failure is None:
            remote.settled.set_result(None)
        else:
            remote.settled.set_exception(failure)
            remote.settled.exception()
            remote.fail(self._named(failure))
        if result is None or remote.result.done():
            return
        if result.HasField("error"):
            result.error.message = f"prefill instance {self.instance_id}: {result.error.message}"
            remote.fail(error_from_proto(result.error))
        else:
            remote.result.set_result(result)

    def _named(self, error: PinyonError) -> PinyonError:
        """Returns an error of the session or of a revocation for the request's owner, with the instance's name.

        It has the field ``prefill_instance``, and is UNAVAILABLE unless the peer found fault with the hello."""
        code = error.grpc_code if error.grpc_code in ("FAILED_PRECONDITION", "INVALID_ARGUMENT") else "UNAVAILABLE"
        return error_from_code(code, f"prefill instance {self.instance_id}: {error.message}", field="prefill_instance")

    def _take(self, message: worker_pb2.PrefillSessionResponse) -> None:
        for result in message.results:
            remote = self.streams.get(result.stream_id)
            if remote is not None and not remote.ending:
                self._end(remote, result)
