"""Which tests begin first, and on which worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.side_by_side import LONGEST, TOGETHER, next_unit, rank, unit_of

ROOT = Path(__file__).resolve().parents[3]
WAITS, COMPUTES = "tests/cluster/test_x.py", "tests/unit/core/test_y.py"


@pytest.mark.parametrize("name", sorted({*LONGEST, *TOGETHER} - set(TOGETHER.values())))
def test_what_is_named_is_there(name: str) -> None:
    assert (ROOT / name).is_file()


@pytest.mark.parametrize("queue", [[WAITS, COMPUTES], [COMPUTES, WAITS]])
def test_every_other_worker_begins_with_what_waits(queue: list[str]) -> None:
    assert [next_unit(queue, worker) for worker in range(4)] == [WAITS, COMPUTES] * 2


@pytest.mark.parametrize("unit", [WAITS, COMPUTES])
def test_whoever_is_idle_takes_what_is_left_in_order(unit: str) -> None:
    queue = [unit, f"{unit}x"]
    assert [next_unit(queue, worker) for worker in range(4)] == [unit] * 4


def test_the_longest_begin_first_and_a_unit_stays_together() -> None:
    shared = [f"{name}::test_{number}" for number, name in enumerate(TOGETHER) if TOGETHER[name].startswith("tests/cl")]
    others = [f"{WAITS}::test_a", f"{COMPUTES}::test_b", f"{LONGEST[0]}::test_c"]
    ordered = sorted([*others[:2], *shared, *others[2:]], key=rank)
    assert ordered == [others[2], *shared, *others[:2]]
    assert len({unit_of(each) for each in shared}) == 1
