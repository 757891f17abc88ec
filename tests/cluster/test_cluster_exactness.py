"""Reuse never changes a token: hundreds of seeded prompts through 2 prefill and 2 decode processes, against one engine
in this process that never reuses anything; also while blocks are evicted and while the store node dies and returns."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

import grpc
import numpy as np
import pytest

from pinyon.api.common.v1 import common_pb2
from pinyon.api.lb.v1 import lb_pb2, lb_pb2_grpc
from pinyon.core.request import SamplingParams
from pinyon.model import load_card
from services.cluster import ClusterSpec, LocalCluster
from services.worker.engines import DecodeSlot, PrefillChunk, create_engine
from tests.cluster.observe import Scrape, wait_idle

SEED = 20260
BLOCK_TOKENS = 32
CONCURRENCY = 6


@dataclass(frozen=True)
class Ask:
    """One request: prompt tokens and how to sample."""

    prompt: tuple[int, ...]
    sampling: SamplingParams


def make_asks(count: int, seed: int) -> list[Ask]:
    """Prompts that share prefixes of a few documents, cut at any token, each with an ending of its own."""
    random_ = random.Random(seed)
    documents = [[random_.randrange(32, 127) for _ in range(random_.randrange(150, 520))] for _ in range(8)]
    asks = []
    for _ in range(count):
        document = random_.choice(documents)
        prefix = document[: random_.randrange(len(document) // 2, len(document))]
        ending = [random_.randrange(32, 127) for _ in range(random_.randrange(1, 40))]
        greedy = random_.random() < 0.5
        sampling = SamplingParams(
            max_tokens=random_.randrange(1, 13),
            temperature=0.0 if greedy else 0.9,
            top_k=0 if greedy else random_.choice([0, 40]),
            top_p=1.0 if greedy else random_.choice([1.0, 0.9]),
            seed=random_.randrange(2**32),
            ignore_eos=True,
        )
        asks.append(Ask(tuple(prefix + ending), sampling))
    return asks


class Reference:
    """One engine, one request at a time, no cache: the whole prompt at once, then token by token."""

    def __init__(self) -> None:
        card = load_card(None)
        self._engine = create_engine("numpy", card, 64, BLOCK_TOKENS)
        self._table = list(range(64))

    def tokens(self, ask: Ask) -> list[int]:
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


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


@dataclass
class Answer:
    tokens: list[int]
    cached: int


async def send(stub: lb_pb2_grpc.LbServiceStub, ask: Ask) -> Answer:
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
    answer = Answer([], 0)
    async for reply in stub.Generate(request, timeout=120):
        answer.tokens += reply.tokens
        if reply.HasField("usage"):
            answer.cached = reply.usage.cached_tokens
            assert reply.usage.completion_tokens == len(answer.tokens)
    return answer


async def send_all(cluster: LocalCluster, asks: list[Ask], on_done=lambda count: None) -> list[Answer]:
    """All asks in order, ``CONCURRENCY`` at a time; ``on_done`` is called with the number finished."""
    answers: list[Answer | None] = [None] * len(asks)
    queue = iter(range(len(asks)))
    finished = 0
    async with grpc.aio.insecure_channel(cluster.services["lb-0"].endpoints["grpc"]) as channel:
        stub = lb_pb2_grpc.LbServiceStub(channel)

        async def client() -> None:
            nonlocal finished
            for index in queue:
                answers[index] = await send(stub, asks[index])
                finished += 1
                on_done(finished)

        async with asyncio.TaskGroup() as group:
            for _ in range(CONCURRENCY):
                group.create_task(client())
    return [answer for answer in answers if answer is not None]


def reusable_tokens(asks: list[Ask]) -> int:
    """Prompt tokens that one unlimited cache could have given, in whole blocks and never the whole prompt."""
    seen: set[tuple[int, ...]] = set()
    total = 0
    for ask in asks:
        blocks = (len(ask.prompt) - 1) // BLOCK_TOKENS
        hit = 0
        for block in range(blocks):
            if ask.prompt[: (block + 1) * BLOCK_TOKENS] not in seen:
                break
            hit += 1
        total += hit * BLOCK_TOKENS
        seen.update(ask.prompt[: (block + 1) * BLOCK_TOKENS] for block in range(len(ask.prompt) // BLOCK_TOKENS))
    return total


def check(reference: Reference, asks: list[Ask], answers: list[Answer]) -> None:
    assert len(answers) == len(asks)
    wrong = [index for index, ask in enumerate(asks) if answers[index].tokens != reference.tokens(ask)]
    assert not wrong, f"seed {SEED}: requests {wrong} got other tokens than without any cache"


async def test_tokens_are_exact_and_most_of_what_can_be_reused_is(cluster, reference):
    asks = make_asks(200, SEED)
    print(f"seed {SEED}")
    answers = await send_all(cluster, asks)
    check(reference, asks, answers)
    reused, reusable = sum(answer.cached for answer in answers), reusable_tokens(asks)
    print(f"reused {reused} of {reusable} reusable tokens ({100 * reused / reusable:.0f} %)")
    assert reused > 0.5 * reusable
    await wait_idle(cluster)


async def test_tokens_are_exact_while_blocks_are_evicted(reference, tmp_path):
    asks = make_asks(80, SEED + 1)
    # Pools that hold a few requests, and a store of 4 MiB = 32 KV objects: everything is evicted all the time.
    spec = ClusterSpec(pool_blocks=80, store_mib=4)
    with LocalCluster(spec, tmp_path) as small:
        answers = await send_all(small, asks)
        check(reference, asks, answers)
        await wait_idle(small)
        scrape = Scrape(small)
        assert scrape.total("pinyon_worker_evicted_blocks_total") > 0
        assert scrape.total("pinyon_kvstore_evicted_objects_total") > 0


async def test_tokens_are_exact_while_the_store_node_dies_and_returns(reference, tmp_path):
    asks = make_asks(80, SEED + 2)
    with LocalCluster(ClusterSpec(), tmp_path) as cluster:

        def disturb(finished: int) -> None:
            if finished == 25:
                cluster.services["kvstore-0"].kill()
            elif finished == 50:
                cluster.restart("kvstore-0")

        answers = await send_all(cluster, asks, disturb)
        check(reference, asks, answers)
        await wait_idle(cluster)
        assert Scrape(cluster).total("pinyon_kvstore_objects") > 0, "the returned node holds nothing"
