"""The engine against the results of transformers on the same checkpoints (tools/make_golden.py)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pinyon.batching import DecodeSlot, PrefillChunk
from pinyon.core.request import SamplingParams
from pinyon.model.card import load_card
from services.worker.engines.numpy_llama import NumpyLlamaEngine
from services.worker.engines.weights import load_weights
from tests.unit.engine.prompt_logits import prompt_logits

GOLDEN = Path(__file__).parents[2] / "data" / "golden"
VARIANTS = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
BLOCK_TOKENS = 8
GREEDY = SamplingParams()


@pytest.fixture(params=VARIANTS)
def case(request: pytest.FixtureRequest) -> tuple[NumpyLlamaEngine, Any]:
    card = load_card(str(GOLDEN / request.param))
    # The reference took the plain argmax.
    config = replace(card.config, suppress_tokens=())
    engine = NumpyLlamaEngine(config, load_weights(card), 40, BLOCK_TOKENS)
    return engine, np.load(GOLDEN / request.param / "golden.npz")


def test_all_architectures_and_types_are_there() -> None:
    assert {name.split("-")[0] for name in VARIANTS} == {"llama", "qwen2", "qwen3"}
    assert {name.split("-")[1] for name in VARIANTS} == {"f32", "f16", "bf16"}


@pytest.mark.parametrize("prompt", [0, 1, 2])
def test_logits_agree_with_transformers(case: tuple[NumpyLlamaEngine, Any], prompt: int) -> None:
    engine, golden = case
    tokens = golden[f"prompt_{prompt}"]
    logits = prompt_logits(engine, PrefillChunk(tokens, 0, range(20)))
    expected = golden[f"logits_{prompt}"]
    assert np.abs(expected).max() > 1.0  # otherwise 1e-4 would prove little
    np.testing.assert_allclose(logits[golden[f"rows_{prompt}"]], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("prompt", [1, 2])
def test_log_probabilities_of_a_prompt_are_those_of_its_logits(case: tuple[NumpyLlamaEngine, Any], prompt: int) -> None:
    engine, golden = case
    tokens, rows = golden[f"prompt_{prompt}"], golden[f"rows_{prompt}"][:-1]  # the last token has no successor
    chunk = PrefillChunk(tokens, 0, range(20), next_tokens=tokens[1:], next_top=3)
    result = engine.step([chunk], [])
    assert result.prefill_tokens == [None]
    told = result.logprobs.prompts[0]
    logits = golden[f"logits_{prompt}"][:-1].astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    followers = tokens[1:][rows]
    np.testing.assert_allclose(
        told.logprobs[rows], np.take_along_axis(expected, followers[:, None].astype(np.int64), 1)[:, 0], atol=2e-4
    )
    best = -np.sort(-expected, axis=1)[:, :3]
    np.testing.assert_allclose(told.top_logprobs[rows], best, atol=2e-4)


@pytest.mark.parametrize("chunk", [7, 90])
@pytest.mark.parametrize("prompt", [0, 1, 2])
def test_greedy_tokens_equal_transformers(case: tuple[NumpyLlamaEngine, Any], prompt: int, chunk: int) -> None:
    engine, golden = case
    tokens, expected = golden[f"prompt_{prompt}"], golden[f"greedy_{prompt}"].tolist()
    assert len(expected) >= 24
    # The blocks are in no order at all.
    table = np.random.default_rng(prompt).permutation(40)[:20].tolist()
    first: list[int | None] = []
    for start in range(0, len(tokens), chunk):
        part = tokens[start : start + chunk]
        last = start + len(part) == len(tokens)
        first = engine.step([PrefillChunk(part, start, table, GREEDY if last else None)], []).prefill_tokens
    assert first[0] is not None
    out = [first[0]]
    while len(out) < len(expected):
        slot = DecodeSlot(out[-1], len(tokens) + len(out) - 1, table, GREEDY, len(out))
        out += engine.step([], [slot]).decode_tokens
    assert out == expected
