"""The plain reference of ``pinyon simulate --model prefill-reference``, without any of its modules.

It is as slow and as short as can be: it looks at everything for each of a router's questions. The simulator is compared
with it row by row."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

BLOCK = 512
TOKEN_S = 127e-6
NANO_S = 1e-9


class Row(NamedTuple):
    """A request: its time in seconds, its tokens and its block ids; the last block may be partial."""

    time_s: float
    tokens: int
    blocks: tuple[int, ...]


class Served(NamedTuple):
    """The instance of a request, the time of its first token and the number of its reused tokens."""

    instance: int
    ttft_s: float
    hit_tokens: int
    tokens: int


def cut(rows: Sequence[tuple[float, int, Sequence[int]]], rate: float, tokens_max: int = 20_480) -> list[Row]:
    """Cuts the prompts, and scales the arrivals to a mean rate between the first and the last."""
    first, last = rows[0][0], rows[-1][0]
    scale = len(rows) / rate / (last - first)
    return [
        Row((time_s - first) * scale, min(tokens, tokens_max), tuple(blocks[: -(-min(tokens, tokens_max) // BLOCK)]))
        for time_s, tokens, blocks in rows
    ]


def run_of(blocks: Sequence[int], *known: Any) -> int:
    count = 0
    for block in blocks:
        if not any(block in each for each in known):
            break
        count += 1
    return count


def hit_tokens(run: int, tokens: int) -> int:
    return min(run * BLOCK, tokens - 1)


class Plain:
    """An instance that computes one prompt at a time."""

    def __init__(self, cache_blocks: int) -> None:
        self.cache: OrderedDict[int, None] = OrderedDict()
        self.room = cache_blocks
        self.queue: list[tuple[int, Row, int]] = []
        """The number, request and predicted new tokens of each waiting prompt."""
        self.running: tuple[int, Row, int] | None = None
        """The number, request and reused tokens of the prompt that is computed."""
        self.ends_s = 0.0

    def load_s(self, now_s: float) -> float:
        """Returns the load, rounded so that equal loads stay equal."""
        rest = self.ends_s - now_s if self.running else 0.0
        return round(rest + sum(new for _, _, new in self.queue) * TOKEN_S, 9)

    def seen(self, row: Row) -> int:
        """Returns the tokens that a router believes will be reused."""
        coming = [other.blocks for _, other, _ in self.queue]
        if self.running:
            coming.append(self.running[1].blocks)
        return hit_tokens(run_of(row.blocks, self.cache, set().union(*coming)), row.tokens)

    def start(self, now_s: float) -> None:
        number, row, _ = self.queue.pop(0)
        hit = hit_tokens(run_of(row.blocks, self.cache), row.tokens)
        self.running = number, row, hit
        self.ends_s = now_s + (row.tokens - hit) * TOKEN_S

    def end(self) -> None:
        assert self.running
        for block in reversed(self.running[1].blocks):
            self.cache[block] = None
            self.cache.move_to_end(block)
        while len(self.cache) > self.room:
            self.cache.popitem(last=False)
        self.running = None


def choose(policy: str, instances: list[Plain], row: Row, now_s: float) -> int:
    loads = [each.load_s(now_s) for each in instances]
    hits = [each.seen(row) for each in instances]
    everyone = range(len(instances))
    if policy == "min_ttft":
        return min(everyone, key=lambda n: (round(loads[n] + (row.tokens - hits[n]) * TOKEN_S, 9), n))
    if policy == "preble" and max(hits) > 0.5 * row.tokens:
        return min((n for n in everyone if hits[n] == max(hits)), key=lambda n: (loads[n], n))
    assert policy in ("least_loaded", "preble")
    return min(everyone, key=lambda n: (loads[n], n))


def simulate(rows: Sequence[Row], policy: str, count: int, cache_tokens: int) -> list[Served]:
    instances = [Plain(cache_tokens // BLOCK) for _ in range(count)]
    ends: list[tuple[float, int]] = []
    served: dict[int, Served] = {}

    def advance(until_s: float) -> None:
        while ends and ends[0][0] <= until_s + NANO_S:
            now_s, number = heapq.heappop(ends)
            instance = instances[number]
            assert instance.running
            index, row, hit = instance.running
            served[index] = Served(number, now_s - row.time_s, hit, row.tokens)
            instance.end()
            if instance.queue:
                instance.start(now_s)
                heapq.heappush(ends, (instance.ends_s, number))

    for index, row in enumerate(rows):
        advance(row.time_s)
        number = choose(policy, instances, row, row.time_s)
        chosen = instances[number]
        chosen.queue.append((index, row, row.tokens - chosen.seen(row)))
        if chosen.running is None:
            chosen.start(row.time_s)
            heapq.heappush(ends, (chosen.ends_s, number))
    advance(float("inf"))
    return [served[index] for index in range(len(rows))]


def report(served: Sequence[Served], slo_s: float = 5.0, warm_up: int = 500) -> dict[str, float]:
    counted = served[warm_up:]
    times = sorted(each.ttft_s for each in counted)
    at = {name: times[int(share * len(times))] for name, share in (("p50_s", 0.5), ("p90_s", 0.9), ("p99_s", 0.99))}
    return {
        "attainment": sum(time <= slo_s + NANO_S for time in times) / len(times),
        **at,
        "hit_ratio": sum(each.hit_tokens for each in counted) / sum(each.tokens for each in counted),
    }
