"""The classes of a life table: no class takes what others may have, and unused classes make room."""

from __future__ import annotations

import numpy as np
import pytest

from pinyon.eviction import Traits
from pinyon.eviction.hazard_table import CLASSES_MAX, GROUP_CLASSES, GROUPS_MAX, HazardTable
from pinyon.eviction.reuse_hazard import ReuseHazard, ReuseHazardSettings

HOUR_S = 3600.0


def learn(table: HazardTable, now_s: float) -> None:
    table.advance(now_s)
    table.adopt(table.fit(now_s)())


def test_every_group_can_have_its_classes_whoever_came_first() -> None:
    table = HazardTable(HOUR_S)
    kept = table.keep("kept")
    greedy = table.of("greedy", table.root)
    for name in range(CLASSES_MAX):
        part = table.of(("greedy", name), greedy)
        table.of(("greedy", name, "part"), part)
    assert table.of(("greedy", "one more"), greedy) is greedy
    assert greedy.size == CLASSES_MAX - 1 - (GROUPS_MAX - 1) * GROUP_CLASSES
    groups = [kept, *(table.of(f"group {number}", table.root) for number in range(GROUPS_MAX - 2))]
    assert table.of("one too many", table.root) is table.root
    for group in groups:
        parts = {table.of((group.name, number), group) for number in range(CLASSES_MAX)}
        assert len(parts - {group}) == group.size - 1 == GROUP_CLASSES - 1
    assert len({each.number for each in table._classes.values()}) == CLASSES_MAX


def test_a_forgotten_class_leaves_what_it_saw_to_its_parent() -> None:
    table = HazardTable(HOUR_S)
    group = table.of("group", table.root)
    part = table.of("part", group)
    for _ in range(100):
        table.again(table.begin(part, 0.0), 0.5)
    waits = table.of("waits", group)
    table.begin(waits, 0.0)
    kept = table.keep("kept")
    learn(table, 5.0)
    table.of("nobody's", part)
    learn(table, 5.0)
    assert set(table._classes) == {"", "group", "part", "waits", "kept"}
    seen = table._again[part.number].copy()
    learn(table, 5.4 * HOUR_S)  # 100 / e^5.4 is 0.45
    assert set(table._classes) == {"", "group", "waits", "kept"}
    assert table._again[group.number] == pytest.approx(seen * np.exp(-(5.4 - 5.0 / HOUR_S)))
    assert part.number == table.root.number != waits.number
    assert kept.parent is table.root


def test_a_class_in_a_forgotten_ones_place_is_like_its_parent() -> None:
    """The class may come while values are being worked out that belonged to the forgotten class."""
    table = HazardTable(HOUR_S)
    often, never = table.of("often", table.root), table.of("never", table.root)
    for _ in range(1000):
        table.again(table.begin(often, 0.0), 0.5)
        table.begin(never, 0.0)
    part = table.of("part", often)
    number = part.number
    learn(table, 3.0)
    assert part.number == table.root.number, "forgotten"
    work = table.fit(3.0)
    new = table.of("new", never)
    assert new.number == number
    assert table.value(new.number, 0) == table.value(never.number, 0) < table.value(often.number, 0)
    table.adopt(work())
    assert table.value(new.number, 0) == table.value(never.number, 0)


def stored(policy: ReuseHazard[int], key: int, now_s: float, category: str) -> str:
    """Returns the class of a new key's prompt."""
    policy.stored([key], now_s, Traits(category), [0])
    return str(policy._tree.run_of(key).of.name)


def test_no_kind_is_taken_for_what_is_no_kind() -> None:
    policy: ReuseHazard[int] = ReuseHazard(ReuseHazardSettings())
    for key, kind in enumerate(("left", "shared", "other", "any")):
        assert f"'{kind}/1'" in stored(policy, key, 0.0, f"{kind}/1")
    assert "'(any)/2'" in stored(policy, 9, 0.0, "/2")


def test_kinds_make_room_for_others_when_nobody_uses_them() -> None:
    policy: ReuseHazard[int] = ReuseHazard(ReuseHazardSettings())
    for key in range(40):
        stored(policy, key, 0.0, f"kind{key}/1")
    assert "'(other)/1'" in stored(policy, 40, 1.0, "text/1")
    policy.dropped(range(40), 1.0)
    work = policy.refit(3 * HOUR_S)
    assert work is not None
    policy.adopt(work())
    assert "'text/1'" in stored(policy, 41, 3 * HOUR_S, "text/1")
