"""Tests that blocks being computed count where they are computed, and nowhere else."""

import struct
from collections import Counter
from random import Random
from statistics import median
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinyon.core.errors import Rejected
from pinyon.placement.expected import ExpectedBlocks
from pinyon.placement.holder_sets import HolderSets
from pinyon.placement.index import COLLECT_SLOTS, BlockIndex
from pinyon.placement.instances import InstanceLoad
from pinyon.placement.key_table import _FIRST, _LAST, _THEN, fingerprint
from pinyon.placement.kvcache_centric import KvCacheCentric, KvCacheCentricSettings
from pinyon.placement.plain import LeastLoaded
from pinyon.placement.policy import PlacementDecision, PlacementRequest
from pinyon.placement.scheduler import Scheduler
from tests.unit.placement.conftest import DECODE, PREFILL, STORE, hold, info, keys, make_fleet, member

BLOCKS = 64


def ask(name: str, own: int = 0, **changes) -> PlacementRequest:
    """Returns a prompt of 64 blocks that all prompts share, and two blocks of its own when ``own`` is not 0."""
    shared = range(BLOCKS)
    tail = (10 * own, 10 * own + 1) if own else ()
    values = {"prompt_tokens": 16 * (BLOCKS + len(tail)) + 1, "block_keys": keys(*shared, *(1000 + n for n in tail))}
    return PlacementRequest(name, "m", **{**values, "max_tokens": 8, **changes})


def where(decision: PlacementDecision) -> str:
    return decision.prefill.info.instance_id


MEMBERS = (*((f"p{i}", PREFILL) for i in range(4)), ("d0", DECODE), ("d1", DECODE))


@pytest.fixture
def fleet():
    return make_fleet(*MEMBERS)


@pytest.fixture
def scheduler(fleet):
    return Scheduler(fleet, KvCacheCentric())


def test_requests_with_one_new_prefix_go_to_one_instance(fleet, scheduler):
    decisions = [scheduler.schedule(ask(f"r{i}", own=i + 1), 0.0) for i in range(4)]
    assert {where(decision) for decision in decisions} == {"p0"}
    assert [decision.local_blocks for decision in decisions] == [0, BLOCKS, BLOCKS, BLOCKS]
    assert all(decision.fetches == () for decision in decisions)
    assert decisions[1].queue_s == pytest.approx(decisions[0].prefill_s, abs=1e-5), "behind the one that computes it"
    assert decisions[1].prefill_s < decisions[0].prefill_s / 4


def test_others_still_spread(fleet, scheduler):
    decisions = [scheduler.schedule(ask(f"r{i}", block_keys=keys(i, i + 50)), 0.0) for i in range(4)]
    assert sorted(where(decision) for decision in decisions) == ["p0", "p1", "p2", "p3"]


def test_nobody_waits_longer_for_it_than_patience_allows(fleet):
    impatient = Scheduler(fleet, KvCacheCentric(KvCacheCentricSettings(sharing_patience=0.0)))
    assert [where(impatient.schedule(ask(f"r{i}", own=i + 1), 0.0)) for i in range(2)] == ["p0", "p1"]
    for request_id in ("r0", "r1"):
        fleet.inflight.release(request_id)
    patient = Scheduler(fleet, KvCacheCentric())
    patient.schedule(ask("long", block_keys=b"", prompt_tokens=4000), 0.0)
    patient.schedule(ask("first", exclude=frozenset({"p1", "p2", "p3"})), 0.0)
    assert where(patient.schedule(ask("next", own=1), 0.0)) != "p0", "there is other work before it"


def test_nobody_misses_an_slo_for_it(fleet, scheduler):
    first = scheduler.schedule(ask("first"), 0.0)
    strict = ask("next", ttft_slo_s=first.ttft_s * 1.01)
    assert where(scheduler.schedule(strict, 0.0)) == "p1"
    fleet.inflight.release("next")
    with pytest.raises(Rejected):
        scheduler.schedule(ask("last", ttft_slo_s=first.ttft_s * 1.01, exclude=frozenset({"p1", "p2", "p3"})), 0.0)


