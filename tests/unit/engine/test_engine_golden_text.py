"""Text in, text out, against ``transformers``, with the values of ``tools/make_golden_text.py``.

The path is the load balancer's tokens, the worker's engine and the text of its answer."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pinyon.batching import DecodeSlot, PrefillChunk, TokenCounts
from pinyon.core.request import SamplingParams
from pinyon.frontdoor.instances.tokenizer_process import tokenize
from pinyon.model.card import ModelCard, load_card
from pinyon.model.detokenizer import IncrementalDetokenizer
from pinyon.model.tokenizer import HfTokenizer
from pinyon.openai.parse import Rendering
from services.worker.engines.numpy_llama import NumpyLlamaEngine
from services.worker.engines.weights import load_weights
from tests.unit.engine.prompt_logits import prompt_logits

GOLDEN = Path(__file__).parents[2] / "data" / "golden_text"
VARIANTS = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
BLOCK_TOKENS = 8
BLOCKS = 64


@cache
def card_of(variant: str) -> ModelCard:
    return load_card(str(GOLDEN / variant))


@cache
def golden(variant: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((GOLDEN / variant / "golden.json").read_text())
    return values


@cache
def engine_of(variant: str) -> NumpyLlamaEngine:
    card = card_of(variant)
    return NumpyLlamaEngine(card.config, load_weights(card), BLOCKS, BLOCK_TOKENS)


def tokens_of(packed: bytes) -> list[int]:
    return np.frombuffer(packed, "<u4").tolist()


def greedy(engine: NumpyLlamaEngine, prompt: list[int], count: int, **changes: float) -> list[int]:
    sampling, table = SamplingParams(max_tokens=count, **changes), range(BLOCKS)
    tokens = np.array(prompt, "<u4")
    counts = TokenCounts.needed(sampling, tokens, 0)
    out = engine.step([PrefillChunk(tokens, 0, table, sampling, counts=counts)], []).prefill_tokens
    while len(out) < count:
        if counts is not None:
            counts.add(out[-1])
        slot = DecodeSlot(out[-1], len(prompt) + len(out) - 1, table, sampling, len(out), counts)
        out += engine.step([], [slot]).decode_tokens
    return out


def answer(card: ModelCard, tokens: list[int]) -> str:
    detokenizer = IncrementalDetokenizer(card.tokenizer)
    return "".join(detokenizer.push([token]) for token in tokens) + detokenizer.flush()


def test_there_is_one_of_each() -> None:
    kinds = {name.removesuffix("-bos") for name in VARIANTS}
    assert kinds == {f"{model}-{form}" for model in ("llama", "qwen2", "qwen3") for form in ("bytes", "pieces")}
    assert all(len(golden(name)["texts"]) == len(golden(name)["chats"]) == 10 for name in VARIANTS)


@pytest.mark.parametrize("variant", VARIANTS)
def test_completions(variant: str) -> None:
    card, engine = card_of(variant), engine_of(variant)
    for case in golden(variant)["texts"]:
        assert tokens_of(tokenize(card, case["text"])) == case["tokens"], case["text"]
        assert tokens_of(tokenize(card, case["text"], Rendering(False))) == case["bare"], case["text"]
        out = greedy(engine, case["tokens"], len(case["greedy"]))
        assert out == case["greedy"], case["text"]
        assert answer(card, out) == case["decoded"]
        assert (case["tokens"] != case["bare"]) == variant.endswith("bos")


@pytest.mark.parametrize("variant", VARIANTS)
def test_chats(variant: str) -> None:
    card, engine = card_of(variant), engine_of(variant)
    for case in golden(variant)["chats"]:
        assert card.chat_template.render(case["messages"], case["variables"]) == case["rendered"]
        tokens = tokens_of(tokenize(card, case["messages"], Rendering(variables=case["variables"])))
        assert tokens == case["tokens"], case["messages"]
        out = greedy(engine, tokens, len(case["greedy"]))
        assert out == case["greedy"], case["messages"]
        assert answer(card, out) == case["decoded"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_repetition_penalty(variant: str) -> None:
    engine = engine_of(variant)
    plain = {tuple(case["tokens"]): case["greedy"] for case in golden(variant)["texts"]}
    for case in golden(variant)["penalised"]:
        tokens, expected = case["tokens"], case["greedy"]
        assert greedy(engine, tokens, len(expected), repetition_penalty=case["repetition_penalty"]) == expected
        assert expected != plain[tuple(tokens)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_log_probabilities_of_prompts(variant: str) -> None:
    for case in golden(variant)["scored"]:
        tokens = np.array(case["tokens"], "<u4")
        logits = prompt_logits(engine_of(variant), PrefillChunk(tokens, 0, range(BLOCKS))).astype(np.float64)
        rows = logits[:-1] - np.log(np.exp(logits[:-1]).sum(axis=1, keepdims=True))
        found = rows[np.arange(len(tokens) - 1), tokens[1:]]
        np.testing.assert_allclose(found, case["logprobs"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_special_tokens_around_a_conversation(variant: str) -> None:
    """A conversation is encoded as it is, or piece by piece where a message holds a marker."""
    card = card_of(variant)
    assert isinstance(card.tokenizer, HfTokenizer)
    before, behind = map(tokens_of, card.tokenizer.around)
    assert len(before) == variant.endswith("bos")
    marker = next(iter(card.tokenizer.special_tokens))
    for text in ("plain", f"with a {marker} in it"):
        messages = [{"role": "user", "content": text}]
        own = tokens_of(tokenize(card, messages))
        assert tokens_of(tokenize(card, messages, Rendering(True))) == [*before, *own, *behind]
