"""An instance's side of ``ConductorService.ReportSession``: who it is, what it holds, how busy it is.

Workers and store nodes share it. One stream: registration, a snapshot of the keys held, then deltas with sequence
numbers, load (the heartbeat) and measurements. When the stream ends it is opened again after a growing pause and the
instance tells everything anew; nothing else of the instance notices.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

import grpc

from pinyon.api.conductor.v1 import conductor_pb2, conductor_pb2_grpc
from pinyon.core.block_keys import pack_keys
from pinyon.runtime.channel import open_channel
from pinyon.runtime.logging import get_logger

__all__ = ["ReportSession", "ReportSource"]

KEYS_PER_MESSAGE = 65536
"""1 MiB of keys; a message may have 4."""
FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 2.0
WRITE_S = 5.0
"""A stream that takes no message for this long counts as broken."""

_log = get_logger("report")


class ReportSource(Protocol):
    """What is reported. Called on the event loop; nothing here may block.

    The ``drain_*`` methods give what is new since the last call and forget it. They are not called while there is no
    conductor, so the source bounds what piles up (drop the oldest). Changes need no bound: ``KeyChanges`` are net.
    """

    def snapshot_keys(self) -> Sequence[bytes]:
        """All keys held now."""
        ...

    def drain_changes(self) -> tuple[Sequence[bytes], Sequence[bytes]]:
        """Net ``(stored, removed)`` keys since the last call."""
        ...

    def load(self) -> conductor_pb2.InstanceLoad: ...

    def drain_measurements(self) -> Sequence[conductor_pb2.PrefillMeasurement]: ...

    def drain_begun(self) -> Sequence[str]:
        """Ids of requests that came to decode here."""
        ...

    def drain_ended(self) -> tuple[Sequence[str], Sequence[str]]:
        """Ids of requests whose ``(prefill, decode)`` here ended in any way."""
        ...


class ReportSession:
    """Reports ``source`` to the conductor at ``address`` until closed.

    ``start`` → (``wake`` whenever something changed) → ``close``. A report goes out every ``period_s``, and sooner
    after ``wake``, but never two within ``gap_s``: what happens meanwhile travels together.
    """

    def __init__(
        self,
        address: str,
        info: conductor_pb2.InstanceInfo,
        source: ReportSource,
        *,
        period_s: float = 0.5,
        gap_s: float = 0.02,
    ) -> None:
        self._address = address
        self._info = info
        self._source = source
        self._period_s = period_s
        self._gap_s = gap_s
        self._seq = 0
        self._wake = asyncio.Event()
        self._resync = False
        self._closing = False
        self._task: asyncio.Task[None] | None = None
        self.registered = asyncio.Event()
        """Set while the conductor has confirmed the registration."""
        self.sessions = 0
        """How often a registration was confirmed."""
        self.acked_seq = 0
        """The last delta that the conductor confirmed."""

    def start(self) -> None:
        if self._task is not None:
            raise RuntimeError("a report session starts once")
        self._task = asyncio.create_task(self._run(), name="report-session")

    def wake(self) -> None:
        """Something changed: report it soon."""
        self._wake.set()

    async def close(self, timeout_s: float = 1.0) -> None:
        """Send what is new and that the instance leaves, wait for the conductor at most ``timeout_s``, end."""
        if self._task is None:
            return
        self._closing = True
        self._wake.set()
        if not self.registered.is_set():
            self._task.cancel()
        done, _ = await asyncio.wait({self._task}, timeout=timeout_s)
        if not done:
            self._task.cancel()
            await asyncio.wait({self._task})
        self._task = None

    async def _run(self) -> None:
        pause = FIRST_PAUSE_S
        while not self._closing:
            before = self.sessions
            channel = open_channel(self._address)
            try:
                await self._session(conductor_pb2_grpc.ConductorServiceStub(channel))
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError) as error:
                reason = error.code().name if isinstance(error, grpc.aio.AioRpcError) else type(error).__name__
                _log.info("no conductor at %s: %s", self._address, reason)
            except Exception:
                _log.exception("report session failed")
            finally:
                self.registered.clear()
                await channel.close(None)
            if self._closing:
                return
            pause = FIRST_PAUSE_S if self.sessions > before else min(2 * pause, MAX_PAUSE_S)
            await asyncio.sleep(pause)

    async def _session(self, stub: Any) -> None:
        """One stream, until it ends; raises what ended it."""
        call = stub.ReportSession()
        reader = asyncio.create_task(self._read(call), name="report-reader")
        try:
            await self._write(call, conductor_pb2.ReportSessionRequest(registration=self._info))
            await self._send_snapshot(call)
            while not reader.done():
                if self._closing:
                    await self._send_news(call, leaving=True)
                    async with asyncio.timeout(WRITE_S):
                        await call.done_writing()
                    await reader
                    return
                if self._resync:
                    await self._send_snapshot(call)
                else:
                    await self._send_news(call)
                await self._wait_for_news(reader)
            await reader
        finally:
            reader.cancel()
            call.cancel()
            await asyncio.wait({reader})
            if not reader.cancelled():
                reader.exception()  # seen, or asyncio warns

    async def _wait_for_news(self, reader: asyncio.Task[None]) -> None:
        if not self._closing:
            await asyncio.sleep(self._gap_s)
        waiter = asyncio.create_task(self._wake.wait())
        try:
            await asyncio.wait({waiter, reader}, timeout=self._period_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiter.cancel()
        self._wake.clear()

    async def _read(self, call: Any) -> None:
        async for reply in call:
            if reply.lease_ms:
                self._period_s = max(self._gap_s, min(self._period_s, reply.lease_ms / 4000))
                if not self.registered.is_set():
                    self.sessions += 1
                    self.registered.set()
                    self._wake.set()  # the wait that runs now was made for the period before
                    _log.info("registered with the conductor at %s", self._address)
            self.acked_seq = max(self.acked_seq, reply.acked_seq)
            if reply.resync:
                self._resync = True
                self._wake.set()

    async def _send_snapshot(self, call: Any) -> None:
        """All keys, in parts. The deltas go on with the next sequence number."""
        self._resync = False
        self._source.drain_changes()  # the snapshot contains them; no await between these two lines
        keys = self._source.snapshot_keys()
        for start in range(0, max(1, len(keys)), KEYS_PER_MESSAGE):
            snapshot = conductor_pb2.CacheSnapshot(
                seq=self._seq,
                keys=pack_keys(keys[start : start + KEYS_PER_MESSAGE]),
                first=start == 0,
                last=start + KEYS_PER_MESSAGE >= len(keys),
            )
            await self._write(call, conductor_pb2.ReportSessionRequest(snapshot=snapshot, load=self._source.load()))

    async def _send_news(self, call: Any, *, leaving: bool = False) -> None:
        stored, removed = self._source.drain_changes()
        for start in range(0, max(len(stored), len(removed)), KEYS_PER_MESSAGE):
            self._seq += 1
            delta = conductor_pb2.CacheDelta(
                seq=self._seq,
                stored_keys=pack_keys(stored[start : start + KEYS_PER_MESSAGE]),
                removed_keys=pack_keys(removed[start : start + KEYS_PER_MESSAGE]),
            )
            if start + KEYS_PER_MESSAGE < max(len(stored), len(removed)):
                await self._write(call, conductor_pb2.ReportSessionRequest(deltas=[delta]))
                continue
            await self._write(call, self._report([delta], leaving))
            return
        await self._write(call, self._report([], leaving))

    def _report(self, deltas: list[conductor_pb2.CacheDelta], leaving: bool) -> conductor_pb2.ReportSessionRequest:
        begun = self._source.drain_begun()
        prefills, decodes = self._source.drain_ended()
        return conductor_pb2.ReportSessionRequest(
            deltas=deltas,
            load=self._source.load(),
            prefills=self._source.drain_measurements(),
            ended_prefill_request_ids=prefills,
            ended_decode_request_ids=decodes,
            leaving=leaving,
            begun_decode_request_ids=begun,
        )

    async def _write(self, call: Any, message: conductor_pb2.ReportSessionRequest) -> None:
        async with asyncio.timeout(WRITE_S):  # not wait_for: on Python 3.11 it may swallow a cancellation
            await call.write(message)
