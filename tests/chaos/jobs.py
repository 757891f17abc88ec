"""Requests of clients, each with its own prompt behind a shared beginning, and their expected answers."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pinyon.core.request import SamplingParams
from pinyon.model import ModelCard, load_card
from services.worker.engines.uniform import uniform
from tests.cluster.reference import Ask, Reference, random_sampling, text_tokens

MODEL = "pinyon-tiny"
SIZES = {"2 KB": 2_000, "200 KB": 200_000}
"""Bytes of a body: a text of 2,000 tokens, or a list of 40,000 token ids."""
TEXT_BYTES_MAX = 30_000
"""Larger prompts are lists of token ids, five bytes each: as text they would not fit into the model's context."""
ID_BYTES = 5
SHARED = 4
NAME_TOKENS = 8
"""The seed as eight letters, which no other prompt has behind the shared beginning."""
POOL_TOKENS = 200_000


@dataclass(frozen=True)
class Job:
    """One request's body, and the text of its answer."""

    body: bytes
    text: str


class Jobs(Protocol):
    def make(self, random_: random.Random, size: str, stream: bool) -> Job: ...


def body_of(prompt: Sequence[int], fields: dict[str, object], pad_to: int = 0) -> bytes:
    """Returns a body with the prompt as a list of token ids, padded with spaces to ``pad_to`` bytes."""
    body = json.dumps({"model": MODEL, **fields})[:-1] + ', "prompt": ' + json.dumps(list(prompt)) + "}"
    return body.encode().ljust(pad_to)


class PacedJobs:
    """Jobs for the paced engine, whose tokens follow from seed and place alone. A quarter of each prompt is shared."""

    def __init__(self, random_: random.Random, max_tokens: int = 48) -> None:
        self._max_tokens = max_tokens
        # The same letters as three-digit ids and as text: a slice of either is a prompt.
        letters = random_.choices(range(100, 123), k=POOL_TOKENS)
        self._text = bytes(letters)
        self._ids = b"".join(b"%d, " % letter for letter in letters)

    def make(self, random_: random.Random, size: str, stream: bool) -> Job:
        return self.sized(random_, SIZES[size], stream)

    def sized(self, random_: random.Random, size_bytes: int, stream: bool, max_tokens: int = 0) -> Job:
        """Returns a job whose prompt takes ``size_bytes`` in its body."""
        max_tokens = max_tokens or self._max_tokens
        seed = random_.randrange(2**32)
        as_text = size_bytes <= TEXT_BYTES_MAX
        tokens = size_bytes // (1 if as_text else ID_BYTES)
        shared = tokens // 4
        rest = tokens - shared - NAME_TOKENS
        begin, own = random_.randrange(SHARED) * shared, random_.randrange(POOL_TOKENS - tokens)
        name = bytes(100 + (seed >> 4 * place & 15) for place in range(NAME_TOKENS))
        if as_text:
            text = self._text
            prompt = b'"' + text[begin : begin + shared] + name + text[own : own + rest] + b'"'
        else:
            ids = self._ids
            first = ids[ID_BYTES * begin : ID_BYTES * (begin + shared)]
            named = b"".join(b"%d, " % letter for letter in name)
            prompt = b"[" + first + named + ids[ID_BYTES * own : ID_BYTES * (own + rest) - 2] + b"]"
        fields = {"model": MODEL, "max_tokens": max_tokens, "seed": seed, "stream": stream}
        body = json.dumps(fields).encode()[:-1] + b', "prompt": ' + prompt + b"}"
        return Job(body, paced_text(seed, tokens, max_tokens))


def paced_text(seed: int, prompt_tokens: int, max_tokens: int) -> str:
    """Returns what the paced engine generates (services/worker/engines/paced.py)."""
    places = ((index << 32) + prompt_tokens - 1 + index for index in range(max_tokens))
    return "".join(chr(97 + int(26 * uniform(seed, place))) for place in places)


class ExactJobs:
    """Jobs for the real engine: prompts that share beginnings, with answers computed by an engine without a cache.

    Bodies of the larger size are padded: prompts of that many tokens would take the engine minutes. ``card`` describes
    the model that serves, by default the built-in one."""

    def __init__(
        self, random_: random.Random, count: int = 16, prompt_tokens: int = 1_200, card: ModelCard | None = None
    ) -> None:
        documents = [text_tokens(random_, prompt_tokens * 3 // 4) for _ in range(SHARED)]
        self.asks = [
            Ask(
                tuple(random_.choice(documents) + text_tokens(random_, prompt_tokens // 4)),
                random_sampling(random_, random_.randrange(8, 25)),
            )
            for _ in range(count)
        ]
        card = card or load_card(None)
        self._texts = [card.tokenizer.decode(tokens) for tokens in Reference(card).all_tokens(self.asks)]

    def make(self, random_: random.Random, size: str, stream: bool) -> Job:
        number = random_.randrange(len(self.asks))
        ask = self.asks[number]
        fields = {**_fields(ask.sampling), "stream": stream}
        return Job(body_of(ask.prompt, fields, pad_to=SIZES[size]), self._texts[number])


SAMPLED = (
    *("max_tokens", "temperature", "top_k", "top_p", "seed", "ignore_eos"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty"),
)


def _fields(sampling: SamplingParams) -> dict[str, object]:
    return {name: getattr(sampling, name) for name in SAMPLED}
