"""The instance's side of a report session, against a conductor that records what it is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import grpc
import pytest

from pinyon.api.conductor.v1 import conductor_pb2, conductor_pb2_grpc
from pinyon.core.block_keys import unpack_keys
from pinyon.core.request import Role
from pinyon.paging import KeyChanges
from pinyon.placement.instances import InstanceInfo, InstanceLoad
from pinyon.runtime import report_session
from pinyon.runtime.report_session import ReportSession
from tests.ports import kept_port

WAIT_S = 60.0
Request = conductor_pb2.ReportSessionRequest


class Source:
    def __init__(self) -> None:
        self.held: set[bytes] = set()
        self.changes = KeyChanges()
        self.ended: list[str] = []
        self.running: list[str] = []

    def store(self, *keys: bytes) -> None:
        for key in keys:
            self.held.add(key)
            self.changes.add(key)

    def snapshot_keys(self) -> Sequence[bytes]:
        return sorted(self.held)

    def drain_changes(self) -> tuple[Sequence[bytes], Sequence[bytes]]:
        return self.changes.drain()

    def load(self) -> InstanceLoad:
        return InstanceLoad(cached_blocks=len(self.held))

    def news(self) -> conductor_pb2.ReportSessionRequest:
        ended, self.ended = self.ended, []
        return conductor_pb2.ReportSessionRequest(
            prefills=[conductor_pb2.PrefillMeasurement(computed_tokens=7)], ended_prefill_request_ids=ended
        )

    def decoding(self) -> Sequence[str]:
        return self.running


class Conductor(conductor_pb2_grpc.ConductorServiceServicer):
    """A conductor that believes its reports, as the real one must."""

    def __init__(self) -> None:
        self.told = asyncio.Condition()
        self.registrations: list[str] = []
        self.keys: set[bytes] = set()
        self.seq = 0
        self.parts = 0
        self.reports = 0
        self.ended: list[str] = []
        self.begun: list[str] = []
        self.left = False
        self.resync = False
        self.every: int | None = None
        self.address = ""
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        self._server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        conductor_pb2_grpc.add_ConductorServiceServicer_to_server(self, self._server)
        self._server.add_insecure_port(self.address)
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    async def until(self, what: str) -> None:
        async with asyncio.timeout(WAIT_S), self.told:
            await self.told.wait_for(lambda: eval(what, {"c": self}))

    async def ReportSession(
        self, request_iterator: AsyncIterator[Request], context: object
    ) -> AsyncIterator[conductor_pb2.ReportSessionResponse]:
        first = True
        async for request in request_iterator:
            assert request.HasField("registration") == first
            if first:
                self.registrations.append(request.registration.instance_id)
                yield conductor_pb2.ReportSessionResponse(lease_ms=400, sample_every=self.every)
            first = False
            self._apply(request)
            self.reports += 1
            async with self.told:
                self.told.notify_all()
            resync, self.resync = self.resync, False
            yield conductor_pb2.ReportSessionResponse(acked_seq=self.seq, resync=resync, sample_every=self.every)

    def _apply(self, request: Request) -> None:
        if request.HasField("snapshot"):
            if request.snapshot.first:
                self.keys = set()
                self.parts = 0
            self.parts += 1
            self.keys.update(unpack_keys(request.snapshot.keys))
            self.seq = request.snapshot.seq
        for delta in request.deltas:
            assert delta.seq == self.seq + 1
            self.seq = delta.seq
            stored, removed = set(unpack_keys(delta.stored_keys)), set(unpack_keys(delta.removed_keys))
            assert not stored & self.keys
            assert removed <= self.keys
            self.keys = (self.keys | stored) - removed
        self.ended += request.ended_prefill_request_ids
        self.begun += request.begun_decode_request_ids
        self.left |= request.leaving


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


@pytest.fixture(autouse=True)
def seldom_but_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_session, "PERIOD_S", 10.0)
    monkeypatch.setattr(report_session, "GAP_S", 0.001)


@pytest.fixture
async def conductor() -> AsyncIterator[Conductor]:
    with kept_port() as port:
        conductor = Conductor()
        conductor.address = f"127.0.0.1:{port}"
        await conductor.start()
        yield conductor
        await conductor.stop()


def session_with(conductor: Conductor, source: Source) -> ReportSession:
    info = InstanceInfo("store-1", "boot", Role.STORE, "127.0.0.1:1")
    return ReportSession(conductor.address, info, source)


async def test_snapshot_in_parts_then_deltas_then_leaving(
    conductor: Conductor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_session, "KEYS_PER_MESSAGE", 3)
    source = Source()
    source.store(*map(key, range(7)))
    session = session_with(conductor, source)
    session.start()
    await conductor.until("len(c.keys) == 7 and c.parts == 3")
    source.store(*map(key, range(10, 18)))
    source.held.discard(key(0))
    source.changes.remove(key(0))
    source.ended.append("request-1")
    session.wake()
    await conductor.until("len(c.keys) == 14 and c.ended")
    assert conductor.keys == source.held
    assert conductor.ended == ["request-1"]
    source.store(key(99))
    await session.close(WAIT_S)
    assert conductor.left
    assert key(99) in conductor.keys


async def test_a_resync_is_answered_with_a_snapshot(conductor: Conductor) -> None:
    source = Source()
    source.store(key(1))
    session = session_with(conductor, source)
    session.start()
    await conductor.until("len(c.keys) == 1")
    conductor.keys, conductor.resync = set(), True
    await conductor.until("len(c.keys) == 1")
    assert conductor.registrations == ["store-1"]
    await session.close()


def in_sample(every: int, *numbers: int) -> set[bytes]:
    """Returns the sampled keys by the field's words: their last byte is a multiple of ``every``."""
    return {key for key in map(placed, numbers) if key[-1] % every == 0}


