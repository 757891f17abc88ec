"""The peers of a conductor in ``bench/conductor.py``: instances that compute nothing but report, and a load balancer.
It streams batches of requests, and tells the instances what was placed on them."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np

from pinyon.api.common.v1 import common_pb2
from pinyon.api.conductor.v1 import conductor_pb2
from pinyon.core.block_keys import KEY_BYTES, unpack_keys
from pinyon.core.layout import KvLayout
from pinyon.core.request import Role
from pinyon.frontdoor.instances.conductor_session import METHOD
from pinyon.placement.cost_model import PrefillCostModel
from pinyon.placement.cost_priors import parse_priors
from pinyon.placement.instances import InstanceInfo, InstanceLoad
from pinyon.runtime.duplex import Dialed
from pinyon.runtime.report_session import ReportSession

BLOCK_TOKENS = 16
LAYOUT = KvLayout(layers=28, kv_heads=4, head_dim=128, block_tokens=BLOCK_TOKENS, dtype="bfloat16")
MODEL = "model"
PROMPT_BLOCKS = 512
SHARED_BLOCKS = PROMPT_BLOCKS // 2
PROMPT_TOKENS = PROMPT_BLOCKS * BLOCK_TOKENS + 8
"""All blocks are full, and the last token is in none of them."""
NEW_TOKENS = 256
TBT_MS = 20.0
KEPT = 16
"""The number of last prompts whose own blocks an instance keeps; those of earlier prompts are evicted."""
HOLDERS_MAX = 4
"""The largest number of instances that hold a shared beginning at first."""
PROFILE = "910b-qwen2.5-7b"
FASTER = 200
"""The factor by which these instances compute and fetch faster than the profile. A few dozen of them thus keep up with
the placements, as the instances of a large enough cluster would."""
NETWORK_BYTES_S = 1e10
START_S, ANSWER_S = 60.0, 60.0
WRITE_S = 5.0
STAGES = 3
"""The reports on one placement: it came and is computed; it is computed; it has ended."""
_PLACES = np.arange(1, PROMPT_BLOCKS + 1).astype(np.uint8)


class Prompts:
    """Beginnings that some instance holds, and endings that none holds; no prompt comes twice."""

    def __init__(self, shared: int, seed: int) -> None:
        self._dice = Random(seed)
        self.shared = [self._keys(0, SHARED_BLOCKS) for _ in range(shared)]

    def _keys(self, first: int, blocks: int) -> bytes:
        """Returns random keys with their places in the last byte."""
        keys = np.frombuffer(bytearray(self._dice.randbytes(blocks * KEY_BYTES)), np.uint8).reshape(-1, KEY_BYTES)
        keys[:, -1] = _PLACES[first : first + blocks]
        return keys.tobytes()

    def next(self) -> tuple[int, bytes]:
        """Returns the number of a prompt's beginning, and the keys of its ending."""
        return self._dice.randrange(len(self.shared)), self._keys(SHARED_BLOCKS, SHARED_BLOCKS)

    def holders(self, instances: int) -> list[int]:
        """Returns the numbers of the instances that hold one more beginning."""
        count = 1 + (self._dice.random() < 0.2) * self._dice.randint(1, HOLDERS_MAX - 1)
        return self._dice.sample(range(instances), min(count, instances))

    def factor(self) -> float:
        """Returns a random factor on the mean time of a prefill."""
        return self._dice.uniform(0.9, 1.1)


@dataclass
class _News:
    """The contents of one report."""

    stored: list[bytes] = field(default_factory=list)
    removed: list[bytes] = field(default_factory=list)
    begun_prefills: list[str] = field(default_factory=list)
    begun_decodes: list[str] = field(default_factory=list)
    ended_prefills: list[str] = field(default_factory=list)
    ended_decodes: list[str] = field(default_factory=list)
    measured: list[conductor_pb2.PrefillMeasurement] = field(default_factory=list)
    first_tokens: list[conductor_pb2.FirstTokenMeasurement] = field(default_factory=list)


