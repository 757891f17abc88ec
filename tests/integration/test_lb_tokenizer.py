"""A checkpoint's prompts from HTTP and gRPC to the worker's tokens; another process gives long ones the same tokens."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shutil
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest

from pinyon.api.lb.v1 import lb_pb2, lb_pb2_grpc
from pinyon.core.errors import InvalidArgument, Unavailable
from pinyon.frontdoor.instances import tokenizer_process
from pinyon.frontdoor.instances.tokenizer_process import TokenizerProcess, tokenize
from pinyon.model import load_card
from pinyon.openai.parse import PLAIN, Rendering
from tests.integration.lb_harness import MODEL, WAIT_S, Bench, running_lb

TEXT_GOLDEN = Path(__file__).parents[1] / "data" / "golden_text"
FOLDER = Path(__file__).parents[1] / "data" / "golden" / "qwen3-f32"
TEXT = "pinyon jays cache seeds <|im_end|> and \N{PINE DECORATION} " * 2000
PROMPTS = [TEXT, [{"role": "user", "content": TEXT}], "short"]


@pytest.fixture
async def process() -> AsyncIterator[TokenizerProcess]:
    process = TokenizerProcess(FOLDER)
    yield process
    await process.close()


def children() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # a process of another test has ended meanwhile
            found += [child] if "tokenizer_process" in " ".join(child.cmdline()) else []
    return found


async def test_the_tokens_are_the_same(process):
    card = load_card(str(FOLDER))
    found = await asyncio.gather(*(process.tokenize("", prompt) for prompt in PROMPTS))
    assert found == [tokenize(card, prompt) for prompt in PROMPTS]
    assert len(children()) == 1
    with pytest.raises(InvalidArgument):
        await process.tokenize("", [{"role": "nobody"}])
    assert await process.tokenize("", "short") == found[2]
    left_open = Rendering(add_generation_prompt=False, continue_final_message=True)
    messages = [{"role": "user", "content": "short"}]
    assert await process.tokenize("", messages, left_open) == tokenize(card, messages, left_open)
    assert tokenize(card, messages, left_open) != tokenize(card, messages)
    await process.close()
    assert not children()


async def test_what_else_a_prompt_depends_on_gets_there():
    folder = TEXT_GOLDEN / "qwen3-bytes"
    process, card = TokenizerProcess(folder), load_card(str(folder))
    messages, thinking = [{"role": "user", "content": "hi"}], {"enable_thinking": False}
    try:
        for how in (PLAIN, Rendering(variables=thinking), Rendering(True), Rendering(False, variables={})):
            assert await process.tokenize("", messages, how) == tokenize(card, messages, how)
        assert tokenize(card, messages) != tokenize(card, messages, Rendering(variables=thinking))
        with pytest.raises(InvalidArgument) as caught:
            await process.tokenize("", messages, Rendering(variables={"enable_thought": False}))
        assert caught.value.field == "chat_template_kwargs"
    finally:
        await process.close()


def sent_prompts(bench: Bench) -> list[list[int]]:
    return [np.frombuffer(s.prompt_tokens_le32, "<u4").tolist() for w in bench.workers for s in w.submissions]


@pytest.mark.parametrize("variant", ["llama-pieces-bos", "qwen3-bytes"])
async def test_prompts_by_http_are_those_of_transformers(variant):
    values = json.loads((TEXT_GOLDEN / variant / "golden.json").read_text())
    async with running_lb(1, model=str(TEXT_GOLDEN / variant), served_model_name=MODEL) as bench:
        for case in values["texts"]:
            if case["text"]:
                assert (await bench.complete(case["text"], max_tokens=1)).status == 200
        for case in values["chats"]:
            if not case["variables"]:
                body = {"model": MODEL, "messages": case["messages"], "max_tokens": 1}
                assert (await bench.post("/v1/chat/completions", body)).status == 200
        expected = [case["tokens"] for case in values["texts"] if case["text"]]
        expected += [case["tokens"] for case in values["chats"] if not case["variables"]]
        assert sent_prompts(bench) == expected


async def test_prompts_by_grpc():
    """The worker gets the same tokens, with or without special tokens around them as the request says."""
    folder = TEXT_GOLDEN / "llama-bytes-bos"
    card = load_card(str(folder))
    case = json.loads((folder / "golden.json").read_text())["texts"][0]
    chat = lb_pb2.Conversation(messages=[lb_pb2.ChatMessage(role="user", content="hi")])
    own = np.frombuffer(tokenize(card, [{"role": "user", "content": "hi"}]), "<u4").tolist()
    request = lb_pb2.GenerateRequest
    cases = [
        (request(prompt=case["text"]), case["tokens"]),
        (request(prompt=case["text"], add_special_tokens=True), case["tokens"]),
        (request(prompt=case["text"], add_special_tokens=False), case["bare"]),
        (request(prompt="", add_special_tokens=True), case["tokens"][:1]),
        (request(conversation=chat), own),
        (request(conversation=chat, add_special_tokens=True), [*case["tokens"][:1], *own]),
    ]
    async with (
        running_lb(1, model=str(folder), served_model_name=MODEL) as bench,
        grpc.aio.insecure_channel(bench.endpoints["grpc"]) as channel,
    ):
        stub = lb_pb2_grpc.LbServiceStub(channel)
        for message, _ in cases:
            message.sampling.max_tokens = 1
            async for _reply in stub.Generate(message):
                pass
        assert sent_prompts(bench) == [tokens for _, tokens in cases]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(request(prompt_tokens_le32=b"\0" * 4, add_special_tokens=True)).read()
        assert caught.value.details().split(": ")[0] == "add_special_tokens"


async def test_special_tokens_come_back_as_their_markers():
    text = "a<|end|> b"
    async with running_lb(1, model=str(TEXT_GOLDEN / "llama-bytes-bos"), served_model_name=MODEL) as bench:
        for times in (1, 600):  # 600 times is long enough to run outside the event loop
            tokens = (await bench.post("/tokenize", {"prompt": text * times})).json["tokens"]
            assert (await bench.post("/detokenize", {"tokens": tokens})).json == {"prompt": "<|bos|>" + text * times}
        tokens = (await bench.post("/tokenize", {"prompt": "ab"})).json["tokens"]
        reply = await bench.complete(tokens, max_tokens=1, echo=True)
        assert reply.json["choices"][0]["text"].startswith("ab"), "in an echo, as in an answer, they have no text"


@pytest.mark.parametrize("has_one", [True, False])
async def test_a_checkpoint_without_a_chat_template_is_told_of(tmp_path, caplog, has_one):
    folder = shutil.copytree(FOLDER, tmp_path / "model")
    if not has_one:
        (folder / "tokenizer_config.json").write_text("{}")
    with caplog.at_level(logging.WARNING):
        async with running_lb(1, model=str(folder), served_model_name=MODEL):
            pass
    told = [record.getMessage() for record in caplog.records if "chat template" in record.getMessage()]
    assert len(told) == (0 if has_one else 1)


async def test_who_leaves_does_not_mix_up_the_answers(process):
    card = load_card(str(FOLDER))
    first = asyncio.ensure_future(process.tokenize("", TEXT))
    second = asyncio.ensure_future(process.tokenize("", "other"))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == tokenize(card, "other")


async def test_a_process_that_dies_is_started_again(process):
    card = load_card(str(FOLDER))
    await process.tokenize("", "short")
    (child,) = children()
    child.suspend()
    waiting = asyncio.ensure_future(process.tokenize("", TEXT))
    await asyncio.sleep(0)
    child.kill()
    with pytest.raises(Unavailable) as caught:
        await waiting
    assert caught.value.retry_after_s
    assert await process.tokenize("", "short") == tokenize(card, "short")


async def test_closing_waits_for_a_process_that_is_just_ended(monkeypatch):
    """The killed process's exit status would otherwise be lost, and requests to it would get no answer."""
    process = TokenizerProcess(FOLDER)
    await process.tokenize("", "short")
    ending, ended, wait = threading.Event(), threading.Event(), process._process.wait

    def late() -> int:
        ending.set()
        ended.wait(WAIT_S)
        return wait()

    monkeypatch.setattr(process._process, "wait", late)
    (child,) = children()
    child.suspend()
    waiting = asyncio.ensure_future(process.tokenize("", "short"))
    child.kill()
    assert await asyncio.to_thread(ending.wait, WAIT_S)
    closing = asyncio.ensure_future(process.close())
    await asyncio.sleep(0.05)
    assert not closing.done()
    ended.set()
    await closing
    with pytest.raises(Unavailable):
        await asyncio.wait_for(waiting, WAIT_S)


async def test_what_waits_is_bounded(monkeypatch):
    monkeypatch.setattr(tokenizer_process, "WAITING_MAX", 1)
    process = TokenizerProcess(FOLDER)
    try:
        waiting = [asyncio.ensure_future(process.tokenize("", TEXT)) for _ in range(3)]
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_EXCEPTION)
        assert isinstance(done.pop().exception(), Unavailable)
    finally:
        await process.close()
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_one_tenant_leaves_places_to_others(monkeypatch):
    monkeypatch.setattr(tokenizer_process, "WAITING_MAX", 4)
    process = TokenizerProcess(FOLDER)
    try:
        for name, refused in (("anna", 2), ("bert", 3)):
            waiting = [asyncio.ensure_future(process.tokenize(name, "short")) for _ in range(4)]
            await asyncio.sleep(0)  # the process has to be started first
            assert sum(each.done() and isinstance(each.exception(), Unavailable) for each in waiting) == refused
    finally:
        await process.close()
