"""How prompts travel to a prefill instance, and when it is not dialed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from pinyon.api.worker.v1 import worker_pb2
from pinyon.core.errors import ResourceExhausted, Unavailable
from pinyon.runtime.outbox import MESSAGE_BYTES
from pinyon.transfer.errors import TransferLimitReached
from services.worker.decode.lb_sessions import LbSession
from services.worker.prefill import peers
from services.worker.prefill.peers import PrefillPeers, RemotePrefill, _messages

GRPC_BYTES = 4 << 20


def start(stop_bytes: int, tokens: int = 8) -> worker_pb2.PrefillStart:
    message = worker_pb2.PrefillStart(prompt_tokens_le32=bytes(4 * tokens))
    message.sampling.stop.append("x" * stop_bytes)
    return message


def test_many_small_starts_and_cancels_fit_their_messages_in_order() -> None:
    items: list[worker_pb2.PrefillStart | int] = []
    for number in range(2000):
        each = start(4096)
        each.stream_id = number
        items += [each, 2**63 + number]
    messages = _messages(items)
    assert all(message.ByteSize() <= MESSAGE_BYTES for message in messages)
    assert [each.stream_id for message in messages for each in message.starts] == list(range(2000))
    assert sum(len(message.cancel_stream_ids) for message in messages) == 2000


def test_a_large_start_goes_alone() -> None:
    large = start(1, tokens=768 * 1024)
    messages = _messages([start(1), large, start(1)])
    assert [len(message.starts) for message in messages] == [1, 1, 1]
    assert all(message.ByteSize() < GRPC_BYTES for message in messages)


async def test_texts_that_are_replayed_at_once_fit_their_messages() -> None:
    parts = SimpleNamespace(settings=SimpleNamespace(outbox_tokens=10_000, write_timeout_s=1.0))
    session = LbSession(SimpleNamespace(decodes=SimpleNamespace(parts=parts)))  # type: ignore[arg-type]
    for number in range(1000):
        session.updates.update(number).text = "x" * 8000
    session.updates.close()
    messages = [message async for message in session._messages()]
    assert all(message.ByteSize() <= MESSAGE_BYTES for message in messages)
    assert [each.stream_id for message in messages for each in message.updates] == list(range(1000))


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
async def sessions(now: list[float], monkeypatch: pytest.MonkeyPatch):
    Stream.dialed = []
    monkeypatch.setattr(peers, "Dialed", Stream)
    monkeypatch.setattr(peers, "hello_to_proto", lambda *_: worker_pb2.PrefillHello())
    parts = SimpleNamespace(
        settings=SimpleNamespace(max_requests=16, settle_s=1.0),
        transfer=SimpleNamespace(
            register_local_memory=lambda _: None, unregister=lambda _: None, descriptor=lambda _: None
        ),
        served=None,
        clock=lambda: now[0],
    )
    sessions = PrefillPeers(parts, None, limit=3)  # type: ignore[arg-type]
    yield sessions
    await sessions.close()


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
    """The peers' results came: nothing of them is under way any more."""
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


async def test_a_session_whose_memory_cannot_be_opened_tells_its_prompts_and_is_forgotten(
    sessions: PrefillPeers,
) -> None:
    def full(_: object) -> None:
        raise TransferLimitReached("4096 regions are registered")

    register, sessions.parts.transfer.register_local_memory = sessions.parts.transfer.register_local_memory, full
    remote = sessions.start("a", "a:1", start(1))
    async with asyncio.timeout(10):
        await asyncio.wait((remote.result, remote.settled))
    error = remote.result.exception()
    assert isinstance(error, Unavailable)
    assert error.field is None, "the prefill instance is not to blame"
    assert sessions.sessions == 0
    sessions.parts.transfer.register_local_memory = register
    sessions.start("a", "a:1", start(1))
    assert sessions.sessions == 1
