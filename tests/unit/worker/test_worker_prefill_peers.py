"""Tests of how prompts travel to a prefill instance, and when it is not dialed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from pinyon.api.worker.v1 import worker_pb2
from pinyon.core.errors import ResourceExhausted, Unavailable
from pinyon.runtime.channel import PLAIN_CHANNELS
from pinyon.runtime.outgoing import MESSAGE_BYTES
from pinyon.transfer import Access, TransferError, TransferLimitReached
from services.worker.prefill import peers
from services.worker.prefill.peers import PrefillPeers, RemotePrefill
from tests.unit.worker.caches import FakeDoors

GRPC_BYTES = 4 << 20


def start(stop_bytes: int, tokens: int = 8) -> worker_pb2.PrefillStart:
    message = worker_pb2.PrefillStart(prompt_tokens_le32=bytes(4 * tokens))
    message.sampling.stop.append("x" * stop_bytes)
    return message


class Stream:
    """A dialed stream that ends when the test says so."""

    dialed: ClassVar[list[Stream]] = []

    def __init__(self, address: str, *_: Any) -> None:
        self.address = address
        self.ended = asyncio.Event()
        self.spoke = self.ending = False
        Stream.dialed.append(self)

    async def run(self, take: Callable[[worker_pb2.PrefillSessionResponse], None], *_: Any) -> None:
        self.take = take
        await self.ended.wait()
        raise Unavailable("gone")

    def end(self, *_: Any) -> None:
        self.ending = True
        self.ended.set()


@pytest.fixture
def now() -> list[float]:
    return [0.0]


@pytest.fixture
async def doors() -> FakeDoors:
    doors = FakeDoors()
    doors.descriptor = lambda _: None  # type: ignore[attr-defined]
    return doors


@pytest.fixture
async def sessions(now: list[float], doors: FakeDoors, monkeypatch: pytest.MonkeyPatch):
    Stream.dialed = []
    monkeypatch.setattr(peers, "Dialed", Stream)
    monkeypatch.setattr(peers, "hello_to_proto", lambda *_: worker_pb2.PrefillHello())
    parts = SimpleNamespace(
        channels=PLAIN_CHANNELS,
        limits=SimpleNamespace(max_requests=16, settle_s=1.0),
        transfer=doors,
        region=None,
        served=SimpleNamespace(layout=SimpleNamespace(block_bytes=64)),
        clock=lambda: now[0],
    )
    sessions = PrefillPeers(parts, limit=3)  # type: ignore[arg-type]
    yield sessions
    await sessions.close()
    assert not doors.open


async def test_many_small_starts_and_cancels_fit_messages_in_order(sessions: PrefillPeers) -> None:
    sessions.parts.limits.max_requests = 4096
    remotes = []
    for _ in range(2000):
        remotes.append(sessions.start("p", "p:1", start(4096)))
        remotes[-1].session.cancel(remotes[-1].stream_id)
    hello, *messages = waiting(remotes[0])
    assert hello.HasField("hello")
    assert not hello.starts
    assert all(message.ByteSize() <= MESSAGE_BYTES for message in messages)
    assert [each.stream_id for message in messages for each in message.starts] == list(range(1, 2001))
    assert [each for message in messages for each in message.cancel_stream_ids] == list(range(1, 2001))


async def test_a_large_start_goes_alone(sessions: PrefillPeers) -> None:
    large = start(1, tokens=768 * 1024)
    remotes = [sessions.start("p", "p:1", each) for each in (start(1), large, start(1))]
    _, *messages = waiting(remotes[0])
    assert [len(message.starts) for message in messages] == [1, 1, 1]
    assert all(message.ByteSize() < GRPC_BYTES for message in messages)


def waiting(remote: RemotePrefill) -> list[worker_pb2.PrefillSessionRequest]:
    return list(remote.session._outgoing.messages)


async def gone(sessions: PrefillPeers) -> None:
    Stream.dialed[-1].ended.set()
    await asyncio.wait(set(sessions._tasks))


async def test_a_dead_address_is_dialed_once_in_its_pause(sessions: PrefillPeers, now: list[float]) -> None:
    for pause in (0.05, 0.1, 0.2):
        remote = sessions.start("p", "p:1", start(1))
        await gone(sessions)
        with pytest.raises(Unavailable):
            remote.result.result()
        now[0] += pause * 0.9
        with pytest.raises(Unavailable) as refused:
            sessions.start("p", "p:1", start(1))
        assert refused.value.field == "prefill_instance"
        now[0] += pause * 0.11
    assert len(Stream.dialed) == 3


async def test_one_that_has_spoken_and_went_is_dialed_at_once(sessions: PrefillPeers) -> None:
    for _ in range(3):
        sessions.start("p", "p:1", start(1))
        Stream.dialed[-1].spoke = True
        await gone(sessions)
    assert len(Stream.dialed) == 3


async def answered(*remotes: RemotePrefill) -> None:
    """Delivers the peers' results, after which nothing of the requests is under way."""
    await asyncio.sleep(0)  # the sessions begin
    for remote in remotes:
        (stream,) = (each for each in Stream.dialed if each.address == remote.session.address and not each.ending)
        stream.spoke = True
        stream.take(worker_pb2.PrefillSessionResponse(results=[{"stream_id": remote.stream_id}]))


