"""Two tiers against one pool of their sum, and against memory whose copies are made late."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pinyon.eviction import EVICTION_POLICIES, Lru, Traits
from pinyon.paging import BlockPool, LeaseTable, Reservation, Reservations, SecondTier, Swap
from pinyon.paging.second_tier import NO_SLOT
from tests.long import usually
from tests.worker_integrity import check_pool

BLOCKS, SLOTS = 5, 4
PROMPTS = [tuple(bytes([prompt, place]) * 8 for place in range(4)) for prompt in range(4)]
"""Prompts, some of which begin alike."""
PROMPTS += [(*PROMPTS[0][:2], *PROMPTS[1][2:]), (*PROMPTS[2][:1], *PROMPTS[3][1:])]
KINDS = [Traits("text/1", "anna"), Traits("text/2", "bert")]
CATEGORIES = st.sampled_from(KINDS)


def pools(policy: str, blocks: int, slots: int, **limits: int) -> tuple[BlockPool, Reservations]:
    below = SecondTier(slots, EVICTION_POLICIES.make(policy), **limits) if slots else None
    pool = BlockPool(blocks, EVICTION_POLICIES.make(policy), below, spares=True)
    return pool, Reservations(pool, LeaseTable())


class Memory:
    """The content of blocks and slots; copies are made on request."""

    def __init__(self) -> None:
        self.blocks: dict[int, object] = {}
        self.slots: dict[int, object] = {}
        self.waiting: list[Swap] = []

    def copy(self, count: int) -> int:
        """Makes the first copies; returns how many went out of blocks."""
        made, self.waiting = self.waiting[:count], self.waiting[count:]
        for block, out, into in made:
            coming = self.slots.get(into)
            if out != NO_SLOT:
                self.slots[out] = self.blocks[block]
            if into != NO_SLOT:
                self.blocks[block] = coming
        return sum(out != NO_SLOT for _, out, _ in made)

    def copy_of(self, block: int) -> int:
        """Makes copies until none that touches the block waits; returns how many went out of blocks."""
        last = max((at for at, swap in enumerate(self.waiting, 1) if swap.block == block), default=0)
        return self.copy(last)


class TierMachine(RuleBasedStateMachine):
    """Requests come, compute and end in both; swaps are made at any time."""

    policy = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.tiers = pools(self.policy, BLOCKS, SLOTS)
        self.one_pool, self.one = pools(self.policy, BLOCKS + SLOTS, 0)
        assert self.pool.below is not None
        self.below = self.pool.below
        self.one_pool.eviction.spared_max = self.pool.eviction.spared_max
        self.wants: list[Sequence[bytes]] = []
        self.memory = Memory()
        self.now_s = 0.0
        self.running: list[tuple[Sequence[bytes], Traits, Reservation, Reservation]] = []
        self.told: set[bytes] = set()

    def _made(self, out: int) -> None:
        if out:
            self.tiers.swapped(out)

    def _take(self) -> None:
        self.memory.waiting += self.tiers.take_swaps()

    @rule(keys=st.sampled_from(PROMPTS), more=st.integers(0, 1), traits=CATEGORIES, pause=st.sampled_from([0.0, 1.0]))
    def begin(self, keys: Sequence[bytes], more: int, traits: Traits, pause: float) -> None:
        self.now_s += pause
        total = len(keys) + more
        held, missing = self.pool.need(keys, total)
        assert held == self.one_pool.need(keys, total)[0] == self.pool.match_prefix(keys)
        if missing > self.pool.free + self.pool.cached:
            return
        here = self.tiers.reserve(keys, total, self.now_s, traits)
        there = self.one.reserve(keys, total, self.now_s, traits)
        assert here is not None
        assert there is not None
        assert here.held == there.held == held
        assert len(set(here.table)) == total
        self._take()
        for key, block in zip(keys, here.table[:held], strict=False):  # a reader
            self._made(self.memory.copy_of(block))
            assert self.memory.blocks[block] == key
        self.running.append((keys, traits, here, there))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), made=st.integers(0, 4), publish_all=st.booleans())
    def end(self, data: st.DataObject, made: int, publish_all: bool) -> None:
        """Ends a request, which has computed and published some of its blocks or none."""
        number = data.draw(st.integers(0, len(self.running) - 1))
        keys, traits, here, there = self.running.pop(number)
        last = min(len(keys), here.held + made)
        for tiers, reservation in ((self.tiers, here), (self.one, there)):
            first = reservation.held
            for key, block in zip(keys[first:last], reservation.table[first:last], strict=False):
                if tiers is self.tiers:  # a writer
                    self._made(self.memory.copy_of(block))
                    self.memory.blocks[block] = key
            if not publish_all and last > first:  # block by block
                for index in range(first, last):
                    self._publish(tiers, reservation, keys, traits, index, index + 1)
            else:
                self._publish(tiers, reservation, keys, traits, first, last)
            tiers.release(reservation.table, self.now_s)

    def _publish(
        self, tiers: Reservations, own: Reservation, keys: Sequence[bytes], traits: Traits, first: int, last: int
    ) -> None:
        after = keys[first - 1] if first else None
        for index, block in tiers.publish(own.table[first:last], keys[first:last], self.now_s, traits, first, after):
            duplicate, own.table[first + index] = own.table[first + index], block
            tiers.release([duplicate], self.now_s)

    @rule(keys=st.sampled_from(PROMPTS))
    def want(self, keys: Sequence[bytes]) -> None:
        count = self.pool.want(keys)
        assert count == self.one_pool.want(keys)
        assert self.pool.eviction.wanted <= BLOCKS // 2
        self.wants.append(keys[:count])

    @precondition(lambda self: self.wants)
    @rule(data=st.data())
    def unwant(self, data: st.DataObject) -> None:
        keys = self.wants.pop(data.draw(st.integers(0, len(self.wants) - 1)))
        self.pool.unwant(keys)
        self.one_pool.unwant(keys)

    @rule(key=st.sampled_from(PROMPTS[0] + PROMPTS[3]))
    def remove(self, key: bytes) -> None:
        assert self.pool.remove(key, now_s=self.now_s) == self.one_pool.remove(key, now_s=self.now_s)

    @rule(count=st.integers(1, 4))
    def copy(self, count: int) -> None:
        self._made(self.memory.copy(count))

    @rule()
    def listen(self) -> None:
        stored, removed = self.pool.drain_changes()
        assert not self.told & set(stored)
        assert self.told >= set(removed)
        self.told = (self.told | set(stored)) - set(removed)
        assert self.told == set(self.pool.keys())

    @rule(key=st.sampled_from([key for keys in PROMPTS for key in keys]))
    def hold(self, key: bytes) -> None:
        """Holds a key only if it is in a block: a hold promotes nothing."""
        found = self.tiers.hold([key], self.now_s)
        assert len(found) == (key in self.pool and key not in self.below)
        again = self.one.hold([key], self.now_s) if found else []
        assert not self.below.pending
        self.tiers.release([block for _, block in found], self.now_s)
        self.one.release([block for _, block in again], self.now_s)

    @invariant()
    def they_hold_the_same(self) -> None:
        assert set(self.pool.keys()) == set(self.one_pool.keys())
        assert self.pool.evicted == self.one_pool.evicted
        assert self.pool.hits == self.one_pool.hits
        assert self.pool.of_all.regrets == self.one_pool.eviction.regrets
        check_pool(self.pool)

    def teardown(self) -> None:
        """Checks that every content is where the records say, once all copies are made."""
        self.memory.copy(len(self.memory.waiting))
        pinned = {block for _, _, here, _ in self.running for block in here.table[: here.held]}
        for key in set(self.pool.keys()):
            if key in self.below:
                assert self.memory.slots[self.below._held[key].slot] == key
            else:
                block = self.pool._contents.block_of[key]
                assert self.memory.blocks[block] == key or block in pinned


for name in EVICTION_POLICIES.names:
    case = type(f"TierMachine_{name}", (TierMachine,), {"policy": name}).TestCase
    case.settings = settings(max_examples=usually(20, long=60), stateful_step_count=40)
    globals()[f"TestTwoTiers_{name}"] = case
del case  # otherwise it would be collected twice


def ended(reservations: Reservations, keys: Sequence[bytes], now_s: float = 0.0) -> int:
    """Runs a request from its beginning to its end; returns how many blocks it found."""
    reservation = reservations.reserve(keys, len(keys), now_s)
    assert reservation is not None
    reservations.publish(reservation.table[reservation.held :], keys[reservation.held :], now_s, first=reservation.held)
    reservations.release(reservation.table, now_s)
    return reservation.held


def test_what_is_demoted_comes_back() -> None:
    pool, reservations = pools("lru", 4, 4)
    assert ended(reservations, PROMPTS[0]) == 0
    assert ended(reservations, PROMPTS[1]) == 0
    assert sorted(block for block, _, into in reservations.take_swaps() if into == NO_SLOT) == [0, 1, 2, 3]
    assert ended(reservations, PROMPTS[0]) == 4, "both tiers are full: they change places"
    assert all(out == into for _, out, into in reservations.take_swaps())
    assert (pool.evicted, pool.hits) == (0, 4)
    assert pool.below is not None
    assert (pool.below.swapped_out, pool.below.swapped_in) == (8, 4)
    stored, removed = pool.drain_changes()
    assert set(stored) == set(PROMPTS[0] + PROMPTS[1])
    assert not removed


def test_what_does_not_keep_up_is_lost() -> None:
    pool, reservations = pools("lru", 4, 8, swaps_out_max=3)
    assert pool.below is not None
    ended(reservations, PROMPTS[0])
    ended(reservations, PROMPTS[1])
    assert (pool.below.swapped_out, pool.below.lost, pool.evicted) == (3, 1, 1)
    assert PROMPTS[0][3] in pool, "the deepest went first, and had its place"
    assert pool.match_prefix(PROMPTS[0]) == 0
    reservations.swapped(3)
    assert ended(reservations, PROMPTS[2]) == 0
    assert (pool.below.swapped_out, pool.below.lost) == (6, 2)
    check_pool(pool)
    with pytest.raises(ValueError, match="3 were under way"):
        reservations.swapped(4)


def test_moves_between_tiers_beyond_the_limit_lose_their_blocks() -> None:
    pool, reservations = pools("lru", 4, 4, swaps_out_max=4)
    for prompt in (0, 1):
        ended(reservations, PROMPTS[prompt])
    assert len(reservations.take_swaps()) == 4
    assert ended(reservations, PROMPTS[0]) == 4
    assert all(out == NO_SLOT for _, out, _ in reservations.take_swaps())
    assert pool.evicted == 4
    assert pool.match_prefix(PROMPTS[1]) == 0
    check_pool(pool)


def test_no_room_for_what_is_below_is_a_shorter_run() -> None:
    """A lease has no promise of room."""
    pool, reservations = pools("lru", 4, 4)
    ended(reservations, PROMPTS[0])
    ended(reservations, PROMPTS[1])
    busy = reservations.reserve((), 2, 0.0)
    assert busy is not None
    lease, held = reservations.lease(PROMPTS[0], 1.0, 0.0, allow_gaps=False)
    assert [index for index, _ in held] == [0, 1]
    assert reservations.end_lease(lease, 0.0)
    check_pool(pool)


def test_switching_keeps_both_tiers() -> None:
    pool, reservations = pools("lru", 4, 4)
    for prompt in (0, 1):
        ended(reservations, PROMPTS[prompt])
    with pytest.raises(ValueError, match="another one"):
        pool.switch(EVICTION_POLICIES.make("fifo"), 0.0)
    pool.switch(EVICTION_POLICIES.make("lfu"), 0.0, EVICTION_POLICIES.make("lfu"))
    check_pool(pool)
    assert ended(reservations, PROMPTS[0]) == ended(reservations, PROMPTS[1]) == 4


def test_a_second_tier_has_slots_and_a_policy_of_its_own() -> None:
    with pytest.raises(ValueError, match="positive"):
        SecondTier(0, Lru())
    pool, reservations = pools("lru", 4, 4)
    ended(reservations, PROMPTS[0])
    with pytest.raises(ValueError, match="belongs to another"):
        SecondTier(1, pool.eviction._policy)


@pytest.mark.parametrize("split", [(8, 24), (16, 16), (31, 1)], ids=str)
def test_hits_of_both_tiers_are_those_of_a_list(split: tuple[int, int]) -> None:
    """Requests in turn, and LRU as a list that is searched from end to end."""
    rng = random.Random(3)
    capacity = sum(split)
    _, reservations = pools("lru", *split)
    order: list[bytes] = []  # the next to go in front
    prefixes: list[list[bytes]] = [[]]
    hits = 0
    for number in range(600):
        keys = rng.choice(prefixes[-12:])[: rng.randrange(7)]
        keys = keys + [number.to_bytes(8, "big") + bytes([place]) * 8 for place in range(8 - len(keys))]
        prefixes.append(keys)
        held = next((place for place, key in enumerate(keys) if key not in order), len(keys))
        hits += held
        order = [key for key in order if key not in keys]
        order = order[max(0, len(order) + len(keys) - capacity) :] + keys[::-1]
        assert ended(reservations, keys) == held, number
        out = sum(swap.out != NO_SLOT for swap in reservations.take_swaps())
        reservations.swapped(out)
    assert hits > 500
