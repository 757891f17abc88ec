"""The load of the live comparison, and the books of the worker with which it is replayed."""

from __future__ import annotations

import itertools
import random

import pytest

from bench.live_load import Mix, mixed
from bench.live_replay import worker_hits
from pinyon.core.trace_hashes import BLOCK_TOKENS
from pinyon_lab.traces import TraceRow


def test_the_load_is_the_seeds() -> None:
    mix = Mix(seconds=60.0, burst=3)
    load = mixed(mix, 5)
    assert load == mixed(mix, 5)
    assert load != mixed(mix, 6)
    chats = [each for each in load if each.kind == "chat"]
    calls = [each for each in load if each.kind == "api"]
    assert len({each.system for each in chats}) == 1
    assert len({each.system for each in calls}) == mix.programs
    assert len({each.says for each in calls}) == len(calls), "nobody asks that again"
    assert all(len(each.says) == len(each.pauses_s) <= mix.turns_max for each in load)
    assert all(0 < each.pauses_s[0] < mix.seconds for each in load)
    times = [each.pauses_s for each in calls]
    assert times[0::3] == times[1::3] == times[2::3], "three at a time"
    # Poisson arrivals with means of 48 and 240; a chat goes on by 0.8 each time, so it has 5 turns but for the longest.
    assert 25 < len(chats) < 75
    assert 150 < len(calls) < 330
    assert 3.5 < sum(len(each.says) for each in chats) / len(chats) < 6.5


def rows_of(dice: random.Random, requests: int) -> list[TraceRow]:
    """Returns the rows of chats that go on or end, with answers of up to three blocks.

    A prompt's whole blocks are those of the turn before and of its answer, then new ones. Now and then a prompt
    repeats."""
    ids = itertools.count()
    begun = [next(ids), next(ids)]
    chats: list[tuple[str, list[int], int]] = []
    rows = []
    for number in range(requests):
        if rows and dice.random() < 0.2:
            rows.append(dice.choice(rows[-5:])._replace(time_s=float(number), chat=str(number), parent=""))
            continue
        if chats and dice.random() < 0.6:
            parent, before, known = chats.pop(dice.randrange(len(chats)))
        else:
            parent, before, known = "", begun[: dice.randint(0, 2)], 0
        tokens = max(known, BLOCK_TOKENS * len(before)) + dice.randint(1, 60)
        output = dice.randint(1, 40)
        whole = [*before, *(next(ids) for _ in range(tokens // BLOCK_TOKENS - len(before)))]
        partial = [next(ids)] if tokens % BLOCK_TOKENS else []
        rows.append(TraceRow(float(number), tokens, output, (*whole, *partial), "chat", 1, str(number), parent))
        if len(whole) < 12:
            filled = (tokens + output - 1) // BLOCK_TOKENS
            answered = [*whole, *(next(ids) for _ in range(filled - len(whole)))]
            chats.append((str(number), answered, tokens + output))
    return rows


def naive_lru(rows: list[TraceRow], capacity: int) -> list[int]:
    """Returns the hits of each request by a plain list of held blocks, the next to evict in front."""
    following = {row.parent: row for row in rows if row.parent}
    held: list[object] = []
    hits = []
    for row in rows:
        whole, computed = row.input_tokens // BLOCK_TOKENS, row.input_tokens + row.output_tokens - 1
        filled = computed // BLOCK_TOKENS
        later = following.get(row.chat)
        made = list(later.blocks[whole:filled]) if later else [(row.chat, place) for place in range(whole, filled)]
        keys: list[object] = [*row.blocks[:whole], *made]
        found = 0
        while found < (row.input_tokens - 1) // BLOCK_TOKENS and keys[found] in held:
            found += 1
        hits.append(found)
        mine = keys[:found]
        held = [key for key in held if key not in mine]
        room = capacity - found - (-(-computed // BLOCK_TOKENS) - found)
        held = held[max(0, len(held) - room) :]
        held = [key for key in held if key not in keys] + keys[::-1]
    return hits


@pytest.mark.parametrize("seed", range(20))
def test_a_workers_books_against_a_list(seed: int) -> None:
    rows = rows_of(random.Random(seed), 150)
    for capacity in (20, 60, 10_000):
        hits = worker_hits(rows, "lru", capacity)
        assert hits == naive_lru(rows, capacity)
    assert sum(hits) > len(rows)


def test_a_request_without_room_is_an_error() -> None:
    rows = [TraceRow(0.0, 100, 30, tuple(range(7)), "chat", 1, "0")]
    assert worker_hits(rows, "lru", 9) == [0]
    with pytest.raises(RuntimeError, match="8 blocks are no room for 129 tokens"):
        worker_hits(rows, "lru", 8)
