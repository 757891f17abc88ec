"""Cross-memory copies with this process as its own peer, which makes no difference to the kernel."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from array import array
from functools import partial

import pytest

from pinyon.transfer import Access
from pinyon.transfer.memory.table import MemoryTable
from pinyon.transfer.transports.shm import cma
from pinyon.transfer.transports.shm.cma import PeerMemory, allow_any_reader, fence, shm_available
from pinyon.transfer.transports.shm.seal import Seals
from pinyon.transfer.transports.shm.wire import Seal

pytestmark = pytest.mark.skipif(shm_available() is not None, reason=str(shm_available()))

UNMAPPED = 4096
"""An address below vm.mmap_min_addr, which is never mapped."""


@pytest.fixture
def memory() -> PeerMemory:
    return PeerMemory(os.getpid())


@pytest.fixture
def cell() -> array[int]:
    return array("Q", [11, 22])


def seal_of(cell: array[int]) -> Seal:
    return Seal(cell.buffer_info()[0], cell.tobytes())


def nothing() -> None:
    pass


def test_random_moves_match_byte_arrays(cell, monkeypatch) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    monkeypatch.setattr(cma, "PIECE_BYTES", 10_000)  # many cuts, also inside a range
    memory = PeerMemory(os.getpid())
    there = array("B", rng.randbytes(1 << 20))
    for _ in range(30):
        here = array("B", bytes(1 << 20))
        model = bytearray(here)
        moves = []
        at = 0
        for _ in range(rng.randrange(1, 3000)):
            length = rng.choice([1, 7, 64, 333])
            at += rng.randrange(3)
            source = rng.randrange((1 << 20) - length)
            moves.append((here.buffer_info()[0] + at, there.buffer_info()[0] + source, length))
            model[at : at + length] = there[source : source + length]
            at += length
        pieces: list[None] = []
        nbytes = sum(move[2] for move in moves)
        assert memory.copy(moves, nbytes, seal_of(cell), partial(pieces.append, None))
        assert here.tobytes() == model
        assert len(pieces) >= max(-(-nbytes // cma.PIECE_BYTES), len(moves) // cma.IOV_MAX)


def test_the_exact_number_of_ranges_that_a_call_takes(memory, cell) -> None:
    there = array("B", bytes(range(256)) * 16)
    for count in (cma.IOV_MAX - 1, cma.IOV_MAX, cma.IOV_MAX + 1):
        here = array("B", bytes(2 * count))
        moves = [(here.buffer_info()[0] + 2 * i, there.buffer_info()[0] + i, 1) for i in range(count)]
        assert memory.copy(moves, count, seal_of(cell), nothing)
        assert here[::2] == there[:count]


def test_a_broken_seal_is_seen(memory, cell) -> None:
    intact = seal_of(cell)
    others = [Seal(intact.address, intact.value)] * (2 * cma.IOV_MAX)
    here, there = array("B", bytes(8)), array("B", bytes(8))
    move = (here.buffer_info()[0], there.buffer_info()[0], 8)
    assert memory.holds([intact, *others])
    assert memory.copy([move], 8, intact, nothing)
    assert memory.fetch_one(move[1], 8, intact) == bytes(8)
    cell[0] = 0
    assert not memory.holds([intact])
    assert memory.fetch_one(move[1], 8, intact) is None
    assert not memory.copy([move], 8, intact, nothing)
    assert not memory.holds([Seal(UNMAPPED, intact.value)])


def test_memory_that_is_not_there(memory, cell) -> None:
    here = array("B", bytes(8))
    to = here.buffer_info()[0]
    assert memory.fetch_one(UNMAPPED, 8, seal_of(cell)) is None
    assert not memory.copy([(to, UNMAPPED, 8)], 8, seal_of(cell), nothing)
    assert not memory.copy([(to, to, 4), (to + 4, UNMAPPED, 4)], 8, seal_of(cell), nothing)


def test_a_process_that_is_not_there(cell) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    memory = PeerMemory(child.pid)
    here = array("B", bytes(8))
    move = (here.buffer_info()[0], here.buffer_info()[0], 8)
    for call in (
        lambda: memory.holds([seal_of(cell)]),
        lambda: memory.fetch_one(move[1], 8, seal_of(cell)),
        lambda: memory.copy([move], 8, seal_of(cell), nothing),
    ):
        with pytest.raises(ProcessLookupError):
            call()


def test_what_stops_a_copy_comes_between_two_calls(cell, monkeypatch) -> None:
    monkeypatch.setattr(cma, "PIECE_BYTES", 4)
    memory = PeerMemory(os.getpid())
    there, here = array("B", b"abcdefgh"), array("B", bytes(8))
    calls = []

    def stop_at_second() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise KeyError

    with pytest.raises(KeyError):
        memory.copy([(here.buffer_info()[0], there.buffer_info()[0], 8)], 8, seal_of(cell), stop_at_second)
    assert here.tobytes() == b"abcd\0\0\0\0"


def test_fence_and_tracer_option_do_not_fail() -> None:
    fence()
    assert allow_any_reader() in (True, False)


def test_why_shm_is_not_available(monkeypatch) -> None:
    def refused(*arguments: object) -> int:
        cma.ctypes.set_errno(1)
        return -1

    monkeypatch.setattr(cma, "_readv", refused)
    assert shm_available() == "process_vm_readv is refused here (EPERM)"
    monkeypatch.setattr(cma, "_readv", None)
    assert shm_available() == "this system has no process_vm_readv"


def test_machines_that_need_a_barrier_and_cannot_have_one(monkeypatch) -> None:
    monkeypatch.setattr(cma.platform, "machine", lambda: "toaster")
    assert shm_available() == "membarrier is refused here (ENOSYS)"


def test_seals_live_as_long_as_their_grant_and_its_region(memory) -> None:
    table, seals = MemoryTable(), Seals(3)
    table.on_revoke.append(seals.revoke)
    regions = [table.register(bytearray(8), "cpu:0", Access.NONE) for _ in range(3)]
    one, revoked, other = (table.grant(region, [(0, 8)], Access.READ) for region in regions)
    first, second, third = (seals.issue(grant) for grant in (one, revoked, other))
    assert first is not None
    assert second is not None
    assert third is not None
    assert seals.issue(one) == first != third
    assert memory.holds([first, second, third])
    table.unregister(regions[0], 0.0)
    table.revoke(revoked, 0.0)
    assert not memory.holds([first])
    assert not memory.holds([second])
    assert memory.holds([third])
    assert seals.issue(one) is None
    assert seals.issue(revoked) is None
    seals.close()
    assert not memory.holds([third])
    assert seals.issue(other) is None
