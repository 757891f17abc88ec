"""The decode instance's side of prefill elsewhere: one long-lived PrefillSession per prefill instance.

A session's peer may write into our pool through a region key made for this session alone. The blocks of a prefill are
free to be used again when it is *settled*: its result came and says that all writes were answered, or the peer's
connections were cut, or the session's key was revoked, which ends with the session.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from pinyon.api.worker.v1 import worker_pb2
from pinyon.core.avoidance import Avoidance
from pinyon.core.errors import PinyonError, ResourceExhausted, Unavailable, error_from_code
from pinyon.runtime.duplex import FIRST_PAUSE_S, MAX_PAUSE_S, Dialed, Method
from pinyon.runtime.logging import get_logger
from pinyon.runtime.outbox import FRAME_BYTES, MESSAGE_BYTES, Outbox, OutboxClosed
from pinyon.transfer import TransferError
from services.worker.convert import hello_to_proto
from services.worker.parts import Parts

__all__ = ["PrefillPeers", "RemotePrefill"]

MAX_SESSIONS = 256
CANCEL_BYTES = 16
WRITE_S = 10.0
METHOD = Method(
    "/pinyon.api.worker.v1.WorkerService/PrefillSession",
    worker_pb2.PrefillSessionRequest,
    worker_pb2.PrefillSessionResponse,
)

_log = get_logger("prefill-peers")


class RemotePrefill:
    """One prompt at a prefill instance."""

    def __init__(self, session: _PeerSession, stream_id: int) -> None:
        loop = asyncio.get_running_loop()
        self.session = session
        self.stream_id = stream_id
        self.result: asyncio.Future[worker_pb2.PrefillResult] = loop.create_future()
        """Or the error: the peer's, or UNAVAILABLE with the field ``prefill_instance`` when the peer is gone."""
        self.settled: asyncio.Future[None] = loop.create_future()
        """Nobody writes to the target any more. An error means that this could not be made sure."""

    def fail(self, error: PinyonError) -> None:
        if not self.result.done():
            self.result.set_exception(error)
            self.result.exception()  # whoever was aborted does not look


