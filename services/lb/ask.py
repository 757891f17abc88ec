"""What a client wants, checked, in tokens."""

from __future__ import annotations

from typing import NamedTuple

from pinyon.core.request import RequestClass, SamplingParams

__all__ = ["Ask"]

_UTF8_MAX = 4
_STOP_TOKEN_BYTES, _BIAS_BYTES = 5, 13
FIXED_BYTES = 1216
"""Numbers, the kind, the fingerprint, tags and lengths of a submission, and what a retry and a trace add to its id and
traceparent."""


class Ask(NamedTuple):
    """``block_keys`` are packed and may be empty (layout unknown)."""

    request_id: str
    model: str
    request_class: RequestClass
    tokens_le32: bytes
    block_keys: bytes
    sampling: SamplingParams
    no_reuse: bool = False
    ttft_slo_ms: int = 0
    traceparent: str = ""

    @property
    def prompt_tokens(self) -> int:
        return len(self.tokens_le32) // 4

    @property
    def size_bytes(self) -> int:
        """What it takes in a message at most; the placement, and tokens that were generated already, come to it."""
        ask = self.request_class
        texts = [self.request_id, self.model, self.traceparent, ask.session, ask.user, ask.tenant, ask.cache_salt]
        texts += ask.geographies
        texts += self.sampling.stop
        tokens = len(self.tokens_le32) + len(self.block_keys)
        tokens += _STOP_TOKEN_BYTES * len(self.sampling.stop_token_ids) + _BIAS_BYTES * len(self.sampling.logit_bias)
        return tokens + _UTF8_MAX * len("".join(texts)) + 4 * len(texts) + FIXED_BYTES
