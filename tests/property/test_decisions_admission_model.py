"""Admission, reservations and leases against a model that keeps lists, with room counted by hand."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pinyon.batching import BatchRequest, Fcfs
from pinyon.decisions import Admission, BlockGrant
from pinyon.decisions.admission import RECENT
from pinyon.eviction import Lru
from pinyon.paging import BlockPool, LeaseTable, Reservation, Reservations
from tests.long import usually
from tests.worker_integrity import check_admission, check_pool

BLOCKS = 6
KEYS = [bytes([n]) * 16 for n in range(6)]
key_runs = st.tuples(st.integers(0, 5), st.integers(0, 5)).map(lambda run: KEYS[run[0] : run[0] + run[1]])


def asked(
    number: int,
    blocks: int,
    keys: list[bytes] = [],  # noqa: B006
    decodes: bool = True,
    computes: bool = False,
) -> BatchRequest:
    return BatchRequest(number, 1, blocks, tuple(keys), len(keys), decodes, computes=computes)


class Model(RuleBasedStateMachine):
    headroom = 0
    slots = 9

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.next = 0
        self.pool = BlockPool(BLOCKS, Lru(), spares=True)
        self.reservations = Reservations(self.pool, LeaseTable(max_leases=3))
        self.admission = Admission(Fcfs, self.pool, self.reservations, self.slots, self.headroom)
        self.waiting: list[BatchRequest] = []
        self.granted: dict[int, tuple[Reservation, BatchRequest]] = {}
        self.leases: dict[int, tuple[float, list[int]]] = {}
        self.overdue: set[int] = set()
        self.held: list[list[int]] = []
        self.anew: list[int] = []
        """The blocks of each admitted request that nobody else had."""
        self.promised: dict[bytes, int] = {}
        """The first block of each key whose holder has yet to compute its content."""

    def references(self) -> Counter[int]:
        taken = [reservation.table for reservation, _ in self.granted.values()]
        taken += [blocks for _, blocks in self.leases.values()] + self.held
        return Counter(block for blocks in taken for block in blocks)

    def free_slots(self) -> int:
        return self.slots - sum(request.decodes for _, request in self.granted.values())

    def first(self) -> BatchRequest | None:
        """Returns the longest waiting request that does not lack a slot."""
        return next((each for each in self.waiting if not each.decodes or self.free_slots() > 0), None)

    def missing(self, request: BatchRequest) -> int:
        """Returns how many blocks the request takes out of the room."""
        used = self.references().keys()
        held = [block for _, block in self.pool.acquire(request.block_keys[: min(request.reusable, request.blocks)])]
        self.pool.release(held)
        return request.blocks - len(used & set(held)) - len(self.promises(request, len(held)))

    def promises(self, request: BatchRequest, held: int) -> list[int]:
        """Returns the request's blocks behind the ``held`` ones that others hold without content."""
        blocks: list[int] = []
        for key in request.block_keys[held : min(request.reusable, request.blocks)] if request.computes else ():
            block = self.promised.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def forget_promises(self) -> None:
        """Forgets promises that were kept, and those of blocks without a holder."""
        used = self.references()
        kept = {key: block for key, block in self.promised.items() if used[block] and self.content(key) != block}
        self.promised = kept

    def content(self, key: bytes) -> int:
        """Returns the block that holds the key, or -1."""
        blocks = [block for _, block in self.pool.acquire([key])]
        self.pool.release(blocks)
        return blocks[0] if blocks else -1

    def room(self) -> int:
        used = self.references()
        return BLOCKS - len(used) - (self.headroom if used else 0)

    def admit(self) -> list[BlockGrant]:
        """Admits requests; none overtakes the first if that had room without later ones.

        Prompts for other instances may pass a request that is decoded here, until others are to give way for it."""
        self.forget_promises()
        first = self.first()
        kept_waiting = first is not None and self.missing(first) <= max(0, self.room()) + sum(
            len(reservation.table) for number, (reservation, _) in self.granted.items() if number > first.number
        )
        grants = self.admission.admit(self.now)
        if kept_waiting:
            numbers = [grant.number for grant in grants]
            before = numbers[: numbers.index(first.number)] if first.number in numbers else numbers
            overtook = [each for each in self.waiting if each.number in before]
            passes = first.decodes and self.admission.claimant() != first.number
            assert not overtook or (passes and not any(each.decodes for each in overtook)), "somebody overtook"
        for number, reservation, _ in grants:
            (request,) = (each for each in self.waiting if each.number == number)
            assert not request.decodes or self.free_slots() > 0
            self.waiting.remove(request)
            assert len(set(reservation.table)) == len(reservation.table) == request.blocks
            assert reservation.held <= min(request.reusable, request.blocks)
            shared = self.promises(request, reservation.held)
            end = reservation.held + len(shared)
            self.anew.append(len(set(reservation.table) - self.references().keys()))
            assert reservation.table[reservation.held : end] == shared, "what others compute is there once"
            assert not set(reservation.table[end:]) & self.references().keys()
            if request.computes:
                for key, block in zip(request.block_keys[end:], reservation.table[end:], strict=False):
                    self.promised.setdefault(key, block)
            self.granted[number] = (reservation, request)
        first = self.first()
        assert first is None or self.missing(first) > self.room(), "somebody waits for what is there"
        return grants

    @rule(keys=key_runs, total=st.integers(1, BLOCKS), decodes=st.booleans(), computes=st.booleans())
    def reserve(self, keys: list[bytes], total: int, decodes: bool, computes: bool) -> None:
        held = self.pool.match_prefix(keys[:total])
        request = asked(self.next, total, keys, decodes, computes)
        self.waiting.append(request)
        self.admission.enqueue(request)
        grants = self.admit()
        if grants and grants[-1].number == self.next and len(grants) == 1:
            assert grants[-1].reservation.held == held
        self.next += 1

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        waiter = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(waiter)
        self.admission.withdraw(waiter.number)
        self.admit()

    @precondition(lambda self: self.granted)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.granted)))
        self.end(number)
        self.admit()

    def end(self, number: int) -> Reservation:
        reservation, _ = self.granted.pop(number)
        self.admission.end(number)
        self.reservations.release(reservation.table, self.now)
        return reservation

    @precondition(lambda self: self.granted)
    @rule(data=st.data(), count=st.integers(1, 2))
    def grow(self, data: st.DataObject, count: int) -> None:
        """Grows a request. Without room, the newest gives way and asks again under its number."""
        number = data.draw(st.sampled_from(sorted(self.granted)))
        room = self.pool.free + self.pool.cached
        blocks = self.admission.grow(number, count, self.now)
        assert (blocks is None) == (room < count)
        if blocks is None:
            victim = max(self.granted)
            request = self.granted[victim][1]
            table = self.end(victim).table
            again = asked(victim, min(len(table), BLOCKS), list(request.block_keys), request.decodes, request.computes)
            self.waiting.append(again)
            self.waiting.sort(key=lambda waiter: waiter.number)
            self.admission.enqueue(again)
        else:
            self.granted[number][0].table.extend(blocks)
        self.admit()

    @precondition(lambda self: self.granted)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        """Publishes the request's next blocks; content that others hold already replaces its own."""
        reservation, request = self.granted[data.draw(st.sampled_from(sorted(self.granted)))]
        keys = request.block_keys
        at, table = reservation.held, reservation.table
        end = min(len(keys), len(table), at + data.draw(st.integers(1, 3)))
        if at < end:
            there = [
                index for index, key in enumerate(keys[at:end]) if self.content(key) not in (-1, table[at + index])
            ]
            swaps = self.reservations.publish(table[at:end], keys[at:end], self.now)
            assert [index for index, _ in swaps] == there
            duplicates = [table[at + index] for index, _ in swaps]
            for index, block in swaps:
                table[at + index] = block
            assert all(key in self.pool for key in keys[at:end])
            # Each content is held once: a request for these keys shares the blocks.
            assert [block for _, block in self.pool.acquire(keys[at:end], allow_gaps=True)] == table[at:end]
            self.pool.release(table[at:end])
            reservation.held = end
            self.reservations.release(duplicates, self.now)
            self.admit()

    @precondition(lambda self: self.granted)
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        reservation, request = self.granted[data.draw(st.sampled_from(sorted(self.granted)))]
        keys = request.block_keys
        before, total = reservation.held, len(reservation.table)
        found = self.pool.match_prefix(keys[before:total])
        assert self.reservations.extend(reservation, keys, self.now) == found
        assert (reservation.held, len(reservation.table)) == (before + found, total)
        self.admit()

    @rule(keys=key_runs)
    def hold(self, keys: list[bytes]) -> None:
        found = self.reservations.hold(keys, self.now)
        assert [index for index, _ in found] == [index for index, key in enumerate(keys) if key in self.pool]
        self.held.append([block for _, block in found])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        blocks = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.reservations.release(blocks, self.now)
        self.admit()

    @rule(keys=key_runs, seconds=st.integers(1, 5), allow_gaps=st.booleans())
    def lease(self, keys: list[bytes], seconds: int, allow_gaps: bool) -> None:
        there = [index for index, key in enumerate(keys) if key in self.pool]
        if not allow_gaps:
            there = there[: self.pool.match_prefix(keys)]
        if there and len(self.leases) == 3:
            with pytest.raises(Exception, match="leases"):
                self.reservations.lease(keys, seconds, self.now, allow_gaps)
            return
        lease_id, found = self.reservations.lease(keys, seconds, self.now, allow_gaps)
        assert [index for index, _ in found] == there
        assert bool(lease_id) == bool(there)
        if lease_id:
            self.leases[lease_id] = (self.now + seconds, [block for _, block in found])

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def end_lease(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.leases)))
        del self.leases[lease_id]
        self.overdue.discard(lease_id)
        assert self.reservations.end_lease(lease_id, self.now)
        assert not self.reservations.end_lease(lease_id, self.now)
        self.admit()

    @rule()
    def switch(self) -> None:
        """Switches to the same policy anew, which learns all that it needs from the waiting and running requests."""
        self.admission.switch("fcfs", self.now)

    @rule(seconds=st.integers(1, 3))
    def time_goes_by(self, seconds: int) -> None:
        self.now += seconds
        overdue = {lease_id for lease_id, lease in self.leases.items() if lease[0] <= self.now} - self.overdue
        assert set(self.reservations.overdue(self.now)) == overdue
        self.overdue |= overdue

    @precondition(lambda self: self.overdue)
    @rule()
    def overdue_readers_are_shut_out(self) -> None:
        lease_id = self.overdue.pop()
        del self.leases[lease_id]
        assert self.reservations.end_lease(lease_id, self.now)
        self.admit()

    @invariant()
    def books_balance(self) -> None:
        self.forget_promises()
        check_admission(self.admission)
        assert (self.admission.waiting, self.admission.admitted) == (len(self.waiting), len(self.granted))
        assert self.reservations.leases == len(self.leases)
        running = [end for lease_id, (end, _) in self.leases.items() if lease_id not in self.overdue]
        assert self.reservations.next_deadline() == min(running, default=None)
        assert self.pool.used == len(self.references())
        assert self.waiting or not self.pool.eviction.wanted
        if self.granted:
            grown = sum(len(reservation.table) - request.blocks for reservation, request in self.granted.values())
            latest = self.anew[-RECENT:]
            assert self.admission.next_blocks == sum(latest) / len(latest) + grown / len(self.granted)

    def teardown(self) -> None:
        """Checks that waiting requests get blocks when others release theirs, and that nothing is left."""
        self.now += 100
        assert set(self.reservations.overdue(self.now)) == set(self.leases) - self.overdue
        while self.leases:
            lease_id, _ = self.leases.popitem()
            self.reservations.end_lease(lease_id, self.now)
            self.admit()
        while self.held:
            self.reservations.release(self.held.pop(), self.now)
            self.admit()
        while self.granted:
            self.end(min(self.granted))
            self.admit()
        assert not self.waiting
        assert (self.pool.used, self.pool.eviction.wanted) == (0, 0)
        check_admission(self.admission)


