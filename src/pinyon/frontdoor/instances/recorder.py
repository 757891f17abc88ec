"""Recording of the requests that this load balancer serves, as a trace. Only the load balancer sees them whole: their
tokens, class and arrival time, and how much was generated for them.

No request waits for a recording: requests that its reader does not take in time are left out and counted."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from functools import partial
from typing import NamedTuple

from pinyon.api.admin.v1 import admin_pb2
from pinyon.core.clock import Clock
from pinyon.core.errors import ResourceExhausted, Unavailable
from pinyon.core.request import RequestClass
from pinyon.core.trace_hashes import hashed_blocks, hashed_name
from pinyon.frontdoor.instances.request import Request

RECORDINGS_MAX = 4
WAITING_MAX = 4096
WAITING_BYTES_MAX = 32 << 20
"""The bytes of prompts that wait for the reader of a recording."""
MESSAGE_BYTES = 1 << 20
"""The bytes of prompts after which a message is full; their hashes take a quarter of that on the wire."""


class Recorder:
    """The recorder, owned by the event loop's thread. Without recordings, a request costs one look at an empty list."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._recordings: list[_Recording] = []
        self._closed = False

    @property
    def recordings(self) -> int:
        return len(self._recordings)

    def ended(self, request: Request) -> None:
        """Offers an ended request that had tokens to all recordings."""
        if self._recordings and request.first_token_s:
            for recording in self._recordings:
                recording.offer(request)

    async def record(self, salt: bytes) -> AsyncGenerator[admin_pb2.RecordResponse, None]:
        """Yields what is served from now on. Raises :class:`ResourceExhausted` if too many recordings run."""
        if self._closed:
            raise Unavailable("the load balancer is stopping")
        if len(self._recordings) >= RECORDINGS_MAX:
            raise ResourceExhausted(f"{RECORDINGS_MAX} traces are being recorded here", retry_after_s=60.0)
        recording = _Recording(self._clock())
        self._recordings.append(recording)
        try:
            yield admin_pb2.RecordResponse()
            while batch := await recording.take():
                requests = await asyncio.to_thread(list, map(partial(_hashed, salt), batch))
                yield admin_pb2.RecordResponse(requests=requests, dropped=recording.dropped)
        finally:
            self._recordings.remove(recording)

    def close(self) -> None:
        """Ends all recordings; their readers still get the rest."""
        self._closed = True
        for recording in self._recordings:
            recording.end()


class _Ended(NamedTuple):
    """The part of a request that is recorded."""

    model: str
    request_class: RequestClass
    tokens_le32: bytes
    generated: int


class _Recording:
    def __init__(self, began_s: float) -> None:
        self._began_s = began_s
        self._waiting: deque[_Ended] = deque()
        self._waiting_bytes = 0
        self.dropped = 0
        self._ended = False
        self._news = asyncio.Event()

    def offer(self, request: Request) -> None:
        if request.arrived_s < self._began_s:
            return
        size = len(request.tokens_le32)
        if len(self._waiting) >= WAITING_MAX or self._waiting_bytes + size > WAITING_BYTES_MAX:
            self.dropped += 1
        else:
            ended = _Ended(request.model, request.request_class, request.tokens_le32, len(request.tokens))
            self._waiting.append(ended)
            self._waiting_bytes += size
        self._news.set()

    def end(self) -> None:
        self._ended = True
        self._news.set()

    async def take(self) -> list[_Ended]:
        """Returns the requests of the next message; none after the last one."""
        while not self._waiting and not self._ended:
            self._news.clear()
            await self._news.wait()
        batch: list[_Ended] = []
        size = 0
        while self._waiting and size < MESSAGE_BYTES:
            batch.append(self._waiting.popleft())
            size += len(batch[-1].tokens_le32)
        self._waiting_bytes -= size
        return batch


def _hashed(salt: bytes, ended: _Ended) -> admin_pb2.RecordedRequest:
    """Hashes a request, in a thread: 16 tokens take a microsecond, and a prompt may have a million."""
    whose = ended.request_class
    return admin_pb2.RecordedRequest(
        arrived_unix_s=whose.arrived_unix_s,
        kind=whose.kind,
        turn=whose.turn,
        user=hashed_name(salt, whose.tenant, whose.user),
        # Two users or tenants may give their sessions the same name.
        session=hashed_name(salt, whose.tenant, whose.user, whose.session) if whose.session else b"",
        prompt_tokens=len(ended.tokens_le32) // 4,
        generated_tokens=ended.generated,
        blocks=hashed_blocks(salt, ended.model, whose, ended.tokens_le32),
    )
