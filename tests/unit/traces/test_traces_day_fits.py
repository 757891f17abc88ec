"""The fits of a trace's last day, against counts of one block at a time."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

from pinyon.eviction.day_fits import CATEGORIES_MAX, DayFits
from pinyon_lab.traces import TraceRow
from pinyon_lab.traces.analysis import day_fits, read_columns

DAY_S = 86_400.0


def rows(seed: int, days: float, kinds: tuple[str, ...] = ("text", "file", "", "a b")) -> list[TraceRow]:
    """Returns chats that go on now and then; a prompt has the ids of its chat, sometimes with a gap."""
    random_ = random.Random(seed)
    times = sorted(random_.uniform(0, days * DAY_S) for _ in range(int(1500 * days)))
    found = []
    for at in times:
        chat, length = random_.randrange(60), random_.randrange(1, 12)
        blocks = tuple(1000 * chat + place + (500 if random_.random() < 0.02 else 0) for place in range(length))
        found.append(TraceRow(at, 16 * length, 1, blocks, random_.choice(kinds), random_.randrange(1, 3)))
    return found


def counted(rows: list[TraceRow], begins_s: float) -> dict[int, dict[str, list[float]]]:
    """Returns blocks used, blocks used again and seconds, by the hour and category of the previous use."""
    sums: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0.0, 0.0, 0.0]))
    last: dict[int, TraceRow] = {}

    def add(row: TraceRow, *more: float) -> None:
        if row.time_s > rows[-1].time_s - DAY_S:
            hour = int((row.time_s + begins_s) // 3600) % 24
            known = row.category if row.kind in ("text", "file") else ""
            for category in {known, ""}:
                sums[hour][category] = [a + b for a, b in zip(sums[hour][category], more, strict=True)]

    for row in rows:
        add(row, len(row.blocks), 0, 0)
        for block in row.blocks:
            if block not in last:
                break
            add(last[block], 0, 1, row.time_s - last[block].time_s)
        last.update(dict.fromkeys(row.blocks, row))
    return sums


@pytest.mark.parametrize(("seed", "days", "begins_s"), [(1, 0.5, 0.0), (2, 2.3, 0.0), (3, 1.0, 36_000.0)])
def test_they_are_those_of_a_plain_count(seed: int, days: float, begins_s: float) -> None:
    trace = rows(seed, days)
    found = day_fits(read_columns(trace, 16, 1 << 30), begins_s)
    wanted = {
        hour: {
            category: (again / used, seconds / again)
            for category, (used, again, seconds) in several.items()
            if again >= 32
        }
        for hour, several in counted(trace, begins_s).items()
    }
    wanted = {hour: several for hour, several in wanted.items() if several}
    assert {hour: set(several) for hour, several in found.hours.items()} == {h: set(f) for h, f in wanted.items()}
    for hour, several in wanted.items():
        for category, fit in several.items():
            assert tuple(found.hours[hour][category]) == pytest.approx(fit)
    assert sum(map(len, found.hours.values())) > 10, "nothing was compared"


def test_of_many_categories_those_with_most_reuses_stay() -> None:
    names = tuple(f"kind{number}" for number in range(CATEGORIES_MAX))
    trace = [
        TraceRow(float(at), 16 * 40, 1, tuple(range(1000 * number, 1000 * number + 40)), name, 1)
        for at in range(4)
        for number, name in enumerate(names)
        for _ in range(1 if number else 2)
    ]
    found = day_fits(read_columns(trace, 16, 1 << 30))
    assert isinstance(found, DayFits)
    (fits,) = found.hours.values()
    assert len(fits) == CATEGORIES_MAX
    assert {"", "kind0/1"} <= set(fits)


def test_a_trace_without_reuse_has_none() -> None:
    assert not day_fits(read_columns([TraceRow(5.0, 16, 1, (1,))], 16, 1 << 30))
