"""Log-probabilities as a worker sends them, for tests that play a worker."""

from __future__ import annotations

from collections.abc import Sequence

from pinyon.api.common.v1 import common_pb2
from pinyon.core.logprobs import TokenLogprob


def logprobs_to_proto(logprobs: Sequence[TokenLogprob]) -> common_pb2.Logprobs:
    pairs = [pair for one in logprobs for pair in one.top]
    return common_pb2.Logprobs(
        logprobs=[one.logprob for one in logprobs],
        top_count=len(logprobs[0].top) if logprobs else 0,
        top_tokens=[token for token, _ in pairs],
        top_logprobs=[logprob for _, logprob in pairs],
    )
