"""Device memory through the staging pool: the pool, the chain that a transport sees, and both with transports."""

from __future__ import annotations

import logging
import os
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from pinyon.transfer import Opcode, Reason, TransferEngine, TransferRequest, TransferStatus
from pinyon.transfer.chains.chain import Chain, ChainOutcome
from pinyon.transfer.chains.slicing import ChainPlan, Slice
from pinyon.transfer.memory.device import DeviceError
from pinyon.transfer.memory.region import Access, Region
from pinyon.transfer.memory.staging_pool import StagingBuffer, StagingPool
from pinyon.transfer.memory.table import MemoryTable
from pinyon.transfer.transports.shm.cma import shm_available
from pinyon.transfer.transports.staged import needs_staging, run_staged
from pinyon.transfer.types.nic import Path
from pinyon.transfer.types.segment import SegmentDescriptor
from tests.unit.transfer.conftest import GENEROUS_S, PATIENT, eventually
from tests.unit.transfer.fake_device import FakeDriver, fake_device

READ, WRITE = Opcode.READ, Opcode.WRITE
PAGE = 4096
COMPLETED = TransferStatus.COMPLETED
INTERNAL = (TransferStatus.FAILED, Reason.INTERNAL)


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    with fake_device() as driver:
        yield driver


def soon() -> float:
    return time.monotonic() + GENEROUS_S


def never() -> bool:
    return False


# --- the pool ---


def pool_of(pages: int, forgotten: list[Region] | None = None) -> StagingPool:
    return StagingPool(pages * PAGE, (forgotten if forgotten is not None else []).append, time.monotonic)


