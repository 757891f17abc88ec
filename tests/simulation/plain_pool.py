"""A plain second version of pinyon's own placement, of a pool of the instances' DRAM and of the most-in-time order.

It places without pairs, and shares no module with the simulator, the policy or the order: it looks at everything each
time."""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Sequence

from tests.simulation.plain_prefill import BLOCK, NANO_S, TOKEN_S, Row, Served, hit_tokens, run_of

FETCH_S = 4.6e-6
"""The seconds for moving the KV of one token."""
CLASS_MAX = 27
SLO_S, AGE_S, AGED_SHARE = 5.0, 20.0, 0.25


class Waits:
    def __init__(self, row: Row, seconds: float) -> None:
        """Takes the seconds that the prompt's computation is predicted to take."""
        self.row, self.seconds = row, seconds
        self.deadline_s = row.time_s + SLO_S
        self.microseconds = round(seconds * 1e6)


class Part:
    """One instance, with its part of the pool."""

    def __init__(self, blocks: int) -> None:
        self.room = blocks
        self.cache: OrderedDict[int, None] = OrderedDict()
        self.queue: OrderedDict[int, Waits] = OrderedDict()
        self.running: tuple[int, Row, int] | None = None
        """The number, request and reused tokens of the prompt that is computed."""
        self.ends_s = 0.0
        self.late: OrderedDict[int, None] = OrderedDict()
        self.aged: OrderedDict[int, None] = OrderedDict()
        self.credit_s = 0.0

    def seen(self, row: Row) -> int:
        """Returns the number of leading blocks that are here or will be."""
        coming = {block for each in self.queue.values() for block in each.row.blocks}
        if self.running:
            coming.update(self.running[1].blocks)
        return run_of(row.blocks, self.cache, coming)

    @property
    def requests(self) -> int:
        """The number of requests that are here, all of which will decode here."""
        return len(self.queue) + (self.running is not None)

    def next(self, now_s: float, *, in_order: bool) -> int:
        """Returns the number of the request whose turn it is."""
        if not in_order:
            return next(iter(self.queue))
        waiting = sorted(self.queue.items(), key=lambda each: (each[1].deadline_s, each[0]))
        for number, each in waiting:
            if now_s + each.seconds > each.deadline_s:
                self.late.setdefault(number)
            if now_s - each.deadline_s > AGE_S:
                self.aged.setdefault(number)
        left = [(number, each) for number, each in waiting if number not in self.late and number not in self.aged]
        if self.aged and (self.credit_s >= 0 or not left):
            number = next(iter(self.aged))
            self.credit_s -= self.queue[number].seconds
        elif left:
            number = shortest_in_time(left, now_s)
            self.credit_s += AGED_SHARE * self.queue[number].seconds
        else:
            number = next(iter(self.late))
        for those in (self.late, self.aged):
            those.pop(number, None)
        if not self.aged:
            self.credit_s = 0.0
        return number


def shortest_in_time(left: Sequence[tuple[int, Waits]], now_s: float) -> int:
    """Returns the shortest request in time that makes none before it late, after Moore (1968) by deadline."""
    kept: list[tuple[int, Waits]] = []
    for one in left:
        kept.append(one)
        if now_s + sum(other.seconds for _, other in kept) > one[1].deadline_s:
            kept.remove(max(reversed(kept), key=lambda other: other[1].seconds))  # the last of equals
    chosen, best_s = kept[0][0], math.inf
    ends_s, slack_s = now_s, math.inf
    for number, each in kept:
        if each.seconds < best_s and (best_s == math.inf or each.seconds <= slack_s):
            chosen, best_s = number, each.seconds
        ends_s += each.seconds
        slack_s = min(slack_s, each.deadline_s - ends_s)
    return chosen


