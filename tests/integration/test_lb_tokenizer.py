"""Long prompts of a tokenizer that keeps the GIL: tokenized by another process, to the same tokens."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

from pinyon.core.errors import InvalidArgument, Unavailable
from pinyon.model import load_card
from services.lb import tokenizer_process
from services.lb.openai_parse import Rendering
from services.lb.tokenizer_process import TokenizerProcess, tokenize

FOLDER = Path(__file__).parents[1] / "data" / "golden" / "qwen3-f32"
TEXT = "pinyon jays cache seeds <|im_end|> and \N{PINE DECORATION} " * 2000
PROMPTS = [TEXT, [{"role": "user", "content": TEXT}], "short"]


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "tokenizer_process" in " ".join(child.cmdline())]


async def test_the_tokens_are_the_same():
    process, card = TokenizerProcess(FOLDER), load_card(str(FOLDER))
    try:
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
    finally:
        await process.close()
    assert not children()


async def test_who_leaves_does_not_mix_up_the_answers():
    process, card = TokenizerProcess(FOLDER), load_card(str(FOLDER))
    try:
        first = asyncio.ensure_future(process.tokenize("", TEXT))
        second = asyncio.ensure_future(process.tokenize("", "other"))
        await asyncio.sleep(0)
        first.cancel()
        assert await second == tokenize(card, "other")
    finally:
        await process.close()


async def test_a_process_that_dies_is_started_again():
    process, card = TokenizerProcess(FOLDER), load_card(str(FOLDER))
    try:
        await process.tokenize("", "short")
        children()[0].suspend()
        waiting = asyncio.ensure_future(process.tokenize("", TEXT))
        await asyncio.sleep(0)
        children()[0].kill()
        with pytest.raises(Unavailable) as caught:
            await waiting
        assert caught.value.retry_after_s
        assert await process.tokenize("", "short") == tokenize(card, "short")
    finally:
        await process.close()


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
            await asyncio.sleep(0)  # nothing was begun yet: the process has to be started
            assert sum(each.done() and isinstance(each.exception(), Unavailable) for each in waiting) == refused
    finally:
        await process.close()