class Instance:
    """A :class:`pinyon.runtime.report_session.ReportSource` that computes nothing. Placements take it no time, but it
    tells of each in :data:`STAGES` reports, as an engine would."""

    def __init__(self, number: int, address: str, prompts: Prompts) -> None:
        self.id = f"instance-{number:04}"
        self._prompts = prompts
        self._cost = PrefillCostModel(parse_priors(PROFILE)[""].prefill)
        self._shared: set[int] = set()
        """The beginnings that the instance holds from the start, and for good."""
        self._copies: dict[int, int] = {}
        """Further beginnings that the instance holds, and how many of :attr:`_kept` have each."""
        self._kept: deque[tuple[int, bytes]] = deque()
        self._decoding: dict[str, None] = {}
        self._stages = deque(_News() for _ in range(STAGES))
        self._now = _News()
        self.told = asyncio.Event()
        """An event that is set while all that happened has been reported."""
        self.told.set()
        self.changed_blocks = self.reports = 0
        """The blocks and reports so far."""
        info = InstanceInfo(
            self.id, "boot", Role.MIXED, f"10.0.{number // 250}.{number % 250}:7000", MODEL, "weights", LAYOUT,
            1 << 20, max_batch=256, short_first=True,
        )  # fmt: skip
        self.session = ReportSession(address, info, self)

    def hold(self, beginning: int) -> None:
        self._shared.add(beginning)

    def compute(self, request_id: str, prompt: tuple[int, bytes], placement: common_pb2.Placement) -> None:
        """Takes the prefill of a prompt that was placed here."""
        came, computed, _ = self._stages
        came.begun_prefills.append(request_id)
        computed.ended_prefills.append(request_id)
        fetched = sum(span.block_count for span in placement.fetches)
        reused = (placement.local_prefix_blocks + fetched) * BLOCK_TOKENS
        measured = conductor_pb2.PrefillMeasurement(
            computed_tokens=PROMPT_TOKENS - reused,
            prefix_tokens=reused,
            compute_us=round(self._cost.predict_s(PROMPT_TOKENS, reused) / FASTER * self._prompts.factor() * 1e6),
        )
        for span in placement.fetches:
            size = span.block_count * LAYOUT.block_bytes
            fetch_us = round(size / (NETWORK_BYTES_S * FASTER) * 1e6)
            measured.fetches.add(source_id=span.source_id, fetched_bytes=size, fetch_us=fetch_us)
        computed.measured.append(measured)
        self._store(*prompt, computed)
        self._changed()

    def decode(self, request_id: str, prompt: tuple[int, bytes], placement: common_pb2.Placement) -> None:
        """Takes the decoding of a prompt that was placed here."""
        came, computed, ended = self._stages
        self._decoding[request_id] = None
        came.begun_decodes.append(request_id)
        ended.ended_decodes.append(request_id)
        told = conductor_pb2.FirstTokenMeasurement(
            placement_number=placement.number,
            ttft_us=round(placement.predicted_ttft_ms * 1e3),
            prefill_instance_id=placement.prefill_instance_id,
            compute_us=round(placement.predicted_prefill_ms * 1e3),
            local_tokens=placement.local_prefix_blocks * BLOCK_TOKENS,
        )
        computed.first_tokens.append(told)
        if placement.prefill_instance_id != self.id:
            self._store(*prompt, computed)
        self._changed()

    def _changed(self) -> None:
        self.told.clear()
        self.session.wake()

    def _store(self, beginning: int, ending: bytes, news: _News) -> None:
        self._kept.append((beginning, ending))
        if beginning not in self._shared:
            self._copies[beginning] = copies = self._copies.get(beginning, 0) + 1
            if copies == 1:
                news.stored.append(self._prompts.shared[beginning])
        news.stored.append(ending)
        if len(self._kept) > KEPT:
            oldest, gone = self._kept.popleft()
            news.removed.append(gone)
            if oldest not in self._shared:
                self._copies[oldest] -= 1
                if not self._copies[oldest]:
                    del self._copies[oldest]
                    news.removed.append(self._prompts.shared[oldest])

    # -- what is reported

    def snapshot_keys(self) -> Sequence[bytes]:
        held = [self._prompts.shared[each] for each in (*self._shared, *self._copies)]
        # kept blocks that are not reported yet come with the changes: reporting them twice does no harm
        return unpack_keys(b"".join([*held, *(ending for _, ending in self._kept)]))

    def drain_changes(self) -> tuple[Sequence[bytes], Sequence[bytes]]:
        self._now = self._stages.popleft()
        self._stages.append(_News())
        if any(each != _News() for each in self._stages):
            self.session.wake()
        else:
            self.told.set()
        stored, removed = unpack_keys(b"".join(self._now.stored)), unpack_keys(b"".join(self._now.removed))
        self.changed_blocks += len(stored) + len(removed)
        return stored, removed

    def news(self) -> conductor_pb2.ReportSessionRequest:
        now = self._now
        for request_id in now.ended_decodes:
            self._decoding.pop(request_id, None)
        return conductor_pb2.ReportSessionRequest(
            prefills=now.measured,
            first_tokens=now.first_tokens,
            begun_prefill_request_ids=now.begun_prefills,
            begun_decode_request_ids=now.begun_decodes,
            ended_prefill_request_ids=now.ended_prefills,
            ended_decode_request_ids=now.ended_decodes,
        )

    def decoding(self) -> Sequence[str]:
        return list(self._decoding)

    def load(self) -> InstanceLoad:
        self.reports += 1
        decoding = len(self._decoding)
        tokens = decoding * (PROMPT_TOKENS + NEW_TOKENS // 2)
        return InstanceLoad(
            running_requests=decoding, used_blocks=tokens // BLOCK_TOKENS, kv_tokens=tokens,
            mean_tbt_ms=TBT_MS if decoding else 0.0, mean_batch=decoding, mean_kv_tokens=tokens,
        )  # fmt: skip


@dataclass
class Batches:
    """The results of a number of requests."""

    placed: int = 0
    refused: int = 0
    error: str = ""
    """The error of the last refused request."""
    reused_blocks: int = 0
    fetching: int = 0
    latencies_s: list[float] = field(default_factory=list)
    """The latency of each batch, from its sending to its answer."""


class Peers:
    """The peers of one conductor: ``start``, then ``place``, then ``close``."""

    def __init__(self, address: str, instances: int, beginnings: int, seed: int) -> None:
        self.prompts = Prompts(beginnings, seed)
        self.instances = [Instance(number, address, self.prompts) for number in range(instances)]
        for beginning in range(beginnings):
            for number in self.prompts.holders(instances):
                self.instances[number].hold(beginning)
        self._by_id = {each.id: each for each in self.instances}
        self._stream = Dialed(address, METHOD, WRITE_S)
        self._outbox: asyncio.Queue[conductor_pb2.ScheduleSessionRequest] = asyncio.Queue()
        self._asked: dict[str, tuple[int, bytes]] = {}
        self._listed = asyncio.Event()
        self._answered = asyncio.Event()
        self._sent_s: deque[float] = deque()
        self._ids = 0
        self._now = Batches()
        self._session: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Connects the peers, and waits until the conductor lists all instances and knows what they hold."""
        for instance in self.instances:
            instance.session.start()
        self._session = asyncio.create_task(self._stream.run(self._take, self._messages()))
        async with asyncio.timeout(START_S):
            await self._listed.wait()

    async def close(self) -> None:
        self._stream.end()
        if self._session is not None:
            await asyncio.wait({self._session})
        await asyncio.gather(*(instance.session.close(0.0) for instance in self.instances))

    @property
    def reports(self) -> int:
        """The reports sent so far, by all instances."""
        return sum(instance.reports for instance in self.instances)

    @property
    def changed_blocks(self) -> int:
        """The changed blocks reported so far, by all instances."""
        return sum(instance.changed_blocks for instance in self.instances)

    async def place(self, requests: int, batch: int, window: int) -> Batches:
        """Sends requests, ``batch`` to a message and ``window`` messages in flight, and waits until all is reported."""
        self._now = Batches()
        for at in range(0, requests, batch):
            while len(self._sent_s) >= window:
                await self._an_answer()
            asked = [self._ask() for _ in range(min(batch, requests - at))]
            self._sent_s.append(time.perf_counter())
            self._outbox.put_nowait(conductor_pb2.ScheduleSessionRequest(requests=asked))
        while self._sent_s:
            await self._an_answer()
        async with asyncio.timeout(ANSWER_S):
            for instance in self.instances:
                await instance.told.wait()
        return self._now

    async def _an_answer(self) -> None:
        self._answered.clear()
        async with asyncio.timeout(ANSWER_S):
            await self._answered.wait()

    def _ask(self) -> conductor_pb2.ScheduleRequest:
        self._ids += 1
        request_id = f"{self._ids:032x}"
        beginning, ending = self._asked[request_id] = self.prompts.next()
        return conductor_pb2.ScheduleRequest(
            request_id=request_id,
            model=MODEL,
            request_class=common_pb2.RequestClass(kind="chat", turn=1, arrived_unix_s=time.time()),
            prompt_tokens=PROMPT_TOKENS,
            block_keys=self.prompts.shared[beginning] + ending,
            max_tokens=NEW_TOKENS,
        )

    async def _messages(self) -> AsyncGenerator[conductor_pb2.ScheduleSessionRequest, None]:
        yield conductor_pb2.ScheduleSessionRequest(lb_id="lb-bench")
        while True:
            yield await self._outbox.get()

    def _take(self, message: conductor_pb2.ScheduleSessionResponse) -> None:
        if message.HasField("instances"):
            schedulable = sum(each.schedulable for each in message.instances.instances)
            if schedulable == len(self.instances):
                self._listed.set()
        if not message.responses:
            return
        self._now.latencies_s.append(time.perf_counter() - self._sent_s.popleft())
        for response in message.responses:
            prompt = self._asked.pop(response.request_id)
            if response.HasField("error"):
                self._now.refused += 1
                self._now.error = response.error.message
                continue
            placement = response.placement
            self._now.placed += 1
            self._now.reused_blocks += placement.local_prefix_blocks
            self._now.fetching += bool(placement.fetches)
            self._by_id[placement.prefill_instance_id].compute(response.request_id, prompt, placement)
            self._by_id[placement.decode_instance_id].decode(response.request_id, prompt, placement)
        self._answered.set()