async def test_a_session_without_prompts_ends_after_a_while(sessions: PrefillPeers, now: list[float]) -> None:
    first, second = sessions.start("a", "a:1", start(1)), sessions.start("b", "b:1", start(1))
    await answered(first)
    now[0] += peers.IDLE_S - 1
    sessions.drop_idle()
    assert sessions.sessions == 2
    now[0] += 2
    sessions.drop_idle()
    assert sessions.sessions == 1, "the other one waits for its result"
    await answered(second)
    sessions.start("a", "a:1", start(1))
    assert len(Stream.dialed) == 3, "it is dialed again at once"


async def test_the_session_used_longest_ago_makes_room_for_another_one(sessions: PrefillPeers) -> None:
    remotes = {name: sessions.start(name, f"{name}:1", start(1)) for name in "abc"}
    with pytest.raises(ResourceExhausted):
        sessions.start("d", "d:1", start(1))
    await answered(*remotes.values())
    await answered(sessions.start("a", "a:1", start(1)))
    sessions.start("d", "d:1", start(1))
    assert [stream.ending for stream in Stream.dialed] == [False, True, False, False]
    assert sessions.sessions == 3


async def test_memory_that_cannot_be_opened_fails_only_its_prompt(sessions: PrefillPeers, doors: FakeDoors) -> None:
    doors.full = True
    with pytest.raises(TransferLimitReached) as refused:
        sessions.start("a", "a:1", into(0))
    assert refused.value.field is None, "the prefill instance is not to blame"
    assert sessions.in_flight == 0
    doors.full = False
    sessions.start("a", "a:1", into(0))
    assert len(doors.open) == sessions.in_flight == sessions.sessions == 1


def into(*offsets: int) -> worker_pb2.PrefillStart:
    message = start(1)
    message.timeout_ms = 9000
    message.target_offsets_bytes.extend(offsets)
    return message


async def answer(remote: RemotePrefill, **fields: Any) -> None:
    """Delivers this answer of the prefill instance."""
    await asyncio.sleep(0)  # the session has begun
    result = worker_pb2.PrefillResult(stream_id=remote.stream_id, **fields)
    Stream.dialed[-1].take(worker_pb2.PrefillSessionResponse(results=[result]))


