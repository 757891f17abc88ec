"""The player sends the requests of a trace to a load balancer at the trace's times, and records the results."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

import grpc

from pinyon.api.lb.v1 import lb_pb2, lb_pb2_grpc
from pinyon.core.clock import Clock
from pinyon.core.request import SamplingParams
from pinyon.eviction.interface import kind_and_turn
from pinyon.messages.sampling import sampling_to_proto
from pinyon_lab.replay.prompts import ReplayPrompts
from pinyon_lab.simulator.clients import Clients
from pinyon_lab.simulator.report import FINISHED, RequestOutcome, longest_tenth
from pinyon_lab.simulator.workload import Arrival

ERRORS_MAX = 16
"""The number of different errors that are reported."""
OTHERS = "other errors"
CUT_OFF = "cut off"
OUTPUT_MAX = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Replayed:
    """The ``numbers`` of the requests that have ended, in order of the trace, and their ``outcomes``."""

    numbers: list[int]
    outcomes: list[RequestOutcome]
    late_p99_s: float
    """The delay of a sent request that this program, or ``in_flight_max``, caused."""
    errors: dict[str, int]
    """The errors of failed requests, status first, with their counts."""


@dataclass(frozen=True, slots=True)
class Sending:
    """The way requests are sent: the model, the ``metadata``, the number of requests at once, and their time limit."""

    clients: int = 0
    """The number of clients, see :class:`Clients`."""
    model: str = ""
    metadata: tuple[tuple[str, str], ...] = ()
    timeout_s: float = 600.0
    in_flight_max: int = 4096


class Player:
    """A player over a ``channel`` to a load balancer, for one :meth:`run`; ``progress`` is told how many have ended."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        arrivals: Sequence[Arrival],
        prompts: ReplayPrompts,
        sending: Sending = Sending(),
        progress: Callable[[int], None] = lambda done: None,
    ) -> None:
        self._stub = lb_pb2_grpc.LbServiceStub(channel)
        self._arrivals, self._prompts = arrivals, prompts
        self._clients, self._sending, self._progress = Clients(arrivals, sending.clients), sending, progress
        self._places = asyncio.Semaphore(sending.in_flight_max)
        self._ended = asyncio.Event()
        self._began_s = 0.0
        self._due: list[tuple[float, int]] = []
        """A heap of the times to send requests."""
        self._outcomes: dict[int, RequestOutcome] = {}
        self._late_s: list[float] = []
        self._errors = Counter[str]()

    async def run(self) -> Replayed:
        """Sends all requests and returns when every one has ended.

        If cancelled, it cancels the requests under way; :meth:`replayed` returns the results of the others."""
        self._began_s = time.monotonic()
        self._add(self._clients.first())
        async with asyncio.TaskGroup() as group:
            while len(self._outcomes) < len(self._arrivals):
                wait_s = self._due[0][0] - self._now_s() if self._due else None
                if wait_s is None or wait_s > 0:
                    self._ended.clear()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(wait_s):
                            await self._ended.wait()
                    continue
                when_s, number = heapq.heappop(self._due)
                await self._places.acquire()
                group.create_task(self._serve(number, when_s), name=f"request {number}")
        return self.replayed()

    def replayed(self) -> Replayed:
        """Returns the results so far."""
        late = sorted(self._late_s)
        numbers = sorted(self._outcomes)
        outcomes = [self._outcomes[number] for number in numbers]
        errors = dict(self._errors.most_common())
        return Replayed(numbers, outcomes, late[99 * len(late) // 100] if late else 0.0, errors)

    def _add(self, due: Sequence[tuple[float, int]]) -> None:
        for each in due:
            heapq.heappush(self._due, each)

    async def _serve(self, number: int, when_s: float) -> None:
        try:
            outcome = await self._ask(number, when_s)
        finally:
            self._places.release()
        self._outcomes[number] = outcome
        self._progress(len(self._outcomes))
        self._add(self._clients.ended(number, self._now_s()))
        self._ended.set()

    def _now_s(self) -> float:
        return time.monotonic() - self._began_s

    async def _ask(self, number: int, when_s: float) -> RequestOutcome:
        arrival = self._arrivals[number]
        request = self._message(number)
        sent_s = self._now_s()
        self._late_s.append(max(0.0, sent_s - when_s))
        seen = _Answer(sent_s)
        try:
            call = self._stub.Generate(request, timeout=self._sending.timeout_s, metadata=self._sending.metadata)
            del request
            await seen.read(call, self._now_s)
            if not seen.end:
                self._failed(CUT_OFF, "the stream ended without the end of the answer")
        except grpc.aio.AioRpcError as error:
            seen.end = error.code().name.lower()
            self._failed(error.code().name, error.details() or "")
        self._prompts.answered(number, seen.tokens if seen.end == FINISHED else ())
        return seen.outcome(arrival, self._now_s())

    def _failed(self, status: str, details: str) -> None:
        told = f"{status}: {details}"
        if told not in self._errors and len(self._errors) >= ERRORS_MAX:
            told = OTHERS
        self._errors[told] += 1

    def _message(self, number: int) -> lb_pb2.GenerateRequest:
        arrival, tokens = self._arrivals[number], self._prompts.of(number)
        wanted = min(max(1, arrival.output_tokens), OUTPUT_MAX)
        kind, turn = kind_and_turn(arrival.traits.category)
        return lb_pb2.GenerateRequest(
            model=self._sending.model,
            prompt_tokens_le32=tokens.astype("<u4").tobytes(),
            sampling=sampling_to_proto(SamplingParams(wanted, ignore_eos=True)),
            labels=lb_pb2.RequestLabels(kind=kind, turn=turn, user=arrival.traits.tenant),
        )


class _Answer:
    """One request's answer as its client sees it."""

    def __init__(self, sent_s: float) -> None:
        self.end = ""
        self.tokens: list[int] = []
        self._sent_s = sent_s
        self._first_s = -1.0
        self._last_s = 0.0
        self._intervals: list[tuple[float, int]] = []
        self._cached = self._local = 0

    async def read(self, messages: AsyncIterator[lb_pb2.GenerateResponse], now: Clock) -> None:
        async for message in messages:
            if message.tokens:
                self._count(len(message.tokens), now())
                self.tokens += message.tokens
            if message.HasField("usage"):
                self._cached, self._local = message.usage.cached_tokens, message.usage.cached_local_tokens
                self.end = FINISHED

    def _count(self, tokens: int, now_s: float) -> None:
        """Counts tokens that come together: they share the time since the tokens before them."""
        if self._first_s < 0:
            self._first_s = self._last_s = now_s
            tokens -= 1
        if tokens:
            self._intervals.append(((now_s - self._last_s) / tokens, tokens))
        self._last_s = now_s

    def outcome(self, arrival: Arrival, now_s: float) -> RequestOutcome:
        return RequestOutcome(
            self._sent_s,
            "",
            "",
            self._first_s - self._sent_s if self._first_s >= 0 else -1.0,
            longest_tenth(self._intervals),
            now_s - self._sent_s,
            arrival.tokens,
            len(self.tokens),
            self._local,
            self._cached - self._local,
            -1.0,
            1,
            self.end or CUT_OFF,
        )
