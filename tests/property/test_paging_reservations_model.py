"""Reservations and leases against a model that keeps lists, with room counted by hand."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pinyon.eviction import Lru
from pinyon.paging import BlockPool, Grant, LeaseTable, Reservation, Reservations

BLOCKS = 6
KEYS = [bytes([n]) * 16 for n in range(6)]
key_runs = st.tuples(st.integers(0, 5), st.integers(0, 5)).map(lambda run: KEYS[run[0] : run[0] + run[1]])


class Model(RuleBasedStateMachine):
    headroom = 0

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.next = 0
        self.pool = BlockPool(BLOCKS, Lru())
        self.reservations = Reservations(self.pool, LeaseTable(max_leases=3), self.headroom)
        self.waiting: list[tuple[int, list[bytes], int]] = []
        self.granted: dict[int, tuple[Reservation, list[bytes]]] = {}
        self.leases: dict[int, tuple[float, list[int]]] = {}
        self.overdue: set[int] = set()
        self.held: list[list[int]] = []

    def references(self) -> Counter[int]:
        taken = [reservation.table for reservation, _ in self.granted.values()]
        taken += [blocks for _, blocks in self.leases.values()] + self.held
        return Counter(block for blocks in taken for block in blocks)

    def take(self, grants: list[Grant]) -> None:
        """What was granted is the longest waiting, and its blocks are nobody else's but for the part with content."""
        for number, reservation in grants:
            first, keys, total = self.waiting.pop(0)
            assert number == first, "somebody overtook"
            assert len(set(reservation.table)) == len(reservation.table) == total
            assert reservation.held <= len(keys[:total])
            assert not set(reservation.table[reservation.held :]) & self.references().keys()
            self.granted[number] = (reservation, keys)

    @rule(keys=key_runs, total=st.integers(1, BLOCKS))
    def reserve(self, keys: list[bytes], total: int) -> None:
        held = self.pool.match_prefix(keys[:total])
        self.waiting.append((self.next, keys, total))
        grants = self.reservations.reserve(self.next, keys, total, self.now)
        self.take(grants)
        if grants and grants[-1].number == self.next and len(grants) == 1:
            assert grants[-1].reservation.held == held
        self.next += 1

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        waiter = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(waiter)
        self.take(self.reservations.withdraw(waiter[0], self.now))

    @precondition(lambda self: self.granted)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.granted)))
        reservation, _ = self.granted.pop(number)
        self.take(self.reservations.release(reservation.table, self.now))

    @precondition(lambda self: self.granted)
    @rule(data=st.data(), count=st.integers(1, 2))
    def grow(self, data: st.DataObject, count: int) -> None:
        """Whoever waits; another one that runs gives way when there is no room, and asks again under its number."""
        number = data.draw(st.sampled_from(sorted(self.granted)))
        room = self.pool.free + self.pool.cached
        blocks = self.reservations.grow(count, self.now)
        assert (blocks is None) == (room < count)
        if blocks is None:
            victim = max(self.granted)
            reservation, keys = self.granted.pop(victim)
            before = self.pool.free + self.pool.cached
            self.reservations.preempt(reservation.table, self.now)
            assert self.pool.free + self.pool.cached >= before
            total = min(len(reservation.table), BLOCKS)
            self.waiting.append((victim, keys, total))
            self.waiting.sort(key=lambda waiter: waiter[0])
            self.take(self.reservations.reserve(victim, keys, total, self.now))
        else:
            self.granted[number][0].table.extend(blocks)
        self.take(self.reservations.settle(self.now))

    @precondition(lambda self: self.granted)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        """The next of its blocks have content now; what others hold already takes their places."""
        reservation, keys = self.granted[data.draw(st.sampled_from(sorted(self.granted)))]
        at, table = reservation.held, reservation.table
        end = min(len(keys), len(table), at + data.draw(st.integers(1, 3)))
        if at < end:
            there = [index for index, key in enumerate(keys[at:end]) if key in self.pool]
            swaps = self.reservations.publish(table[at:end], keys[at:end])
            assert [index for index, _ in swaps] == there
            duplicates = [table[at + index] for index, _ in swaps]
            for index, block in swaps:
                table[at + index] = block
            assert all(key in self.pool for key in keys[at:end])
            # The content of each is held once: whoever asks for these keys shares the blocks.
            assert [block for _, block in self.pool.acquire(keys[at:end], allow_gaps=True)] == table[at:end]
            self.pool.release(table[at:end])
            reservation.held = end
            self.take(self.reservations.release(duplicates, self.now))

    @precondition(lambda self: self.granted)
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        reservation, keys = self.granted[data.draw(st.sampled_from(sorted(self.granted)))]
        before, total = reservation.held, len(reservation.table)
        found = self.pool.match_prefix(keys[before:total])
        grants = self.reservations.extend(reservation, keys, self.now)
        assert (reservation.held, len(reservation.table)) == (before + found, total)
        self.take(grants)

    @rule(keys=key_runs)
    def hold(self, keys: list[bytes]) -> None:
        found = self.reservations.hold(keys)
        assert [index for index, _ in found] == [index for index, key in enumerate(keys) if key in self.pool]
        self.held.append([block for _, block in found])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        blocks = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.take(self.reservations.release(blocks, self.now))

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
        grants = self.reservations.end_lease(lease_id, self.now)
        assert grants is not None
        self.take(grants)
        assert self.reservations.end_lease(lease_id, self.now) is None

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
        grants = self.reservations.end_lease(lease_id, self.now)
        assert grants is not None
        self.take(grants)

    @invariant()
    def books_balance(self) -> None:
        self.reservations.check_integrity()
        assert self.reservations.waiting == len(self.waiting)
        assert self.reservations.leases == len(self.leases)
        running = [end for lease_id, (end, _) in self.leases.items() if lease_id not in self.overdue]
        assert self.reservations.next_deadline() == min(running, default=None)
        assert self.pool.used == len(self.references())

    def teardown(self) -> None:
        """Whoever waits gets its blocks when the others gave theirs back, and then nothing is left."""
        self.now += 100
        assert set(self.reservations.overdue(self.now)) == set(self.leases) - self.overdue
        while self.leases:
            lease_id, _ = self.leases.popitem()
            self.take(self.reservations.end_lease(lease_id, self.now) or [])
        while self.held:
            self.take(self.reservations.release(self.held.pop(), self.now))
        while self.granted:
            reservation, _ = self.granted.pop(min(self.granted))
            self.take(self.reservations.release(reservation.table, self.now))
        assert not self.waiting
        assert self.pool.used == 0
        self.reservations.check_integrity()