class ModelWithHeadroom(Model):
    headroom = 2
    slots = 2


for one in (Model, ModelWithHeadroom):
    one.TestCase.settings = settings(max_examples=usually(20, long=80), stateful_step_count=40)
TestReservations = Model.TestCase
TestReservationsWithHeadroom = ModelWithHeadroom.TestCase


def test_what_runs_comes_first_and_what_gave_way_comes_next() -> None:
    pool = BlockPool(6, Lru())
    reservations = Reservations(pool, LeaseTable())
    admission = Admission(Fcfs, pool, reservations, slots=9, headroom=1)
    for number in (1, 2):
        admission.enqueue(asked(number, 2))
    (_, old, _), (_, young, _) = admission.admit(0.0)
    admission.enqueue(asked(3, 2))
    assert admission.admit(0.0) == [], "one block is left for those that run"
    for _ in range(2):
        grown = admission.grow(1, 1, 0.0)
        assert grown
        old.table += grown
    assert admission.grow(1, 1, 0.0) is None
    admission.end(2)
    reservations.release(young.table, 0.0)
    grown = admission.grow(1, 1, 0.0)
    assert grown
    old.table += grown
    admission.enqueue(asked(2, 3))
    assert admission.admit(0.0) == []
    admission.end(1)
    reservations.release(old.table, 0.0)
    assert [number for number, _, _ in admission.admit(0.0)] == [2, 3]