class Pool:
    """All instances and their pooled DRAM."""

    def __init__(self, count: int, cache_tokens: int, *, in_order: bool) -> None:
        self.parts = [Part(cache_tokens // BLOCK) for _ in range(count)]
        self.where: dict[int, Part] = {}
        self.ends: list[tuple[float, int]] = []
        self.served: dict[int, Served] = {}
        self.in_order = in_order

    def use(self, part: Part, blocks: Sequence[int]) -> None:
        """Uses the blocks of one prompt in the part that they are in or go to."""
        for block in reversed(blocks):
            self.where[block] = part
            part.cache[block] = None
            part.cache.move_to_end(block)
        while len(part.cache) > part.room:
            del self.where[part.cache.popitem(last=False)[0]]

    def start(self, place: int, now_s: float) -> None:
        mine = self.parts[place]
        number = mine.next(now_s, in_order=self.in_order)
        row = mine.queue.pop(number).row
        run = run_of(row.blocks, self.where)
        moved = 0
        for part in self.parts:
            blocks = [block for block in row.blocks[:run] if self.where[block] is part]
            if part is not mine and blocks:
                moved += len(blocks)
                self.use(part, blocks)
        hit = hit_tokens(run, row.tokens)
        mine.running = number, row, hit
        mine.ends_s = now_s + (row.tokens - hit) * TOKEN_S + moved * BLOCK * FETCH_S
        heapq.heappush(self.ends, (mine.ends_s, place))

    def advance(self, until_s: float) -> None:
        while self.ends and self.ends[0][0] <= until_s + NANO_S:
            now_s, place = heapq.heappop(self.ends)
            part = self.parts[place]
            assert part.running
            number, row, hit = part.running
            self.served[number] = Served(place, now_s - row.time_s, hit, row.tokens)
            self.use(part, [block for block in row.blocks if self.where.get(block, part) is part])
            part.running = None
            if part.queue:
                self.start(place, now_s)

    def place(self, row: Row) -> tuple[int, float]:
        """Returns the instance where the request costs least, and the seconds that it computes there."""
        costs = [self.cost(part, row) for part in self.parts]
        least_s = min(cost_s for cost_s, _ in costs)
        place = next(place for place, (cost_s, _) in enumerate(costs) if cost_s <= least_s + NANO_S)
        return place, costs[place][1]

    def cost(self, part: Part, row: Row) -> tuple[float, float]:
        local = reach = part.seen(row)
        most = run_of(row.blocks, self.where)
        while reach < most and self.where[row.blocks[reach]] is not part:
            reach += 1  # another instance has the block
        prefill_s, transfer_s = self.fetching(row, local, local)
        fetched_s, moving_s = self.fetching(row, local, reach)
        if fetched_s + moving_s < prefill_s:
            prefill_s, transfer_s = fetched_s, moving_s
        size = self.size(round(prefill_s * 1e6))
        waiting = [each.microseconds for each in part.queue.values()]
        before = [each for each in waiting if not self.in_order or self.size(each) <= size]
        rest_s = max(0.0, part.ends_s - row.time_s) if part.running else 0.0
        behind = len(waiting) - len(before)
        decodes = 0.25 * part.requests / max(8, *(each.requests for each in self.parts))
        return rest_s + sum(before) * 1e-6 + transfer_s + prefill_s * (1 + behind + decodes), prefill_s

    @staticmethod
    def fetching(row: Row, local: int, blocks: int) -> tuple[float, float]:
        """Returns the seconds to compute and the seconds to move if this many leading blocks are reused."""
        return (row.tokens - hit_tokens(blocks, row.tokens)) * TOKEN_S, (blocks - local) * BLOCK * FETCH_S

    @staticmethod
    def size(microseconds: int) -> int:
        """Returns the size class: classes are powers of two."""
        return min(microseconds.bit_length(), CLASS_MAX)


def simulate(rows: Sequence[Row], count: int, cache_tokens: int, *, in_order: bool) -> list[Served]:
    """Returns how each request was served: by the most-in-time order if ``in_order``, else as they come."""
    pool = Pool(count, cache_tokens, in_order=in_order)
    for number, row in enumerate(rows):
        pool.advance(row.time_s)
        place, seconds = pool.place(row)
        part = pool.parts[place]
        part.queue[number] = Waits(row, seconds)
        if part.running is None:
            pool.start(place, row.time_s)
    pool.advance(math.inf)
    return [pool.served[number] for number in range(len(rows))]
