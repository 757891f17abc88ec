"""The sampler against transformers' logits processors (tools/make_golden_sampling.py)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pinyon.batching import TokenCounts
from pinyon.core.request import SamplingParams
from services.worker.engines.sampling import Sampler, token_logprob
from services.worker.engines.uniform import uniform

GOLDEN = np.load(Path(__file__).parents[2] / "data" / "sampling.npz")
LOGITS, TOKENS, GENERATED = GOLDEN["logits"], GOLDEN["tokens"], int(GOLDEN["generated"])
CASES = sorted(name.removeprefix("case_") for name in GOLDEN.files if name.startswith("case_"))
SAMPLER = Sampler(LOGITS.shape[1], (), tuple(GOLDEN["eos"].tolist()))
DRAWS = 60


@pytest.mark.parametrize("number", CASES)
def test_draws_follow_the_scores_of_transformers(number: str) -> None:
    case = json.loads(str(GOLDEN[f"case_{number}"]))
    case["logit_bias"] = tuple((token, bias) for token, bias in case.get("logit_bias", ()))
    params = SamplingParams(**{"max_tokens": 99, "temperature": 1.0, **case})
    counts = TokenCounts.needed(params, TOKENS, GENERATED)
    drawn = 0
    for row, scores in zip(LOGITS, GOLDEN[f"scores_{number}"], strict=True):
        greedy = replace(params, temperature=0.0)
        assert SAMPLER.sample(row, greedy, GENERATED, counts) == int(np.argmax(scores))
        order = np.argsort(-scores, kind="stable")
        weights = np.exp(scores[order] - scores.max())
        edges = np.cumsum(weights) / weights.sum()
        for seed in range(DRAWS):
            u = uniform(seed, GENERATED)
            if np.abs(edges - u).min() < 1e-9:
                continue  # either result is right
            drawn += 1
            expected = int(order[np.searchsorted(edges, u, side="right")])
            assert SAMPLER.sample(row, replace(params, seed=seed), GENERATED, counts) == expected
    assert drawn > 0.9 * DRAWS * len(LOGITS)


def test_log_probabilities_are_those_of_torch() -> None:
    for row, expected in zip(LOGITS, GOLDEN["log_softmax"], strict=True):
        for token in range(0, len(row), 7):
            told = token_logprob(row, token, 5)
            assert told.logprob == pytest.approx(expected[token], abs=1e-12)
            best = np.argsort(-expected, kind="stable")[:5]
            assert [one for one, _ in told.top] == best.tolist()
            assert [value for _, value in told.top] == pytest.approx(expected[best].tolist(), abs=1e-12)
