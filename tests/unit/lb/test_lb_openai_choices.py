from __future__ import annotations

import json
from pathlib import Path

import pytest

from pinyon.core.logprobs import TokenLogprob
from pinyon.core.request import SamplingParams, Usage
from pinyon.messages.logprobs import SentLogprobs
from pinyon.model import load_card
from pinyon.openai.choices import Choice, CompletionChoices
from pinyon.openai.parse import Call
from pinyon.openai.token_texts import TokenTexts
from tests.sent_logprobs import logprobs_to_proto

FOLDER = Path(__file__).parents[2] / "data" / "golden_text"


@pytest.mark.parametrize("name", ["llama-bytes-bos", "qwen3-bytes", "llama-pieces-bos"])
@pytest.mark.parametrize("marked", [False, True], ids=["plain", "marked"])
def test_offsets_point_into_an_echoed_prompt(name: str, marked: bool) -> None:
    """Each token with a text stands where its offset says, also behind markers of special tokens."""
    card = load_card(str(FOLDER / name))
    texts = TokenTexts(card.tokenizer)
    special = list(card.tokenizer.special_tokens)[-1]
    text = f"a jay{special * marked} caches{special * 2 * marked} seeds"
    tokens = card.tokenizer.encode(text).tolist()
    call = Call("m", text, "prompt")
    call.echo, call.sampling = True, SamplingParams(logprobs=0, prompt_logprobs=True)
    told_before = SentLogprobs(logprobs_to_proto([TokenLogprob(-1.0) for _ in tokens[1:]]))
    choice = Choice(0, tokens, text, prompt_logprobs=told_before, reason="length")
    answer = json.loads(CompletionChoices("r", 0, call, card.tokenizer, texts).whole([choice], Usage(1, 0, 0), None))
    (told,) = answer["choices"]
    assert told["text"] == text
    offsets = told["logprobs"]["text_offset"]
    assert offsets == sorted(offsets)
    seen = 0
    for token, offset in zip(told["logprobs"]["tokens"], offsets, strict=True):
        if token in text:
            assert text[offset:].startswith(token) or text[offset:].startswith(token.lstrip()), (token, offset)
            seen += 1
    assert seen > 5
    assert told["logprobs"]["tokens"][1:].count(special) == 3 * marked
