"""Workers in this process with real sockets and a tiny real transformer, and helpers that drive them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, NamedTuple

import grpc
import numpy as np
from prometheus_client import CollectorRegistry

from launch.process import ROOT
from pinyon.api.common.v1 import common_pb2
from pinyon.api.worker.v1 import worker_pb2, worker_pb2_grpc
from pinyon.batching import DecodeSlot, PrefillChunk, TokenCounts
from pinyon.core.logprobs import TokenLogprob
from pinyon.core.request import SamplingParams
from pinyon.messages.logprobs import SentLogprobs, append_logprob, logprobs_from_proto
from pinyon.messages.sampling import sampling_to_proto
from pinyon.model import ModelCard, load_card
from pinyon.placement.instances import InstanceState
from pinyon.runtime.process import child_environment
from pinyon.runtime.telemetry import Telemetry
from services.conductor.app import Conductor
from services.conductor.app import build as build_conductor
from services.conductor.settings import ConductorSettings
from services.worker.app import Worker
from services.worker.engines.decode_plan import KERNEL_DEFAULT
from services.worker.engines.numpy_llama import NumpyLlamaEngine
from services.worker.engines.protocol import StepResult
from services.worker.engines.weights import builtin_weights
from services.worker.settings import WorkerSettings
from tests.idle import left_in
from tests.waiting import eventually
from tests.worker_integrity import check_admission

BLOCK_TOKENS = 8
WAIT_S = 60.0
PROMPT = list(range(32, 32 + 5 * BLOCK_TOKENS + 3))
OTHER = PROMPT[::-1]
SHORT = SamplingParams(max_tokens=4, ignore_eos=True)

Asks = Sequence[tuple[list[int], SamplingParams]]


@cache
def tiny_card() -> ModelCard:
    card = load_card(None)
    config = replace(
        card.config, num_layers=2, hidden_size=64, intermediate_size=96, num_heads=2, num_kv_heads=1, max_context=512
    )
    return replace(card, config=config, fingerprint="tiny")


@cache
def _weights() -> Any:
    return builtin_weights(tiny_card().config)


def new_engine(blocks: int, kernel: str = KERNEL_DEFAULT) -> NumpyLlamaEngine:
    return NumpyLlamaEngine(tiny_card().config, _weights(), blocks, BLOCK_TOKENS, kernel=kernel, check=False)


class GateEngine:
    """The real engine, whose steps can be held at their beginning, and made to fail."""

    def __init__(self, blocks: int, kernel: str) -> None:
        self._engine = new_engine(blocks, kernel)
        self.config, self.layout = self._engine.config, self._engine.layout
        self.num_blocks, self.pool = blocks, self._engine.pool
        self.unsupported, self.kernel = self._engine.unsupported, self._engine.kernel
        self._open = threading.Event()
        self._open.set()
        self._entered = threading.Event()
        self.steps: list[tuple[int, int]] = []
        self.fail = lambda prefills, decodes: None

    def hold(self) -> None:
        self._entered.clear()
        self._open.clear()

    def release(self) -> None:
        self._open.set()

    async def entered(self) -> None:
        """Waits until a step has begun since :meth:`hold`."""
        assert await asyncio.to_thread(self._entered.wait, WAIT_S)

    def step(self, prefills: Sequence[PrefillChunk], decodes: Sequence[DecodeSlot]) -> StepResult:
        self._entered.set()
        assert self._open.wait(WAIT_S)
        self.steps.append((sum(len(chunk.tokens) for chunk in prefills), len(decodes)))
        error = self.fail(prefills, decodes)
        if error is not None:
            raise error
        return self._engine.step(prefills, decodes)


class Gate:
    """A gate that stops one of the engines, once, at the first step whose decodes satisfy ``at``."""

    def __init__(self, at: Callable[[Sequence[DecodeSlot]], bool], *engines: GateEngine) -> None:
        self._reached, self._open = threading.Event(), threading.Event()

        def look(prefills: Sequence[PrefillChunk], decodes: Sequence[DecodeSlot]) -> None:
            if not self._reached.is_set() and at(decodes):
                self._reached.set()
                assert self._open.wait(WAIT_S)

        for engine in engines:
            engine.fail = look

    async def reached(self) -> None:
        assert await asyncio.to_thread(self._reached.wait, WAIT_S)

    def open(self) -> None:
        self._open.set()


class Alone(NamedTuple):
    """The result of one engine alone for a request."""

    tokens: list[int]
    logprobs: list[TokenLogprob]
    """The tokens' log-probabilities, rounded as in a message; empty if not requested."""
    prompt_logprobs: list[TokenLogprob]


