"""The instances that decode each prefix, by reports and placements, and the place of the prefix's next request."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pinyon.core.block_keys import KEY_BYTES, SharedPrefix
from pinyon.placement.decode_selection import decode_blocks
from pinyon.placement.instances import InstanceLoad
from pinyon.placement.policies import PLACEMENT_POLICIES
from pinyon.placement.policy import PlacementRequest
from pinyon.placement.scheduler import Scheduler
from pinyon.placement.shared_prefixes import DEPTHS_MAX, FOUND_MAX, SharedPrefixes
from tests.unit.placement.conftest import DECODE, LAYOUT, PREFILL, info, key, keys, make_fleet, member

BLOCK = LAYOUT.block_tokens
COMMON = 256
"""The blocks of the prefix, 4,096 tokens."""
BATCHED = InstanceLoad(running_requests=8, kv_tokens=8 * 4_500, level_blocks=4)


def test_the_deepest_of_what_was_reported_and_placed_counts() -> None:
    prefixes = SharedPrefixes()
    prefixes.reported(1, 2, (SharedPrefix(key(4), 5, 3),))
    prefixes.reported(2, 2, ())
    assert prefixes.found(keys(*range(8)), 2) == {1: 5}
    first, second = prefixes.placed(2, keys(*range(9))), prefixes.placed(2, keys(*range(3), 99))
    assert prefixes.found(keys(*range(8)), 2) == {2: 8, 1: 5}
    assert prefixes.found(keys(*range(3)), 1) == {2: 2}
    prefixes.reported(1, 2, ())
    prefixes.ended(2, first)
    assert prefixes.found(keys(*range(8)), 2) == {2: 2}, "the other one is there still"
    prefixes.check_integrity()
    prefixes.ended(2, second)
    assert prefixes.empty
    prefixes.check_integrity()


def test_an_instance_without_prefix_batching_is_not_counted() -> None:
    prefixes = SharedPrefixes()
    assert prefixes.placed(1, keys(*range(8))) == []
    prefixes.reported(1, 0, (SharedPrefix(key(4), 5, 3),))
    assert prefixes.empty


def test_nothing_is_kept_where_nobody_asks() -> None:
    prefixes = SharedPrefixes()
    prefixes.used = False
    prefixes.reported(1, 2, (SharedPrefix(key(4), 5, 3),))
    assert prefixes.placed(1, keys(*range(8))) == []
    assert prefixes.empty


def test_what_strangers_report_is_bounded() -> None:
    prefixes = SharedPrefixes()
    for row in range(DEPTHS_MAX):
        prefixes.reported(row, 1, tuple(SharedPrefix(key(row), 7 + 4 * row + more, 2) for more in range(4)))
    assert len(prefixes) == DEPTHS_MAX
    marks = prefixes.placed(3, keys(*range(1000)))
    assert [depth for depth, _ in marks] == [1, 4, 16, 64, 256], "placements have room of their own"
    prefixes.ended(3, marks)
    for row in range(DEPTHS_MAX):
        prefixes.reported(row, 0, ())
    assert prefixes.empty
    prefixes.check_integrity()


def test_one_request_is_told_of_some_and_of_the_one_asked_about() -> None:
    prefixes = SharedPrefixes()
    for row in range(2 * FOUND_MAX):
        prefixes.reported(row, 1, (SharedPrefix(key(3), 4, 2),))
    found = prefixes.found(keys(*range(9)), 2 * FOUND_MAX - 1)
    assert len(found) == FOUND_MAX
    assert found[2 * FOUND_MAX - 1] == 4


def world(decodes: int, sharing: bool = True):
    fleet = make_fleet(("p0", PREFILL))
    fleet.loads.prefixes.used = sharing
    for number in range(decodes):
        state = fleet.join(replace(info(f"d{number}", DECODE), max_batch=64, capacity_blocks=20_000), 0.0)
        fleet.set_load(state, BATCHED, 0.0)
    return fleet, Scheduler(fleet, PLACEMENT_POLICIES.make("pinyon"))


def of_group(group: int, number: int) -> PlacementRequest:
    common = range(group * 10_000, group * 10_000 + COMMON)
    own = range(1 << 40 | number * 100, (1 << 40 | number * 100) + 16)
    return PlacementRequest(f"r{group}-{number}", "m", (COMMON + 16) * BLOCK + 1, keys(*common, *own), 256)


def counts(fleet, decisions) -> list[int]:
    names = [each.decode.info.instance_id for each in decisions]
    return [names.count(f"d{number}") for number in range(4)]


def test_between_reports_alike_prompts_are_decoded_together() -> None:
    for sharing in (False, True):
        fleet, scheduler = world(4, sharing)
        for number in range(4):
            fleet.set_load(member(fleet, f"d{number}"), InstanceLoad(level_blocks=4), 0.0)
        turns = [[(first + each) % 4 for each in range(4)] for first in range(4)]
        places = []
        for number, turn in enumerate(turns):
            row = {group: scheduler.schedule(of_group(group, number), 1.0) for group in turn}
            places.append([row[group] for group in range(4)])
        spread = [len({row[group].decode for row in places}) for group in range(4)]
        if not sharing:
            assert max(spread) > 1
            continue
        assert spread == [1, 1, 1, 1]
        assert len({each.decode for each in places[0]}) == 4
        assert {each.shared_blocks for row in places[1:] for each in row} == {COMMON}


def test_a_hot_prefix_does_not_pile_up() -> None:
    fleet, scheduler = world(4)
    placed = counts(fleet, [scheduler.schedule(of_group(0, number), 1.0) for number in range(100)])
    assert min(placed) >= 10, placed
    assert max(placed) <= 56, "of 64 slots, 8 are taken"


def test_what_is_shared_is_held_and_read_once() -> None:
    fleet, scheduler = world(1)
    one = scheduler.schedule(of_group(0, 0), 1.0)
    state = member(fleet, "d0")
    alone = state.inflight_decode_blocks
    assert (one.shared_blocks, alone) == (0, decode_blocks(of_group(0, 0), BLOCK))
    before_s = state.decode_s(alone * BLOCK)
    two = scheduler.schedule(of_group(0, 1), 1.0)
    assert state.inflight_decode_blocks == 2 * alone - COMMON
    per_token = state.decode_model.coefficients[2]
    assert two.tbt_s == pytest.approx(before_s - per_token * COMMON * BLOCK)


def test_the_time_between_tokens_is_learned_of_what_is_read() -> None:
    fleet, _ = world(1)
    state, block = member(fleet, "d0"), BLOCK
    load = replace(BATCHED, pending_requests=8, shared=(SharedPrefix(key(3), 10, 11),))
    assert load.read_once(5_000, block) == 5_000 - 10 * 10 * block / 2, "half of them are in the batch"
    assert load.read_once(10, block) == 0
    was_s = state.decode_s(0)
    fleet.set_load(state, replace(load, pending_requests=0), 1.0)
    assert was_s - state.decode_s(0) == pytest.approx(state.decode_model.coefficients[2] * 10 * 10 * block)


def test_who_is_placed_again_shares_nothing_with_himself() -> None:
    fleet, scheduler = world(2)
    again = [scheduler.schedule(of_group(0, 0), 1.0) for _ in range(3)]
    assert [each.shared_blocks for each in again] == [0, 0, 0]
    needs = decode_blocks(of_group(0, 0), BLOCK)
    assert sum(member(fleet, f"d{number}").inflight_decode_blocks for number in range(2)) == needs
    fleet.loads.prefixes.check_integrity()


def test_a_report_that_had_no_place_has_one_later() -> None:
    prefixes = SharedPrefixes()
    for row in range(DEPTHS_MAX):
        prefixes.reported(row, 1, (SharedPrefix(key(row), 7 + row, 2),))
    late = (SharedPrefix(key(255), 256, 50),)
    prefixes.reported(DEPTHS_MAX, 1, late)
    assert prefixes.found(keys(*range(300)), DEPTHS_MAX) == {}
    for row in range(DEPTHS_MAX):
        prefixes.reported(row, 0, ())
    prefixes.reported(DEPTHS_MAX, 1, late)
    assert prefixes.found(keys(*range(300)), DEPTHS_MAX) == {DEPTHS_MAX: 256}
    prefixes.check_integrity()


def test_placements_take_no_room_of_reports() -> None:
    prefixes = SharedPrefixes()
    marks = []
    for level in range(3, 3 + 2 * DEPTHS_MAX, 2):  # a liar reports another level each time
        prefixes.reported(1, level, ())
        marks += prefixes.placed(1, keys(*range(level)))
    prefixes.reported(2, 1, (SharedPrefix(key(399), 400, 8),))
    assert prefixes.found(keys(*range(500)), 2)[2] == 400
    prefixes.ended(1, marks)
    prefixes.check_integrity()


def test_full_instances_hide_nobody_who_decodes_the_same() -> None:
    fleet, scheduler = world(16)
    group = (SharedPrefix(of_group(0, 0).block_keys[(COMMON - 1) * KEY_BYTES : COMMON * KEY_BYTES], COMMON, 8),)
    for number in range(12):
        busy = {"running_requests": 64, "pending_requests": 60} if number < 8 else {"running_requests": 10}
        fleet.set_load(member(fleet, f"d{number}"), replace(BATCHED, shared=group, **busy), 1.0)
    chosen = scheduler.schedule(of_group(0, 1), 1.0)
    assert (chosen.decode.info.instance_id, chosen.shared_blocks) == ("d8", COMMON)
