"""The requests this instance owns: taken in, bounded, counted, ended."""

from __future__ import annotations

import asyncio
import itertools
from typing import Protocol

from pinyon.api.common.v1 import common_pb2
from pinyon.api.worker.v1 import worker_pb2
from pinyon.core.errors import Cancelled, PinyonError, ResourceExhausted, Unavailable
from services.worker.decode.request import DecodeRequest
from services.worker.decode.updates import UpdateBuffer
from services.worker.orders import parse_submission
from services.worker.parts import Core
from services.worker.prefill.peers import PrefillPeers
from services.worker.prefill.prefills import Prefills

__all__ = ["DecodeObserver", "Decodes"]


class DecodeObserver(Protocol):
    """Told of what metrics count."""

    def first_token(self, seconds: float) -> None: ...

    def request_ended(self, update: worker_pb2.StreamUpdate) -> None: ...


class Decodes:
    """Owned by the event loop's thread."""

    def __init__(self, core: Core, prefills: Prefills, peers: PrefillPeers, observer: DecodeObserver) -> None:
        self.core = core
        self.prefills = prefills
        self.peers = peers
        self._observer = observer
        self._numbers = itertools.count(1)
        self._tasks: dict[DecodeRequest, asyncio.Task[None]] = {}
        self._unfinished = 0
        self._idle: asyncio.Future[None] | None = None

    @property
    def owned(self) -> int:
        """Requests that hold anything here, those being cleaned up included."""
        return len(self._tasks)

    @property
    def pending(self) -> int:
        """Requests accepted and not yet in the batch."""
        return max(0, self._unfinished - self.core.members.running)

    def submit(self, submission: worker_pb2.Submission, updates: UpdateBuffer) -> DecodeRequest:
        """Take a request in; its updates go to ``updates``.

        Raises:
            InvalidArgument, NotFound, FailedPrecondition: see ``parse_submission``.
            ResourceExhausted: too many requests.
            Unavailable: draining.
        """
        core = self.core
        if core.draining:
            raise Unavailable(f"{core.served.instance_id} is draining", field="decode_instance")
        if len(self._tasks) >= core.settings.max_requests:
            raise ResourceExhausted(f"{core.settings.max_requests} requests are here", retry_after_s=1.0)
        order = parse_submission(submission, core.served, core.settings.request_timeout_s)
        request = DecodeRequest(self, next(self._numbers), order, submission.stream_id, updates)
        self._unfinished += 1
        core.journal.decode_begun(order.request_id)
        task = asyncio.get_running_loop().create_task(request.run(), name="decode")
        self._tasks[request] = task
        task.add_done_callback(lambda _: self._gone(request))
        return request

    def cancel(self, request: DecodeRequest, reason: str) -> None:
        request.abort.fire(Cancelled(reason))

    # -- what a request says about itself

    def first_token(self, seconds: float) -> None:
        self._observer.first_token(seconds)

    def ended(self, request: DecodeRequest, update: worker_pb2.StreamUpdate) -> None:
        """Its last update was given out."""
        self._unfinished -= 1
        self.core.journal.decode_ended(request.order.request_id)
        self._observer.request_ended(update)

    def _gone(self, request: DecodeRequest) -> None:
        del self._tasks[request]
        if not self._tasks and self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    # -- the end

    async def drained(self, timeout_s: float) -> bool:
        """Whether all requests ended by themselves within the time."""
        if self._tasks:
            self._idle = asyncio.get_running_loop().create_future()
            await asyncio.wait((self._idle,), timeout=timeout_s)
        return not self._tasks

    async def close(self) -> None:
        """End what is left, and wait until nothing of it is here."""
        error: PinyonError = Unavailable(f"{self.core.served.instance_id} is stopping", field="decode_instance")
        for request in list(self._tasks):
            request.abort.fire(error)
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()))


def failed_update(update: worker_pb2.StreamUpdate, error: common_pb2.Error) -> None:
    """A stream that never became a request ends here."""
    update.finish_reason = common_pb2.FINISH_REASON_ERROR
    update.error.CopyFrom(error)