class PrefillPeers:
    """Sessions by address. ``close`` ends all of them."""

    def __init__(self, parts: Parts, pool: Any) -> None:
        self.parts = parts
        self.pool = pool
        self._sessions: dict[str, _PeerSession] = {}
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
        """Ask for a prompt; ``start.stream_id`` is set here.

        Raises:
            ResourceExhausted: too many sessions or unsent requests.
            Unavailable: nobody was there a moment ago.
        """
        session = self._sessions.get(address)
        if session is not None and session.closing:
            self.forget(session)
            session = None
        if session is None:
            if self._pauses.avoids(address, self.parts.clock()):
                raise Unavailable(f"prefill instance {instance_id} was not there", field="prefill_instance")
            if len(self._tasks) >= MAX_SESSIONS:
                raise ResourceExhausted(f"{MAX_SESSIONS} prefill instances are connected", field="prefill_instance")
            session = _PeerSession(self, instance_id, address)
            self._sessions[address] = session
            task = asyncio.create_task(session.run(), name="prefill-peer")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return session.start(start)

    async def settle(self, remote: RemotePrefill) -> None:
        """Wait until the target's memory is ours alone, cancelling what runs. Bounded.

        Raises:
            TransferError: that could not be achieved; the memory must not be used again.
        """
        if not remote.settled.done():
            if not remote.result.done():
                remote.session.cancel(remote.stream_id)
            done, _ = await asyncio.wait((remote.settled,), timeout=self.parts.settings.settle_s)
            if not done:
                remote.session.end(f"{remote.session.instance_id} did not answer a cancel")
                await asyncio.wait((remote.settled,))
        remote.settled.result()

    def forget(self, session: _PeerSession) -> None:
        if self._sessions.get(session.address) is session:
            del self._sessions[session.address]
            if session.spoke:
                self._pauses.succeeded(session.address)
            else:
                self._pauses.failed(session.address, self.parts.clock())

    async def close(self) -> None:
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
        self._stream = Dialed(address, METHOD, WRITE_S)
        self._outbox: Outbox[worker_pb2.PrefillStart | int] = Outbox(2 * peers.parts.settings.max_requests + 16)
        self._next_id = 1
        self._cuts: set[asyncio.Task[None]] = set()

    @property
    def closing(self) -> bool:
        return self._stream.ending

    @property
    def spoke(self) -> bool:
        return self._stream.spoke

    # -- for the owner of a request

    def start(self, start: worker_pb2.PrefillStart) -> RemotePrefill:
        start.stream_id = self._next_id
        self._outbox.put(start)
        self._next_id += 1
        remote = self.streams[start.stream_id] = RemotePrefill(self, start.stream_id)
        return remote

    def cancel(self, stream_id: int) -> None:
        try:
            self._outbox.put(stream_id)
        except (ResourceExhausted, OutboxClosed):
            self.end("cancels cannot be delivered")

    def end(self, reason: str) -> None:
        """Break the session: its prefills fail, its region key is revoked."""
        self._stream.end(Unavailable(reason))

    # -- life

    async def run(self) -> None:
        parts = self._peers.parts
        region = parts.transfer.register_local_memory(self._peers.pool)
        error: PinyonError = Unavailable(f"prefill instance {self.instance_id} is gone", field="prefill_instance")
        try:
            hello = hello_to_proto(parts.served, parts.transfer.descriptor([region]))
            await self._stream.run(self._take, self._requests(hello))
        except PinyonError as failure:
            _log.info("session with %s ends: %s", self.address, failure)
            error = self._named(failure)
        except Exception:
            _log.exception("session with %s failed", self.address)
        finally:
            self._stream.end()
            self._peers.forget(self)
            self._outbox.close()
            for remote in self.streams.values():
                remote.fail(error)
            await self._revoke(region)

    async def _revoke(self, region: Any) -> None:
        failure: TransferError | None = None
        try:
            await asyncio.to_thread(self._peers.parts.transfer.unregister, region)
        except TransferError as error:
            _log.error("a peer's writes cannot be stopped: its target blocks stay unused", exc_info=error)
            failure = error
        if self._cuts:
            await asyncio.wait(set(self._cuts))
        for remote in list(self.streams.values()):
            self._settle(remote, failure)

    def _settle(self, remote: RemotePrefill, failure: TransferError | None = None) -> None:
        self.streams.pop(remote.stream_id, None)
        if remote.settled.done():
            return
        if failure is None:
            remote.settled.set_result(None)
        else:
            remote.settled.set_exception(failure)
            remote.settled.exception()

    def _named(self, error: PinyonError) -> PinyonError:
        """Whatever ended the session, the request's owner learns which instance it was."""
        code = error.grpc_code if error.grpc_code in ("FAILED_PRECONDITION", "INVALID_ARGUMENT") else "UNAVAILABLE"
        return error_from_code(code, f"prefill instance {self.instance_id}: {error.message}", field="prefill_instance")

    async def _requests(self, hello: worker_pb2.PrefillHello) -> AsyncGenerator[worker_pb2.PrefillSessionRequest, None]:
        yield worker_pb2.PrefillSessionRequest(hello=hello)
        while True:
            for message in _messages(await self._outbox.take_all()):
                yield message

    def _take(self, message: worker_pb2.PrefillSessionResponse) -> None:
        for result in message.results:
            remote = self.streams.get(result.stream_id)
            if remote is not None and not remote.result.done():
                self._take_result(remote, result)

    def _take_result(self, remote: RemotePrefill, result: worker_pb2.PrefillResult) -> None:
        if result.HasField("error"):
            remote.fail(
                error_from_code(
                    result.error.code,
                    f"prefill instance {self.instance_id}: {result.error.message}",
                    field=result.error.field or None,
                    retry_after_s=result.error.retry_after_ms / 1000 if result.error.retry_after_ms else None,
                )
            )
        else:
            remote.result.set_result(result)
        if result.unconfirmed_boot_id:
            cut = asyncio.ensure_future(self._cut(remote, result.unconfirmed_boot_id))
            self._cuts.add(cut)
            cut.add_done_callback(self._cuts.discard)
        else:
            self._settle(remote)

    async def _cut(self, remote: RemotePrefill, boot_id: bytes) -> None:
        if await asyncio.to_thread(self._peers.parts.transfer.drop_peer, boot_id):
            self._settle(remote)
        else:
            self.end(f"late writes of {self.instance_id} cannot be cut off")


def _messages(items: list[worker_pb2.PrefillStart | int]) -> list[worker_pb2.PrefillSessionRequest]:
    """All of it in as few messages as the size limit allows, in order."""
    message = worker_pb2.PrefillSessionRequest()
    messages, filled = [message], 0
    for item in items:
        size = CANCEL_BYTES if isinstance(item, int) else item.ByteSize() + FRAME_BYTES
        if filled and filled + size > MESSAGE_BYTES:
            message, filled = worker_pb2.PrefillSessionRequest(), 0
            messages.append(message)
        filled += size
        if isinstance(item, int):
            message.cancel_stream_ids.append(item)
        else:
            message.starts.append(item)
    return messages
