"""A request that is cancelled, disconnected or late, in any phase: nothing of it is left, on either side."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from pinyon.api.common.v1 import common_pb2
from pinyon.api.worker.v1 import worker_pb2, worker_pb2_grpc
from pinyon.core.block_keys import chain_block_keys, pack_keys, tokens_to_bytes
from pinyon.core.request import SamplingParams
from pinyon.messages.orders import hello_to_proto
from pinyon.messages.segment import region_to_proto
from pinyon.store.reader import ReadResult
from pinyon.transfer import Access
from tests.integration.worker_parts import (
    BLOCK_TOKENS,
    PROMPT,
    WAIT_S,
    Fleet,
    Gate,
    gauge,
    peer_span,
    reference,
    submission,
    until,
)

LONG = SamplingParams(max_tokens=60, ignore_eos=True)


class HungSource:
    """A holder of blocks that never answers."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.ended = asyncio.Event()

    async def read(self, *args, **kwargs) -> ReadResult:
        self.asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.set()
        return ReadResult(0, worked=None)


class SlowGroup:
    """A transfer group whose end waits until the test lets it through; the writes themselves are real."""

    def __init__(self, group, waiting: asyncio.Event, let_go: asyncio.Event) -> None:
        self._group, self._waiting, self._let_go = group, waiting, let_go
        self.submit = group.submit

    async def wait_async(self, timeout_s=None):
        self._waiting.set()
        await self._let_go.wait()
        return await self._group.wait_async(timeout_s)