_alone: dict[tuple[bytes, SamplingParams], Alone] = {}


def alone(prompt: Sequence[int], sampling: SamplingParams) -> Alone:
    """Computes the whole prompt without a cache, then token by token. Honours EOS and stop tokens, no stop strings.

    The counts for penalties are computed anew for each token."""
    tokens = np.array(prompt, "<u4")
    key = (tokens.tobytes(), sampling)
    if key in _alone:
        return _alone[key]
    blocks = -(-(len(prompt) + sampling.max_tokens) // BLOCK_TOKENS)
    engine, table = new_engine(blocks), list(range(blocks))
    ends = (*sampling.stop_token_ids, *(() if sampling.ignore_eos else tiny_card().config.eos_token_ids))
    out: list[int] = []
    told, told_of_prompt = common_pb2.Logprobs(), common_pb2.Logprobs()
    while len(out) < sampling.max_tokens and not (len(out) > sampling.min_tokens and out[-1] in ends):
        counts = TokenCounts.needed(sampling, np.array([*prompt, *out], "<u4"), len(out))
        if not out:
            followers = tokens[1:] if sampling.prompt_logprobs else None
            chunk = PrefillChunk(tokens, 0, table, sampling, 0, counts, followers, max(0, sampling.logprobs))
            result = engine.step([chunk], [])
            out += result.prefill_tokens
            logprob = result.logprobs.prefills[0] if sampling.logprobs >= 0 else None
            if sampling.prompt_logprobs:
                SentLogprobs(told_of_prompt).add_rows(result.logprobs.prompts[0])
        else:
            slot = DecodeSlot(out[-1], len(prompt) + len(out) - 1, table, sampling, len(out), counts)
            result = engine.step([], [slot])
            out += result.decode_tokens
            logprob = result.logprobs.decodes[0] if sampling.logprobs >= 0 else None
        if logprob is not None:
            append_logprob(told, logprob)
    _alone[key] = Alone(out, logprobs_from_proto(told), logprobs_from_proto(told_of_prompt))
    return _alone[key]


def reference(prompt: Sequence[int], sampling: SamplingParams) -> list[int]:
    return alone(prompt, sampling).tokens


def gauge(worker: Worker, name: str) -> float:
    value = worker._registry.get_sample_value(f"pinyon_worker_{name}")
    assert value is not None, f"no metric pinyon_worker_{name}"
    return value


class Fleet:
    """The workers of one test. ``close`` waits for all requests, stops the workers, and fails if anything was left."""

    def __init__(self) -> None:
        self.workers: list[Worker] = []
        self.clients: list[LbClient] = []
        self.conductor: Conductor | None = None

    async def start_conductor(self) -> str:
        """Starts a conductor; returns its address, for the setting ``conductor`` of the workers."""
        settings = ConductorSettings(listen="127.0.0.1:0", index_stride_tokens=1)  # tests count keys
        self.conductor = build_conductor(settings, CollectorRegistry(), Telemetry("conductor", "c"))
        return await self.conductor.server.start()

    async def known(self, name: str, condition: Callable[[InstanceState], bool]) -> InstanceState:
        """Waits until the conductor's state of the worker meets the condition; returns it."""
        deadline = time.monotonic() + WAIT_S
        while (state := self.conductor.fleet.get(name)) is None or not condition(state):
            assert time.monotonic() < deadline, f"in vain: {state}"
            await asyncio.sleep(0.005)  # polls, as nothing announces this
        return state

    async def start(
        self,
        role: str,
        name: str,
        *,
        blocks: int = 128,
        source=None,
        store=None,
        clock=time.monotonic,
        card: ModelCard | None = None,
        **settings,
    ) -> Worker:
        """Starts a worker; the numpy engine, which is the default, can be held."""
        settings = {"drain_s": 0, "metrics_listen": "", "prefill_chunk_tokens": 16, **settings}
        values = WorkerSettings(role=role, pool_blocks=blocks, block_tokens=BLOCK_TOKENS, **settings)
        engine = GateEngine(blocks, values.attention_kernel) if values.engine == "numpy" else None
        worker = Worker(values, name, CollectorRegistry(), card=card or tiny_card(), engine=engine, clock=clock)
        await worker.start(source=source, store=store)
        self.workers.append(worker)
        return worker

    async def pair(self, **settings) -> tuple[Worker, Worker]:
        return await self.start("prefill", "p0", **settings), await self.start("decode", "d0", **settings)

    async def mixed(self, **settings) -> tuple[Worker, LbClient]:
        """Starts an instance that does all itself; returns it with a client."""
        worker = await self.start("mixed", "m0", **settings)
        return worker, await self.client(worker)

    async def decode(self, **settings) -> tuple[Worker, LbClient]:
        """Starts an instance that only decodes; returns it with a client."""
        worker = await self.start("decode", "d0", **settings)
        return worker, await self.client(worker)

    async def serving(self, *, apart: bool = True, **settings) -> tuple[Worker, Worker, LbClient]:
        """Starts who computes prompts and who decodes, one instance unless ``apart``; with a client of the latter."""
        if not apart:
            worker, client = await self.mixed(**settings)
            return worker, worker, client
        p, d = await self.pair(**settings)
        return p, d, await self.client(d)

    async def client(self, worker: Worker) -> LbClient:
        client = LbClient(worker)
        self.clients.append(client)
        return client

    async def idle(self) -> None:
        """Waits until nothing is under way; fails if anything is left then."""
        self._release()
        for worker in self.workers:
            assert await worker.decodes.drained(WAIT_S)
            assert await worker.prefills.drained(WAIT_S)
            await worker.parts.engine_loop.step_over()
            await worker.parts.cache.settled(range(worker.parts.cache.pool.total))
            storage = worker.parts.storage
            await eventually(lambda storage=storage: not storage.pending, "what waits for the store is put or dropped")
        for worker in self.workers:
            left = left_in("worker", partial(gauge, worker))
            assert not left, f"{worker.served.instance_id}: {left}"
            assert not gauge(worker, "engine_hangs")
            check_admission(worker.parts.cache.admission)

    def _release(self) -> None:
        for worker in self.workers:
            if isinstance(worker.engine, GateEngine):
                worker.engine.release()

    async def close(self) -> None:
        try:
            await self.idle()
        finally:
            await self._stop()

    async def _stop(self) -> None:
        for client in self.clients:
            await client.close()
        self._release()
        for worker in reversed(self.workers):  # those that open sessions first
            await worker.stop(0)
            check_admission(worker.parts.cache.admission)
            assert worker.parts.cache.pool.used == 0, worker.served.instance_id
            assert worker.transfer.stats().requests_now == 0
        if self.conductor is not None:
            await self.conductor.server.drain(0)


@dataclass
class Answer:
    """The tokens and messages of one stream."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] | None = None
    text: str = ""
    prefill: Any = None
    last: Any = None
    updates: int = 0
    done: asyncio.Event = field(default_factory=asyncio.Event)
    first: asyncio.Event = field(default_factory=asyncio.Event)
    lost: Exception | None = None

    @property
    def finish(self) -> str:
        return common_pb2.FinishReason.Name(self.last.finish_reason).removeprefix("FINISH_REASON_").lower()

    async def wait(self) -> Answer:
        await asyncio.wait_for(self.done.wait(), WAIT_S)
        if self.lost is not None:
            raise AssertionError("the stream ended before its answer") from self.lost
        return self


async def ended(answers: Iterable[Answer]) -> None:
    for answer in answers:
        await answer.wait()


class LbClient:
    """One Session stream, as a load balancer has it."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.answers: dict[int, Answer] = {}
        self.messages: list[worker_pb2.SessionResponse] = []
        self._channel = grpc.aio.insecure_channel(worker.address)
        self.call = worker_pb2_grpc.WorkerServiceStub(self._channel).Session()
        self._reader = asyncio.ensure_future(self._read())
        self._next = 1

    async def submit(self, *submissions: worker_pb2.Submission) -> list[Answer]:
        answers = []
        for submission in submissions:
            submission.stream_id = submission.stream_id or self._next
            self._next = max(self._next, submission.stream_id) + 1
            answer = self.answers[submission.stream_id] = Answer()
            answers.append(answer)
        await self.call.write(worker_pb2.SessionRequest(submissions=submissions))
        return answers

    async def answer(self, prompt: Sequence[int], sampling: SamplingParams | None = None, **fields: Any) -> Answer:
        """Returns the whole answer to :func:`submission`."""
        (answer,) = await self.submit(submission(prompt, sampling, **fields))
        return await answer.wait()

    async def held(self, worker: Worker, prompt: Sequence[int], sampling: SamplingParams, **fields: Any) -> Answer:
        """Returns the begun answer to :func:`submission`, for which the worker's engine is held at a step."""
        worker.engine.hold()
        (answer,) = await self.submit(submission(prompt, sampling, **fields))
        await worker.engine.entered()
        return answer

    async def cancel(self, answer: Answer) -> None:
        ids = [stream_id for stream_id, each in self.answers.items() if each is answer]
        await self.call.write(worker_pb2.SessionRequest(cancel_stream_ids=ids))

    async def _read(self) -> None:
        try:
            await self._read_all()
        except grpc.RpcError as error:
            for answer in self.answers.values():
                if answer.last is None:
                    answer.lost = error
                    answer.done.set()
            raise

    async def _read_all(self) -> None:
        async for message in self.call:
            self.messages.append(message)
            for update in message.updates:
                answer = self.answers[update.stream_id]
                assert answer.last is None, "an update after the last one"
                answer.updates += 1
                answer.tokens += update.tokens
                answer.text += update.text
                answer.logprobs += logprobs_from_proto(update.logprobs)
                if update.HasField("prompt_logprobs"):
                    assert answer.prompt_logprobs is None, "told twice"
                    assert len(answer.tokens) == len(update.tokens), "not with the first token"
                    answer.prompt_logprobs = logprobs_from_proto(update.prompt_logprobs)
                if update.tokens:
                    answer.first.set()
                if update.HasField("prefill"):
                    answer.prefill = update.prefill
                if update.finish_reason:
                    answer.last = update
                    answer.done.set()

    async def close(self) -> None:
        self.call.cancel()
        await asyncio.wait((self._reader,))
        if not self._reader.cancelled():
            self._reader.exception()
        await self._channel.close()


def submission(
    prompt: Sequence[int],
    sampling: SamplingParams | None = None,
    *,
    prefill: Worker | None = None,
    decode: Worker | None = None,
    fetches: Sequence[common_pb2.FetchSpan] = (),
    **fields: Any,
) -> worker_pb2.Submission:
    """Returns a request; ``prefill`` and ``decode`` form its placement."""
    sampling = sampling or SamplingParams(max_tokens=8, ignore_eos=True)
    message = worker_pb2.Submission(
        prompt_tokens_le32=np.array(prompt, "<u4").tobytes(),
        sampling=sampling_to_proto(sampling),
        **{"request_id": "r", **fields},
    )
    if prefill is not None and decode is not None:
        message.placement.CopyFrom(
            common_pb2.Placement(
                prefill_instance_id=prefill.served.instance_id,
                prefill_address=prefill.address,
                decode_instance_id=decode.served.instance_id,
                decode_address=decode.address,
                fetches=fetches,
            )
        )
    return message


def check(asks: Asks, answers: Sequence[Answer]) -> None:
    """Asserts that each answer is that of one engine alone."""
    for (prompt, sampling), answer in zip(asks, answers, strict=True):
        expected = alone(prompt, sampling)
        assert answer.finish in ("stop", "length"), answer.last
        assert answer.tokens == expected.tokens
        assert answer.logprobs == expected.logprobs
        assert answer.prompt_logprobs == (expected.prompt_logprobs if sampling.prompt_logprobs else None)
        assert answer.last.usage.prompt_tokens == len(prompt)
        assert answer.last.usage.completion_tokens == len(answer.tokens)
        if sampling.prompt_logprobs:
            assert answer.last.usage.cached_tokens == 0
            assert len(answer.prompt_logprobs) == len(prompt) - 1


async def run_all(
    client: LbClient, prefill: Worker | None, decode: Worker | None, asks: Asks, **fields: Any
) -> list[Answer]:
    answers = await client.submit(
        *(submission(prompt, sampling, prefill=prefill, decode=decode, **fields) for prompt, sampling in asks)
    )
    await ended(answers)
    return answers


@contextlib.asynccontextmanager
async def worker_process(*arguments: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """Runs a worker with the instant engine as a process; yields it and its address."""
    reader, writer = os.pipe()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.worker", "--engine", "instant", "--metrics-listen", ""),
        *("--ready-fd", str(writer), *arguments),
        pass_fds=(writer,),
        stderr=asyncio.subprocess.DEVNULL,
        env=child_environment(ROOT, os.getpid()),
    )
    os.close(writer)
    try:
        with os.fdopen(reader) as pipe:
            address = json.loads(await asyncio.to_thread(pipe.readline))["grpc"]
        yield process, address
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def peer_span(worker: Worker, first: int, count: int) -> common_pb2.FetchSpan:
    return common_pb2.FetchSpan(
        source_id=worker.served.instance_id,
        source_address=worker.address,
        source=common_pb2.KV_SOURCE_PEER,
        first_block=first,
        block_count=count,
    )


async def until(condition, timeout_s: float = WAIT_S) -> None:
    """Runs other tasks of this loop until ``condition``; sockets have no event for it."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
