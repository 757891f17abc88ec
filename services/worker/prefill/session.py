"""The prefill instance's side of PrefillSession: prompts in, results out, in one stream per decode instance."""

from __future__ import annotations

import asyncio
from typing import Any

from pinyon.api.worker.v1 import worker_pb2
from pinyon.core.avoidance import Avoidance
from pinyon.core.errors import (
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    PinyonError,
    Unavailable,
)
from pinyon.messages.error import error_to_proto
from pinyon.messages.logprobs import append_logprob
from pinyon.messages.orders import parse_hello, parse_prefill, parse_target
from pinyon.messages.prefill_report import report_to_proto
from pinyon.runtime.duplex import Accepted
from pinyon.runtime.identity import WORKER, check_claim
from pinyon.runtime.logging import get_logger
from pinyon.runtime.outgoing import FRAME_BYTES, Outgoing, Pace
from pinyon.transfer import SegmentDescriptor
from services.worker.instance.parts import Parts
from services.worker.kv.push import SendingFailed
from services.worker.prefill.job import PrefillJob
from services.worker.prefill.prefills import Prefills

HELLO_S = 10.0
WRITE_S = 10.0
MAX_PAUSE_S = 10.0
"""The longest pause in s for a decode instance that does not take KV: its prompts would hold KV memory and a place."""
TARGET = "target"

_log = get_logger("prefill-session")


class PrefillSession:
    """The session with one decode instance. When its stream ends, its prompts are cancelled."""

    def __init__(self, parts: Parts, prefills: Prefills) -> None:
        self._parts = parts
        self._prefills = prefills
        self._jobs: dict[int, PrefillJob] = {}
        self._unsent_max = 2 * parts.limits.max_prefills + 16
        """The limit of unsent results."""
        pace = Pace(lambda: 0, parts.clock)  # nothing waits for the pace
        self._outgoing: Outgoing[worker_pb2.PrefillSessionResponse]
        self._outgoing = Outgoing(worker_pb2.PrefillSessionResponse, pace, self._unsent_max)
        self._sending = Avoidance(max_s=MAX_PAUSE_S, max_peers=1)

    async def run(self, context: Any) -> None:
        """Serves the stream until it ends.

        Raises :class:`InvalidArgument` or :class:`FailedPrecondition` if the hello is missing or does not fit, see
        ``parse_hello``, and :class:`PermissionDenied` if the certificate is another instance's."""
        served = self._parts.served
        if not served.role.prefills:
            raise FailedPrecondition(f"{served.instance_id} is a decode instance: it computes no prompts")
        stream = Accepted[worker_pb2.PrefillSessionResponse, worker_pb2.PrefillSessionRequest](context, WRITE_S)
        first = await stream.first(HELLO_S)
        if first is None or not first.HasField("hello"):
            raise InvalidArgument("the first message must have a hello", field="hello")
        check_claim(context, WORKER, first.hello.instance_id)
        segment = parse_hello(first.hello, served)

        def take(message: worker_pb2.PrefillSessionRequest) -> None:
            for start in message.starts:
                self._start(start, segment)
            for stream_id in message.cancel_stream_ids:
                job = self._jobs.get(stream_id)
                if job is not None:
                    self._prefills.cancel(job, Cancelled("cancelled by the decode instance"))

        self._outgoing.by(stream)
        try:
            take(first)
            await stream.run(take, self._outgoing, self._drain)
        finally:
            self._cancel_all()
            self._outgoing.close()

    async def _drain(self) -> None:
        """Cancels all prompts, as the peer sends nothing more, and waits; results still say when they ended."""
        self._cancel_all()
        if self._jobs:
            await asyncio.wait([job.done for job in self._jobs.values()])
        self._outgoing.finish()

    def _cancel_all(self) -> None:
        for job in list(self._jobs.values()):
            self._prefills.cancel(job, Cancelled("the decode instance went away"))

    def _start(self, start: worker_pb2.PrefillStart, segment: SegmentDescriptor) -> None:
        stream_id = start.stream_id
        try:
            if stream_id in self._jobs:
                raise InvalidArgument(f"stream {stream_id} is in use", field="stream_id")
            if self._sending.avoids(TARGET, self._parts.clock()):
                raise _nothing_taken()
            order = parse_prefill(start, self._parts.served)
            job = self._prefills.submit(order, target=parse_target(start, segment, self._parts.served))
        except PinyonError as error:
            self._put(worker_pb2.PrefillResult(stream_id=stream_id, error=error_to_proto(error)))
            return
        self._jobs[stream_id] = job
        late = DeadlineExceeded("the request's time was up during its prefill")
        timeout_s = start.timeout_ms / 1000 if start.timeout_ms else self._parts.limits.request_timeout_s
        timer = asyncio.get_running_loop().call_later(timeout_s, self._prefills.cancel, job, late)
        job.done.add_done_callback(lambda _: self._finished(stream_id, job, timer))

    def _finished(self, stream_id: int, job: PrefillJob, timer: asyncio.TimerHandle) -> None:
        del self._jobs[stream_id]
        timer.cancel()
        result = worker_pb2.PrefillResult(stream_id=stream_id)
        error = job.done.exception()
        if error is None:
            first = job.done.result()
            result.first_token = first.token
            if first.logprob is not None:
                append_logprob(result.logprobs, first.logprob)
            if first.prompt_logprobs is not None:
                first.prompt_logprobs.put(result.prompt_logprobs)
            result.report.CopyFrom(report_to_proto(first.report))
            self._sending.succeeded(TARGET)
        elif isinstance(error, PinyonError):
            result.error.CopyFrom(error_to_proto(error))
            if isinstance(error, SendingFailed):
                self._sending.failed(TARGET, self._parts.clock())
                self._prefills.drop_queued(list(self._jobs.values()), _nothing_taken())
        else:
            result.error.CopyFrom(error_to_proto(Internal("the prefill failed")))
        self._put(result)

    def _put(self, result: worker_pb2.PrefillResult) -> None:
        if self._outgoing.closed:
            return
        if sum([len(each.results) for each in self._outgoing.messages]) >= self._unsent_max:
            _log.error("a decode instance does not read its results")
            self._outgoing.finish()
            return
        self._outgoing.message(result.ByteSize() + FRAME_BYTES).results.append(result)


def _nothing_taken() -> Unavailable:
    return Unavailable("the decode instance took no KV a moment ago")