def test_the_pool_lends_each_byte_to_one_at_a_time() -> None:
    """The loans are random, against a set of pages."""
    seed = secrets.randbits(32)
    print("seed", seed)
    rng = random.Random(seed)
    pool = pool_of(16)
    loans: dict[StagingBuffer, set[int]] = {}
    for _ in range(3000):
        if loans and rng.random() < 0.5:
            buffer = rng.choice(list(loans))
            del loans[buffer]
            buffer.release()
            buffer.release()
            continue
        nbytes = rng.randint(1, 6 * PAGE)
        pages = -(-nbytes // PAGE)
        buffer = pool.acquire(nbytes, 0.0, never)
        used = set().union(*loans.values())
        if buffer is None:
            assert not any(not used & set(range(at, at + pages)) for at in range(16 - pages + 1))
            continue
        mine = set(range(buffer.start // PAGE, buffer.start // PAGE + pages))
        assert buffer.start % PAGE == 0
        assert not mine & used
        assert max(mine) < 16
        loans[buffer] = mine
    for buffer in loans:
        buffer.release()
    assert not any(pool._pages)
    assert not pool._queue


def test_who_waits_longest_is_served_first() -> None:
    """A small request must not overtake a large one, which would else wait for ever."""
    pool = pool_of(4)
    first, second = pool.acquire(2 * PAGE, 0.0, never), pool.acquire(2 * PAGE, 0.0, never)
    assert first is not None
    assert second is not None
    served: list[int] = []
    threads: list[threading.Thread] = []

    def serve(pages: int) -> None:
        with pool.acquire(pages * PAGE, soon(), never) or pytest.fail("nothing"):
            served.append(pages)

    for pages in (4, 1):
        threads.append(threading.Thread(target=serve, args=(pages,)))
        threads[-1].start()
        eventually(lambda: len(pool._queue) == len(threads), "waits")
    first.release()
    second.release()
    for thread in threads:
        thread.join(GENEROUS_S)
    assert served == [4, 1]
    assert not any(pool._pages)


def test_waiting_ends_by_deadline_by_giving_up_or_by_closing() -> None:
    forgotten: list[Region] = []
    pool = pool_of(1, forgotten)
    with pytest.raises(DeviceError, match="do not fit"):
        pool.acquire(PAGE + 1, soon(), never)
    buffer = pool.acquire(1, soon(), never)
    assert buffer is not None
    assert pool.acquire(1, time.monotonic() + 0.01, never) is None
    assert pool.acquire(1, soon(), lambda: True) is None
    answers: list[StagingBuffer | None] = []
    waiter = threading.Thread(target=lambda: answers.append(pool.acquire(1, soon(), never)))
    waiter.start()
    eventually(lambda: len(pool._queue) == 1, "waits")
    pool.close()
    waiter.join(GENEROUS_S)
    assert answers == [None]
    assert not forgotten  # not while it is in use
    region = buffer.region
    buffer.view(0, 1)[:] = b"x"
    buffer.release()
    assert forgotten == [region]
    assert not region.alive
    assert pool.acquire(1, soon(), never) is None


def test_a_used_pool_is_pinned_and_works_if_pinning_fails(driver, caplog) -> None:
    other = FakeDriver()
    other.pin_fails = True
    pool = pool_of(4)
    pool.use(driver)
    pool.use(driver)
    assert not driver.pinned
    buffer = pool.acquire(1, soon(), never)
    assert buffer is not None
    assert driver.pinned == 4 * PAGE
    with caplog.at_level(logging.WARNING):
        pool.use(other)
    assert "not pinned" in caplog.text
    pool.close()
    assert driver.pinned == 4 * PAGE
    buffer.release()
    assert not driver.pinned


def test_the_pools_live_as_long_as_device_memory_is_registered(driver) -> None:
    table = MemoryTable()
    taken_back: list[Region] = []
    table.on_unregister.append(taken_back.append)
    host = table.register(bytearray(8), None, Access.READ)
    assert not table.staging_in.regions
    one, two = (table.register(driver.tensor(bytearray(8)), None, Access.READ) for _ in range(2))
    assert table.staging_in.regions == 2
    with table.staging_out.acquire(1, soon(), never) or pytest.fail("nothing") as buffer:
        pass
    table.unregister(one, 0.0)
    table.unregister(one, 0.0)
    assert table.staging_in.regions == 1
    assert driver.pinned
    table.unregister(two, 0.0)
    assert not table.staging_in.regions
    assert not driver.pinned
    assert table.staging_out.acquire(1, soon(), never) is None
    assert taken_back == [one, two, buffer.region]
    table.unregister(host, 0.0)
    table.register(driver.tensor(bytearray(8)), None, Access.READ)
    with table.staging_out.acquire(1, soon(), never) or pytest.fail("nothing") as other:
        assert other.region is not buffer.region


# --- the chain that a transport sees ---


class Wire:
    """A transport that moves bytes to and from ``far``, with the test's actions in between."""

    name = "tcp"

    def __init__(self, far: bytearray) -> None:
        self.far = far
        self.refuse: set[int] = set()
        self.before_claim: Callable[[Chain], None] = lambda chain: None
        self.between: Callable[[Chain], None] = lambda chain: None
        """The action between the claim of the chain and the first byte."""
        self.outcome: ChainOutcome | None = None
        self.aborted = 0
        self.claims: list[bool] = []
        self.unclaims: list[bool] = []
        self.runs: list[list[int]] = []

    def abort(self) -> None:
        self.aborted += 1

    def run(self, chain: Chain, path: Path) -> ChainOutcome:
        self.runs.append([part.length for part in chain.slices])
        assert sum(part.length for part in chain.slices) == chain.nbytes
        self.before_claim(chain)
        self.claims.append(chain.claim(self.abort))
        if not self.claims[-1]:
            return ChainOutcome(TransferStatus.CANCELLED, Reason.CANCELLED)
        try:
            self.between(chain)
        except BaseException:
            chain.unclaim()
            raise
        codes = bytearray()
        for part in chain.slices:
            codes.append(Reason.OUT_OF_RANGE if part.remote_offset in self.refuse else 0)
            here = chain.regions[part.local].view[part.local_offset : part.local_offset + part.length]
            if codes[-1]:
                if chain.opcode is READ:
                    here[:] = b"!" * part.length  # these bytes must stay invisible
                continue
            there = memoryview(self.far)[part.remote_offset : part.remote_offset + part.length]
            if chain.opcode is READ:
                here[:] = there
            else:
                there[:] = here
        self.unclaims.append(chain.unclaim())
        if self.outcome is not None:
            chain.fence = 77
            return self.outcome
        return ChainOutcome(COMPLETED, Reason.NONE, bytes(codes) if any(codes) else None)


PATH = Path("tcp", "", "")
REMOTE = SegmentDescriptor("10.0.0.1", 1, bytes(16))


class Staged:
    """A chain of one device region and one host region, which runs over a :class:`Wire`."""

    def __init__(self, driver: FakeDriver, opcode: Opcode, staging_bytes: int = 64 * PAGE) -> None:
        self.table = MemoryTable(staging_bytes=staging_bytes)
        self.near, self.host, self.far = (bytearray(os.urandom(16 * PAGE)) for _ in range(3))
        self.region = self.table.register(driver.tensor(self.near), None, Access.READ)
        self.plain = self.table.register(self.host, None, Access.READ)
        self.wire = Wire(self.far)
        self.opcode = opcode
        self.ended: list[ChainOutcome] = []

    def chain(self, *parts: tuple[Region, int, int, int]) -> Chain:
        """Returns a chain of parts ``(local region, offset there, offset at the far end, length)``."""
        slices = [Slice(0, region.key, here, bytes(16), there, size) for region, here, there, size in parts]
        plan = ChainPlan(REMOTE, self.opcode, slices, sum(part.length for part in slices), "fake:0", "")
        regions = {region.key: region for region in (self.region, self.plain)}
        return Chain(plan, regions, soon(), lambda _, outcome: self.ended.append(outcome))

    def run(self, chain: Chain) -> ChainOutcome:
        return run_staged(self.wire, chain, PATH, self.table.staging_out)

    def idle(self) -> bool:
        pool = self.table.staging_out
        return not pool._lent and not pool._queue


@pytest.mark.parametrize("opcode", [READ, WRITE])
def test_neighbours_are_copied_together(driver, opcode) -> None:
    staged = Staged(driver, opcode, 8 * PAGE)
    chain = staged.chain(
        (staged.region, 0, 100, 3 * PAGE),
        (staged.region, 3 * PAGE, 100 + 3 * PAGE, 50),
        (staged.plain, 5, 40_000, 1000),
        (staged.region, 9 * PAGE, 50_000, PAGE),
    )
    near, host, far = bytearray(staged.near), bytearray(staged.host), bytearray(staged.far)
    for part in chain.slices:
        here = near if part.local == staged.region.key else host
        one, other = slice(part.local_offset, part.local_offset + part.length), part.remote_offset
        if opcode is READ:
            here[one] = far[other : other + part.length]
        else:
            far[other : other + part.length] = here[one]
    assert staged.run(chain) == ChainOutcome(COMPLETED)
    assert (staged.near, staged.host, staged.far) == (near, host, far)
    assert staged.wire.runs == [[3 * PAGE, 50, 1000, PAGE]]
    direction = "in" if opcode is READ else "out"
    assert driver.copies == {"in": 0, "out": 0} | {direction: 2}
    assert staged.idle()
    assert chain.claim(lambda: None)  # the chain was released


@pytest.mark.parametrize("opcode", [READ, WRITE])
def test_refused_slices_are_not_copied_to_the_device(driver, opcode) -> None:
    staged = Staged(driver, opcode, 8 * PAGE)
    parts = (0, 0, 100), (4 * PAGE, 5000, 100), (100, PAGE, 2 * PAGE)  # the last is the first one's neighbour
    staged.wire.refuse = {5000}
    before = bytes(staged.near)
    outcome = staged.run(staged.chain(*((staged.region, *part) for part in parts)))
    assert outcome.status is COMPLETED
    assert outcome.refusals == bytes([0, Reason.OUT_OF_RANGE, 0])
    end = 100 + 2 * PAGE
    if opcode is READ:
        assert staged.near == staged.far[:100] + staged.far[PAGE : 3 * PAGE] + before[end:]
    else:
        assert staged.far[PAGE : 3 * PAGE] == staged.near[100:end]
    assert staged.idle()


@pytest.mark.parametrize(("opcode", "direction"), [(READ, "in"), (WRITE, "out")])
def test_a_failing_device_fails_the_chain(driver, opcode, direction, caplog) -> None:
    staged = Staged(driver, opcode)
    driver.fail_after[direction] = 1
    chain = staged.chain((staged.region, 0, 0, PAGE), (staged.region, 2 * PAGE, 2 * PAGE, PAGE))
    with caplog.at_level(logging.ERROR):
        outcome = staged.run(chain)
    assert outcome[:2] == INTERNAL
    assert "as told" in caplog.text
    assert staged.idle()
    assert not staged.wire.aborted
    assert staged.wire.claims == ([True] if opcode is READ else [])
    chain.finish(outcome)
    assert staged.ended == [outcome]


@pytest.mark.parametrize("opcode", [READ, WRITE])
def test_a_failed_attempt_leaves_its_fence_and_no_device_byte(driver, opcode) -> None:
    staged = Staged(driver, opcode)
    before = bytes(staged.near)
    staged.wire.outcome = ChainOutcome(TransferStatus.FAILED, Reason.CONNECTION_LOST)
    chain = staged.chain((staged.region, 0, 0, PAGE))
    assert staged.run(chain) == staged.wire.outcome
    assert chain.fence == 77
    assert staged.near == before
    assert staged.idle()
    seen = []
    staged.wire.before_claim = lambda part: seen.append(part.fence)
    staged.wire.outcome = None
    assert staged.run(chain).status is COMPLETED
    assert seen == [77]


def test_a_chain_ending_while_it_waits_for_room_touches_nothing(driver) -> None:
    staged = Staged(driver, WRITE, 4 * PAGE)
    pool = staged.table.staging_out
    buffer = pool.acquire(4 * PAGE, soon(), never)
    chain = staged.chain((staged.region, 0, 0, 10))
    outcomes: list[ChainOutcome] = []
    runner = threading.Thread(target=lambda: outcomes.append(staged.run(chain)))
    runner.start()
    eventually(lambda: len(pool._queue) == 1, "waits")
    chain.shut()
    assert [one.reason for one in staged.ended] == [Reason.SHUTDOWN]  # at once
    runner.join(GENEROUS_S)
    assert outcomes[0].status is TransferStatus.CANCELLED
    assert staged.wire.runs == []
    buffer.release()
    chain = staged.chain((staged.region, 0, 0, 10))
    buffer = pool.acquire(4 * PAGE, soon(), never)
    chain.deadline = 0.0
    assert staged.run(chain) == ChainOutcome(TransferStatus.TIMEOUT, Reason.DEADLINE)
    buffer.release()
    assert staged.idle()


def test_a_chain_that_ends_before_its_claim_is_left_alone(driver) -> None:
    staged = Staged(driver, WRITE)
    chain = staged.chain((staged.region, 0, 0, 10))
    staged.wire.before_claim = lambda part: (chain.shut(), None)[1]
    assert staged.run(chain).status is TransferStatus.CANCELLED
    assert staged.wire.claims == [False]
    assert staged.idle()


@pytest.mark.parametrize("opcode", [READ, WRITE])
def test_stopping_aborts_only_an_endpoint_still_in_use(driver, opcode) -> None:
    """An endpoint goes to another chain between the transport's part and the copies."""
    staged = Staged(driver, opcode)
    before = bytes(staged.near)
    chain = staged.chain((staged.region, 0, 0, PAGE), (staged.region, 2 * PAGE, 2 * PAGE, PAGE))
    driver.on_copy = lambda direction: chain.shut()
    outcome = staged.run(chain)
    assert not staged.wire.aborted
    assert outcome.status is TransferStatus.CANCELLED
    assert sum(driver.copies.values()) == 1  # the second one did not begin
    if opcode is WRITE:
        assert staged.near == before
        assert staged.wire.claims == []
    assert not staged.ended  # the device's memory was in use until now
    chain.finish(outcome)
    assert [one.reason for one in staged.ended] == [Reason.SHUTDOWN]

    driver.on_copy = lambda direction: None
    chain = staged.chain((staged.region, 0, 0, PAGE))
    staged.wire.between = lambda part: chain.shut()
    staged.wire.outcome = ChainOutcome(TransferStatus.FAILED, Reason.CONNECTION_LOST)
    chain.finish(staged.run(chain))
    assert [one.reason for one in staged.ended] == [Reason.SHUTDOWN] * 2
    assert staged.wire.aborted == 1
    assert staged.wire.unclaims[-1] is False
    assert staged.idle()


def test_a_path_that_is_gone_does_not_undo_what_has_arrived(driver) -> None:
    staged = Staged(driver, READ)
    chain = staged.chain((staged.region, 0, 0, PAGE), (staged.region, 2 * PAGE, 2 * PAGE, PAGE))
    driver.on_copy = lambda direction: chain.interrupt()
    assert staged.run(chain) == ChainOutcome(COMPLETED)
    assert driver.copies["in"] == 2
    assert not staged.wire.aborted
    assert staged.idle()


def test_what_is_stopped_while_the_wire_runs_is_not_copied_in(driver) -> None:
    staged = Staged(driver, READ)
    chain = staged.chain((staged.region, 0, 0, PAGE))
    staged.wire.between = lambda part: chain.shut()
    assert staged.run(chain).status is TransferStatus.CANCELLED
    assert not driver.copies["in"]
    assert staged.idle()


def test_a_defect_of_the_transport_lets_go_of_everything(driver) -> None:
    staged = Staged(driver, WRITE)

    def fail(_: Chain) -> None:
        raise RuntimeError("on purpose")

    staged.wire.between = fail
    chain = staged.chain((staged.region, 0, 0, PAGE))
    with pytest.raises(RuntimeError):
        staged.run(chain)
    assert staged.idle()
    chain.shut()
    assert [one.reason for one in staged.ended] == [Reason.SHUTDOWN]


def test_only_what_a_transport_cannot_reach_is_staged(driver) -> None:
    staged = Staged(driver, WRITE)
    on_device, host = staged.chain((staged.region, 0, 0, 1)), staged.chain((staged.plain, 0, 0, 1))
    assert needs_staging(on_device, PATH)
    assert not needs_staging(host, PATH)
    rdma = Path("rdma", "a", "b")
    assert needs_staging(on_device, rdma)
    staged.region.direct = True  # the initial state of an exportable region
    assert not needs_staging(on_device, rdma)
    assert needs_staging(on_device, PATH)


# --- with transports ---


@pytest.fixture
def start(started) -> Callable[..., TransferEngine]:
    return lambda *transports, limits=PATIENT: started(transports=transports, limits=limits)


@pytest.mark.parametrize("opcode", [READ, WRITE])
@pytest.mark.parametrize("near_on_device", [True, False])
@pytest.mark.parametrize("transport", ["tcp", "local"])
def test_a_device_error_fails_the_request_and_not_the_engine(
    driver, start, opcode, near_on_device, transport, caplog
) -> None:
    engine = start(transport)
    server = engine if transport == "local" else start("tcp")
    near, far = bytearray(os.urandom(5000)), bytearray(os.urandom(5000))
    local = engine.register_local_memory(driver.tensor(near) if near_on_device else near)
    remote = server.register_local_memory(far if near_on_device else driver.tensor(far))
    request = TransferRequest(opcode, local.key, 0, server.descriptor(), remote.key, 0, 5000)
    direction = "in" if (opcode is READ) is near_on_device else "out"
    driver.fail_after[direction] = 0
    with caplog.at_level(logging.ERROR):
        (result,) = engine.transfer([request])
    assert "as told" in caplog.text
    assert (result.status, result.reason) == INTERNAL
    driver.fail_after[direction] = 1 << 60
    eventually(lambda: engine.transfer([request])[0].ok, "works again")
    assert near == far
    for table in (engine._memory, server._memory):
        assert not table.staging_out._lent
        eventually(lambda table=table: not table.staging_in._lent, "given back")


@pytest.mark.parametrize("opcode", [READ, WRITE])
@pytest.mark.parametrize("published", [True, False])
def test_shm_does_not_reach_device_memory_and_tcp_goes_on(driver, start, opcode, published) -> None:
    if (reason := shm_available()) is not None:
        pytest.skip(f"shm: {reason}")
    engine, server = start("shm", "tcp"), start("shm", "tcp")
    near, far, plain = bytearray(os.urandom(5000)), bytearray(os.urandom(5000)), bytearray(5000)
    local = engine.register_local_memory(near)
    remote, host = server.register_local_memory(driver.tensor(far)), server.register_local_memory(plain)
    segment = server.descriptor() if published else server.descriptor([])
    for _ in range(2):
        (result,) = engine.transfer([TransferRequest(opcode, local.key, 0, segment, remote.key, 0, 5000)])
        assert result.ok
    assert near == far
    assert engine.transfer([TransferRequest(WRITE, local.key, 0, segment, host.key, 0, 5000)])[0].ok
    assert plain == near
    moved = {one.path.transport: one for one in engine.stats().paths}
    assert moved["shm"].chains == 1  # host memory is still reached by shm
    assert moved["tcp"].chains == 2
    assert not any(one.failures for one in moved.values())
    alone = start("shm")
    local = alone.register_local_memory(bytearray(5000))
    (result,) = alone.transfer([TransferRequest(opcode, local.key, 0, segment, remote.key, 0, 5000)])
    assert (result.status, result.reason) == (TransferStatus.FAILED, Reason.NO_PATH)


def test_closing_in_the_middle_gives_everything_back(driver, start) -> None:
    engine, server = start("tcp"), start("tcp")
    near, far = bytearray(20 << 20), bytearray(20 << 20)
    tensors = [driver.tensor(near), driver.tensor(far)]
    local, remote = engine.register_local_memory(tensors[0]), server.register_local_memory(tensors[1])
    copying = threading.Event()
    driver.on_copy = lambda direction: copying.set()
    handle = engine.submit([TransferRequest(READ, local.key, 0, server.descriptor(), remote.key, 0, len(near))] * 4)
    assert copying.wait(GENEROUS_S)
    engine.close()
    near[:] = bytes(len(near))
    far[:] = b"f" * len(far)
    for result in handle.wait(GENEROUS_S):
        assert result.status in (COMPLETED, TransferStatus.CANCELLED)
    assert not any(near)  # nothing landed after the end
    server.close()
    assert not driver.pinned
    assert [tensor.deleted for tensor in tensors] == [1, 1]


def test_host_requests_beside_device_memory_are_not_staged(driver, start) -> None:
    engine, server = start("tcp"), start("tcp")
    engine.register_local_memory(driver.tensor(bytearray(8)))
    server.register_local_memory(driver.tensor(bytearray(8)))
    near, far = bytearray(b"n" * 100), bytearray(100)
    local, remote = engine.register_local_memory(near), server.register_local_memory(far)
    (result,) = engine.transfer([TransferRequest(WRITE, local.key, 0, server.descriptor(), remote.key, 0, 100)])
    assert result.ok
    assert far == near
    assert not driver.pinned  # the pools were not even allocated
