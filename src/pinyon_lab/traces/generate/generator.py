"""The requests of a profile in order of time, without an end: only conversations and jobs under way are kept."""

from __future__ import annotations

import math
from collections.abc import Iterator
from heapq import heappop, heappush
from random import Random

from pinyon_lab.traces.formats import FORMATS, TraceRow
from pinyon_lab.traces.generate.draws import Ids, Users, exponential, weights
from pinyon_lab.traces.generate.profile import DAY_S, Chats, Profile
from pinyon_lab.traces.generate.sources import ChatSource, ProgramSource, Series


def generate(profile: Profile, seed: int) -> Iterator[TraceRow]:
    """Yields the rows of a profile, the same ones for the same seed (from 0). The busiest user is 0. Memory holds the
    conversations and jobs under way, and a program for each user."""
    rng = Random(seed)
    ids = Ids(FORMATS[profile.format].block_tokens)
    users = Users(weights(profile.users.number, profile.users.points, profile.users.steepness))
    chatty = [rng.random() < profile.chatty_users for _ in range(profile.users.number)]
    sources: list[ChatSource | ProgramSource] = [
        ChatSource(profile, part, users, chatty, ids)
        if isinstance(part, Chats)
        else ProgramSource(profile, part, users, ids)
        for part in profile.parts
    ]
    hours = profile.hours
    days = [
        1.0 + hours.workdays_differ * (2 * rng.random() - 1.0) for _ in range(_day(profile, profile.duration_s) + 1)
    ]
    busiest = max(days)
    number = len(sources)
    # time, unique number, and event: a source that may begin something, or what goes on
    heap: list[tuple[float, int, ChatSource | ProgramSource | Series]] = [
        (-profile.warm_up_s, place, source) for place, source in enumerate(sources)
    ]
    while heap:
        now_s, _, series = heappop(heap)
        if now_s >= profile.duration_s:
            return
        if isinstance(series, (ChatSource, ProgramSource)):
            number += 1
            after_s = exponential(rng, 1.0 / (profile.per_s * busiest * series.begins_per_request))
            heappush(heap, (now_s + after_s, number, series))
            rate = hours.rate(profile.start_s + now_s) * days[max(0, _day(profile, now_s))]
            if rng.random() * busiest >= rate:
                continue
            series = series.begin(now_s, rng)
        row, then_s = next(series)
        if then_s < math.inf:
            number += 1
            heappush(heap, (then_s, number, series))
        if now_s >= 0:
            yield row


def _day(profile: Profile, now_s: float) -> int:
    return int((profile.start_s + now_s) // DAY_S)
