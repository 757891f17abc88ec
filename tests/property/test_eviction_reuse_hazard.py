"""pinyon's own policy: prefixes outlive extensions, tenants keep shares, records stay small, learning is right."""

from __future__ import annotations

import math
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pinyon.eviction import Traits
from pinyon.eviction.fair_queues import RunQueues
from pinyon.eviction.hazard_table import BINS, EDGES_S, HazardTable, bin_of
from pinyon.eviction.prefix_tree import TreeRun
from pinyon.eviction.reuse_hazard import STALE_MIN, ReuseHazard, ReuseHazardSettings
from pinyon.eviction.tenant_shares import (
    FLOOD,
    GROUPS,
    KNOWN,
    LATER,
    LONGEST_S,
    RARE,
    ROUND,
    SEEN_MAX,
    ReuseGaps,
    TenantShares,
)
from pinyon_lab.caches.replay import CacheReplay, CacheRequest, replay
from tests.long import usually
from tests.on_compiled import REPLACES_METHODS

EIGHTHS = st.integers(1, 72_000).map(lambda eighths: eighths / 8)
"""Times in eighths of a second, which add up without rounding."""


def own(**values: float) -> ReuseHazard[int]:
    return ReuseHazard(ReuseHazardSettings(**values))  # type: ignore[arg-type]


class Prompts:
    """Generated chains of blocks that share prefixes: a block determines all blocks before it."""

    def __init__(self, rng: Random, tenants: int = 3) -> None:
        self._rng = rng
        self._tenants = tenants
        self._asked: list[tuple[int, ...]] = [()]
        self._ids = 0
        self.before: dict[int, int | None] = {}

    def next(self) -> tuple[tuple[int, ...], Traits]:
        rng = self._rng
        known = rng.choice(self._asked[-40:])
        kept = known[: rng.randint(0, len(known))] if rng.random() < 0.5 else known
        new = []
        for _ in range(rng.randint(0, 6)):
            self._ids += 1
            new.append(self._ids)
        blocks = (*kept, *new) or (0,)
        for number, block in enumerate(blocks):
            self.before.setdefault(block, blocks[number - 1] if number else None)
        self._asked.append(blocks)
        tenant = str(rng.randrange(self._tenants))
        return blocks, Traits(f"text/{rng.randint(1, 4)}", tenant)


@settings(max_examples=usually(12, long=60), deadline=None)
@given(st.integers(0, 1 << 32), st.integers(5, 60), st.booleans())
def test_what_extends_a_block_never_outlives_it(seed: int, capacity: int, fair: bool) -> None:
    rng = Random(seed)
    prompts = Prompts(rng)
    policy = own(refit_s=1.0, fair=fair)
    cache = CacheReplay(policy, capacity)
    now_s = 0.0
    for _ in range(120):
        now_s += rng.choice((0.0, 0.1, 3.0, 70.0))
        blocks, traits = prompts.next()
        cache.request(blocks, now_s, traits)
        for block in [block for block in prompts.before if block in cache.resident]:
            before = prompts.before[block]
            assert before is None or before in cache.resident, f"{block} without {before}"
        assert len(policy) == len(cache.resident) <= capacity
        assert len(policy._ghosts) <= len(policy) + STALE_MIN
    assert sorted(policy.victims(capacity + 1, now_s)) == sorted(
        block for block in prompts.before if block in cache.resident
    ), "some cannot be had"


def test_a_flooding_tenant_takes_no_more_than_its_share() -> None:
    """Two tenants repeat the same requests; a third asks for something new each time, ten times as often."""
    held = {"quiet": list(range(40)), "calm": list(range(100, 140))}
    cache = CacheReplay(own(), 120)
    fresh = iter(range(1_000, 1_000_000))
    hits = blocks = 0
    for step in range(usually(300, long=600)):
        now_s = step * 7.0
        for tenant, mine in held.items():
            hits += cache.request(mine, now_s, Traits("text/1", tenant))
            blocks += len(mine)
        for _ in range(10):
            cache.request([next(fresh) for _ in range(40)], now_s + 1.0, Traits("text/1", "flood"))
    assert hits == blocks - 80, "what is not above its share was taken"


