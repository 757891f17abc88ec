"""The sends of simulated clients: each request once, in order, and never before the request that it follows."""

from __future__ import annotations

import heapq
import random

import pytest

from pinyon.eviction import NO_TRAITS
from pinyon_lab.simulator.clients import Clients
from pinyon_lab.simulator.workload import Arrival, cut
from pinyon_lab.traces import TraceRow


def arrivals(follows: list[int]) -> list[Arrival]:
    return [Arrival(float(number), 1, 1, (number,), NO_TRAITS, before) for number, before in enumerate(follows)]


@pytest.mark.parametrize("count", [0, 1, 3, 100])
@pytest.mark.parametrize("seed", range(20))
def test_each_is_sent_once_and_after_what_it_follows(count: int, seed: int) -> None:
    rng = random.Random(seed)
    total = rng.randint(1, 40)
    follows = [rng.randrange(number) if number and rng.random() < 0.4 else -1 for number in range(total)]
    clients = Clients(arrivals(follows), count)
    heap = [(at, 0, number) for at, number in clients.first()]  # (time, 0 = begins or 1 = ends, request)
    heapq.heapify(heap)
    sent: list[int] = []
    over: set[int] = set()
    most = 0
    while heap:
        now_s, ends, number = heapq.heappop(heap)
        if ends:
            over.add(number)
            for at, each in clients.ended(number, now_s):
                assert at >= now_s
                heapq.heappush(heap, (at, 0, each))
            continue
        assert follows[number] == -1 or follows[number] in over
        assert count or now_s >= number
        sent.append(number)
        most = max(most, len(sent) - len(over))
        heapq.heappush(heap, (now_s + rng.choice([0.1, 5.0]), 1, number))
    assert sorted(sent) == list(range(total))
    assert not count or most <= count


def test_nobody_follows_what_comes_later() -> None:
    with pytest.raises(ValueError, match="request 0 follows 1"):
        Clients(arrivals([1, -1]))


def test_turns_follow_each_other_by_name_or_conversation() -> None:
    def row(chat: str, parent: str = "", turn: int = 0) -> TraceRow:
        return TraceRow(0.0, 1, 1, (1,), turn=turn, chat=chat, parent=parent)

    named = [row("1", turn=1), row("2", "1", 2), row("3", "nobody", 2), row("4", "2", 3)]
    assert [each.follows for each in cut(named, 16, 100)] == [-1, 0, -1, 1]
    sessions = [row("a", turn=1), row("b", turn=1), row("a", turn=2), row("a", turn=3), row("b", turn=2)]
    assert [each.follows for each in cut(sessions, 16, 100)] == [-1, -1, 0, 2, 1]
    assert [each.follows for each in cut([row(""), row("")], 16, 100)] == [-1, -1]
