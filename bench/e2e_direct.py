"""A client that speaks to a worker as a load balancer does: one long-lived stream, by the same transport."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator
from contextlib import suppress

from bench.load import Sample
from pinyon.api.common.v1 import common_pb2
from pinyon.api.worker.v1 import worker_pb2
from pinyon.core.errors import Cancelled, PinyonError
from pinyon.frontdoor.instances.worker_sessions import METHOD, WRITE_S
from pinyon.runtime.channel import OpenSession
from pinyon.runtime.duplex import Dialed

ANSWER_S = 30.0
UNSENT_MAX = 4096

Work = tuple[bytes, bytes]
"""A prompt's tokens as little-endian u32, and its block keys."""


class DirectClient:
    """A client of the worker at ``address``. Keys come with the prompt, so that the worker does no more work than for a
    load balancer."""

    def __init__(self, address: str, connect: OpenSession) -> None:
        self._stream = Dialed(address, METHOD, WRITE_S, connect)
        self._waiting: dict[int, tuple[asyncio.Future[None], list[float]]] = {}
        self._ids = itertools.count(1)
        self._unsent: asyncio.Queue[worker_pb2.Submission] = asyncio.Queue(UNSENT_MAX)
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            await self._stream.run(self._take, self._messages())
        except PinyonError as error:
            for future, _ in self._waiting.values():
                if not future.done():
                    future.set_exception(RuntimeError(error.message))

    async def _messages(self) -> AsyncGenerator[worker_pb2.SessionRequest, None]:
        while True:
            together = [await self._unsent.get()]
            while not self._unsent.empty():
                together.append(self._unsent.get_nowait())
            yield worker_pb2.SessionRequest(submissions=together)

    def _take(self, message: worker_pb2.SessionResponse) -> None:
        now_s = time.perf_counter()
        for update in message.updates:
            future, times = self._waiting[update.stream_id]
            times.append(now_s)
            if not update.finish_reason:
                continue
            del self._waiting[update.stream_id]
            if update.HasField("error"):
                future.set_exception(RuntimeError(update.error.message))
            else:
                future.set_result(None)

    async def send(self, work: Work, max_tokens: int) -> Sample:
        number = next(self._ids)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        times: list[float] = []
        self._waiting[number] = (future, times)
        began_s = time.perf_counter()
        self._unsent.put_nowait(
            worker_pb2.Submission(
                stream_id=number,
                request_id=f"direct-{number}",
                prompt_tokens_le32=work[0],
                block_keys=work[1],
                sampling=common_pb2.SamplingParams(max_tokens=max_tokens),
            )
        )
        await asyncio.wait_for(future, ANSWER_S)
        return Sample(times[0] - began_s, times[-1] - began_s)

    async def close(self) -> None:
        self._stream.end(Cancelled("closed"))
        with suppress(asyncio.CancelledError):
            await self._task
