"""The policies of a pool and a store node learn where something is evicted."""

from __future__ import annotations

from pinyon.eviction import EVICTION_POLICIES, Traits, Use
from pinyon.eviction.fit import PRIOR
from pinyon.paging import BlockPool, LeaseTable
from pinyon.store.allocator import OffsetAllocator
from pinyon.store.objects import ObjectTable
from tests.worker_integrity import check_pool

CHAT, FILE = Traits("chat/1"), Traits("file/1")
KEYS = [number.to_bytes(16, "big") for number in range(100)]


def test_a_pool_learns_whose_blocks_come_again() -> None:
    policy = EVICTION_POLICIES.make("workload_aware:refit_s=1")
    pool = BlockPool(100, policy)
    blocks = pool.allocate(100, now_s=0.0)
    assert blocks is not None
    pool.publish_all(blocks, KEYS, traits=CHAT, now_s=0.0)
    pool.release(blocks, now_s=0.0)
    found = [block for _, block in pool.acquire(KEYS[:50], now_s=20.0, use=Use(CHAT))]
    pool.release(found, now_s=20.0)
    held = pool.acquire(KEYS[:50], now_s=30.0)  # no request holds these
    pool.release([block for _, block in held], now_s=30.0)
    assert policy.fits == {"": PRIOR}  # type: ignore[attr-defined]
    assert pool.allocate(1, now_s=31.0) is not None
    share, mean_s = policy.fits["chat/1"]  # type: ignore[attr-defined]
    assert (round(share, 3), mean_s) == (round(50 / 150, 3), 20.0)
    check_pool(pool)


def test_a_node_learns_from_its_leases() -> None:
    policy = EVICTION_POLICIES.make("workload_aware:refit_s=1")
    table = ObjectTable(OffsetAllocator(1 << 16, 64), policy, LeaseTable())
    put_id, _ = table.put_start(KEYS, 64, 0.0, 60.0, CHAT)
    table.close_put(put_id)
    table.end_put(put_id, commit=True, now_s=0.0)
    lease = table.acquire(KEYS[:50], 20.0, 60.0)
    table.release(lease.lease_id, 20.0)
    assert policy.fits == {"": PRIOR}  # type: ignore[attr-defined]
    table.put_start([b"x" * 16], 64, 21.0, 60.0, FILE)
    share, mean_s = policy.fits["chat/1"]  # type: ignore[attr-defined]
    assert (round(share, 3), mean_s) == (round(50 / 150, 3), 20.0)
