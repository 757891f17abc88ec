"""The expected tokens, from one engine in this process that reuses no KV, and requests to compare with it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pinyon.api.lb.v1 import lb_pb2, lb_pb2_grpc
from pinyon.batching import DecodeSlot, PrefillChunk, TokenCounts
from pinyon.core.request import SamplingParams
from pinyon.messages.sampling import sampling_to_proto
from pinyon.model import ModelCard, load_card
from services.worker.engines import create_engine

BLOCK_TOKENS = 32
ABREAST = 8
"""The number of answers that the reference decodes in one step."""
ASK_BLOCKS = 64
"""The number of blocks of the longest prompt with its answer."""
KEPT = 24
"""The number of prompts whose KV the reference keeps; at least :data:`ABREAST`."""


@dataclass(frozen=True)
class Ask:
    """One request: prompt tokens and sampling parameters."""

    prompt: tuple[int, ...]
    sampling: SamplingParams


def text_tokens(random_: random.Random, count: int) -> list[int]:
    """Returns tokens of printable ASCII."""
    return [random_.randrange(32, 127) for _ in range(count)]


def random_sampling(random_: random.Random, max_tokens: int) -> SamplingParams:
    """Returns seeded sampling for exactly ``max_tokens`` tokens, greedy or not, penalised or not."""
    greedy, penalised = random_.random() < 0.5, random_.random() < 0.5
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=0.0 if greedy else 0.9,
        top_k=0 if greedy else random_.choice([0, 40]),
        top_p=1.0 if greedy else random_.choice([1.0, 0.9]),
        seed=random_.randrange(2**32),
        ignore_eos=True,
        repetition_penalty=1.2 if penalised else 1.0,
        frequency_penalty=0.5 if penalised else 0.0,
        presence_penalty=-0.25 if penalised else 0.0,
    )


class Reference:
    """One engine without a block cache: whole prompts, each in a step of its own, then token by token.

    Answers are decoded abreast, which costs a third. For a repeated prompt only the last token is computed again.
    Neither changes a token (tests/property/test_engine_invariance.py)."""

    def __init__(self, card: ModelCard | None = None) -> None:
        """Makes the engine of the built-in model, or of another."""
        self._engine = create_engine("numpy", card or load_card(None), KEPT * ASK_BLOCKS, BLOCK_TOKENS)
        self._known: dict[Ask, list[int]] = {}
        self._tables: dict[tuple[int, ...], range] = {}
        """The block table of each prompt, the most recently used last."""

    def tokens(self, ask: Ask) -> list[int]:
        return self.all_tokens([ask])[0]

    def all_tokens(self, asks: Sequence[Ask]) -> list[list[int]]:
        """Returns the tokens of each answer, in the order of ``asks``."""
        fresh = list(dict.fromkeys(ask for ask in asks if ask not in self._known))
        fresh.sort(key=lambda ask: ask.sampling.max_tokens)  # answers of similar length are decoded together
        while fresh:
            # Answers to the same prompt would share blocks, so they are decoded one after the other.
            abreast: dict[tuple[int, ...], Ask] = {}
            for ask in fresh:
                abreast.setdefault(ask.prompt, ask)
            self._compute(list(abreast.values())[:ABREAST])
            fresh = [ask for ask in fresh if ask not in self._known]
        return [self._known[ask] for ask in asks]

    def _place(self, prompt: tuple[int, ...]) -> tuple[range, int]:
        """Returns the prompt's blocks, and how many of its tokens are computed already."""
        table = self._tables.pop(prompt, None)
        there = 0 if table is None else len(prompt) - 1
        if table is None and len(self._tables) < KEPT:
            table = range(len(self._tables) * ASK_BLOCKS, (len(self._tables) + 1) * ASK_BLOCKS)
        elif table is None:
            table = self._tables.pop(next(iter(self._tables)))
        self._tables[prompt] = table
        return table, there

    def _compute(self, asks: Sequence[Ask]) -> None:
        tables: list[range] = []
        outputs: list[list[int]] = []
        for ask in asks:
            table, there = self._place(ask.prompt)
            tables.append(table)
            prompt = np.array(ask.prompt, dtype=np.uint32)
            counts = TokenCounts.needed(ask.sampling, prompt, 0)
            chunk = PrefillChunk(prompt[there:], start=there, block_table=table, sampling=ask.sampling, counts=counts)
            token = self._engine.step([chunk], []).prefill_tokens[0]
            assert token is not None
            outputs.append([token])
        while going := [one for one, ask in enumerate(asks) if len(outputs[one]) < ask.sampling.max_tokens]:
            slots = [
                DecodeSlot(
                    outputs[one][-1],
                    len(asks[one].prompt) + len(outputs[one]) - 1,
                    tables[one],
                    asks[one].sampling,
                    len(outputs[one]),
                    _counts(asks[one], outputs[one]),
                )
                for one in going
            ]
            for one, token in zip(going, self._engine.step([], slots).decode_tokens, strict=True):
                outputs[one].append(token)
        self._known.update(zip(asks, outputs, strict=True))


def _counts(ask: Ask, output: Sequence[int]) -> TokenCounts | None:
    return TokenCounts.needed(ask.sampling, np.array([*ask.prompt, *output], np.uint32), len(output))


@dataclass
class Answer:
    """The answer so far; :func:`send` fills it."""

    tokens: list[int] = field(default_factory=list)
    cached: int = 0


async def send(stub: lb_pb2_grpc.LbServiceStub, ask: Ask, answer: Answer | None = None) -> Answer:
    """Returns the whole answer over gRPC; ``answer``, if given, grows as tokens arrive."""
    answer = answer or Answer()
    request = lb_pb2.GenerateRequest(
        prompt_tokens_le32=np.array(ask.prompt, dtype="<u4").tobytes(), sampling=sampling_to_proto(ask.sampling)
    )
    async for reply in stub.Generate(request, timeout=120):
        answer.tokens += reply.tokens
        if reply.HasField("usage"):
            answer.cached = reply.usage.cached_tokens
            assert reply.usage.completion_tokens == len(answer.tokens)
    return answer