@pytest.mark.parametrize("end", ["prefilled", "failed", "released", "expired"])
def test_it_counts_until_the_prefill_ends(fleet, scheduler, end):
    scheduler.schedule(ask("first"), 0.0)
    p0 = member(fleet, "p0")
    assert fleet.inflight.expected.of(p0)
    if end == "prefilled":
        fleet.inflight.end_prefill("first", p0, 0.0)
    elif end == "failed":
        fleet.inflight.end_decode("first", member(fleet, "d0"))
    elif end == "released":
        fleet.inflight.release("first")
    else:
        fleet.inflight.expire(60.0)
    assert not fleet.inflight.expected.of(p0)
    assert scheduler.schedule(ask("next"), 0.0).local_blocks == 0


def test_two_that_expect_the_same_and_one_ends(fleet, scheduler):
    for name in ("first", "second"):
        scheduler.schedule(ask(name), 0.0)
    fleet.inflight.release("first")
    decision = scheduler.schedule(ask("third", own=3), 0.0)
    assert (where(decision), decision.local_blocks) == ("p0", BLOCKS)


def test_what_is_not_computed_yet_is_fetched_by_nobody(fleet, scheduler):
    scheduler.schedule(ask("first"), 0.0)
    fleet.set_load(member(fleet, "p0"), InstanceLoad(pending_prefill_tokens=100_000), 0.0)
    decision = scheduler.schedule(ask("next"), 0.0)
    assert (where(decision), decision.local_blocks, decision.fetches) == ("p1", 0, ())