def test_a_share_is_not_for_what_nobody_will_use() -> None:
    """A prefix that was requested once keeps its place beside a flood for half an hour, not for half a day."""
    cache = CacheReplay(own(), 120)
    mine = list(range(40))
    cache.request(mine, 0.0, Traits("text/1", "quiet"))
    fresh = iter(range(1_000, 1_000_000))
    steps = usually(360, long=720)
    for step in range(1, steps):
        now_s = step * 43_200.0 / steps
        cache.request([next(fresh) for _ in range(40)], now_s, Traits("text/1", "flood"))
        if now_s < LONGEST_S:
            assert all(block in cache.resident for block in mine)
    assert not any(block in cache.resident for block in mine)


@pytest.mark.parametrize(("gap_s", "kept"), [(1.0, False), (100.0, True)])
def test_how_long_a_share_protects_is_what_its_tenant_does(gap_s: float, kept: bool) -> None:
    """A tenant that used to return within a second will not after ten minutes of a flood; one with two minutes may."""
    cache = CacheReplay(own(), 120)
    mine = list(range(40))
    traits = Traits("text/1", "mine")
    for turn in range(ROUND + 1):
        cache.request(mine, turn * gap_s, traits)
    start_s = ROUND * gap_s
    fresh = iter(range(1_000, 1_000_000))
    for step in range(1, 60):
        cache.request([next(fresh) for _ in range(40)], start_s + step * 6.0, Traits("text/1", "flood"))
    assert all(block in cache.resident for block in mine) == kept
    assert any(block in cache.resident for block in mine) == kept


def test_what_others_use_says_little_of_a_tenant() -> None:
    """A flooding tenant that reuses its blocks at once counts once; the habits of most others are taken as usual."""
    shares = TenantShares()
    quiet, flood = shares.group("quiet"), shares.group("flood")
    shares.add(quiet, 1)
    for _ in range(10 * SEEN_MAX):
        shares.again(flood, 0.5)
    assert shares.protects_s(flood) == LATER
    assert shares.protects_s(quiet) == LONGEST_S
    for number in range(KNOWN):
        for _ in range(ROUND):
            shares.again(shares.group(f"tenant {number}"), 30.0)
    assert shares.protects_s(quiet) == LATER * 32.0
    for _ in range(ROUND):
        shares.again(quiet, 400.0)
    assert shares.protects_s(quiet) == LONGEST_S


def test_a_group_that_changed_tenants_knows_nothing_of_the_old() -> None:
    shares = TenantShares()
    groups = [shares.group(f"tenant {number}") for number in range(GROUPS)]
    for group in groups[1:]:
        shares.add(group, 1)
    for _ in range(ROUND):
        shares.again(groups[0], 0.5)
    assert shares.protects_s(groups[0]) == LATER
    assert shares.group("one more") == groups[0], "it held nothing"
    assert shares.protects_s(groups[0]) == LONGEST_S