async def test_a_prefills_key_is_its_own_and_opens_targets_for_writing(
    sessions: PrefillPeers, doors: FakeDoors
) -> None:
    first, second = into(128, 640), into(0)
    remotes = [sessions.start("p", "p:1", each) for each in (first, second)]
    one, other = doors.open[first.target_region.key], doors.open[second.target_region.key]
    assert one.ranges == ((128, 64), (640, 64))
    assert other.ranges == ((0, 64),)
    assert (one.access, one.lifetime_s) == (Access.WRITE, 10.0)
    await answer(remotes[0], first_token=7)
    assert list(doors.open.values()) == [other], "it is refused before anybody hears the result"
    assert remotes[0].result.result().first_token == 7
    assert remotes[0].settled.done()
    assert not remotes[1].settled.done()


async def test_without_targets_there_is_no_key(sessions: PrefillPeers, doors: FakeDoors) -> None:
    message = into()
    remote = sessions.start("p", "p:1", message)
    assert not doors.open
    assert not message.HasField("target_region")
    await answer(remote, first_token=7)
    assert remote.result.result().first_token == 7


async def test_the_result_is_known_when_nothing_is_written_any_more(sessions: PrefillPeers, doors: FakeDoors) -> None:
    remote = sessions.start("p", "p:1", into(0))
    doors.idle.clear()
    await answer(remote, first_token=7)
    await answer(remote, first_token=8)
    assert not doors.open
    await asyncio.sleep(0)
    assert not remote.result.done()
    assert not remote.settled.done()
    doors.idle.set()
    assert (await asyncio.wait_for(remote.result, 60)).first_token == 7
    assert remote.settled.done()
    assert sessions.in_flight == 0


async def test_an_ended_session_takes_keys_back_and_keeps_its_results(sessions: PrefillPeers, doors: FakeDoors) -> None:
    had, lost = (sessions.start("p", "p:1", into(offset)) for offset in (0, 64))
    doors.idle.clear()
    await answer(had, first_token=7)
    Stream.dialed[-1].ended.set()
    await asyncio.wait((lost.result,))
    assert not doors.open
    assert not lost.settled.done()
    doors.idle.set()
    await asyncio.wait(set(sessions._tasks))
    assert had.result.result().first_token == 7
    with pytest.raises(Unavailable):
        lost.result.result()
    assert had.settled.done()
    assert lost.settled.done()


async def test_what_cannot_be_asked_has_no_key(sessions: PrefillPeers, doors: FakeDoors) -> None:
    for _ in range(2 * sessions.parts.limits.max_requests + 16):  # unsent ones
        sessions.start("p", "p:1", into(0))
    with pytest.raises(ResourceExhausted):
        sessions.start("p", "p:1", into(64))
    assert len(doors.open) == sessions.in_flight
    doors.full = True
    with pytest.raises(TransferLimitReached):
        sessions.start("q", "q:1", into(0))
    assert not sessions._sessions["q:1"].streams


async def test_writes_that_cannot_be_stopped_fail_the_prefill(
    sessions: PrefillPeers, doors: FakeDoors, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stuck(_: object) -> None:
        raise TransferError("operations do not end")

    remote = sessions.start("p", "p:1", into(0))
    doors.idle.clear()
    monkeypatch.setattr(doors, "revoke_async", stuck)
    await answer(remote, first_token=7)
    with pytest.raises(Unavailable):
        await asyncio.wait_for(remote.result, 60)
    with pytest.raises(TransferError):
        await sessions.settle(remote)


async def test_settling_ends_also_when_a_key_is_never_taken_back(
    sessions: PrefillPeers, doors: FakeDoors, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions.parts.limits.settle_s = 0.01
    over = asyncio.Event()

    async def waits(_: object) -> None:
        await over.wait()

    remote = sessions.start("p", "p:1", into(0))
    doors.idle.clear()
    monkeypatch.setattr(doors, "revoke_async", waits)
    with pytest.raises(TransferError, match=r"not revoked"):
        await asyncio.wait_for(sessions.settle(remote), 60)
    over.set()
    await sessions.settle(remote)
