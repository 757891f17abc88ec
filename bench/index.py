"""The conductor's block index: bytes a key, changes and look-ups per second, pauses, and what a sample of the keys
loses.

It is filled to its limit by prompts of 512 blocks, each in one or a few instances. Times are CPU time of the process,
so that others do not count. ``--trace FILE`` (may be repeated) adds to the generated traces."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import NamedTuple

from bench.index_traces import EVERY, Seen, Source, seen
from bench.report import Aim, Report, parser, percentile, progress
from pinyon.core.block_keys import KEY_BYTES
from pinyon.core.key_sample import key_sample
from pinyon.placement.index import BlockIndex
from pinyon.placement.prefix_match import Holder as PrefixHolder

PROMPT_BLOCKS = 512
PROMPTS = 1000
"""The number of prompts that are looked up in the end, of those that filled the index."""
BATCHES = (1, 16, 64, 512)
HOLDERS = (32, 256, 1024)
PART_KEYS = 2_048
"""The keys of a snapshot that the conductor takes in one go."""
DEFAULT_EVERY = 4
"""One key in so many is known, for blocks of 16 tokens at the default stride."""
BYTES_MAX = 64
EVENTS_MIN = 1_000_000
PAUSE_MAX_MS = 10.0
PLACES = tuple(bytes((place,)) for place in range(256))


class Holder(NamedTuple):
    bit: int


class Filled:
    """An index filled with ``keys`` keys of its holders, and the prompts that are looked up in it."""

    def __init__(
        self,
        index: BlockIndex,
        holders: Sequence[PrefixHolder],
        keys: int,
        every: int,
        dice: Random,
        prompts: int = PROMPTS,
    ) -> None:
        gc.collect()
        before = _resident_bytes()
        self.index, self.holders = index, holders
        self.every, self._dice = every, dice
        self._seqs = [0] * len(holders)
        self.prompts: list[bytes] = []
        """The prompts to look up: about ``prompts`` of those that filled the index, or all."""
        self.held_by: list[list[int]] = []
        """The numbers of each prompt's holders."""
        for holder in holders:
            index.apply_snapshot(holder, 0, b"", first=True, last=True)
        kept = keys // (PROMPT_BLOCKS // every) / prompts
        while len(index) + PROMPT_BLOCKS // every <= keys:
            prompt = self.prompt()
            count = 1 + (dice.random() < 0.2) * dice.randint(1, 3)
            numbers = dice.sample(range(len(holders)), min(count, len(holders)))
            for number in numbers:
                self.store(number, prompt)
            if dice.random() * kept < 1:
                self.prompts.append(prompt)
                self.held_by.append(numbers)
        kept_bytes = len(self.prompts) * PROMPT_BLOCKS * KEY_BYTES
        self.bytes_per_key = (_resident_bytes() - before - kept_bytes) / len(index)

    def prompt(self, blocks: int = PROMPT_BLOCKS) -> bytes:
        """Returns keys that nobody has, with their places in the last byte."""
        raw = self._dice.randbytes(blocks * (KEY_BYTES - 1))
        parts = (raw[at : at + KEY_BYTES - 1] for at in range(0, len(raw), KEY_BYTES - 1))
        return b"".join(part + PLACES[place % 256] for place, part in enumerate(parts, 1))

    def store(self, number: int, keys: bytes, gone: bytes = b"") -> float:
        """Stores ``keys`` of a holder, removes ``gone``, and returns the seconds."""
        self._seqs[number] += 1
        began = time.process_time()
        self.index.apply_delta(
            self.holders[number], self._seqs[number], key_sample(keys, self.every), key_sample(gone, self.every)
        )
        return time.process_time() - began

    def events(self, batch: int, repeats: int) -> tuple[int, int]:
        """Returns the blocks stored and removed per second in changes of ``batch`` blocks, including those that the
        sample leaves out."""
        changes = [self.prompt(batch) for _ in range(repeats)]
        stored_s = sum(self.store(0, keys) for keys in changes)
        removed_s = sum(self.store(0, b"", keys) for keys in changes)
        return round(batch * repeats / stored_s), round(batch * repeats / removed_s)

    def look_ups_us(self) -> list[float]:
        """Returns the µs of each look-up of 512 blocks, including how much of them each holder has."""
        taken = []
        for prompt in self.prompts:
            began = time.process_time()
            match = self.index.match(prompt, every=self.every)
            match.held_by_row(len(self.holders))
            taken.append(1e6 * (time.process_time() - began))
            assert match.blocks == PROMPT_BLOCKS
        return taken


def _filled(keys: int, limit: int, holders: int, every: int, seed: int) -> Filled:
    index = BlockIndex(limit)
    return Filled(index, [Holder(index.add()) for _ in range(holders)], keys, every, Random(seed))


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _timed(step: Callable[[], object]) -> tuple[object, float]:
    began = time.process_time()
    result = step()
    return result, 1e3 * (time.process_time() - began)


