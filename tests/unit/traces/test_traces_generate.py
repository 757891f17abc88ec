"""Generated workloads: equal for a seed, in order, with ids that stand for prefixes; days and nights."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from itertools import islice, pairwise
from random import Random
from typing import NamedTuple

import numpy as np
import pytest

from pinyon.core.errors import InvalidArgument
from pinyon_lab.traces import FORMATS, TraceRow
from pinyon_lab.traces.formats import line_of
from pinyon_lab.traces.generate import DAY_S, PROFILES, generate, generator, profile
from pinyon_lab.traces.generate.draws import Ids, Quantiles, Users
from pinyon_lab.traces.generate.profile import Chats, Profile, Programs

HOUR_S = 3600.0

GOLDEN = {
    "qwen-a": (885, "8ed78d252781c90d3e1502de00fe7cf604cff12750c2c0453a72dc3e7c80acf4"),
    "qwen-b": (1020, "b3e4e18d9ba9d552561c934ef0fc8ca7ccdfc84edaa4de0167fef886b961ba22"),
    "toolagent": (933, "503c43c1638cebca23906ed8b394358a30cd2223d80d5e4818f1204a691c6d3f"),
}
"""The rows and the hash of 15 minutes of seed 1 at one request per second.

A change of these changes what was measured on generated traces, and must say so."""


@pytest.mark.parametrize("name", PROFILES)
def test_a_seed_means_the_same_bytes(name: str) -> None:
    made = dataclasses.replace(profile(name), per_s=1.0, duration_s=900.0)
    digest, count = hashlib.sha256(), 0
    for row in generate(made, 1):
        digest.update(line_of(row, made.format).encode())
        count += 1
    assert (count, digest.hexdigest()) == GOLDEN[name]


@pytest.mark.parametrize("name", PROFILES)
def test_another_seed_is_another_trace(name: str) -> None:
    made = dataclasses.replace(profile(name), warm_up_s=60.0)
    first, again, other = (list(islice(generate(made, seed), 50)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def variants() -> Iterator[tuple[str, Profile]]:
    """Yields each profile with its usual values and with all values at either end of their ranges.

    The last profile has programs whose calls are often followed up."""
    for name, spec in PROFILES.items():
        for which in ("usual", "low", "high"):
            made = profile(name, **{key: getattr(free, which) for key, free in spec.free.items()})
            yield f"{name}-{which}", dataclasses.replace(made, duration_s=300.0, warm_up_s=600.0)
    made = profile("qwen-b")
    (part,) = made.parts
    part = dataclasses.replace(part, second_turn=0.2)
    yield "qwen-b-followed", dataclasses.replace(made, parts=(part,), duration_s=300.0, warm_up_s=600.0)


@pytest.mark.parametrize("made", [pytest.param(made, id=name) for name, made in variants()])
def test_rows_are_what_rows_must_be(made: Profile) -> None:
    size = FORMATS[made.format].block_tokens
    kinds = {part.kind: part for part in made.parts}
    longest = {part.kind: part.context_max for part in made.parts if isinstance(part, Chats)}
    rows = list(generate(made, 3))
    assert len(rows) > 500
    assert all(before.time_s <= after.time_s for before, after in pairwise(rows))
    assert 0 <= rows[0].time_s <= rows[-1].time_s <= made.duration_s
    by_chat: dict[str, TraceRow] = {}
    places: dict[int, tuple[int, int]] = {}
    lost = 0
    for row in rows:
        assert len(row.blocks) == -(-row.input_tokens // size)
        assert row.output_tokens >= 1
        assert row.input_tokens <= longest.get(row.kind, row.input_tokens)
        assert row.kind in kinds
        assert 0 <= int(row.user) < made.users.number
        assert row.chat not in by_chat
        by_chat[row.chat] = row
        for place, block in enumerate(row.blocks):
            before = row.blocks[place - 1] if place else -1
            assert places.setdefault(block, (place, before)) == (place, before), "one id, two prefixes"
        assert (row.turn == 1) == (not row.parent)
        parent = by_chat.get(row.parent)
        if parent is None:
            continue  # the first turn, or a chat that began before the trace
        assert (row.turn, row.user, row.kind) == (parent.turn + 1, parent.user, parent.kind)
        whole = parent.input_tokens // size
        if row.blocks[:whole] == parent.blocks[:whole]:
            assert row.blocks[whole : whole + 1] != parent.blocks[whole:], (
                "a block that was not full is another one now"
            )
            assert row.input_tokens > parent.input_tokens + parent.output_tokens
        else:
            lost += 1
            assert row.kind in longest, "only a conversation that grew too long loses its older half"
    assert lost < 0.02 * len(rows)


@pytest.mark.parametrize(
    ("name", "free", "said"),
    [
        ("nonsense", {}, "no profile 'nonsense'; known: qwen-a, qwen-b, toolagent"),
        ("qwen-a", {"name": 1.0}, "profile qwen-a has no parameter 'name'; known: users, "),
        ("qwen-a", {"think_s": 511.0}, "think_s of profile qwen-a must be from 250 to 510, got 511"),
        ("qwen-b", {"calls": 1.9}, "calls of profile qwen-b must be from 2 to 15, got 1.9"),
        ("toolagent", {"growth": float("nan")}, "growth of profile toolagent must be from 0.7 to 1.4, got nan"),
    ],
)
def test_parameters_out_of_range_are_named(name: str, free: dict[str, float], said: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        profile(name, **free)
    assert said in refused.value.message


@pytest.mark.parametrize("name", PROFILES)
def test_usual_values_are_in_their_ranges(name: str) -> None:
    for free in PROFILES[name].free.values():
        assert free.low <= free.usual <= free.high
        assert free.low < free.high
        assert free.text


def test_every_free_parameter_changes_the_workload() -> None:
    for name, spec in PROFILES.items():
        usual = profile(name)
        for key, free in spec.free.items():
            for value in (free.low, free.high):
                assert (profile(name, **{key: value}) == usual) == (value == free.usual), key


class Week(NamedTuple):
    """Five workdays of text conversations: the time of each first turn."""

    starts_s: np.ndarray
    first_s: np.ndarray
    """The times of the first turns that have a next one, ``gaps_s`` later."""
    gaps_s: np.ndarray

    def of_day(self, day: int, begin: int, end: int) -> np.ndarray:
        """Returns the gaps of the first turns of these hours."""
        hours = (self.first_s - day * DAY_S) / HOUR_S
        return self.gaps_s[(hours >= begin) & (hours < end)]


@pytest.fixture(scope="module")
def week() -> Week:
    made = profile("qwen-a")
    text = dataclasses.replace(made.parts[0], system_tokens=0, again_later=0.0, long_share=0.0)
    made = dataclasses.replace(made, per_s=0.4, duration_s=5 * DAY_S, start_s=0.0, parts=(text,))
    rows = [row._replace(blocks=()) for row in generate(made, 1)]
    begun = {row.chat: row.time_s for row in rows if row.turn == 1}
    turns = [(begun[row.parent], row.time_s) for row in rows if row.turn == 2 and row.parent in begun]
    first_s, second_s = np.array(turns).T
    return Week(np.array(list(begun.values())), first_s, second_s - first_s)


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """Returns the Kolmogorov-Smirnov distance: the largest difference between the shares below any value."""
    values = np.concatenate((one, other))
    below = [np.searchsorted(np.sort(each), values, side="right") / len(each) for each in (one, other)]
    return float(np.abs(below[0] - below[1]).max())


def test_workdays_differ_a_little_and_nights_are_quieter(week: Week) -> None:
    requests, _ = np.histogram(week.starts_s, bins=5 * 24, range=(0, 5 * DAY_S))
    by_day = requests.reshape(5, 24)
    days = by_day.sum(axis=1) / by_day.sum() * 5
    assert 0.02 < days.max() - days.min() < 0.25
    by_hour = by_day.sum(axis=0)
    assert by_hour[3:5].mean() / by_hour[10:21].mean() == pytest.approx(0.25, abs=0.05)


def test_the_same_hours_of_workdays_are_alike(week: Week) -> None:
    """The hours 9:00 to 11:00 are alike on all workdays, nights are not (Figs. 15 and 29).

    Two samples of *n* of one distribution are 1.63 √(2/n) apart in 1 % of the cases."""
    mornings = [week.of_day(day, 9, 11) for day in range(5)]
    least = min(map(len, mornings))
    assert least > 200
    apart = [distance(mornings[0], other) for other in mornings[1:]]
    assert max(apart) < 1.63 * (2 / least) ** 0.5
    nights = np.concatenate([week.of_day(day, 2, 6) for day in range(5)])
    assert distance(np.concatenate(mornings), nights) > 0.1


def test_reuse_times_of_a_category_are_exponential(week: Week) -> None:
    """The times count from the answer's time (Fig. 15, text-1 by day)."""
    gaps = np.concatenate([week.of_day(day, 10, 21) for day in range(5)])
    expected = 1 - np.exp(-np.sort(gaps) / gaps.mean())
    assert np.abs(expected - np.arange(1, len(gaps) + 1) / len(gaps)).max() < 0.03


