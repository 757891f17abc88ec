"""A reader against holders that lie, are late or vanish: it uses no wrong bytes, and returns every lease."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
from xxhash import xxh3_64_digest

from pinyon.api.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc
from pinyon.core.errors import FailedPrecondition, InvalidArgument, PinyonError, Unavailable
from pinyon.store.kv_memory import KvMemory
from pinyon.store.node_channels import NodeChannels
from pinyon.store.reader import LEASE_S, LEASE_SLACK_S, BlockReader, PartRange, ReadResult
from pinyon.transfer import Access, TransferEngine, TransferRequest, TransferResult
from tests.unit.store.block_holder import BLOCK, KEYS, PATIENT, WAIT_S, Holder, serving
from tests.waiting import eventually


class Place:
    """The reader's side."""

    def __init__(self, address: str, engine: LateEngine) -> None:
        self.address = address
        self.engine = engine
        self.now = 0.0
        self.memory = bytearray(b"\xff" * BLOCK * 8)
        self.region = engine.register_local_memory(self.memory)
        self.kv = KvMemory.whole(self.region, BLOCK)
        self.channels = NodeChannels()
        self.reader = BlockReader(engine, self.channels, clock=lambda: self.now)

    async def fetch(self, keys: Sequence[bytes] = KEYS, timeout_s: float = WAIT_S) -> int:
        return (await self.read(keys, timeout_s)).leading

    async def read(self, keys: Sequence[bytes] = KEYS, timeout_s: float = WAIT_S) -> ReadResult:
        places = [self.kv.pieces(slot) for slot in range(len(keys))]
        return await self.reader.read(self.address, keys, places, BLOCK, timeout_s)

    async def settled(self, holder: Holder) -> None:
        async with asyncio.timeout(WAIT_S):
            while self.reader.duties:  # noqa: ASYNC110 - there is no event for outsiders
                await asyncio.sleep(0.001)
        assert not holder.leases

    def blocks(self, count: int) -> bool:
        return all(self.memory[each * BLOCK : (each + 1) * BLOCK] == bytes([each]) * BLOCK for each in range(count))


class LateEngine(TransferEngine):
    """An engine whose transfers end only after the lease."""

    place: Place
    pass_s = 0.0
    waits_for: asyncio.Event | None = None
    requests: Sequence[TransferRequest] = ()

    async def transfer_async(
        self, requests: Sequence[TransferRequest], timeout_s: float | None = None, *, checksum: bool = True
    ) -> list[TransferResult]:
        self.requests = requests
        if self.waits_for is not None:
            await self.waits_for.wait()
        results = await super().transfer_async(requests, timeout_s, checksum=checksum)
        self.place.now += self.pass_s
        return results


@pytest.fixture
async def holder() -> AsyncIterator[Holder]:
    holder = Holder()
    yield holder
    holder.engine.close()


@pytest.fixture
async def place(holder: Holder) -> AsyncIterator[Place]:
    async with serving(holder) as address:
        engine = LateEngine(limits=PATIENT)
        engine.start()
        place = engine.place = Place(address, engine)
        yield place
        await place.reader.close()
        await place.channels.close()
    engine.close()


async def test_all_arrive_in_their_places(holder: Holder, place: Place) -> None:
    assert await place.fetch() == 8
    assert place.blocks(8)
    await place.settled(holder)
    assert holder.asked[0].lease_ms == LEASE_S * 1000
    assert await place.fetch(timeout_s=2.0) == 8
    assert holder.asked[1].lease_ms == round((2.0 + LEASE_SLACK_S) * 1000)


async def test_the_way_to_the_holder_is_all_that_it_said(holder: Holder, place: Place) -> None:
    assert await place.fetch() == 8
    assert {request.remote for request in place.engine.requests} == {holder.engine.descriptor()}
    await place.settled(holder)


async def test_nothing_held_is_no_error(holder: Holder, place: Place) -> None:
    holder.twist = lambda reply: reply.Clear()
    assert await place.fetch() == 0
    await place.settled(holder)


async def test_what_arrives_after_the_lease_is_not_used(holder: Holder, place: Place) -> None:
    place.engine.pass_s = WAIT_S + LEASE_SLACK_S
    assert await place.fetch() == 0
    await place.settled(holder)


async def test_what_a_read_says_of_the_holder(holder: Holder, place: Place) -> None:
    assert (await place.read()).worked is True
    assert (await place.read(timeout_s=0.0)).worked is None, "it was not asked"
    place.engine.pass_s = WAIT_S + LEASE_SLACK_S
    assert (await place.read()).worked is None, "we were late"
    place.engine.pass_s = 0.0
    closed = holder.engine.register_local_memory(bytearray(8 * BLOCK), access=Access.NONE).key
    holder.twist = lambda reply: setattr(reply.segment.regions[0], "key", closed)
    assert (await place.read()).worked is False
    holder.twist = lambda reply: setattr(reply.segment.regions[0], "key", bytes(16))
    assert (await place.read()).worked is None, "it has taken its key back"
    holder.twist = lambda reply: setattr(reply.segment, "boot_id", "00" * 16)
    assert (await place.read()).worked is None, "it was restarted"
    holder.twist = lambda reply: reply.Clear()
    assert (await place.read()).worked is True, "a miss is an answer"
    holder.twist = lambda reply: None
    await place.settled(holder)


