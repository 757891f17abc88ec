"""What the tokens must be: one engine in this process that never reuses anything, and requests to compare with it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from pinyon.api.common.v1 import common_pb2
from pinyon.api.lb.v1 import lb_pb2, lb_pb2_grpc
from pinyon.core.request import SamplingParams
from pinyon.model import load_card
from services.worker.engines import DecodeSlot, PrefillChunk, create_engine

BLOCK_TOKENS = 32


@dataclass(frozen=True)
class Ask:
    """One request: prompt tokens and how to sample."""

    prompt: tuple[int, ...]
    sampling: SamplingParams


def text_tokens(random_: random.Random, count: int) -> list[int]:
    """Tokens of printable ASCII."""
    return [random_.randrange(32, 127) for _ in range(count)]


def random_sampling(random_: random.Random, max_tokens: int) -> SamplingParams:
    """Greedy or not, with a seed of its own; always exactly ``max_tokens`` tokens."""
    greedy = random_.random() < 0.5
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=0.0 if greedy else 0.9,
        top_k=0 if greedy else random_.choice([0, 40]),
        top_p=1.0 if greedy else random_.choice([1.0, 0.9]),
        seed=random_.randrange(2**32),
        ignore_eos=True,
    )


class Reference:
    """One engine, one request at a time, no cache: the whole prompt at once, then token by token."""

    def __init__(self) -> None:
        card = load_card(None)
        self._engine = create_engine("numpy", card, 64, BLOCK_TOKENS)
        self._table = list(range(64))
        self._known: dict[Ask, list[int]] = {}

    def tokens(self, ask: Ask) -> list[int]:
        known = self._known.get(ask)
        if known is None:
            known = self._known[ask] = self._compute(ask)
        return known

    def _compute(self, ask: Ask) -> list[int]:
        prompt = np.array(ask.prompt, dtype=np.uint32)
        chunk = PrefillChunk(tokens=prompt, start=0, block_table=self._table, sampling=ask.sampling, sample_index=0)
        token = self._engine.step([chunk], []).prefill_tokens[0]
        assert token is not None
        tokens = [token]
        while len(tokens) < ask.sampling.max_tokens:
            position = len(prompt) + len(tokens) - 1
            slot = DecodeSlot(tokens[-1], position, self._table, ask.sampling, len(tokens))
            tokens += self._engine.step([], [slot]).decode_tokens
        return tokens


@dataclass
class Answer:
    """What came so far; :func:`send` fills it."""

    tokens: list[int] = field(default_factory=list)
    cached: int = 0


async def send(stub: lb_pb2_grpc.LbServiceStub, ask: Ask, answer: Answer | None = None) -> Answer:
    """The whole answer over gRPC; ``answer``, if given, grows while it comes."""
    answer = answer or Answer()
    sampling = ask.sampling
    request = lb_pb2.GenerateRequest(
        prompt_tokens_le32=np.array(ask.prompt, dtype="<u4").tobytes(),
        sampling=common_pb2.SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            seed=sampling.seed,
            ignore_eos=sampling.ignore_eos,
        ),
    )
    async for reply in stub.Generate(request, timeout=120):
        answer.tokens += reply.tokens
        if reply.HasField("usage"):
            answer.cached = reply.usage.cached_tokens
            assert reply.usage.completion_tokens == len(answer.tokens)
    return answer