def test_misuse_is_refused() -> None:
    pool = BlockPool(2, Lru())
    admission = Admission(Fcfs, pool, Reservations(pool, LeaseTable()), slots=9, headroom=0)
    admission.enqueue(asked(1, 2))
    (grant,) = admission.admit(0.0)
    assert grant == BlockGrant(1, Reservation(grant.reservation.table, 0), 0.0)
    admission.enqueue(asked(2, 1))
    assert admission.admit(0.0) == []
    for number in (1, 2):
        with pytest.raises(ValueError, match=f"request {number}"):
            admission.enqueue(asked(number, 1))
    with pytest.raises(ValueError, match="3 blocks"):
        admission.enqueue(asked(3, 3))
    with pytest.raises(KeyError):
        admission.withdraw(1)
    for number in (2, 7):
        with pytest.raises(KeyError):
            admission.end(number)


@pytest.mark.parametrize("spares", [True, False])
def test_what_one_that_waits_will_reuse_is_evicted_last(spares: bool) -> None:
    """The block is the oldest, and the running request needs room before the other one enters."""
    pool = BlockPool(8, Lru(), spares=spares)
    reservations = Reservations(pool, LeaseTable())
    admission = Admission(Fcfs, pool, reservations, slots=1, headroom=0)
    for number, keys in enumerate((KEYS[:3], KEYS[3:])):
        admission.enqueue(asked(number, 3, keys))
        ((_, reservation, _),) = admission.admit(0.0)
        reservations.publish(reservation.table, keys, 0.0)
        admission.end(number)
        reservations.release(reservation.table, float(number))
    admission.enqueue(asked(2, 2))
    ((_, running, _),) = admission.admit(2.0)
    admission.enqueue(asked(3, 4, KEYS[:3]))
    assert admission.admit(2.0) == [], "there is one slot"
    for left in (3, 3, 3, 2) if spares else (2, 1, 0, 0):
        grown = admission.grow(2, 1, 3.0)
        assert grown
        running.table += grown
        assert pool.match_prefix(KEYS[:3]) == left, "and the deepest first"
    admission.end(2)
    reservations.release(running.table, 4.0)
    ((_, entered, _),) = admission.admit(4.0)
    assert entered.held == (2 if spares else 0)
    assert pool.eviction.wanted == 0


