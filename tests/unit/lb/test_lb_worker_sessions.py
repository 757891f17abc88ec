"""Tests of when an instance is dialed, and how large messages to it get."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import pytest

from pinyon.api.common.v1 import common_pb2
from pinyon.api.worker.v1 import worker_pb2
from pinyon.core.errors import Unavailable
from pinyon.core.request import RequestClass, SamplingParams
from pinyon.frontdoor.instances import worker_sessions
from pinyon.frontdoor.instances.request import Request, Terms
from pinyon.frontdoor.instances.worker_sessions import WorkerSessions
from pinyon.runtime.outgoing import MESSAGE_BYTES


class Stream:
    """A dialed stream that ends, and lets go of its session, when the test says so."""

    dialed: ClassVar[list[Stream]] = []

    def __init__(self, address: str, *_: Any) -> None:
        self.ended, self.let_go = asyncio.Event(), asyncio.Event()
        self.let_go.set()
        self.spoke = self.ending = self.connected = self.has_room = False
        Stream.dialed.append(self)

    async def run(self, take: Any, messages: Any) -> None:
        self.messages = messages
        await self.ended.wait()
        await self.let_go.wait()
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
    monkeypatch.setattr(worker_sessions, "Dialed", Stream)
    sessions = WorkerSessions(100, lambda: now[0])
    yield sessions
    for stream in Stream.dialed:
        stream.let_go.set()
    await sessions.close()


async def gone(sessions: WorkerSessions) -> None:
    task = next(iter(sessions._sessions.values()))._task
    Stream.dialed[-1].end()
    await asyncio.wait({task})


async def test_a_dead_address_is_dialed_once_in_its_pause(sessions: WorkerSessions, now: list[float]) -> None:
    for pause in (0.05, 0.1, 0.2):
        await sessions.open("d:1", 10, 0.0)
        await gone(sessions)
        now[0] += pause * 0.9
        for _ in range(3):
            with pytest.raises(Unavailable):
                await sessions.open("d:1", 10, 0.0)
        await sessions.open("d:2", 10, 0.0)  # another session
        await gone(sessions)
        now[0] += 1.0
        sessions.keep_only(frozenset(("d:1", "d:2")), renewed=("d:2",))
    assert len(Stream.dialed) == 6


async def test_one_that_has_spoken_or_is_new_again_is_dialed_at_once(sessions: WorkerSessions) -> None:
    await sessions.open("d:1", 10, 0.0)
    Stream.dialed[-1].spoke = True
    await gone(sessions)
    await sessions.open("d:1", 10, 0.0)
    await gone(sessions)
    sessions.keep_only(frozenset(("d:1",)), renewed=("d:1",))
    await sessions.open("d:1", 10, 0.0)
    assert len(Stream.dialed) == 3


async def test_a_session_that_is_ending_is_replaced(sessions: WorkerSessions) -> None:
    await sessions.open("d:1", 10, 0.0)
    await asyncio.sleep(0)
    Stream.dialed[0].spoke = True
    Stream.dialed[0].let_go.clear()
    Stream.dialed[0].end()
    stream, _ = await sessions.open("d:1", 10, 0.0)
    assert len(Stream.dialed) == 2
    Stream.dialed[0].let_go.set()
    await asyncio.wait(set(sessions._closing))
    assert not stream.ended
    assert sessions.streams == 1


async def test_a_burst_waits_for_the_instance_to_take_it(sessions: WorkerSessions) -> None:
    """Prompts that fill more messages than may wait are no failure of the instance."""
    async with asyncio.timeout(60):
        opened = [
            asyncio.ensure_future(sessions.open("d:1", MESSAGE_BYTES, 0.0))
            for _ in range(3 * worker_sessions.MESSAGES_MAX)
        ]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waiting = [each for each in opened if not each.done()]
        assert 0 < len(waiting) < len(opened)
        waiting[0].cancel()
        taken = 0
        while not all(each.done() for each in opened):
            message = await anext(Stream.dialed[0].messages)
            taken += len(message.submissions)
            await asyncio.sleep(0)
        assert sum(not each.cancelled() for each in opened) == len(opened) - 1
        assert sessions.streams == len(opened) - 1


async def test_those_who_wait_for_room_learn_that_the_instance_is_gone(sessions: WorkerSessions) -> None:
    async with asyncio.timeout(60):
        opened = [
            asyncio.ensure_future(sessions.open("d:1", MESSAGE_BYTES, 0.0))
            for _ in range(2 * worker_sessions.MESSAGES_MAX)
        ]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waiting = [each for each in opened if not each.done()]
        assert waiting
        await gone(sessions)
        for each in waiting:
            with pytest.raises(Unavailable):
                await each


def test_block_keys_do_not_outgrow_a_message() -> None:
    """The prompt has one key per token: the conductor gets the first keys, the instance computes them all."""
    sampling, terms = SamplingParams(1000), Terms(0.0, 1e6)
    request = Request("r", "m", RequestClass(), bytes(4 * 700_000), bytes(16 * 700_000), sampling, terms)
    schedule = request.schedule_message()
    assert schedule.ByteSize() < MESSAGE_BYTES
    assert 0 < len(schedule.block_keys) < len(request.block_keys)
    submission = worker_pb2.Submission()
    request.placement = common_pb2.Placement()
    request.begin_attempt(0.0)
    request.fill(submission, "r", True, "f", 0.0)
    assert not submission.block_keys
    assert submission.ByteSize() < 4 << 20


def test_a_submission_is_no_larger_than_was_said() -> None:
    wide = "\N{GRINNING FACE}"
    kind = RequestClass("k" * 32, 1 << 20, wide * 256, wide * 256, -1000, 1e9, wide * 128, ("g" * 64,) * 16)
    sampling = SamplingParams(
        *(1000, 1.5, 1 << 30, 0.9, 2**64 - 1, (wide * 64,) * 16),
        ignore_eos=True,
        min_p=0.5,
        min_tokens=1000,
        stop_token_ids=(2**32 - 1,) * 64,
        repetition_penalty=2.0,
        frequency_penalty=2.0,
        presence_penalty=2.0,
        logit_bias=tuple((2**32 - 1 - token, 1.0) for token in reversed(range(1024))),
        logprobs=20,
        prompt_logprobs=True,
    )
    terms = Terms(0.0, 1e6, traceparent="t" * 55)
    request = Request("r" * 128, "m" * 128, kind, bytes(4096), b"k" * 512, sampling, terms)
    placement = common_pb2.Placement(prefill_instance_id="p" * 128, decode_instance_id="d" * 128)
    for number in range(256):
        placement.fetches.add(source_id=str(number) * 40, source_address="a" * 250, first_block=number)
    for _ in range(3):
        submission = worker_pb2.Submission(stream_id=2**63)
        attempt_id = request.attempt_id
        request.placement = placement
        request.begin_attempt(0.0)
        request.fill(submission, attempt_id, True, wide * 128, 0.0)
        assert submission.ByteSize() <= request.size_bytes + placement.ByteSize()
        request.tokens += [128000] * 300
