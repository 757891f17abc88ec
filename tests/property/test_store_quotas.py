"""Tenants' quotas over a model: none is above its own at rest, and each loses its own coldest objects only."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pinyon.core.errors import InvalidArgument
from pinyon.eviction import EVICTION_POLICIES, Traits
from pinyon.paging import LeaseTable
from pinyon.store.allocator import OffsetAllocator
from pinyon.store.kv_object import SlotState
from pinyon.store.objects import EVICTED_MAX, ObjectTable
from pinyon.store.quotas import parse_quotas
from tests.long import usually
from tests.store_integrity import check_table

SIZE = 64
CAPACITY = 64 * SIZE
LIMITS = {"anna": 16, "": 8, "carl": 12, "dora": 12}
"""The objects that each tenant may hold; there is room for all of them, so nothing else makes an object go."""
QUOTAS: dict[str, int | float] = {"anna": 0.25, "": 8 * SIZE, "*": 12 * SIZE}
KEYS = {tenant: [bytes([number, each]) * 8 for each in range(24)] for number, tenant in enumerate(LIMITS)}


class Tenant:
    """The model of a tenant: its readable keys by their last use, and those that are read."""

    def __init__(self) -> None:
        self.order: OrderedDict[bytes, None] = OrderedDict()
        self.read: dict[bytes, int] = {}

    def use(self, keys: list[bytes]) -> None:
        for key in reversed(keys):
            self.order[key] = None
            self.order.move_to_end(key)

    def put(self, keys: list[bytes], limit: int) -> None:
        """Puts keys, each of which stays or comes, and takes room from the coldest of the others."""
        kept = [key for key in keys if key in self.order]
        may_go = [key for key in self.order if key not in kept and key not in self.read]
        self.use([key for key in kept if key not in self.read])
        come: list[bytes] = []
        for key in keys:
            if key in kept:
                continue
            if len(self.order) + len(come) >= limit:
                if not may_go:
                    continue
                del self.order[may_go.pop(0)]
            come.append(key)
        self.use(come)


operations = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "put", "acquire", "release", "remove", "give up"]),
        st.sampled_from(list(LIMITS)),
        st.lists(st.integers(0, 23), min_size=1, max_size=6, unique=True),
    ),
    max_size=60,
)


@pytest.mark.parametrize("policy", EVICTION_POLICIES.names)
@settings(max_examples=usually(20, long=300))
@given(steps=operations)
def test_each_tenant_loses_its_own_coldest_objects_only(policy: str, steps: list[tuple[str, str, list[int]]]) -> None:
    table = ObjectTable(OffsetAllocator(CAPACITY), EVICTION_POLICIES.make(policy), LeaseTable(), quotas=QUOTAS)
    model = {tenant: Tenant() for tenant in LIMITS}
    leases: list[tuple[int, str, list[bytes]]] = []
    for now, (step, tenant, numbers) in enumerate(steps):
        keys, expected = [KEYS[tenant][number] for number in numbers], model[tenant]
        if step in ("put", "give up"):
            put_id, slots = table.put_start(keys, SIZE, now, 1.0, Traits("", tenant))
            held = len({*table.keys()} & {*KEYS[tenant]}) + table.reserved_objects
            assert held <= LIMITS[tenant]
            expected.put(keys, LIMITS[tenant])
            reserved = [key for key, slot in zip(keys, slots, strict=True) if slot.state is SlotState.RESERVED]
            if any(slot.state is SlotState.NO_SPACE for slot in slots):
                assert f"tenant {tenant!r} may hold {LIMITS[tenant] * SIZE} bytes here" in table.why_no_space(
                    tenant, 64
                )
            if put_id:
                table.close_put(put_id)
                table.end_put(put_id, commit=step == "put", now_s=now)
            for key in reserved if step == "give up" else ():
                del expected.order[key]
        elif step == "acquire":
            lease = table.acquire(keys, now, 1e9, allow_gaps=True)
            there = [key for key in keys if key in expected.order]
            assert [held.key for _, held in lease.blocks] == there
            for key in there:
                expected.read[key] = expected.read.get(key, 0) + 1
            leases.append((lease.lease_id, tenant, there))
        elif step == "release" and leases:
            lease_id, reader, there = leases.pop(0)
            table.release(lease_id, now)
            for key in there:
                model[reader].read[key] -= 1
            ended = [key for key in there if not model[reader].read[key]]
            for key in ended:
                del model[reader].read[key]
            model[reader].use(ended)
        elif step == "remove":
            idle = [key for key in keys if key not in expected.read]
            table.remove(idle)
            for key in idle:
                expected.order.pop(key, None)
        for each, rest in model.items():
            assert [key in table for key in KEYS[each]] == [key in rest.order for key in KEYS[each]], each
        check_table(table)
    assert sum(table.quotas.held_bytes().values()) == table.used_bytes
    assert sum(table.quotas.evicted.values()) == table.eviction.evicted


def test_a_node_enforces_its_part_of_the_pool() -> None:
    table = ObjectTable(
        OffsetAllocator(CAPACITY), EVICTION_POLICIES.make("lru"), LeaseTable(), quotas={"anna": 8 * SIZE, "*": 0.5}
    )
    for tenant in ("anna", "carl"):
        put_id, _ = table.put_start(KEYS[tenant][:8], SIZE, 0.0, 1.0, Traits("", tenant))
        table.close_put(put_id)
        table.end_put(put_id, commit=True, now_s=0.0)
    lease = table.acquire(KEYS["anna"][4:5], 0.0, 9.0)
    assert not table.share_pool(CAPACITY, 1.0)
    assert table.share_pool(4 * CAPACITY, 1.0), "anna may hold two of eight here now"
    assert table.exists(KEYS["anna"][:8]) == [number in (0, 4) for number in range(8)]
    assert table.exists(KEYS["carl"][:8]) == [True] * 8
    assert table.share_pool(16 * CAPACITY, 1.0)
    assert not table.share_pool(16 * CAPACITY, 1.0), "what is read stays"
    assert table.put_start(KEYS["anna"][8:9], SIZE, 1.0, 1.0, Traits("", "anna"))[0] == 0
    assert table.counters.over_quota == 1
    table.release(lease.lease_id, 2.0)
    assert table.share_pool(16 * CAPACITY, 2.0)
    assert table.quotas.held_bytes() == {"anna": 0, "*": 8 * SIZE}
    assert table.quotas.limits() == {"anna": SIZE // 2, "*": CAPACITY // 2}
    assert table.quotas.evicted == {"anna": 8, "*": 0}
    put_id, _ = table.put_start(KEYS["dora"][:8], SIZE, 2.0, 1.0, Traits("", "dora"))
    assert table.quotas.held_bytes()["*"] == 16 * SIZE
    table.close_put(put_id)
    table.end_put(put_id, commit=False, now_s=2.0, lost=True)
    assert table.quotas.held_bytes()["*"] == 8 * SIZE, "lost room is nobody's"
    check_table(table)


def test_objects_on_their_way_to_the_disk_give_room_too() -> None:
    table = ObjectTable(OffsetAllocator(CAPACITY), EVICTION_POLICIES.make("lru"), LeaseTable(), quotas={"*": 2 * SIZE})
    for key in KEYS["anna"][:3]:
        if key == KEYS["anna"][2]:
            demoting = [table.demote(0.0), table.demote(0.0)]
        put_id, _ = table.put_start([key], SIZE, 0.0, 1.0, Traits("", "anna"))
        table.close_put(put_id)
        table.end_put(put_id, commit=True, now_s=0.0)
    assert table.exists(KEYS["anna"][:3]) == [False, True, True]
    for held in demoting:
        assert held is not None
        table.demoted(held)
    assert table.exists(KEYS["anna"][:3]) == [False, False, True]
    check_table(table)


def test_quotas_are_read_from_text() -> None:
    assert parse_quotas("") == {}
    assert parse_quotas("anna=10%, ben=4096,=1,*=0,a=b=2") == {
        "anna": 0.1, "ben": 4096 << 20, "": 1 << 20, "*": 0, "a=b": 2 << 20,
    }  # fmt: skip
    for wrong in ("anna", "anna=", "anna=-1", "anna=1.5", "anna=101%", "anna=1GB", "anna=1,anna=2", "anna=%"):
        with pytest.raises(InvalidArgument, match="NAME=MIB"):
            parse_quotas(wrong)


def test_what_a_smaller_quota_evicts_goes_in_portions() -> None:
    held, kept = EVICTED_MAX + 300, 100
    capacity, keys = (held + 8) * SIZE, [number.to_bytes(16) for number in range(held + 1)]
    table = ObjectTable(
        OffsetAllocator(capacity), EVICTION_POLICIES.make("lru"), LeaseTable(), quotas={"*": held * SIZE}
    )
    put_id, _ = table.put_start(keys[:held], SIZE, 0.0, 1.0, Traits("", "carl"))
    table.close_put(put_id)
    table.end_put(put_id, commit=True, now_s=0.0)
    assert len(table) == held
    pool_bytes = table.quotas.pool_bytes = capacity * held // kept
    assert table.put_start(keys[held:], SIZE, 1.0, 1.0, Traits("", "carl"))[0] == 0, "too many would go for one put"
    assert "too few of its objects may go now" in table.why_no_space("carl", SIZE)
    for expected in (held - EVICTED_MAX, kept):
        assert table.share_pool(pool_bytes, 1.0)
        assert len(table) == expected
    assert not table.share_pool(pool_bytes, 1.0)
    assert table.put_start(keys[held:], SIZE, 1.0, 1.0, Traits("", "carl"))[0]
