"""The object table over a simulated memory: no client's bytes change while it may use them."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pinyon.core.errors import InvalidArgument, ResourceExhausted
from pinyon.eviction import EVICTION_POLICIES
from pinyon.paging import LeaseTable
from pinyon.store.allocator import OffsetAllocator
from pinyon.store.kv_object import KvObject, PutSlot, SlotState
from pinyon.store.objects import ObjectTable
from pinyon.store.records import Tier
from tests.long import usually
from tests.store_integrity import check_table

CAPACITY = 1024
KEYS = [bytes([n]) * 16 for n in range(1, 9)]
key_lists = st.lists(st.sampled_from(KEYS), min_size=1, max_size=4)


def table(capacity: int = CAPACITY, eviction: str = "lru", **limits: int) -> ObjectTable:
    leases: LeaseTable[KvObject] = LeaseTable(max_leases=limits.pop("max_leases", 8))
    return ObjectTable(OffsetAllocator(capacity, 64), EVICTION_POLICIES.make(eviction), leases, **limits)


class TableMachine(RuleBasedStateMachine):
    policy = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.table = table(eviction=self.policy, max_open_puts=3)
        self.changes = self.table.listen()
        self.now = 0.0
        self.memory = bytearray(CAPACITY)
        self.puts: dict[int, tuple[list[tuple[bytes, int, int, int]], float, bool]] = {}
        self.sizes: dict[bytes, int] = {}  # readable keys, as far as the model knows (evictions make it smaller)
        self.reads: dict[int, tuple[list[tuple[int, int, bytes]], float]] = {}
        self.overdue: set[int] = set()
        self.told: set[bytes] = set()
        self.pinned: dict[bytes, tuple[int, float]] = {}
        """The offset of each pinned object, and the end of its pin."""
        self.version = 0

    def expected_readable(self) -> set[bytes]:
        return {key for key, held in zip(KEYS, self.table.exists(KEYS), strict=True) if held}

    @rule(keys=key_lists, size=st.integers(1, 400), timeout=st.sampled_from([1.0, 5.0]))
    def put_start(self, keys: list[bytes], size: int, timeout: float) -> None:
        before = self.expected_readable()
        reserved = {key for objects, _, _ in self.puts.values() for key, *_ in objects}
        try:
            put_id, slots = self.table.put_start(keys, size, self.now, timeout)
        except ResourceExhausted:
            assert len(self.puts) == 3
            return
        objects: list[tuple[bytes, int, int, int]] = []
        for key, slot in zip(keys, slots, strict=True):
            if key in reserved or key in {each[0] for each in objects}:
                assert slot.state is SlotState.BEING_PUT
            elif slot.state is SlotState.RESERVED:
                self.version += 1
                objects.append((key, slot.offset, size, self.version % 256))
            elif slot.state is SlotState.EXISTS:
                assert key in before
        assert bool(put_id) == bool(objects)
        if objects:
            assert put_id not in self.puts
            self.puts[put_id] = (objects, self.now + timeout, False)

    @rule(policy=st.sampled_from(EVICTION_POLICIES.names))
    def switch(self, policy: str) -> None:
        before = self.expected_readable()
        self.table.switch(EVICTION_POLICIES.make(policy), self.now)
        assert self.expected_readable() == before

    @rule()
    def write(self) -> None:
        """Writes for all open puts, at any time."""
        for objects, _, closing in self.puts.values():
            if not closing:
                for _, offset, size, version in objects:
                    self.memory[offset : offset + size] = bytes([version]) * size

    @rule(data=st.data(), commit=st.booleans())
    def put_end(self, data: st.DataObject, commit: bool) -> None:
        if not self.puts:
            return
        put_id = data.draw(st.sampled_from(sorted(self.puts)))
        objects, _, closing = self.puts[put_id]
        if not closing:
            for _, offset, size, version in objects if commit else ():
                self.memory[offset : offset + size] = bytes([version]) * size
        else:
            commit = False  # it timed out, so it can only be given up
        assert self.table.close_put(put_id) == (not closing)
        assert self.table.end_put(put_id, commit=commit, now_s=self.now) == (len(objects) if commit else 0)
        assert not self.table.close_put(put_id)
        del self.puts[put_id]
        if commit:
            self.sizes.update((key, size) for key, _, size, _ in objects)
            assert all(self.table.exists([key for key, *_ in objects]))

    @rule(seconds=st.sampled_from([0.5, 2.0, 10.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        overdue = [put_id for put_id, (_, end, closing) in self.puts.items() if end <= self.now and not closing]
        assert sorted(self.table.close_overdue(self.now)) == sorted(overdue)
        for put_id in overdue:
            objects, end, _ = self.puts[put_id]
            self.puts[put_id] = (objects, end, True)
        expired = [lease for lease, (_, end) in self.reads.items() if end <= self.now]
        assert sorted(self.table.overdue_leases(self.now)) == sorted(set(expired) - self.overdue)
        self.overdue |= set(expired)
        self.table.end_overdue_pins(self.now)
        self.pinned = {key: pin for key, pin in self.pinned.items() if pin[1] > self.now}

    @rule(data=st.data())
    def overdue_readers_are_shut_out(self, data: st.DataObject) -> None:
        for lease in data.draw(st.lists(st.sampled_from(sorted(self.overdue)), unique=True)) if self.overdue else ():
            assert self.table.release(lease, self.now)
            self.overdue.remove(lease)
            del self.reads[lease]

    @rule(keys=key_lists, gaps=st.booleans(), lease=st.sampled_from([1.0, 5.0]))
    def acquire(self, keys: list[bytes], gaps: bool, lease: float) -> None:
        held = self.table.exists(keys)
        expected = [index for index in range(len(keys)) if (held[index] if gaps else all(held[: index + 1]))]
        try:
            granted = self.table.acquire(keys, self.now, lease, allow_gaps=gaps)
        except ResourceExhausted:
            assert len(self.reads) == 8
            return
        assert [index for index, _ in granted.blocks] == expected
        if expected:
            read = []
            for index, held_object in granted.blocks:
                assert held_object.size == self.sizes[keys[index]]
                end = held_object.offset + held_object.size
                read.append((held_object.offset, end, bytes(self.memory[held_object.offset : end])))
            self.reads[granted.lease_id] = (read, self.now + lease)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if not self.reads:
            return
        lease = data.draw(st.sampled_from(sorted(self.reads)))
        assert self.table.release(lease, self.now)
        assert not self.table.release(lease, self.now)
        del self.reads[lease]
        self.overdue.discard(lease)

    @rule(keys=key_lists)
    def remove(self, keys: list[bytes]) -> None:
        held = {key for key, there in zip(keys, self.table.exists(keys), strict=True) if there}
        assert self.table.remove(keys) == len(held)
        assert not any(self.table.exists(keys))
        for key in keys:
            self.pinned.pop(key, None)

    @rule(keys=key_lists, seconds=st.sampled_from([1.0, 5.0, inf]))
    def pin(self, keys: list[bytes], seconds: float) -> None:
        here = [key for key in dict.fromkeys(keys) if key in self.table]
        room = sum(-(-self.sizes[key] // 64) * 64 for key in self.pinned.keys() | set(here))
        try:
            assert self.table.pin(keys, self.now, self.now + seconds) == here
        except ResourceExhausted:
            assert room > CAPACITY // 2
            return
        assert room <= CAPACITY // 2
        for key in here:
            held = self.table.in_memory(key)
            assert held is not None
            self.pinned[key] = held.offset, self.now + seconds

    @rule(keys=key_lists)
    def unpin(self, keys: list[bytes]) -> None:
        pinned = [key for key in dict.fromkeys(keys) if self.pinned.pop(key, None)]
        assert self.table.unpin(keys, self.now) == pinned

    @rule()
    def listen(self) -> None:
        stored, removed = self.changes.drain()
        self.told = (self.told | set(stored)) - set(removed)
        assert self.told == set(self.table.keys())

    @invariant()
    def what_is_leased_does_not_change(self) -> None:
        for read, _ in self.reads.values():
            for offset, end, content in read:
                assert self.memory[offset:end] == content

    @invariant()
    def what_is_pinned_stays(self) -> None:
        assert set(self.table.pinned) == set(self.pinned)
        for key, (offset, _) in self.pinned.items():
            held = self.table.in_memory(key)
            assert held is not None
            assert held.offset == offset

    @invariant()
    def readable_objects_hold_one_put(self) -> None:
        assert set(self.table.keys()) <= set(self.sizes)
        for key in list(self.table.keys()):
            assert self.table.entry(key) == (self.sizes[key], Tier.MEMORY, "")

    @invariant()
    def books_balance(self) -> None:
        check_table(self.table)
        assert self.table.open_puts == len(self.puts)
        assert self.table.leases == len(self.reads)
        assert self.table.reserved_objects == sum(len(objects) for objects, _, _ in self.puts.values())
        read = {start for ranges, _ in self.reads.values() for start, _, _ in ranges}
        assert self.table.leased_objects == len(read)
        pinned = {offset for offset, _ in self.pinned.values()}
        assert self.table.idle_objects == len(self.table) - len(pinned | (read & self.offsets()))

    def offsets(self) -> set[int]:
        """Returns the places of the readable objects."""
        return {held.offset for held in self.table.snapshot()[0]}

    def teardown(self) -> None:
        for lease in list(self.reads):
            self.table.release(lease, self.now)
        for put_id, (_, _, closing) in list(self.puts.items()):
            assert closing or self.table.close_put(put_id)
            self.table.end_put(put_id, commit=False, now_s=self.now)
        self.table.remove(KEYS)
        assert self.table.pinned_bytes == 0
        assert self.table.used_bytes == 0
        check_table(self.table)


for name in EVICTION_POLICIES.names:
    case = type(f"TableMachine_{name}", (TableMachine,), {"policy": name}).TestCase
    case.settings = settings(max_examples=usually(20, long=80), stateful_step_count=40)
    globals()[f"TestObjectTable_{name}"] = case
del case  # otherwise it would be collected twice


def store(objects: ObjectTable, *keys: bytes, size: int = 256) -> None:
    put_id, _ = objects.put_start(keys, size, 0.0, 1.0)
    assert objects.close_put(put_id)
    assert objects.end_put(put_id, commit=True, now_s=0.0) == len(keys)


def test_the_least_recent_object_goes_first_and_a_runs_end_first() -> None:
    objects = table()
    store(objects, *KEYS[:2])
    store(objects, *KEYS[2:4])
    lease = objects.acquire(KEYS[:1], 0.0, 1.0)
    objects.release(lease.lease_id, 0.0)
    store(objects, *KEYS[4:7])
    assert objects.exists(KEYS[:7]) == [True, False, False, False, True, True, True]
    assert objects.eviction.evicted == 3


def test_what_is_read_or_written_makes_no_room() -> None:
    objects = table()
    store(objects, *KEYS[:2])
    objects.acquire(KEYS[:2], 0.0, 1.0)
    put_id, slots = objects.put_start(KEYS[2:6], 256, 0.0, 1.0)
    states = [SlotState.RESERVED] * 2 + [SlotState.NO_SPACE] * 2
    assert [slot.state for slot in slots] == states
    assert objects.put_start(KEYS[4:5], 256, 0.0, 1.0) == (0, [PutSlot(SlotState.NO_SPACE)])
    assert objects.close_overdue(0.99) == []
    assert objects.close_overdue(1.0) == [put_id]
    assert objects.put_start(KEYS[4:5], 256, 1.0, 1.0)[0] == 0, "room is free only after the writer is shut out"
    objects.end_put(put_id, commit=False, now_s=1.0)
    assert objects.put_start(KEYS[4:5], 256, 1.0, 1.0)[0] > 0


def test_nothing_is_evicted_in_vain() -> None:
    objects = table()
    store(objects, *KEYS[:3])
    objects.acquire(KEYS[:1], 0.0, 1.0)
    objects.put_start(KEYS[4:5], 900, 0.0, 1.0)
    assert objects.exists(KEYS[:3]) == [True] * 3


def test_idle_objects_are_not_evicted_for_one_that_fits_nowhere() -> None:
    objects = table()
    for key in KEYS[:4]:
        store(objects, key)
    objects.acquire([KEYS[1]], 0.0, 1.0)
    lease = objects.acquire([KEYS[3]], 0.0, 1.0)
    large = KEYS[4:5]
    assert objects.put_start(large, 512, 0.0, 1.0) == (0, [PutSlot(SlotState.NO_SPACE)])
    assert objects.exists(KEYS[:4]) == [True] * 4
    assert objects.eviction.evicted == 0
    objects.release(lease.lease_id, 0.5)
    assert objects.put_start(large, 512, 0.5, 1.0)[0] == 0, "what was refused a moment ago is not looked at again"
    _, slots = objects.put_start(large, 512, 1.0, 1.0)
    assert slots == [PutSlot(SlotState.RESERVED, 512)]
    assert objects.exists(KEYS[:4]) == [True, True, False, False], "the first one went in vain"


@given(data=st.data(), policy=st.sampled_from(EVICTION_POLICIES.names))
def test_an_object_finds_room_where_a_piece_is_free_or_idle(data: st.DataObject, policy: str) -> None:
    objects = table(eviction=policy)
    sizes = data.draw(st.lists(st.integers(1, 400), max_size=7))
    for key, size in zip(KEYS, sizes, strict=False):
        put_id, _ = objects.put_start([key], size, 0.0, 1.0)
        if put_id:
            objects.close_put(put_id)
            objects.end_put(put_id, commit=True, now_s=0.0)
    held = data.draw(st.lists(st.sampled_from(KEYS[:7]), unique=True))
    leased = objects.acquire(held, 0.0, 9.0, allow_gaps=True).blocks
    objects.remove(data.draw(st.lists(st.sampled_from(KEYS[:7]), unique=True)))
    before, evicted = set(objects.keys()), objects.eviction.evicted
    room = ["."] * CAPACITY
    for _, each in leased:
        end = each.offset + -(-each.size // 64) * 64
        room[each.offset : end] = "x" * (end - each.offset)
    wanted = data.draw(st.integers(1, CAPACITY))
    _, slots = objects.put_start(KEYS[7:], wanted, 0.0, 1.0)
    fits = "." * (-(-wanted // 64) * 64) in "".join(room)
    assert (slots[0].state is SlotState.RESERVED) == fits
    check_table(objects)
    if not fits:
        assert set(objects.keys()) == before
        assert objects.eviction.evicted == evicted


def test_removed_objects_go_with_their_last_lease_and_may_return() -> None:
    objects = table()
    store(objects, KEYS[0])
    first, second = (objects.acquire(KEYS[:1], 0.0, 1.0) for _ in range(2))
    assert objects.remove(KEYS[:1]) == 1
    store(objects, KEYS[0])
    assert objects.used_bytes == 512
    objects.release(first.lease_id, 0.0)
    assert objects.used_bytes == 512
    objects.release(second.lease_id, 0.0)
    assert objects.used_bytes == 256
    assert objects.exists(KEYS[:1]) == [True]


def test_lost_room_is_never_used_again() -> None:
    objects = table()
    put_id, _ = objects.put_start(KEYS[:2], 256, 0.0, 1.0)
    objects.close_put(put_id)
    assert objects.end_put(put_id, commit=True, now_s=0.0, lost=True) == 0
    assert objects.lost_bytes == 512
    _, slots = objects.put_start(KEYS[:3], 256, 0.0, 1.0)
    assert [slot.state for slot in slots].count(SlotState.RESERVED) == 2


def test_limits() -> None:
    objects = table(max_objects=2)
    store(objects, *KEYS[:2], size=64)
    store(objects, KEYS[2], size=64)
    assert len(objects) == 2
    for size in (0, CAPACITY + 1):
        with pytest.raises(InvalidArgument, match="bytes here"):
            objects.put_start(KEYS[:1], size, 0.0, 1.0)


def test_pinned_objects_make_no_room_until_they_are_unpinned() -> None:
    objects = table()
    store(objects, *KEYS[:4])
    assert objects.pin(KEYS[:2], 0.0, inf) == KEYS[:2]
    with pytest.raises(ResourceExhausted, match="256 bytes that are not pinned yet; 512 are, and at most 512 may be"):
        objects.pin(KEYS[1:3], 0.0, inf)
    _, slots = objects.put_start(KEYS[4:7], 256, 0.0, 1.0)
    assert [slot.state for slot in slots] == [SlotState.RESERVED] * 2 + [SlotState.NO_SPACE]
    assert "512 are leased or pinned (512 pinned), 512 being put" in objects.why_no_space("", 256)
    assert objects.unpin(KEYS[:3], 0.0) == KEYS[:2]
    assert objects.put_start(KEYS[6:7], 256, 0.0, 1.0)[0] > 0


def test_the_end_of_a_pin_is_that_of_the_last_one() -> None:
    objects = table()
    store(objects, KEYS[0])
    objects.pin(KEYS[:1], 0.0, inf)
    assert objects.next_deadline_s() is None
    objects.pin(KEYS[:1], 0.0, 5.0)
    objects.pin(KEYS[:1], 1.0, 3.0)
    assert objects.next_deadline_s() == 3.0
    objects.end_overdue_pins(2.9)
    assert list(objects.pinned) == KEYS[:1]
    objects.end_overdue_pins(3.0)
    assert not objects.pinned
    assert objects.next_deadline_s() is None


def test_a_demoted_object_that_is_pinned_stays() -> None:
    objects = table()
    store(objects, KEYS[0])
    held = objects.demote(0.0)
    assert held is not None
    objects.pin(KEYS[:1], 0.0, inf)
    objects.demoted(held)
    assert objects.exists(KEYS[:1]) == [True]
    check_table(objects)
