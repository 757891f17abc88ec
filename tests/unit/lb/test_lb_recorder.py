"""Recorders are told what is served, and no request waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from pinyon.api.admin.v1 import admin_pb2
from pinyon.core.errors import ResourceExhausted, Unavailable
from pinyon.core.request import RequestClass, SamplingParams
from pinyon.frontdoor.instances import recorder as recorder_module
from pinyon.frontdoor.instances.recorder import RECORDINGS_MAX, Recorder
from pinyon.frontdoor.instances.request import Request, Terms

SALT = b"s" * 16
Messages = AsyncGenerator[admin_pb2.RecordResponse, None]


def served(arrived_s: float = 2.0, tokens: int = 20, generated: int = 3) -> Request:
    asked = RequestClass(kind="chat", turn=2, user="anna", session="tea", tenant="acme", arrived_unix_s=1e9)
    prompt, terms = b"\1\0\0\0" * tokens, Terms(arrived_s, 99.0)
    request = Request("id", "m", asked, prompt, b"", SamplingParams(), terms)
    request.tokens = [1] * generated
    request.first_token_s = 3.0 if generated else 0.0
    return request


async def begun(recorder: Recorder) -> Messages:
    messages = recorder.record(SALT)
    assert await anext(messages) == admin_pb2.RecordResponse()
    return messages


async def test_what_is_told_and_what_is_not() -> None:
    recorder = Recorder(lambda: 1.0)
    recorder.ended(served())
    async with aclosing(await begun(recorder)) as messages:
        recorder.ended(served(arrived_s=0.5))
        recorder.ended(served(generated=0))
        recorder.ended(served(tokens=33, generated=7))
        recorder.ended(served())
        message = await anext(messages)
        assert [(each.prompt_tokens, each.generated_tokens) for each in message.requests] == [(33, 7), (20, 3)]
        told = message.requests[0]
        assert (told.kind, told.turn, told.arrived_unix_s, len(told.blocks)) == ("chat", 2, 1e9, 3 * 16)
        assert len(told.user) == len(told.session) == 16
        raw = message.SerializeToString()
        assert not any(name in raw for name in (b"anna", b"tea", b"acme", b"\1\0\0\0\1\0\0\0"))
        assert recorder.recordings == 1
    assert recorder.recordings == 0


async def test_who_is_too_slow_misses_some_and_is_told_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "WAITING_MAX", 3)
    monkeypatch.setattr(recorder_module, "WAITING_BYTES_MAX", 4 * 50)
    recorder = Recorder(lambda: 1.0)
    async with aclosing(await begun(recorder)) as slow, aclosing(await begun(recorder)) as quick:
        for tokens in (20, 20, 20, 1, 1, 1):
            recorder.ended(served(tokens=tokens))
            if tokens == 20:
                assert [each.prompt_tokens for each in (await anext(quick)).requests] == [20]
        message = await anext(slow)
        assert [each.prompt_tokens for each in message.requests] == [20, 20, 1]
        assert message.dropped == 3
        message = await anext(quick)
        assert ([each.prompt_tokens for each in message.requests], message.dropped) == ([1, 1, 1], 0)
        for tokens in (50, 1):
            recorder.ended(served(tokens=tokens))
        message = await anext(slow)
        assert ([each.prompt_tokens for each in message.requests], message.dropped) == ([50], 4)


async def test_a_message_has_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "MESSAGE_BYTES", 4 * 30)
    recorder = Recorder(lambda: 1.0)
    async with aclosing(await begun(recorder)) as messages:
        for _ in range(5):
            recorder.ended(served(tokens=20))
        assert [len((await anext(messages)).requests) for _ in range(3)] == [2, 2, 1]


async def test_the_end_of_the_load_balancer_is_the_end() -> None:
    recorder = Recorder(lambda: 1.0)
    messages, idle = await begun(recorder), await begun(recorder)
    waiting = asyncio.ensure_future(anext(idle, None))
    await asyncio.sleep(0)
    recorder.ended(served())
    assert (await waiting).requests  # type: ignore[union-attr]
    recorder.close()
    assert len((await anext(messages)).requests) == 1
    assert await anext(messages, None) is None
    assert await anext(idle, None) is None
    assert recorder.recordings == 0
    with pytest.raises(Unavailable):
        await anext(recorder.record(SALT))


async def test_few_record_at_a_time() -> None:
    recorder = Recorder(lambda: 1.0)
    several = [await begun(recorder) for _ in range(RECORDINGS_MAX)]
    with pytest.raises(ResourceExhausted, match="are being recorded"):
        await anext(recorder.record(SALT))
    await several.pop().aclose()
    several.append(await begun(recorder))
    for each in several:
        await each.aclose()
