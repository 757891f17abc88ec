"""The requests that this instance owns: it takes them in, limits them, counts them and ends them."""

from __future__ import annotations

import asyncio

from pinyon.api.worker.v1 import worker_pb2
from pinyon.core.errors import Cancelled, ResourceExhausted, Unavailable
from pinyon.messages.orders import parse_submission
from services.worker.decode.outgoing_updates import OutgoingUpdates
from services.worker.decode.request import DecodeObserver, DecodeRequest
from services.worker.instance.parts import Parts
from services.worker.prefill.peers import PrefillPeers
from services.worker.prefill.prefills import Prefills


class Decodes:
    """The requests of this instance, owned by the event loop's thread."""

    def __init__(self, parts: Parts, prefills: Prefills, peers: PrefillPeers, observer: DecodeObserver) -> None:
        self.parts = parts
        self._prefills = prefills
        self._peers = peers
        self._observer = observer
        self._tasks: dict[DecodeRequest, asyncio.Task[None]] = {}
        self._unfinished = 0

    @property
    def owned(self) -> int:
        """Requests that hold anything here, including those being cleaned up."""
        return len(self._tasks)

    @property
    def pending(self) -> int:
        """Requests accepted and not yet in the batch."""
        return max(0, self._unfinished - self.parts.members.running)

    @property
    def elsewhere(self) -> int:
        """Requests whose prompt another instance computes, except those that wait for KV memory here. O(owned)."""
        return sum([request.elsewhere for request in list(self._tasks)])

    def unfinished(self) -> list[str]:
        """Returns the ids of the requests whose last update has not been handed out yet."""
        return [request.order.prompt.request_id for request in self._tasks if not request.ended.done()]

    def submit(self, submission: worker_pb2.Submission, updates: OutgoingUpdates) -> DecodeRequest:
        """Takes in a request; its updates go to ``updates``.

        Raises :class:`InvalidArgument`, :class:`NotFound` or :class:`FailedPrecondition` as ``parse_submission`` does,
        :class:`ResourceExhausted` for too many requests, :class:`Unavailable` if this drains or the engine hangs."""
        parts = self.parts
        parts.check_serving("decode_instance")
        if len(self._tasks) >= parts.limits.max_requests:
            raise ResourceExhausted(
                f"{parts.limits.max_requests} requests are here", field="decode_instance", retry_after_s=1.0
            )
        order = parse_submission(submission, parts.served, parts.limits.request_timeout_s)
        request = DecodeRequest(
            parts, self._prefills, self._peers, self._observer, order, submission.stream_id, updates, self._ended
        )
        self._unfinished += 1
        parts.ledger.decode_begun(order.prompt.request_id)
        task = asyncio.get_running_loop().create_task(request.run(), name="decode")
        self._tasks[request] = task
        task.add_done_callback(lambda _: self._tasks.pop(request))
        return request

    def cancel(self, request: DecodeRequest, reason: str) -> None:
        request.abort.fire(Cancelled(reason))

    def _ended(self) -> None:
        self._unfinished -= 1

    # -- the end

    async def drained(self, timeout_s: float) -> bool:
        """Returns whether all requests ended by themselves within the time."""
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()), timeout=timeout_s)
        return not self._tasks

    def give_up(self, why: str) -> None:
        """Ends all requests with UNAVAILABLE: they go on elsewhere. Blocks are released when nothing uses them."""
        error = Unavailable(f"{self.parts.served.instance_id} {why}", field="decode_instance")
        for request in list(self._tasks):
            request.abort.fire(error)

    async def close(self) -> None:
        """Ends the remaining requests, and waits until nothing of them is left here."""
        self.give_up("is stopping")
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()))