async def test_a_shorter_lease_than_asked_for_counts(holder: Holder, place: Place) -> None:
    def shorten(reply: kvstore_pb2.AcquireResponse) -> None:
        reply.lease_ms = 1000

    holder.twist = shorten
    place.engine.pass_s = 0.999
    assert await place.fetch() == 8
    place.engine.pass_s = 1.0
    assert await place.fetch() == 0
    await place.settled(holder)


async def test_the_lease_runs_from_before_the_question(holder: Holder, place: Place) -> None:
    def answer_after(seconds: float) -> int:
        """Makes the answer take so long, of a lease of a second. Returns how many blocks may be used."""

        def slowly(reply: kvstore_pb2.AcquireResponse) -> None:
            reply.lease_ms = 1000
            place.now += seconds

        holder.twist = slowly
        return 8 if seconds < 1.0 else 0

    for seconds in (0.5, 1.0, 2.0):
        usable = answer_after(seconds)
        assert await place.fetch() == usable
    await place.settled(holder)


def _block(position: int, **change: int):
    def twist(reply: kvstore_pb2.AcquireResponse) -> None:
        for name, value in change.items():
            setattr(reply.blocks[position], name, value)

    return twist


@pytest.mark.parametrize(
    ("twist", "arrived"),
    [
        (_block(3, length_bytes=BLOCK - 1), 3),
        (_block(3, length_bytes=1 << 60), 3),
        (_block(3, offset_bytes=8 * BLOCK - 1), 3),
        (_block(3, offset_bytes=2**64 - 1), 3),
        (_block(3, index=2), 3),
        (_block(3, index=4), 3),
        (_block(7, index=8), 7),
        (_block(0, index=1), 0),
        (lambda reply: reply.segment.Clear(), 0),
        (lambda reply: reply.segment.regions.pop(), 0),
        (lambda reply: setattr(reply.segment, "boot_id", "zz"), 0),
        (lambda reply: reply.blocks.extend(list(reply.blocks)), 8),
    ],
)
async def test_answers_that_make_no_sense_end_the_run(holder: Holder, place: Place, twist, arrived: int) -> None:
    holder.twist = twist
    assert await place.fetch() == arrived
    assert place.blocks(arrived)
    assert place.memory[arrived * BLOCK :] == b"\xff" * BLOCK * (8 - arrived)
    await place.settled(holder)


async def test_memory_that_is_gone_is_a_miss(holder: Holder, place: Place) -> None:
    holder.twist = lambda reply: setattr(reply.segment.regions[0], "key", bytes(16))
    assert await place.fetch() == 0
    holder.twist = lambda reply: setattr(reply.segment, "boot_id", "00" * 16)
    assert await place.fetch() == 0
    await place.settled(holder)