class Situation:
    """A request in one phase: ``answer``. ``resume`` lets everything continue."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.resume = lambda: None

    async def _ask(self, prompt=PROMPT, sampling=LONG, **fields):
        (answer,) = await self.client.submit(submission(prompt, sampling, prefill=self.p, decode=self.d, **fields))
        return answer

    async def _begun(self, prompt=PROMPT):
        answer = await self._ask(prompt)
        await answer.first.wait()
        return answer

    async def _held(self, worker):
        return await self.client.held(worker, PROMPT, LONG, prefill=self.p, decode=self.d)

    async def room_at_decode(self):
        self.p, self.d, self.client = await self.fleet.serving(blocks=20)
        self.other = await self._held(self.d)
        self.answer = await self._ask(PROMPT[::-1] * 3, SamplingParams(max_tokens=20, ignore_eos=True))
        await until(lambda: gauge(self.d, "room_waiters") == 1)
        self.resume = self.d.engine.release

    async def queue_at_prefill(self):
        self.p, self.d, self.client = await self.fleet.serving(active_prefills=1)
        self.other = await self._held(self.p)
        self.answer = await self._ask(PROMPT[::-1])
        await until(lambda: gauge(self.p, "queued_prefills") == 1)
        self.resume = self.p.engine.release

    async def room_at_prefill(self):
        self.p = await self.fleet.start("prefill", "p0", blocks=8)
        self.d, self.client = await self.fleet.decode()
        self.other = await self._held(self.p)
        self.answer = await self._ask(PROMPT[::-1])
        await until(lambda: gauge(self.p, "room_waiters") == 1)
        self.resume = self.p.engine.release

    async def fetching(self):
        source = HungSource()
        self.p = await self.fleet.start("prefill", "p0", source=source, fetch_timeout_s=60)
        self.d, self.client = await self.fleet.decode()
        self.answer = await self._ask(fetches=[peer_span(self.d, 0, 4)])
        await asyncio.wait_for(source.asked.wait(), WAIT_S)

    async def computing(self):
        self.p, self.d, self.client = await self.fleet.serving()
        self.answer = await self._held(self.p)
        self.resume = self.p.engine.release

    async def pushing(self):
        self.p, self.d, self.client = await self.fleet.serving()
        waiting, let_go = asyncio.Event(), asyncio.Event()
        group = self.p.transfer.group
        self.p.transfer.group = lambda: SlowGroup(group(), waiting, let_go)
        self.answer = await self._ask()
        await asyncio.wait_for(waiting.wait(), WAIT_S)
        self.resume = let_go.set

    async def batch_slot(self):
        self.p, self.d, self.client = await self.fleet.serving(max_batch=1)
        gate = Gate(bool, self.d.engine)
        self.other = await self._begun(PROMPT)
        await gate.reached()
        self.answer = await self._begun(PROMPT[::-1])
        self.resume = gate.open

    async def decoding(self):
        self.p, self.d, self.client = await self.fleet.serving()
        gate = Gate(bool, self.d.engine)
        self.answer = await self._begun()
        await gate.reached()
        self.resume = gate.open

    async def gave_way(self):
        """Waits until the second of two requests is preempted; each needs 13 blocks in the end, in a pool of 14."""
        await self._until_preempted(lambda decodes: decodes == 1)
        assert gauge(self.d, "preemptions_total") == gauge(self.d, "room_waiters") == 1

    async def computed_again(self):
        """Waits until the first request has ended, and the tokens of the second are computed again with its prompt."""
        await self._until_preempted(lambda decodes: decodes == 0)
        await self.other.wait()
        assert gauge(self.d, "running_prefills") == 1

    async def _until_preempted(self, then):
        self.p, self.d, self.client = await self.fleet.serving(blocks=14)
        together = []

        def at(decodes):
            together.append(len(decodes) == 2)
            return any(together) and then(len(decodes))

        gate = Gate(at, self.d.engine)
        self.d.engine.hold()
        self.other = await self._begun(PROMPT)
        self.answer = await self._begun(PROMPT[::-1])
        self.d.engine.release()
        await gate.reached()
        self.resume = gate.open

    async def own_prefill(self):
        self.p = self.d = await self.fleet.start("mixed", "m0")
        self.client = await self.fleet.client(self.d)
        self.answer = await self._held(self.d)
        self.resume = self.d.engine.release


PHASES = [
    "room_at_decode",
    "queue_at_prefill",
    "room_at_prefill",
    "fetching",
    "computing",
    "pushing",
    "batch_slot",
    "decoding",
    "gave_way",
    "computed_again",
    "own_prefill",
]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("how", ["cancel", "disconnect", "deadline"])
async def test_nothing_is_left(fleet, phase, how):
    situation = Situation(fleet)
    await getattr(situation, phase)()
    answer = situation.answer
    if how == "cancel":
        await situation.client.cancel(answer)
        await answer.wait()
        assert answer.finish == "cancelled"
    elif how == "disconnect":
        await situation.client.close()
        await until(lambda: gauge(situation.d, "lb_sessions") == 0)
    else:
        # as the request's own timer does
        (request,) = [each for each in situation.d.decodes._tasks if each.stream_id == max(situation.client.answers)]
        request.is_over()
        await answer.wait()
        assert answer.finish == "error"
        assert answer.last.error.code == "DEADLINE_EXCEEDED"
    situation.resume()
    other = getattr(situation, "other", None)
    if other is not None and how != "disconnect":
        await other.wait()
        assert other.tokens == reference(PROMPT, LONG)


async def test_a_request_is_given_up_when_its_time_is_over(fleet):
    mixed, client = await fleet.mixed()
    mixed.engine.hold()
    answer = await client.answer(PROMPT, LONG, prefill=mixed, decode=mixed, timeout_ms=200)
    assert (answer.last.error.code, answer.last.error.message) == ("DEADLINE_EXCEEDED", "not finished within 0.2 s")


async def test_blocks_that_a_cancelled_prefill_completed_are_right(fleet):
    p, d, client = await fleet.serving(prefill_chunk_tokens=2 * BLOCK_TOKENS)
    answer = await client.held(p, PROMPT, LONG, prefill=p, decode=d)
    await client.cancel(answer)
    await answer.wait()
    await fleet.idle()
    kept = gauge(p, "cached_blocks")
    again = await client.answer(PROMPT, LONG, prefill=p, decode=d)
    assert again.tokens == reference(PROMPT, LONG)
    assert again.last.usage.cached_local_tokens == kept * BLOCK_TOKENS


async def test_prompts_of_a_decode_instance_that_died_end_at_once(fleet):
    """A dead decode instance cancels nothing: its connection breaks."""
    source = HungSource()
    p = await fleet.start("prefill", "p0", source=source, fetch_timeout_s=4 * WAIT_S)
    d = await fleet.start("decode", "d0")
    blocks = -(-len(PROMPT) // BLOCK_TOKENS)
    size = d.served.layout.block_bytes
    grant = d.transfer.grant(d.parts.region, [(0, blocks * size)], Access.WRITE)
    keys = chain_block_keys(p.served.namespace(""), tokens_to_bytes(PROMPT), BLOCK_TOKENS)
    start = worker_pb2.PrefillStart(
        stream_id=1,
        prompt_tokens_le32=tokens_to_bytes(PROMPT),
        block_keys=pack_keys(keys),
        sampling=common_pb2.SamplingParams(max_tokens=1),
        fetches=[peer_span(d, 0, 4)],
        target_region=region_to_proto(grant.descriptor()),
        target_offsets_bytes=[number * size for number in range(blocks)],
    )
    hello = hello_to_proto(d.served, d.transfer.descriptor())
    async with grpc.aio.insecure_channel(p.address) as channel:
        call = worker_pb2_grpc.WorkerServiceStub(channel).PrefillSession()
        await call.write(worker_pb2.PrefillSessionRequest(hello=hello, starts=[start]))
        await asyncio.wait_for(source.asked.wait(), WAIT_S)
    await asyncio.wait_for(source.ended.wait(), WAIT_S)
    await fleet.idle()
    assert not p.engine.steps


async def test_a_lease_that_nobody_releases_ends_by_itself(fleet):
    from pinyon.api.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc

    m, client = await fleet.mixed()
    await client.answer(PROMPT, SamplingParams(max_tokens=1))
    keys = chain_block_keys(m.served.namespace(""), tokens_to_bytes(PROMPT), BLOCK_TOKENS)
    async with grpc.aio.insecure_channel(m.address) as channel:
        stub = kvstore_pb2_grpc.BlockReadServiceStub(channel)
        reply = await stub.Acquire(kvstore_pb2.AcquireRequest(keys=pack_keys(keys), lease_ms=3000))
        assert [block.index for block in reply.blocks] == [0, 1, 2, 3, 4]
        assert gauge(m, "leases") == 1
        await until(lambda: gauge(m, "leases") == 0)
        assert not (await stub.Release(kvstore_pb2.ReleaseRequest(lease_id=reply.lease_id))).released


@pytest.mark.parametrize("transports", ["tcp", "shm"])
async def test_a_workers_lease_opens_only_its_blocks_only_for_reading(fleet, transports):
    from pinyon.api.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc
    from pinyon.messages.segment import segment_from_proto
    from pinyon.transfer import Opcode, Reason, TransferEngine, TransferRequest

    m, client = await fleet.mixed()
    await client.answer(PROMPT, SamplingParams(max_tokens=1))
    keys = chain_block_keys(m.served.namespace(""), tokens_to_bytes(PROMPT), BLOCK_TOKENS)
    size = m.served.layout.block_bytes
    async with grpc.aio.insecure_channel(m.address) as channel:
        stub = kvstore_pb2_grpc.BlockReadServiceStub(channel)
        nothing = await stub.Acquire(kvstore_pb2.AcquireRequest(keys=bytes(16)))
        assert not nothing.HasField("segment")
        leases = [
            await stub.Acquire(kvstore_pb2.AcquireRequest(keys=pack_keys(some), lease_ms=60_000))
            for some in (keys[:2], keys[2:3])
        ]
        with TransferEngine(transports=(transports,)) as engine:
            memory = bytearray(size)
            local = engine.register_local_memory(memory)

            async def move(opcode, lease, offset, length=size):
                segment = segment_from_proto(lease.segment)
                (region,) = segment.regions
                request = TransferRequest(opcode, local.key, 0, segment, region.key, offset, length)
                return (await engine.transfer_async([request]))[0].reason

            mine, other = ([block.offset_bytes for block in lease.blocks] for lease in leases)
            assert (len(mine), len(other)) == (2, 1)
            for offset in mine:
                assert await move(Opcode.READ, leases[0], offset) is Reason.NONE
                assert memory == m.engine.pool.data.cast("B")[offset : offset + size]
                assert await move(Opcode.WRITE, leases[0], offset) is Reason.ACCESS_DENIED
            everything = {block * size for block in range(m.served.pool_blocks)}
            for offset in everything - set(mine):
                assert await move(Opcode.READ, leases[0], offset) is Reason.OUT_OF_RANGE
            for lease in leases:
                assert (await stub.Release(kvstore_pb2.ReleaseRequest(lease_id=lease.lease_id))).released
            assert await move(Opcode.READ, leases[0], mine[0]) is Reason.UNKNOWN_REGION
    await fleet.idle()
    assert m.transfer.stats().grants_now == 0