def placed(number: int) -> bytes:
    """Returns a key like real ones: the last byte is its place."""
    return number.to_bytes(15, "little") + bytes((number % 256,))


async def test_only_sampled_keys_are_told_and_a_finer_sample_is_whole(conductor: Conductor) -> None:
    source = Source()
    conductor.every = 4
    session = session_with(conductor, source)
    session.start()
    await asyncio.wait_for(session.registered.wait(), WAIT_S)
    source.store(*map(placed, range(300)))
    source.ended.append("first")
    session.wake()
    await conductor.until("'first' in c.ended")
    assert conductor.keys == in_sample(4, *range(300))
    for number in range(8):
        source.held.discard(placed(number))
        source.changes.remove(placed(number))
    source.ended.append("second")
    session.wake()
    await conductor.until("'second' in c.ended")
    assert conductor.keys == in_sample(4, *range(8, 300))
    conductor.every = 2
    session.wake()
    await conductor.until("len(c.keys) == 146")
    assert conductor.keys == in_sample(2, *range(8, 300))
    conductor.every, parts = 8, conductor.parts
    conductor.parts = -1
    for name in ("third", "fourth"):  # the second report follows the answer to the first
        source.store(*map(placed, range(300, 320)) if name == "fourth" else ())
        source.ended.append(name)
        session.wake()
        await conductor.until(f"'{name}' in c.ended")
        async with asyncio.timeout(WAIT_S):
            while session._every != 8:  # noqa: ASYNC110 - told in the answer, after the conductor has heard
                await asyncio.sleep(0)
    assert conductor.keys == in_sample(2, *range(8, 300)) | in_sample(8, *range(300, 320))
    assert (parts, conductor.parts) == (1, -1), "no snapshot for less than before"
    conductor.resync = True
    session.wake()
    await conductor.until("c.parts == 1")
    assert conductor.keys == in_sample(8, *range(8, 320)), "unless one is asked for"
    await session.close()


async def test_the_sample_is_remembered_when_the_conductor_comes_back(conductor: Conductor) -> None:
    source = Source()
    source.store(*map(placed, range(32)))
    conductor.every = 4
    session = session_with(conductor, source)
    session.start()
    await conductor.until("len(c.keys) == 32")
    assert conductor.keys == set(map(placed, range(32))), "who does not know the sample yet tells all"
    await conductor.stop()
    conductor.keys, conductor.seq, conductor.every = set(), 0, 8
    await conductor.start()
    await conductor.until("c.keys")
    assert conductor.keys == in_sample(4, *range(32))
    await session.close()


async def test_a_conductor_of_before_there_were_samples_is_told_all(conductor: Conductor) -> None:
    source = Source()
    source.store(*map(placed, range(32)))
    conductor.every = 4
    session = session_with(conductor, source)
    session.start()
    await conductor.until("len(c.keys) == 32")
    await conductor.stop()
    conductor.keys, conductor.seq, conductor.every = set(), 0, None  # rolled back, so it asks for all keys
    await conductor.start()
    await conductor.until("len(c.keys) == 32")
    await session.close()


async def test_the_lease_sets_the_heartbeat(conductor: Conductor) -> None:
    session = session_with(conductor, Source())
    session.start()
    # The session is not woken, and the period is 10 s: only the lease of 400 ms makes it report this often.
    await conductor.until("c.reports == 8")
    assert session._period_s == pytest.approx(0.1)
    await session.close()


async def test_everything_is_told_anew_after_the_conductor_was_gone(conductor: Conductor) -> None:
    source = Source()
    source.store(key(1))
    session = session_with(conductor, source)
    session.start()
    await conductor.until("len(c.keys) == 1")
    await conductor.stop()
    source.store(key(2))
    session.wake()
    conductor.keys, conductor.seq = set(), 0
    await conductor.start()
    await conductor.until("len(c.keys) == 2")
    await asyncio.wait_for(session.registered.wait(), WAIT_S)
    assert session.sessions == 2
    await session.close()
    assert not session.registered.is_set()


async def test_each_session_begins_with_the_requests_that_are_there(
    conductor: Conductor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_session, "REQUESTS_PER_MESSAGE", 2)
    source = Source()
    source.running = ["a", "b", "c"]
    session = session_with(conductor, source)
    session.start()
    await conductor.until("c.begun == ['a', 'b', 'c']")
    await conductor.stop()
    source.running, conductor.begun = ["c"], []
    await conductor.start()
    await conductor.until("c.begun == ['c']")
    await session.close()


async def test_closing_without_a_conductor_does_not_wait() -> None:
    conductor = Conductor()
    conductor.address = "127.0.0.1:9"  # nobody listens there
    session = session_with(conductor, Source())
    session.start()
    await session.close(timeout_s=WAIT_S)
    assert not session.sessions
