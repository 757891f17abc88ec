"""A script that makes ``tests/data/sampling.npz``: what ``transformers``' logits processors make of random logits.

It is run once, by hand, in an environment of its own (the project does not depend on these)::

    pip install torch transformers
    python tools/make_golden_sampling.py tests/data

``logits`` is ``(rows, vocab)``, ``tokens`` are those of a request so far, of which the last ``generated`` ones were
generated. For every row and case ``i``, ``case_i`` has the parameters as JSON, and ``scores_i`` the scores after the
processors, in the order in which this project applies them. Tokens that may not be sampled have -inf.
``log_softmax`` is that of the plain logits, in float64."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

ROWS, VOCAB, PROMPT, GENERATED = 6, 120, 20, 9
EOS = [5, 11]

CASES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.7, "temperature": 0.8},
    {"min_p": 0.1},
    {"min_p": 0.02, "temperature": 1.7},
    {"min_p": 0.05, "top_k": 7, "top_p": 0.8},
    {"min_tokens": 10},
    {"min_tokens": 9},
    {"logit_bias": [[3, 6.0], [40, -100.0], [77, 2.5]]},
    {
        "logit_bias": [[5, 9.0], [8, 3.0]],
        "min_tokens": 12,
        "repetition_penalty": 1.9,
        "temperature": 1.3,
        "min_p": 0.03,
        "top_k": 30,
        "top_p": 0.95,
    },
]


def processors(case: dict[str, Any]) -> LogitsProcessorList:
    made = LogitsProcessorList()
    if "logit_bias" in case:
        made.append(SequenceBiasLogitsProcessor({(token,): bias for token, bias in case["logit_bias"]}))
    if "min_tokens" in case:
        made.append(MinNewTokensLengthLogitsProcessor(PROMPT, case["min_tokens"], EOS))
    if "repetition_penalty" in case:
        made.append(RepetitionPenaltyLogitsProcessor(case["repetition_penalty"]))
    if "temperature" in case:
        made.append(TemperatureLogitsWarper(case["temperature"]))
    if "min_p" in case:
        made.append(MinPLogitsWarper(case["min_p"]))
    if "top_k" in case:
        made.append(TopKLogitsWarper(case["top_k"]))
    if "top_p" in case:
        made.append(TopPLogitsWarper(case["top_p"]))
    return made


def main() -> None:
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 3, (ROWS, VOCAB)).astype("<f4")
    tokens = rng.integers(0, VOCAB, PROMPT + GENERATED).astype("<u4")
    arrays: dict[str, Any] = {"logits": logits, "tokens": tokens, "generated": np.array(GENERATED), "eos": EOS}
    wide = torch.from_numpy(logits).double()
    arrays["log_softmax"] = torch.log_softmax(wide, -1).numpy()
    ids = torch.from_numpy(tokens.astype(np.int64)).repeat(ROWS, 1)
    for number, case in enumerate(CASES):
        arrays[f"case_{number}"] = json.dumps(case)
        arrays[f"scores_{number}"] = processors(case)(ids, wide.clone()).numpy()
    np.savez_compressed(Path(sys.argv[1]) / "sampling.npz", **arrays)


if __name__ == "__main__":
    main()