def test_applications_have_instructions_as_in_the_paper() -> None:
    """Single-turn text and multimodal requests share their beginnings, files and searches do not (Fig. 18)."""
    seen: set[int] = set()
    there: dict[str, list[bool]] = {}
    for row in generate(dataclasses.replace(profile("qwen-a"), duration_s=600.0), 1):
        if row.turn == 1:
            there.setdefault(row.kind, []).append(row.blocks[0] in seen)
        seen.update(row.blocks)
    shared = {kind: np.mean(hits) for kind, hits in there.items()}
    assert min(shared["text"], shared["multimodal"]) > 0.95
    assert max(shared["file"], shared["search"]) == 0


@pytest.mark.parametrize("name", PROFILES)
def test_memory_is_what_goes_on(name: str) -> None:
    """The number of requests that wait for their time does not grow with the hours."""
    made = dataclasses.replace(profile(name), per_s=0.5, duration_s=10 * HOUR_S)
    rows = generate(made, 1)
    waiting = [0] * 10
    for row in rows:
        hour = int(row.time_s // HOUR_S)
        waiting[hour] = max(waiting[hour], len(rows.gi_frame.f_locals["heap"]))  # type: ignore[attr-defined]
    assert 0 < max(waiting[2:]) < 2 * max(waiting[:2])


def test_texts_to_be_asked_again_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program keeps only its latest texts."""
    monkeypatch.setattr(generator, "TEXTS_MAX", 5)
    made = profile("qwen-b")
    (part,) = made.parts
    assert isinstance(part, Programs)
    part = dataclasses.replace(part, same=1.0, same_after_s=Quantiles((0, 50), (1, 90)))
    users = Users([1.0])
    source, rng = generator.ProgramSource(made, part, users, Ids(16)), Random(1)
    for at_s in range(20):
        next(source.begin(float(at_s), rng))
    (program,) = source._by_user.values()
    assert len(program.texts) == 5
    asked = [next(source.begin(at_s, rng))[0].blocks for at_s in sorted(when for when, _, _ in program.texts)]
    assert len({*asked}) == 5