def test_a_fetch_continues_behind_what_is_being_computed(fleet):
    scheduler = Scheduler(fleet, KvCacheCentric())
    fleet.join(info("s0", STORE), 0.0)
    only = frozenset({"p1", "p2", "p3"})
    scheduler.schedule(ask("first", block_keys=keys(*range(BLOCKS // 4)), exclude=only), 0.0)
    hold(fleet, "s0", range(BLOCKS))
    decision = scheduler.schedule(ask("next", exclude=only), 0.0)
    assert decision.local_blocks == BLOCKS // 4
    assert [(span.first_block, span.block_count) for span in decision.fetches] == [(BLOCKS // 4, BLOCKS * 3 // 4)]


def test_whoever_shares_a_fetch_waits_for_it(fleet, scheduler):
    fleet.join(info("s0", STORE), 0.0)
    hold(fleet, "s0", range(BLOCKS))
    for name in ("p0", "p1", "p2", "p3"):
        for _ in range(50):
            fleet.learn_transfers(member(fleet, name), [(BLOCKS * 8192, 0.05, None)], 0.0)
    only = frozenset({"p1", "p2", "p3"})
    first = scheduler.schedule(ask("first", exclude=only), 0.0)
    assert first.fetches
    shared = scheduler.schedule(ask("next", exclude=only), 0.0)
    assert (shared.local_blocks, shared.fetches) == (BLOCKS, ())
    assert shared.queue_s == pytest.approx(first.transfer_s + first.prefill_s, abs=1e-5)
    stranger = scheduler.schedule(ask("other", block_keys=b"", exclude=only), 0.0)
    assert stranger.queue_s == pytest.approx(first.prefill_s + shared.prefill_s, abs=1e-5), (
        "fetching occupies no engine"
    )


def test_what_may_not_be_reused_is_not_expected(fleet, scheduler):
    scheduler.schedule(ask("first", no_reuse=True), 0.0)
    assert not fleet.inflight.expected.of(member(fleet, "p0"))
    scheduler.schedule(ask("second"), 0.0)
    assert scheduler.schedule(ask("third", no_reuse=True), 0.0).local_blocks == 0


def test_the_baseline_counts_on_it_as_well(fleet):
    scheduler = Scheduler(fleet, LeastLoaded())
    only = frozenset({"p1", "p2", "p3"})
    scheduler.schedule(ask("first", exclude=only), 0.0)
    assert scheduler.schedule(ask("next", exclude=only), 0.0).local_blocks == BLOCKS


def test_expectations_are_bounded():
    fleet = make_fleet(*MEMBERS, expected_keys_max=BLOCKS)
    scheduler = Scheduler(fleet, KvCacheCentric())
    for number in range(3):
        scheduler.schedule(ask(f"r{number}"), 0.0)
    assert fleet.inflight.expected.of(member(fleet, "p0")) == BLOCKS
    fleet.inflight.release("r0")
    assert not fleet.inflight.expected.of(member(fleet, "p0"))
    scheduler.schedule(ask("r4"), 0.0)
    assert fleet.inflight.expected.pairs == BLOCKS


def test_only_what_is_not_held_yet_is_expected(fleet, scheduler):
    hold(fleet, "p0", range(BLOCKS // 4))
    assert where(scheduler.schedule(ask("first"), 0.0)) == "p0"
    assert fleet.inflight.expected.of(member(fleet, "p0")) == BLOCKS * 3 // 4
    decision = scheduler.schedule(ask("next", own=1), 0.0)
    assert (where(decision), decision.local_blocks) == ("p0", BLOCKS)


PROMPT = st.tuples(st.integers(0, 2), st.lists(st.integers(0, 12), max_size=6, unique=True).map(tuple))


class Bit(NamedTuple):
    bit: int


@given(st.lists(PROMPT, max_size=8), st.lists(PROMPT, max_size=3), st.randoms(use_true_random=False))
def test_prompts_come_and_go_in_any_order(prompts, held, dice):
    """The table agrees with a multiset for each instance, and tells how much of a prompt each instance has soon."""
    index, expected = BlockIndex(1000), ExpectedBlocks()
    holders = [Bit(index.add()) for _ in range(3)]
    counted = [Counter() for _ in holders]
    there = [set() for _ in holders]
    for number, prompt in held:
        there[number].update(prompt)
    for holder, numbers in zip(holders, there, strict=True):
        index.apply_snapshot(holder, 0, keys(*numbers), first=True, last=True)

    def check() -> None:
        assert expected.pairs == sum(len(+each) for each in counted)
        assert len(expected) == len({number for each in counted for number in +each})
        for asked in [(number,) for number in range(13)] + [prompt for _, prompt in prompts] + [tuple(range(13))]:
            match = index.match(keys(*asked), None, expected)
            for holder, each, numbers in zip(holders, counted, there, strict=True):
                assert match.held_by(holder) == leading(asked, numbers)
                assert match.soon.held_by(holder) == leading(asked, numbers | set(+each))

    for number, prompt in prompts:
        expected.add(holders[number], keys(*prompt))
        counted[number].update(prompt)
    check()
    for number, prompt in dice.sample(prompts, len(prompts)):
        expected.remove(holders[number], keys(*prompt))
        counted[number].subtract(prompt)
        check()
    assert not expected
    assert not expected.pairs


def leading(asked, numbers):
    return next((at for at, number in enumerate(asked) if number not in numbers), len(asked))


@pytest.mark.parametrize("shared", [False, True])
def test_a_key_that_a_client_names_twice_is_one(fleet, scheduler, shared):
    """The keys that clients send are not checked, and each counted key must be uncounted."""
    if shared:
        scheduler.schedule(ask("other", block_keys=keys(1, 2), exclude=frozenset({"p1", "p2", "p3"})), 0.0)
    twice = ask("twice", block_keys=keys(1, 1, 2, 1), exclude=frozenset({"p1", "p2", "p3"}))
    scheduler.schedule(twice, 0.0)
    fleet.inflight.check_integrity()
    assert fleet.inflight.expected.of(member(fleet, "p0")) == 2
    for request_id in ("twice", "other"):
        fleet.inflight.release(request_id)
        fleet.inflight.check_integrity()
    assert not fleet.inflight.expected
    assert not fleet.inflight.expected.pairs


def test_who_left_holds_nothing_soon():
    index, expected = BlockIndex(100_000), ExpectedBlocks()
    left, stays = Bit(index.add()), Bit(index.add())
    prompt = range(2 * COLLECT_SLOTS)
    index.apply_snapshot(left, 0, keys(*prompt), first=True, last=True)
    expected.add(stays, keys(*prompt))
    index.drop(left)
    for number in prompt:
        soon = index.match(keys(number), None, expected).soon
        assert (soon.held_by(left), soon.held_by(stays)) == (0, 1)


def print_at(packed, at):
    low, high = struct.unpack_from("<qq", packed, at)
    return fingerprint(low, high)


PAIRS = st.lists(st.tuples(st.integers(0, 70), st.lists(st.integers(0, 400), max_size=60)), max_size=30)


@given(PAIRS, st.randoms(use_true_random=False))
def test_a_table_knows_what_a_dict_knows(prompts, dice):
    """The test includes few places with many instances, and removals of pairs that were never added."""
    expected, counted = ExpectedBlocks(), Counter()
    left = []

    def check() -> None:
        there = +counted
        assert (len(expected), expected.pairs) == (len({number for number, _ in there}), len(there))
        masks = [sum(1 << row for row in range(71) if there[number, row]) for number in range(401)]
        assert [expected.mask_of(print_at(keys(number), 0)) for number in range(401)] == masks

    def remove(row: int, numbers: list[int]) -> None:
        expected.remove(Bit(1 << row), keys(*numbers))
        counted.subtract((number, row) for number in numbers)

    for row, numbers in prompts:
        if left and dice.random() < 0.4:
            remove(*left.pop(dice.randrange(len(left))))
        left.append((row, [*dict.fromkeys(numbers)]))
        expected.add(Bit(1 << row), keys(*left[-1][1]))
        counted.update((number, row) for number in left[-1][1])
    check()
    for row, numbers in left:
        remove(row, numbers)
    check()
    assert not expected
    expected.remove(Bit(1), keys(1, 2))
    assert not expected


def key_with(print_: int) -> bytes:
    """Returns a key with this fingerprint, by inverting all rounds."""
    left, right = print_ >> 32, print_ & 0xFFFFFFFF
    left ^= right * _LAST >> 15 & 0x7FFFFFFF
    right ^= left * _THEN >> 29 & 0xFFFFFFFF
    left ^= right * _FIRST >> 15 & 0x7FFFFFFF
    return struct.pack("<qq", left << 32 | right, 0)


def test_keys_that_look_alike_leave_nothing_behind():
    """A client that chooses prompts finds two such keys among millions: they count as one key with several requests."""
    some, other = key_with(7 << 40 | 5), key_with(7 << 40 | 6)
    assert print_at(some, 0) ^ print_at(other, 0) == 3
    table, row = ExpectedBlocks(), Bit(1)
    for _ in range(3):
        table.add(row, some)
        table.add(row, other)
        table.remove(row, some)
        table.add(row, some)
        assert table.mask_of(print_at(other, 0)) == 1
        table.remove(row, other)
        assert table.mask_of(print_at(some, 0)) == 1
        table.remove(row, some)
        assert (len(table), table.pairs, table._again) == (0, 0, {})


def test_keys_that_a_client_chose_are_not_in_one_place():
    """The fingerprints are alike in their lowest bits, by which all keys would follow one another."""
    prints = [number << 22 | 5 for number in range(1, 2001)]
    # Each process has its own secret, and one in some hundred spreads an even sequence badly.
    tables, dice = [ExpectedBlocks() for _ in range(15)], Random(3)
    for table in tables:
        table._secret = dice.randrange(1 << 63) | 1
    homes = [len({table._home(print_ - (print_ >> 63 << 64)) for print_ in prints}) for table in tables]
    assert median(homes) > 500, "of 1,024"


def test_where_sets_are_too_many_nothing_stays_behind():
    table, dice = ExpectedBlocks(), Random(5)
    table._sets = HolderSets(20)
    added = [(row, keys(*range(6))) for row in range(10) for _ in range(2)]
    for row, packed in added:
        table.add(Bit(1 << row), packed)
    dice.shuffle(added)
    for row, packed in added:
        table.remove(Bit(1 << row), packed)
    assert (len(table), table.pairs, table._again) == (0, 0, {})