def _snapshot_and_drop(keys: int, seed: int) -> dict[str, float]:
    """Measures snapshot and drop of an instance with ``keys`` keys among ten times as many: longest parts, and all."""
    filled = _filled(9 * keys, 10 * keys, 32, 1, seed)
    big = Holder(filled.index.add())
    packed = filled.prompt(keys)
    parts = range(0, len(packed), PART_KEYS * KEY_BYTES)
    figures = {}
    for name in ("snapshot", "the same again"):
        taken = []
        for at in parts:
            part = packed[at : at + PART_KEYS * KEY_BYTES]
            first, last = at == parts[0], at == parts[-1]
            take = filled.index.apply_snapshot
            taken.append(_timed(lambda: take(big, 0, part, first=first, last=last))[1])  # noqa: B023
        figures[f"{name}_ms"] = round(sum(taken), 1)
        figures[f"{name}_longest_part_ms"] = round(max(taken), 2)
        while filled.index.collect():
            pass
    assert filled.index.blocks_of(big) == keys
    taken = list(_pauses(filled.index, big))
    assert len(filled.index) <= 9 * keys
    return {**figures, "drop_ms": round(sum(taken), 1), "drop_longest_pause_ms": round(max(taken), 2)}


def _pauses(index: BlockIndex, holder: Holder) -> Iterator[float]:
    yield _timed(lambda: index.drop(holder))[1]
    more: object = True
    while more:
        more, pause = _timed(index.collect)
        yield pause


def _measure(keys: int, every: int, holders: int, seed: int) -> dict[str, float]:
    filled = _filled(keys // every, keys, holders, every, seed)
    taken = filled.look_ups_us()
    figures = {
        "keys": len(filled.index),
        "bytes_per_key": round(filled.bytes_per_key, 1),
        "match_us": round(percentile(taken, 50), 1),
        "match_p99_us": round(percentile(taken, 99), 1),
    }
    for batch in BATCHES if holders == HOLDERS[1] else ():
        stored, removed = filled.events(batch, max(20, 50_000 // batch))
        figures |= {f"stored_by_{batch}_per_s": stored, f"removed_by_{batch}_per_s": removed}
    return figures


def _row(found: Seen) -> dict[str, object]:
    return {
        "hit_percent": round(100 * found.reusable / max(1, found.prompts), 2),
        "hit_tokens_mean": round(found.reusable / max(1, found.hits)),
        "seen_percent": {every: found.percent(found.by_place[every]) for every in EVERY},
        "seen_percent_if_chosen_by_hash": {every: found.percent(found.by_hash[every]) for every in EVERY},
        "lost_points": {every: found.lost_points(found.by_place[every]) for every in EVERY},
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--trace", type=Path, action="append", default=[], help="a trace file (may be repeated)")
    options.add_argument("--rows", type=int, default=0, help="of each trace (default 20,000; quick: 2,000)")
    arguments = options.parse_args()
    keys = 500_000 if arguments.quick else 10_000_000
    rows = arguments.rows or (2_000 if arguments.quick else 20_000)
    report = Report("index", {"keys": keys, "rows": rows, "seed": arguments.seed})
    # each in a process of its own, in which no memory was freed before
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as alone:
        for every, holders in product((1, DEFAULT_EVERY), HOLDERS):
            figures = alone.submit(_measure, keys, every, holders, arguments.seed).result()
            report.results[f"one key in {every}, {holders} holders"] = figures
            progress(f"one key in {every}, {holders} holders: {figures}")
        report.results["one instance"] = alone.submit(_snapshot_and_drop, keys // 10, arguments.seed).result()
        progress(f"one instance: {report.results['one instance']}")
    sources = [Source(name) for name in ("qwen-a", "qwen-b", "toolagent")]
    for source in (*sources, *(Source(path.name.partition(".")[0], path) for path in arguments.trace)):
        report.results[f"trace {source.name}"] = row = _row(seen(*source.rows(rows, arguments.seed)))
        progress(f"trace {source.name}: {row}")
    all_of_them = report.results[f"one key in 1, {HOLDERS[1]} holders"]
    report.aims += [
        Aim("bytes a key", BYTES_MAX, all_of_them["bytes_per_key"]),
        Aim("stored blocks per second, 512 at once", EVENTS_MIN, all_of_them["stored_by_512_per_s"], at_most=False),
        Aim("removed blocks per second, 512 at once", EVENTS_MIN, all_of_them["removed_by_512_per_s"], at_most=False),
        Aim(
            "longest pause by a dropped instance, ms",
            PAUSE_MAX_MS,
            report.results["one instance"]["drop_longest_pause_ms"],
        ),
    ]
    report.emit()


if __name__ == "__main__":
    main()