class ModelWithHeadroom(Model):
    headroom = 2


for one in (Model, ModelWithHeadroom):
    one.TestCase.settings = settings(max_examples=80, stateful_step_count=40)
TestReservations = Model.TestCase
TestReservationsWithHeadroom = ModelWithHeadroom.TestCase


def test_what_runs_comes_first_and_what_was_preempted_comes_next() -> None:
    pool = BlockPool(6, Lru())
    reservations = Reservations(pool, LeaseTable(), headroom=1)
    ((_, old),) = reservations.reserve(1, [], 2, 0.0)
    ((_, young),) = reservations.reserve(2, [], 2, 0.0)
    assert reservations.reserve(3, [], 2, 0.0) == [], "one block is left for those that run"
    for _ in range(2):
        grown = reservations.grow(1, 0.0)
        assert grown
        old.table += grown
    assert reservations.grow(1, 0.0) is None
    reservations.preempt(young.table, 0.0)
    grown = reservations.grow(1, 0.0)
    assert grown
    old.table += grown
    assert reservations.reserve(2, [], 3, 0.0) == []
    assert [number for number, _ in reservations.release(old.table, 0.0)] == [2, 3]


def test_misuse_is_refused() -> None:
    reservations = Reservations(BlockPool(2, Lru()), LeaseTable())
    (grant,) = reservations.reserve(1, [], 2, 0.0)
    assert grant == Grant(1, Reservation(grant.reservation.table, 0))
    assert reservations.reserve(2, [], 1, 0.0) == []
    with pytest.raises(ValueError, match="reservation 2"):
        reservations.reserve(2, [], 1, 0.0)
    with pytest.raises(ValueError, match="3 blocks"):
        reservations.reserve(3, [], 3, 0.0)
    with pytest.raises(KeyError):
        reservations.withdraw(1, 0.0)