def test_what_requests_that_wait_together_share_counts_once() -> None:
    """Four requests share a prefix of four blocks, not computed yet, and have one block each, in a pool of eight."""
    for computes, admitted in ((True, 4), (False, 1)):
        pool = BlockPool(8, Lru())
        reservations = Reservations(pool, LeaseTable())
        admission = Admission(Fcfs, pool, reservations, slots=9, headroom=0)
        for number in range(4):
            admission.enqueue(asked(number, 5, KEYS[:4], computes=computes))
        grants = admission.admit(0.0)
        assert len(grants) == admitted
        assert pool.used == (8 if computes else 5)
        if not computes:
            continue
        # The first request leaves before it has computed anything; the next one has its blocks.
        tables = [grant.reservation.table for grant in grants]
        admission.end(0)
        reservations.release(tables[0], 0.0)
        assert pool.used == 7
        assert reservations.publish(tables[1][:4], KEYS[:4], 0.0) == []
        for grant in grants[2:]:
            assert reservations.extend(grant.reservation, KEYS[:4], 0.0) == 4
        assert pool.used == 7
        check_pool(pool)
        for grant in grants[1:]:
            admission.end(grant.number)
            reservations.release(grant.reservation.table, 0.0)
        assert (pool.used, pool.cached) == (0, 4)
        check_pool(pool)
        admission.enqueue(asked(9, 8, computes=True))
        assert len(admission.admit(1.0)) == 1, "what was promised and evicted is promised no more"
        check_pool(pool)


def test_who_loses_reusable_blocks_to_others_waits_on() -> None:
    pool = BlockPool(6, Lru(), spares=True)
    reservations = Reservations(pool, LeaseTable())
    admission = Admission(Fcfs, pool, reservations, slots=9, headroom=0)

    runs = [KEYS[1:2], KEYS[:1], KEYS[2:6]]
    for number, keys in enumerate(runs):
        admission.enqueue(asked(number, len(keys), keys))
    kept, old, new = (grant.reservation.table for grant in admission.admit(0.0))
    admission.enqueue(asked(3, 3))
    admission.enqueue(asked(4, 3, KEYS[:2]))
    assert admission.admit(0.0) == []
    for blocks, keys in zip((kept, old, new), runs, strict=True):  # they come too late to be spared for it
        reservations.publish(blocks, keys, 0.0)
    for number, blocks in ((1, old), (2, new)):
        admission.end(number)
        reservations.release(blocks, 0.0)
    ((number, reservation, _),) = admission.admit(0.0)
    assert (number, admission.waiting) == (3, 1), "the first one took a block that the other counted on"
    check_admission(admission)
    admission.end(number)
    reservations.release(reservation.table, 0.0)
    ((number, reservation, _),) = admission.admit(0.0)
    assert (number, admission.waiting) == (4, 0)
    admission.end(number)
    admission.end(0)
    reservations.release([*reservation.table, *kept], 0.0)
    check_admission(admission)
