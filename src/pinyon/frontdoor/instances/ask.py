"""A client's request in tokens, checked."""

from __future__ import annotations

from typing import NamedTuple

from pinyon.core.request import RequestClass, SamplingParams

_UTF8_MAX = 4
FIXED_BYTES = 1216
"""The bytes that a submission takes for numbers, the kind, the fingerprint, tags and lengths, and for what a retry and
a trace add to its id and traceparent."""


class Wishes(NamedTuple):
    """A client's wishes for one request beside its body: compute the prompt anew, and the first token within so many ms
    (0: as soon as the conductor promises). Also the trace that the request belongs to."""

    no_reuse: bool = False
    ttft_slo_ms: int = 0
    traceparent: str = ""


NONE = Wishes()


class Ask:
    """A client's request, which nobody changes. ``block_keys`` are packed, and empty if the layout is unknown."""

    __slots__ = (
        "block_keys", "model", "request_class", "request_id", "sampling", "texts_bytes", "tokens_le32", "wishes",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str,
        model: str,
        request_class: RequestClass,
        tokens_le32: bytes,
        block_keys: bytes,
        sampling: SamplingParams,
        wishes: Wishes = NONE,
    ) -> None:
        self.request_id, self.model, self.request_class = request_id, model, request_class
        self.tokens_le32, self.block_keys, self.sampling = tokens_le32, block_keys, sampling
        self.wishes = wishes
        whose = request_class
        texts = [request_id, model, wishes.traceparent, whose.session, whose.user, whose.tenant, whose.cache_salt]
        texts += whose.geographies
        self.texts_bytes = _UTF8_MAX * len("".join(texts)) + 4 * len(texts)
        """The maximum size of the texts in a message."""

    @property
    def prompt_tokens(self) -> int:
        return len(self.tokens_le32) // 4

    @property
    def size_bytes(self) -> int:
        """The maximum size in a message, without the placement and tokens that were generated already."""
        prompt = len(self.tokens_le32) + len(self.block_keys)
        return prompt + self.texts_bytes + self.sampling.list_bytes + FIXED_BYTES
