"""Fig. 29 of "KVCache cache in the wild": on small workloads against plain counts and replays."""

from __future__ import annotations

import random

import pytest

from pinyon.core.errors import InvalidArgument
from pinyon_lab.caches.replay import replay
from pinyon_lab.papers import FIGURES, Basis, Result, Workload
from pinyon_lab.papers.wild.days import WITHIN_S, reused_within
from pinyon_lab.traces import TraceRow
from pinyon_lab.traces.analysis import day_fits, read_columns
from tests.reproduction.small import SHARED, plain, text_of

DAY_S, HOUR_S = 86_400.0, 3600.0


def rows(days: int, slower: float = 1.0) -> list[TraceRow]:
    """Returns chats of two turns and files of one turn, from 8 to 11 a.m. of each day.

    The second turn of a chat comes ``slower`` times as late from one day to the next."""
    random_ = random.Random(29)
    found = []
    for day in range(days):
        for _ in range(700):
            at = day * DAY_S + random_.uniform(8, 11) * HOUR_S
            first = random_.randrange(1 << 40)
            blocks = tuple(range(first, first + random_.randrange(1, 9)))
            if random_.random() < 0.4:
                found.append(TraceRow(at, 16 * len(blocks), 1, (*blocks, first - 1), "file", 1))
                continue
            found.append(TraceRow(at, 16 * len(blocks), 1, blocks, "text", 1))
            if random_.random() < 0.7:
                later = at + random_.expovariate(1 / 100.0) * slower**day
                found.append(TraceRow(later, 16 * len(blocks), 1, (*blocks, first + 20), "text", 2))
    return sorted(found, key=lambda row: row.time_s)


def make(given: list[TraceRow], *, generated: bool = True) -> Result:
    return FIGURES["wild-fig29"].make([Workload("qwen_a_5d", given, 16, generated)], lambda _: None)


def test_reuse_within_a_time_equals_a_plain_count() -> None:
    random_ = random.Random(3)
    trace = [
        TraceRow(at, 1, 1, tuple(range(100 * chat, 100 * chat + random_.randrange(1, 9))))
        for at, chat in ((at, random_.randrange(30)) for at in sorted(random_.uniform(0, 5000) for _ in range(400)))
    ]
    wanted = [[0] * len(WITHIN_S) for _ in trace]
    last: dict[int, int] = {}
    for number, row in enumerate(trace):
        for block in row.blocks:
            if block in last:
                before = last[block]
                for at, within_s in enumerate(WITHIN_S):
                    wanted[before][at] += row.time_s - trace[before].time_s <= within_s
            last[block] = number
    assert reused_within(read_columns(trace, 16, 1 << 30)).tolist() == wanted


@pytest.fixture(scope="module")
def alike() -> Result:
    return make(rows(3))


def test_days_that_are_alike_are_as_far_apart_as_by_chance(alike: Result) -> None:
    similar, predicted, image = alike.claims
    assert similar.agrees
    assert predicted.agrees
    assert not image.agrees, "there is none"
    found = {(row["what"], row["hour"]): row for row in alike.rows}
    assert ("multimodal/1", 9) not in found
    text = found["text/1", 9]
    assert text["requests"] == pytest.approx(700 * 0.6 / 3, rel=0.1)
    assert text["reused"] == pytest.approx(0.7, abs=0.06)
    assert text["distance"] == pytest.approx(text["chance"], abs=0.05)
    assert found["file/1", 9]["reused"] == found["file/1", 9]["distance"] == 0
    assert {row["basis"] for row in alike.rows} == {Basis.CONSTRUCTION}


def test_days_that_differ_are_farther_apart() -> None:
    result = make(rows(2, slower=8.0), generated=False)
    assert not result.claims[0].agrees
    assert {row["basis"] for row in result.rows} == {Basis.MEASURED}


def test_hits_are_those_of_replays_with_the_last_days_fits(alike: Result) -> None:
    given = rows(3)
    by_day = [[row for row in given if row.time_s // DAY_S == day] for day in range(3)]
    parts = [[row for row in day if 8 <= row.time_s % DAY_S / HOUR_S < 11] for day in by_day]
    capacity = round(0.02 * sum(len({block for row in part for block in row.blocks}) for part in parts[1:]) / 2)
    fits = [day_fits(read_columns(day, 16, 1 << 30)) for day in by_day]
    for name, choice in (
        ("LRU", "lru"),
        ("last day", "workload_aware:fitted=false,fits={last}"),
        ("last day, online", "workload_aware:fits={last}"),
        ("same day", "workload_aware:fitted=false,fits={own}"),
    ):
        hits = blocks = 0
        for number in (1, 2):
            asked = Workload("", parts[number], 16).asked()
            seen = replay(asked, choice.format(last=fits[number - 1], own=fits[number]), capacity)
            hits, blocks = hits + seen.hit_blocks, blocks + seen.blocks
        ratios = {row["hour"]: row["hits"] for row in alike.rows if row["what"] == name}
        weights = {
            hour: sum(len(row.blocks) for part in parts[1:] for row in part if row.time_s % DAY_S // HOUR_S == hour)
            for hour in ratios
        }
        assert sum(ratios[hour] * weights[hour] for hour in ratios) == pytest.approx(hits)
        assert sum(weights.values()) == blocks
        assert f"{capacity:,} blocks" in alike.notes[1]


def test_one_day_is_too_few() -> None:
    with pytest.raises(InvalidArgument, match="2 to 31 days"):
        make(rows(1))


def test_other_categories_are_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"needs requests of text/1, .* from 9 to 10 a\.m\."):
        make([row._replace(kind="api") for row in rows(2)])


@pytest.mark.skipif(not (SHARED / "seeds").is_dir(), reason="the papers' texts are not here")
def test_quotes_are_in_the_paper(alike: Result) -> None:
    for claim in alike.claims:
        assert plain(claim.said) in text_of("wild")
