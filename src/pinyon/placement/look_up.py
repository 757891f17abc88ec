"""A look-up in the block index: along a prompt's keys, until one that nobody holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from librt.strings import read_i64_le
from librt.vecs import vec
from mypy_extensions import i64

from pinyon.core.block_keys import KEY_BYTES
from pinyon.placement.expected import ExpectedBlocks
from pinyon.placement.key_table import KeyTable, fingerprint
from pinyon.placement.prefix_match import NO_MATCH, PrefixMatch

HoldersOf = Callable[[int], int]
"""Number of a set → bits of its holders."""

_TOGETHER: Final = 16
"""Keys whose buckets are brought from memory at the same time; of a prompt the first one alone, as most that miss, miss
there."""

_PLACE: Final = 15
"""The byte of a key that tells its block's place (:mod:`pinyon.core.key_sample`)."""


def look_up(
    table: KeyTable,
    holders_of: HoldersOf,
    packed_keys: bytes,
    keys: i64,
    expected: ExpectedBlocks | None,
    every: i64,
) -> tuple[int, PrefixMatch]:
    """The slot of the last key that was found, or -1, and who holds how much of the prompt; of the first so many keys,
    one in ``every`` counts."""
    runs: list[tuple[int, int]] = []
    soon_runs: list[tuple[int, int]] = []
    last_slot: i64 = -1
    before: i64 = -1
    blocks: i64 = 0
    start: i64 = 0  # the first block that the next key tells of
    held = shown = coming = coming_before = both = 0
    ended = comes = changed = False
    size, others = keys * KEY_BYTES, every - 1
    prints, ats = vec[i64]([0] * _TOGETHER), vec[i64]([0] * _TOGETHER)
    slots, numbers = vec[i64]([0] * _TOGETHER), vec[i64]([0] * _TOGETHER)
    at: i64 = 0
    first: i64 = 1
    while at < size:
        count: i64 = 0
        while at < size and count < first:
            if not packed_keys[at + _PLACE] & others:
                ats[count] = at
                prints[count] = fingerprint(read_i64_le(packed_keys, at), read_i64_le(packed_keys, at + 8))
                count += 1
            at += KEY_BYTES
        table.find(prints, count, slots, numbers)
        some_come = expected is not None and expected.has_some(prints, count)
        first = _TOGETHER
        for each in range(count):
            here = ats[each]
            number = numbers[each]
            changed = number != before
            if changed:
                before, shown = number, 0
                if number:
                    shown = holders_of(number)
            if not ended:
                if not shown:  # nobody has it, or all who had have gone
                    ended = True
                else:
                    if changed and shown != held:
                        held = shown
                        runs.append((start, held))
                    last_slot, blocks = slots[each], here // KEY_BYTES + 1
            if expected is not None:
                coming = expected.mask_of(prints[each]) if some_come else 0
                comes = comes or coming != 0
                if changed or coming != coming_before:
                    coming_before = coming
                    if shown | coming != both:
                        both = shown | coming
                        if both:
                            soon_runs.append((start, both))
            if ended and not shown | coming:
                at = size
                break
            start = here // KEY_BYTES + 1
    if not comes:
        return last_slot, PrefixMatch(runs, blocks) if runs else NO_MATCH
    return last_slot, PrefixMatch(runs, blocks, PrefixMatch(soon_runs, start))