async def test_many_keys_go_in_parts(holder: Holder, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pinyon.store.reader.MAX_KEYS", 3)
    assert await place.fetch() == 8
    assert place.blocks(8)
    assert [len(request.keys) // 16 for request in holder.asked] == [3, 3, 2]
    holder.asked.clear()
    holder.twist = lambda reply: reply.blocks.pop()
    assert await place.fetch() == 2
    assert len(holder.asked) == 1, "nothing is asked for after the first gap"
    await place.settled(holder)


async def test_cancelled_while_asking(holder: Holder, place: Place) -> None:
    """The holder grants the lease after the caller has gone: the lease is returned all the same."""
    holder.gate.clear()
    fetch = asyncio.create_task(place.fetch())
    await asyncio.wait_for(holder.reached.wait(), WAIT_S)
    fetch.cancel()
    await asyncio.wait({fetch})
    assert fetch.cancelled()
    assert holder.leases == {1}
    holder.gate.set()
    await place.settled(holder)
    assert place.memory == b"\xff" * BLOCK * 8


async def test_a_holder_that_is_not_there_is_an_error(holder: Holder, place: Place) -> None:
    place.address = "127.0.0.1:9"
    with pytest.raises(Unavailable):
        await place.fetch()
    with pytest.raises(InvalidArgument):
        await place.reader.read("127.0.0.1:9", KEYS, [place.kv.pieces(0)], BLOCK, 1.0)
    assert await place.fetch(timeout_s=0.0) == 0


async def test_a_holder_that_does_not_answer_is_left_in_time(holder: Holder, place: Place) -> None:
    holder.gate.clear()
    with pytest.raises(PinyonError) as caught:
        await place.fetch(timeout_s=0.05)
    assert caught.value.grpc_code == "DEADLINE_EXCEEDED"
    holder.gate.set()


async def test_channels_are_shared_and_a_bounded_number_stays_open(holder: Holder, place: Place) -> None:
    channels, asked = NodeChannels(max_idle=2), kvstore_pb2.AcquireRequest()

    async def ask(address: str) -> None:
        await channels.call(address, kvstore_pb2_grpc.BlockReadServiceStub, "Acquire", asked, WAIT_S)

    holder.gate.clear()
    waiting = [asyncio.create_task(ask(place.address)) for _ in range(2)]
    await eventually(lambda: len(holder.asked) == 2, "both calls are under way")
    (used,) = channels._channels
    for port in (1, 2, 3):
        with pytest.raises(Unavailable):
            await ask(f"127.0.0.1:{port}")
    assert [address for address, _ in channels._channels] == [used[0], "127.0.0.1:3"], "unused ones go, used ones stay"
    holder.gate.set()
    await asyncio.gather(*waiting)
    await channels.close()
    with pytest.raises(FailedPrecondition):
        await ask(place.address)


def short(reply: kvstore_pb2.AcquireResponse) -> None:
    reply.lease_ms = 200


async def test_a_read_that_takes_long_renews_its_lease(holder: Holder, place: Place) -> None:
    holder.twist = short
    place.engine.waits_for = holder.renewed
    assert await place.fetch() == 8
    assert holder.renewals >= 3
    await place.settled(holder)


async def test_a_lease_that_is_not_renewed_ends_the_read(holder: Holder, place: Place) -> None:
    holder.twist, holder.renews = short, False
    place.engine.waits_for, place.engine.pass_s = holder.renewed, 0.2
    assert await place.read() == ReadResult(0, worked=None)
    assert holder.renewals == 1
    await place.settled(holder)


@pytest.mark.parametrize("bad", [0, 3])
async def test_bytes_that_do_not_match_their_checksum_are_a_miss(holder: Holder, place: Place, bad: int) -> None:
    def sums(reply: kvstore_pb2.AcquireResponse) -> None:
        for number, block in enumerate(reply.blocks):
            block.checksums = xxh3_64_digest(bytes([number]) * BLOCK)

    holder.twist = sums
    assert await place.read() == ReadResult(8, worked=True)
    holder.memory[bad * BLOCK + 7] ^= 1
    assert await place.read() == ReadResult(bad, worked=True), "the node is not to blame for one block"
    assert place.reader.corrupt == 1
    await place.settled(holder)
    assert holder.complaints == [bad]
    holder.memory[7 * BLOCK] ^= 1
    assert await place.read() == ReadResult(bad, worked=False), "the path is not to be trusted"


@pytest.mark.parametrize("sums", [b"short", bytes(8 * 2000)])
async def test_checksums_that_make_no_sense_are_a_miss(holder: Holder, place: Place, sums: bytes) -> None:
    holder.twist = lambda reply: setattr(reply.blocks[2], "checksums", sums)
    assert await place.fetch() == 2
    await place.settled(holder)


async def test_parts_of_blocks_are_read_alone(holder: Holder, place: Place) -> None:
    quarter = BLOCK // 4
    for block in range(8):
        for part in range(4):
            at = block * BLOCK + part * quarter
            holder.memory[at : at + quarter] = bytes([16 * part + block]) * quarter

    def sums(reply: kvstore_pb2.AcquireResponse) -> None:
        for number, block in enumerate(reply.blocks):
            block.checksums = b"".join(xxh3_64_digest(bytes([16 * part + number]) * quarter) for part in range(4))

    holder.twist = sums
    two = KvMemory.whole(place.region, 2 * quarter)
    places = [two.pieces(slot) for slot in range(8)]

    async def read() -> ReadResult:
        return await place.reader.read(place.address, KEYS, places, 2 * quarter, WAIT_S, parts=PartRange(1, 2, 4))

    assert await read() == ReadResult(8, worked=True)
    for block in range(8):
        expected = bytes([16 + block]) * quarter + bytes([32 + block]) * quarter
        assert place.memory[block * 2 * quarter : (block + 1) * 2 * quarter] == expected
    holder.memory[5 * BLOCK] ^= 1  # in a part that is not read
    assert await read() == ReadResult(8, worked=True)
    holder.memory[5 * BLOCK + quarter] ^= 1
    assert await read() == ReadResult(5, worked=True)
    holder.twist = lambda reply: setattr(reply.blocks[0], "checksums", bytes(8))
    assert (await read()).leading == 0, "it was put as a whole, so that nobody can check a part"
    await place.settled(holder)