@given(st.lists(st.floats(0.0, 1e6), max_size=100))
def test_how_late_is_rare(gaps_s: list[float]) -> None:
    gaps = ReuseGaps()
    for gap_s in gaps_s:
        gaps.add(gap_s)
    seen = gaps_s[: len(gaps_s) // ROUND * ROUND]
    if not seen:
        assert gaps.over_s is None
        return
    assert gaps.over_s is not None
    assert gaps.over_s <= LONGEST_S
    if gaps.over_s < LONGEST_S:
        at = gaps.over_s / LATER
        assert sum(gap > at for gap in seen) <= RARE * len(seen)
        assert at == 1.0 or sum(gap > at / 2 for gap in seen) > RARE * len(seen)


def test_gaps_of_long_ago_are_forgotten() -> None:
    gaps = ReuseGaps()
    for _ in range(100):
        gaps.add(1000.0)
    assert gaps.over_s == LONGEST_S
    for _ in range(8 * SEEN_MAX):
        gaps.add(1.0)
    assert gaps.over_s == LATER


def test_shares() -> None:
    shares = TenantShares()
    few = [shares.group(name) for name in ("a", "b", "c")]
    assert few == [0, 1, 2]
    for group, keys in zip(few, (10, 20, 60), strict=True):
        shares.add(group, keys)
    assert [shares.above(group) for group in few] == [0, 0, 30]
    shares.add(2, -60)
    assert [shares.above(group) for group in few] == [0, 5, 0]


def test_with_many_tenants_nobody_may_flood() -> None:
    shares, held = TenantShares(), dict.fromkeys(range(GROUPS), 0)
    for number in range(3 * GROUPS):
        group = shares.group(f"tenant {number}")
        assert group == shares.group(f"tenant {number}")
        shares.add(group, 10)
        held[group] += 10
    assert all(shares.above(group) == keys > 0 for group, keys in held.items()), "nobody floods: all may go"
    shares.add(7, 4000)
    held[7] += 4000
    most = sum(held.values()) // FLOOD
    assert [group for group in held if shares.above(group)] == [7]
    assert shares.above(7) == held[7] - most


@settings(max_examples=usually(10, long=40), deadline=None)
@given(st.lists(st.tuples(EIGHTHS, EIGHTHS | st.none()), min_size=1, max_size=60))
def test_the_life_table_counts_what_happens(lives: list[tuple[float, float | None]]) -> None:
    """The table equals a count of each life. ``None``: never used again."""
    table = HazardTable(1e12)
    of = table.of("x", table.root)
    end_s = 200_000.0
    events = sorted(
        [(begun, 0, number) for number, (begun, _) in enumerate(lives)]
        + [(begun + after, 1, number) for number, (begun, after) in enumerate(lives) if after is not None]
    )
    samples = {}
    for at_s, what, number in events:
        table.advance(at_s)
        if what == 0:
            samples[number] = table.begin(of, at_s)
        else:
            table.again(samples[number], at_s)
    table.advance(end_s)
    again, through = np.zeros(BINS), np.zeros(BINS)
    for begun, after in lives:
        age = (begun + after) - begun if after is not None else end_s - begun
        last = bin_of(age)
        for bin in range(last):
            through[bin] += 1
        if after is not None:
            again[last] += 1
        elif age >= 2 * EDGES_S[-1]:
            through[last] += 1
    assert table._again[of.number].tolist() == again.tolist()
    assert table._through[of.number].tolist() == through.tolist()


def test_what_is_learned_of_an_exponential_is_its_hazard() -> None:
    """Half of the blocks are used again, after 100 s on average; by the posterior the youngest are worth most."""
    rng = Random(5)
    table = HazardTable(1e12)
    of = table.of("x", table.root)
    events: list[tuple[float, int, int]] = []
    for number in range(20_000):
        begun = number * 0.5
        events.append((begun, 0, number))
        if rng.random() < 0.5:
            events.append((begun - 100.0 * math.log(1 - rng.random()), 1, number))
    samples = {}
    for at_s, what, number in sorted(events):
        table.advance(at_s)
        if what == 0:
            samples[number] = table.begin(of, at_s)
        else:
            table.again(samples[number], at_s)
    table.adopt(table.fit(10_000.0)())
    for bin in range(3, 9):
        middle_s = (EDGES_S[bin] + EDGES_S[bin + 1]) / 2
        alive = 0.5 * math.exp(-middle_s / 100.0)
        hazard = alive / (alive + 0.5) / 100.0
        assert table.value(of.number, bin) == pytest.approx(hazard, rel=0.12), f"bin {bin}"
    belief = table.beliefs()["x"]
    assert belief.share == pytest.approx(0.5, abs=0.02)
    assert belief.mean_s == pytest.approx(100.0, rel=0.15)


def conversations(seed: int, count: int, again: float) -> list[CacheRequest]:
    """Returns two kinds: one continues with probability ``again`` after 50 s; one, four times as common, never does."""
    rng = Random(seed)
    asked: list[CacheRequest] = []
    ids = iter(range(10_000_000))
    for number in range(count):
        start_s = number * 1.0
        if number % 5:
            asked.append(CacheRequest([next(ids) for _ in range(8)], start_s, Traits("once/1", "t")))
            continue
        blocks: list[int] = []
        turn = 1
        while True:
            blocks = [*blocks, *(next(ids) for _ in range(8))]
            asked.append(CacheRequest(blocks, start_s, Traits(f"chat/{turn}", "t")))
            if rng.random() >= again:
                break
            start_s += -50.0 * math.log(1 - rng.random())
            turn += 1
    asked.sort(key=lambda each: each.now_s)
    return asked


@pytest.mark.parametrize("seed", [3, 4, 6, 8][: usually(1, long=4)])
def test_it_keeps_what_comes_back(seed: int) -> None:
    """The policy must learn that one kind never returns. Of the other, the last used is likeliest to be used again.

    A perfect policy would use LRU with all the room for this kind. LRU over both kinds gets at most 0.893 of its hits,
    and this policy 0.907 if it never adopts what it learned (seeds 3 to 10)."""
    asked = conversations(seed, 3_000, 0.8)
    chats = [each for each in asked if each.traits.category.startswith("chat")]
    known = replay(chats, "lru", 600).hit_blocks
    hits = {name: replay(asked, name, 600).hit_blocks for name in ("lru", "reuse_hazard")}
    assert hits["lru"] < 0.91 * known < hits["reuse_hazard"], (hits, known)


def test_it_follows_when_the_workload_shifts() -> None:
    """The kinds swap roles in the middle; in the last third the policy is as good as one that began there."""
    first = conversations(4, usually(1_200, long=2_000), 0.8)
    names = {"once": "chat", "chat": "once"}
    shift_s = first[-1].now_s + 1.0
    later = [
        CacheRequest(
            [block + 20_000_000 for block in each.blocks],
            each.now_s + shift_s,
            Traits("/".join((names[each.traits.category.split("/")[0]], each.traits.category.split("/")[1])), "t"),
        )
        for each in conversations(5, usually(1_800, long=3_000), 0.8)
    ]
    shifted, fresh = CacheReplay(own(window_s=300.0), 600), CacheReplay(own(window_s=300.0), 600)
    for each in first:
        shifted.request(*each)
    seen = {}
    for name, cache in (("shifted", shifted), ("fresh", fresh)):
        for number, each in enumerate(later):
            if number == len(later) * 2 // 3:
                seen[name] = -cache.hit_blocks
            cache.request(*each)
        seen[name] += cache.hit_blocks
    assert seen["shifted"] > 0.97 * seen["fresh"], seen


def test_what_is_pinned_stays_even_if_all_else_must_go() -> None:
    policy = own()
    policy.stored([1, 2, 3], 0.0, Traits(), range(3))
    policy.stored([4, 5], 1.0, Traits(), range(3, 5), 3)
    policy.pinned([4, 5], 1.0)
    assert policy.victims(9, 2.0) == [3, 2, 1], "what is before something pinned goes if nothing else can"
    policy.unpinned([4, 5], 3.0)
    assert policy.victims(9, 4.0) == [5, 4]
    assert len(policy) == 0


def test_a_prefix_stored_again_is_held_by_its_extensions() -> None:
    policy = own(guard=False)
    policy.stored([1, 2], 0.0, Traits(), range(2))
    policy.stored([3, 4], 1.0, Traits(), range(2, 4), 2)
    policy.dropped([1, 2], 2.0)
    policy.stored([1, 2], 3.0, Traits(), range(2))
    policy.used([1, 2, 3, 4], 4.0, Traits(), range(4))
    assert policy.victims(4, 5.0) == [4, 3, 2, 1]


def test_what_is_held_does_not_hold_all_that_ever_went_before_it() -> None:
    """Prompts that lose their beginning as they grow."""
    policy = own()
    policy.stored([0], 0.0, Traits(), [0])
    for number in range(1, 50):
        policy.stored([number], float(number), Traits(), [number], number - 1)
        policy.dropped([number - 1], float(number))
    (run,) = policy._tree.runs()
    assert run.parent is None or run.parent.parent is None


@pytest.mark.parametrize("values", [{"window_s": 0.0}, {"refit_s": math.inf}])
def test_settings_are_checked(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be from"):
        own(**values)


def test_what_was_kept_by_a_pinned_prefix_is_found_again() -> None:
    """A request that branches off pins and uses a prefix; the blocks behind it may then be evicted as before."""
    policy = own()
    policy.stored([1, 2, 3, 4, 5, 6], 0.0, Traits(), range(6))
    policy.pinned([1, 2], 5.0)
    policy.used([1, 2], 5.0, Traits(), range(2))
    policy.stored([7], 5.0, Traits(), [2], 2)
    policy.pinned([7], 5.0)
    policy.stored([8, 9], 5.5, Traits(), range(2))
    assert policy.victims(4, 6.0) == [6, 5, 4, 3], "younger ones went first"
    assert policy.victims(2, 6.0) == [9, 8]
    assert policy.peek(6.0) is None
    policy.unpinned([1, 2, 7], 7.0)
    assert policy.victims(9, 8.0) == [7, 2, 1]


def test_what_enters_its_queue_late_is_as_old_as_it_is() -> None:
    """A run behind a younger one of its class and bin is evicted first, and leaves the bin when its time comes."""
    policy = own()
    policy.stored([1], 0.0, Traits(), [0])
    policy.pinned([1], 0.0)
    policy.stored([2], 1.75, Traits(), [0])
    policy.peek(3.75)
    policy.unpinned([1], 3.75)
    worth, key = policy.peek(4.5) or (0.0, 0)
    assert (worth, key) == (policy._table.value(policy._tree.run_of(1).of.number, bin_of(4.5)), 1)
    assert policy._tree.run_of(1).bin == bin_of(4.5)
    assert policy.victims(2, 4.5) == [1, 2]


def test_what_only_pins_keep_is_next_where_nothing_else_may_go() -> None:
    policy = own()
    policy.stored([1, 2], 0.0, Traits(), range(2))
    policy.pinned([2], 0.0)
    assert policy.peek(1.0) == (math.inf, 1)
    assert policy.victims(5, 1.0) == [1]


def test_what_is_not_valid_any_more_does_not_pile_up() -> None:
    """Runs that aged and are gone leave entries in bins that time alone would take hours to reach."""
    policy = own(refit_s=1e9)
    policy.stored([-1], 0.0, Traits(), [0])
    for number in range(4_000):
        policy.stored([number], 0.0, Traits(), [0])
    for now_s in (10.0, 1_000.0, 40_000.0):
        policy.peek(now_s)
        policy._table.advance(now_s)
    policy.dropped(range(4_000), 40_000.0)
    policy.stored([-2], 40_000.0, Traits(), [0])
    (queues,), table = policy._queues._queues.values(), policy._table
    assert queues._inside == table._alive == len(policy) == 2
    assert sum(map(len, queues._queues.values())) == queues._entries <= 2 * 2 + STALE_MIN
    assert sum(map(len, table._samples)) == table._entries <= 2 * 2 + STALE_MIN
    assert sorted(policy.victims(9, 40_001.0)) == [-2, -1]


@REPLACES_METHODS
def test_tenants_near_their_shares_cost_no_more_than_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request lifts one of two tenants above its share in turn, without work on the other's blocks."""
    entered = 0
    append = RunQueues._append

    def counted(self: RunQueues[int], run: TreeRun[int]) -> None:
        nonlocal entered
        entered += 1
        append(self, run)

    cache = CacheReplay(own(guard=False), 400)
    tenants = "x" * 200 + "y" * 200 + "yx" * 100
    requests = [CacheRequest([number], 0.5, Traits("a/1", tenant)) for number, tenant in enumerate(tenants)]
    for each in requests[:400]:
        cache.request(*each)
    monkeypatch.setattr(RunQueues, "_append", counted)
    for each in requests[400:]:
        cache.request(*each)
    assert cache.evicted == 200
    assert entered == 200, "one for each that came"
