"""The CPU time of a worker's bookkeeping per block, on a full pool.

The worker finds and holds what a prompt reuses, makes room for the rest, publishes it chunk by chunk, gives all of it
back, and tells the conductor. No KV moves. A prompt has 512 blocks of which the first half is held; none comes twice.
Figures are of all of its blocks."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from random import Random
from typing import TypeVar

from bench.report import Aim, Report, parser, progress, summary
from pinyon.batching import BATCHING_POLICIES, BatchRequest
from pinyon.core.block_keys import KEY_BYTES, BlockKey, pack_keys
from pinyon.core.key_sample import sampled_keys
from pinyon.decisions import Admission
from pinyon.eviction import EVICTION_POLICIES
from pinyon.paging import BlockPool, LeaseTable, Reservations

PROMPT_BLOCKS = 512
SHARED_BLOCKS = PROMPT_BLOCKS // 2
BEGINNINGS = 20
POOL_BLOCKS = 20_000
CHUNK_BLOCKS = 64
"""The blocks published at once: 1,024 tokens in blocks of 16."""
EVERY = 4
"""One key in so many is told: the conductor's default for blocks of 16 tokens."""
BLOCK_MAX_US = 1.0
PARTS = ("enqueue", "admit", "publish", "give back", "tell")

Result = TypeVar("Result")


class Books:
    """A worker's bookkeeping of blocks; :attr:`us` is the time of each part so far, in µs."""

    def __init__(self, eviction: str, seed: int) -> None:
        self._dice = Random(seed)
        self.pool = BlockPool(POOL_BLOCKS, EVICTION_POLICIES.make(eviction), spares=True)
        self._reservations = Reservations(self.pool, LeaseTable())
        self.admission = Admission(BATCHING_POLICIES.make("fcfs").policy, self.pool, self._reservations, 99, 0)
        self._beginnings = [self._keys(0, SHARED_BLOCKS) for _ in range(BEGINNINGS)]
        self._number = 0
        self.reused = 0
        self.us = dict.fromkeys(PARTS, 0.0)

    def _keys(self, first: int, count: int) -> list[BlockKey]:
        return [self._dice.randbytes(KEY_BYTES - 1) + bytes((1 + at & 0xFF,)) for at in range(first, first + count)]

    def serve(self, prompts: int) -> None:
        """Serves prompts one after the other, one in each second of the books' clock."""
        for _ in range(prompts):
            keys = (*self._dice.choice(self._beginnings), *self._keys(SHARED_BLOCKS, SHARED_BLOCKS))
            self._serve(keys, float(self._number))

    def _serve(self, keys: tuple[BlockKey, ...], now_s: float) -> None:
        self._number += 1
        tokens, blocks = 16 * len(keys), len(keys) + 1  # the next token needs a block of its own
        request = BatchRequest(self._number, tokens, blocks, keys, len(keys), computes=True)
        self._timed("enqueue", lambda: self.admission.enqueue(request))
        ((_, reservation, _),) = self._timed("admit", lambda: self.admission.admit(now_s))
        self.reused += reservation.held
        table = reservation.table
        for at in range(reservation.held, len(keys), CHUNK_BLOCKS):
            chunk, after = keys[at : at + CHUNK_BLOCKS], keys[at - 1] if at else None
            mine = table[at : at + len(chunk)]
            self._timed("publish", lambda: self._reservations.publish(mine, chunk, now_s, first=at, after=after))  # noqa: B023
        self._timed("give back", lambda: self._give_back(request.number, table, now_s))
        self._timed("tell", self._tell)

    def _give_back(self, number: int, table: list[int], now_s: float) -> None:
        self.admission.end(number)
        self._reservations.release(table, now_s)

    def _tell(self) -> list[bytes]:
        return [pack_keys(sampled_keys(keys, EVERY)) for keys in self.pool.drain_changes()]

    def _timed(self, part: str, act: Callable[[], Result]) -> Result:
        began_ns = time.thread_time_ns()
        try:
            return act()
        finally:
            self.us[part] += (time.thread_time_ns() - began_ns) / 1e3


def measure(eviction: str, quick: bool, seed: int) -> dict[str, object]:
    """Returns the µs per block of a prompt over the repetitions, and the blocks that a prompt reuses."""
    prompts, repetitions = (40, 3) if quick else (200, 7)
    books = Books(eviction, seed)
    books.serve(2 * POOL_BLOCKS // SHARED_BLOCKS)
    found: dict[str, list[float]] = {part: [] for part in ("all", *PARTS)}
    reused, served = books.reused, 0
    for _ in range(repetitions):
        books.us = dict.fromkeys(PARTS, 0.0)
        books.serve(prompts)
        served += prompts
        for part, taken_us in (*books.us.items(), ("all", sum(books.us.values()))):
            found[part].append(taken_us / prompts / PROMPT_BLOCKS)
    books.admission.check_integrity()
    figures: dict[str, object] = {f"{part}_us_per_block": summary(taken, 3) for part, taken in found.items()}
    figures["reused_blocks"] = round((books.reused - reused) / served)
    return figures


def main() -> None:
    arguments = parser(__doc__).parse_args()
    report = Report("blocks", {"prompt_blocks": PROMPT_BLOCKS, "pool_blocks": POOL_BLOCKS, "seed": arguments.seed})
    for eviction in ("lru", "workload_aware", "reuse_hazard"):
        report.results[eviction] = figures = measure(eviction, arguments.quick, arguments.seed)
        progress(f"{eviction}: {json.dumps(figures)}")
    taken = report.results["lru"]["all_us_per_block"]["median"]
    report.aims.append(Aim("lru: CPU for each block of a prompt, µs", BLOCK_MAX_US, taken))
    report.emit()


if __name__ == "__main__":
    main()
