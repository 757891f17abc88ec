"""The load balancer's one stream to the conductor: requests of one loop turn travel in one message.

While there is no conductor the session tries again with growing pauses; requests are then placed by the load balancer
itself on the last instances it was told of.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

import grpc

from pinyon.api.common.v1 import common_pb2
from pinyon.api.conductor.v1 import conductor_pb2, conductor_pb2_grpc
from pinyon.core.errors import PinyonError, ResourceExhausted, Unavailable
from pinyon.messages.error import error_from_proto
from pinyon.runtime.channel import open_channel
from pinyon.runtime.logging import get_logger
from pinyon.runtime.outbox import Outbox, OutboxClosed
from pinyon.runtime.pace import Pace

__all__ = ["ConductorAway", "ConductorSession"]

FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 2.0
WRITE_S = 5.0
OUTBOX_LIMIT = 65_536
REQUESTS_PER_MESSAGE = 64
MESSAGE_BYTES = 2 << 20
"""Half of what a message may have, so that one more request always fits."""

_log = get_logger("lb.conductor")


class ConductorAway(Unavailable):
    """No conductor answers: choose by yourself."""


class ConductorSession:
    """``start`` → ``place`` and ``release`` → ``close``. ``on_instances`` is called with each new list.

    ``in_flight`` counts this load balancer's requests: with many, they travel to the conductor together, and on from it
    to the workers.
    """

    def __init__(
        self,
        address: str,
        lb_id: str,
        on_instances: Callable[[conductor_pb2.InstanceList], None],
        answer_timeout_s: float,
        in_flight: Callable[[], int],
    ) -> None:
        self._address = address
        self._lb_id = lb_id
        self._on_instances = on_instances
        self._answer_timeout_s = answer_timeout_s
        self._in_flight = in_flight
        self._call: Any = None
        self._heard = 0
        self._closing = False
        self._outbox: Outbox[conductor_pb2.ScheduleRequest | str] | None = None
        self._pending: dict[str, asyncio.Future[conductor_pb2.ScheduleResponse]] = {}
        self._task: asyncio.Task[None] | None = None
        self.sessions = 0
        """How often a conductor answered a new session."""

    @property
    def connected(self) -> bool:
        return self._outbox is not None

    @property
    def pending(self) -> int:
        """Requests that wait for their placement."""
        return len(self._pending)

    def start(self) -> None:
        if self._task is not None:
            raise RuntimeError("a conductor session starts once")
        if self._address:
            self._task = asyncio.create_task(self._run(), name="conductor-session")

    async def close(self) -> None:
        self._closing = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            self._task = None

    async def place(self, request: conductor_pb2.ScheduleRequest) -> common_pb2.Placement:
        """Where the request runs.

        Raises :class:`ConductorAway` when no conductor answers in time, else the :class:`PinyonError` it answered with.
        A placement that comes too late, or after a cancel, is given back.
        """
        outbox = self._outbox
        if outbox is None:
            raise ConductorAway("the conductor is away")
        request_id = request.request_id
        answer: asyncio.Future[conductor_pb2.ScheduleResponse] = asyncio.get_running_loop().create_future()
        try:
            outbox.put(request)
        except (OutboxClosed, ResourceExhausted):
            raise ConductorAway("the conductor does not keep up") from None
        self._pending[request_id] = answer
        call, heard = self._call, self._heard
        try:
            async with asyncio.timeout(self._answer_timeout_s):
                response = await answer
        except TimeoutError:
            if call is self._call and heard == self._heard:
                call.cancel()  # it is silent: do not let every request wait this long
            raise ConductorAway(f"the conductor gave no answer within {self._answer_timeout_s:g} s") from None
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                self.release(request_id)  # it had just come
            raise
        finally:
            self._pending.pop(request_id, None)
        if response.HasField("error"):
            raise error_from_proto(response.error)
        return response.placement

    def release(self, request_id: str) -> None:
        """This placement is not used (any more). Without a conductor there is nothing to tell."""
        if self._outbox is not None:
            with contextlib.suppress(OutboxClosed, PinyonError):
                self._outbox.put(request_id)

    # -- the stream

    async def _run(self) -> None:
        pause = FIRST_PAUSE_S
        while True:
            before = self.sessions
            channel = open_channel(self._address)
            try:
                await self._session(conductor_pb2_grpc.ConductorServiceStub(channel))
            except asyncio.CancelledError:
                if self._closing:
                    raise
                _log.info("the conductor at %s is silent", self._address)  # the call was cancelled, not this task
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError) as error:
                reason = error.code().name if isinstance(error, grpc.aio.AioRpcError) else type(error).__name__
                _log.info("no conductor at %s: %s", self._address, reason)
            except Exception:
                _log.exception("conductor session failed")
            finally:
                self._disconnected()
                await channel.close(None)
            pause = FIRST_PAUSE_S if self.sessions > before else min(2 * pause, MAX_PAUSE_S)
            await asyncio.sleep(pause)

    async def _session(self, stub: Any) -> None:
        """One stream, until it ends; raises what ended it."""
        self._call = call = stub.ScheduleSession()
        writer: asyncio.Task[None] | None = None
        try:
            await self._write(call, conductor_pb2.ScheduleSessionRequest(lb_id=self._lb_id))
            while True:
                message = await call.read()
                if message is grpc.aio.EOF:  # type: ignore[attr-defined]
                    return
                if writer is None:  # it speaks: from here on it is asked
                    self.sessions += 1
                    self._outbox = Outbox(OUTBOX_LIMIT)
                    writer = asyncio.create_task(self._write_all(call, self._outbox), name="conductor-writer")
                self._take(message)
        finally:
            call.cancel()
            if writer is not None:
                writer.cancel()
                await asyncio.wait({writer})
                if not writer.cancelled() and (error := writer.exception()) is not None:
                    _log.info("writing to the conductor failed: %s", type(error).__name__)

    def _take(self, message: conductor_pb2.ScheduleSessionResponse) -> None:
        self._heard += 1
        if message.HasField("instances"):
            self._on_instances(message.instances)
        for response in message.responses:
            answer = self._pending.get(response.request_id)
            if answer is not None and not answer.done():
                answer.set_result(response)
            elif response.HasField("placement"):
                self.release(response.request_id)  # nobody waits for it any more

    async def _write_all(self, call: Any, outbox: Outbox[conductor_pb2.ScheduleRequest | str]) -> None:
        pace = Pace(self._in_flight, time.monotonic)
        try:
            while True:
                items = await outbox.take_all()
                await pace.turn()
                if len(outbox):
                    items += await outbox.take_all()
                message = conductor_pb2.ScheduleSessionRequest()
                size = 0
                for item in items:
                    if isinstance(item, str):
                        message.released_request_ids.append(item)
                        size += 128
                    else:
                        message.requests.append(item)
                        size += len(item.block_keys) + 1024
                    if len(message.requests) >= REQUESTS_PER_MESSAGE or size >= MESSAGE_BYTES:
                        await self._write(call, message)
                        message, size = conductor_pb2.ScheduleSessionRequest(), 0
                if size:
                    await self._write(call, message)
        except BaseException:
            call.cancel()  # ends the reader too
            raise

    async def _write(self, call: Any, message: conductor_pb2.ScheduleSessionRequest) -> None:
        async with asyncio.timeout(WRITE_S):
            await call.write(message)

    def _disconnected(self) -> None:
        if self._outbox is not None:
            self._outbox.close()
            self._outbox = None
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(ConductorAway("the conductor went away"))
