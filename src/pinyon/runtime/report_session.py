"""An instance's side of ``ConductorService.ReportSession``: its identity, its keys and its load.

Workers and store nodes share it. One stream carries the registration, a snapshot of the held keys, then deltas with
sequence numbers, load (the heartbeat) and measurements. When the stream ends, it is opened again after a growing pause,
and the instance reports everything again; the rest of the instance does not notice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import suppress
from typing import Protocol

from pinyon.api.conductor.v1 import conductor_pb2
from pinyon.core.block_keys import pack_keys
from pinyon.core.key_sample import is_sample, sampled_keys
from pinyon.messages.instance import info_to_proto, load_to_proto
from pinyon.placement.instances import InstanceInfo, InstanceLoad
from pinyon.runtime.channel import OpenSession, open_session
from pinyon.runtime.duplex import Dialed, Method, Redialer
from pinyon.runtime.logging import get_logger

KEYS_PER_MESSAGE = 65536
"""The largest number of keys in one message: 1 MiB of them, where a message may have 4 MiB."""
REQUESTS_PER_MESSAGE = 4096
PERIOD_S = 0.5
GAP_S = 0.02

Report = conductor_pb2.ReportSessionRequest
METHOD = Method("/pinyon.api.conductor.v1.ConductorService/ReportSession", Report, conductor_pb2.ReportSessionResponse)

_log = get_logger("report")


class ReportSource(Protocol):
    """A source of reports. It is called on the event loop and may not block.

    :meth:`drain_changes` and :meth:`news` return what is new since the last call, and forget it. They are not called
    without a conductor, so the source has to bound its news (drop the oldest). Key changes need no bound:
    ``KeyChanges`` are net."""

    def snapshot_keys(self) -> Sequence[bytes]:
        """Returns all keys held now."""
        ...

    def drain_changes(self) -> tuple[Sequence[bytes], Sequence[bytes]]:
        """Returns the net ``(stored, removed)`` keys since the last call."""
        ...

    def load(self) -> InstanceLoad: ...

    def news(self) -> Report | None:
        """Returns begins, ends and measurements, without load and keys; None if the source never has any."""
        ...

    def decoding(self) -> Sequence[str]:
        """Returns the ids of all requests that are here to decode now."""
        ...


class ReportSession:
    """The reports of ``source`` to the conductor at ``address``: ``start`` → (``wake`` after changes) → ``close``.

    A report goes out every ``PERIOD_S``, or four times per lease, and sooner after ``wake``, but never two within
    ``GAP_S``: changes in between travel together."""

    def __init__(
        self,
        address: str,
        info: InstanceInfo,
        source: ReportSource,
        *,
        connect: OpenSession = open_session,
        on_copies: Callable[[conductor_pb2.CopyOrder], None] = lambda _: None,
    ) -> None:
        """Takes what is called with the conductor's orders of copies."""
        self._address = address
        self._info = info
        self._source = source
        self._on_copies = on_copies
        self._period_s = PERIOD_S
        self._seq = 0
        self._wake = asyncio.Event()
        self._resync = False
        self._every = 1
        """The sampling interval of reported keys (:mod:`pinyon.core.key_sample`) that the conductor last asked for."""
        self._link = Redialer("conductor", address, METHOD, self._converse, connect=connect, log=_log)
        self.registered = asyncio.Event()
        """Set while the conductor has confirmed the registration."""
        self.sessions = 0
        """The number of confirmed registrations."""

    def start(self) -> None:
        self._link.start()

    def wake(self) -> None:
        """Makes the next report go out soon, as something changed."""
        self._wake.set()

    async def close(self, timeout_s: float = 1.0) -> None:
        """Sends the last news and that the instance leaves, waits for the conductor at most ``timeout_s``, and ends."""
        self._wake.set()
        await self._link.close(timeout_s if self.registered.is_set() else 0.0)

    async def _converse(self, stream: Dialed[Report, conductor_pb2.ReportSessionResponse]) -> None:
        try:
            await stream.run(self._take, self._reports())
        finally:
            self.registered.clear()

    def _take(self, reply: conductor_pb2.ReportSessionResponse) -> None:
        if reply.lease_ms:
            self._period_s = max(GAP_S, min(self._period_s, reply.lease_ms / 4000))
            if not self.registered.is_set():
                self.sessions += 1
                self.registered.set()
                self._wake.set()  # the present wait uses the former period
                _log.info("registered with the conductor at %s", self._address)
        every = reply.sample_every
        if reply.lease_ms and not reply.HasField("sample_every"):
            every = 1  # an older conductor without sampling, which looks up all keys
        if is_sample(every):
            finer, self._every = every < self._every, every
        else:
            finer = False
        if reply.resync or finer:
            self._resync = True
            self._wake.set()
        if reply.HasField("copies"):
            self._on_copies(reply.copies)

    async def _reports(self) -> AsyncGenerator[Report, None]:
        """Yields all messages of one stream, the farewell last."""
        yield Report(registration=info_to_proto(self._info))
        # The last reports of the former session may be lost; requests that ended then are missing from this list.
        decoding = self._source.decoding()
        for start in range(0, len(decoding), REQUESTS_PER_MESSAGE):
            yield Report(begun_decode_request_ids=decoding[start : start + REQUESTS_PER_MESSAGE])
        self._resync = True
        while True:
            leaving = self._link.closing
            for report in self._snapshot() if self._resync and not leaving else self._news(leaving):
                yield report
            if leaving:
                return
            if not self._link.closing:
                await asyncio.sleep(GAP_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._period_s):
                    await self._wake.wait()
            self._wake.clear()

    def _snapshot(self) -> Iterator[Report]:
        """Yields all keys, in parts. The deltas continue with the next sequence number."""
        self._resync = False
        self._source.drain_changes()  # the snapshot contains them, as no other task runs before it
        keys = sampled_keys(self._source.snapshot_keys(), self._every)
        for start in range(0, max(1, len(keys)), KEYS_PER_MESSAGE):
            snapshot = conductor_pb2.CacheSnapshot(
                seq=self._seq,
                keys=pack_keys(keys[start : start + KEYS_PER_MESSAGE]),
                first=start == 0,
                last=start + KEYS_PER_MESSAGE >= len(keys),
            )
            yield Report(snapshot=snapshot, load=load_to_proto(self._source.load()))

    def _news(self, leaving: bool) -> Iterator[Report]:
        stored, removed = (sampled_keys(keys, self._every) for keys in self._source.drain_changes())
        deltas: list[conductor_pb2.CacheDelta] = []
        for start in range(0, max(len(stored), len(removed)), KEYS_PER_MESSAGE):
            if deltas:
                yield Report(deltas=deltas)
            self._seq += 1
            deltas = [
                conductor_pb2.CacheDelta(
                    seq=self._seq,
                    stored_keys=pack_keys(stored[start : start + KEYS_PER_MESSAGE]),
                    removed_keys=pack_keys(removed[start : start + KEYS_PER_MESSAGE]),
                )
            ]
        report = self._source.news() or Report()
        report.load.CopyFrom(load_to_proto(self._source.load()))
        report.deltas.extend(deltas)
        report.leaving = leaving
        yield report
