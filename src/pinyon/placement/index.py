"""The block index: which instance holds which block, as the conductor knows it from all snapshots and changes.

The index is a hint: it lags behind the instances by a report, and a reader finds out at the source whether a block is
really there. So it may forget the oldest keys when it is full, it may know only a sample of the keys
(:mod:`pinyon.core.key_sample`), and it never needs to be written to disk.

This file follows what the instances say; :mod:`pinyon.placement.holdings` stores it."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import Final

from librt.strings import read_i64_le
from librt.vecs import vec
from mypy_extensions import i64

from pinyon.core.block_keys import KEY_BYTES
from pinyon.placement.expected import ExpectedBlocks
from pinyon.placement.holder_sets import SETS_MAX
from pinyon.placement.holdings import COLLECT_SLOTS, Holdings
from pinyon.placement.key_table import Advise, KeyTable, fingerprint
from pinyon.placement.prefix_match import NO_MATCH, Holder, PrefixMatch

HoldersOf = Callable[[int], int]
"""A function from the number of a set to the bits of its holders."""

_TOGETHER: Final = 16
"""Keys whose buckets are brought from memory at the same time. The first key of a prompt is looked up alone, as most
look-ups that miss, miss there."""

_PLACE: Final = 15
"""The byte of a key that tells its block's place (:mod:`pinyon.core.key_sample`)."""


class Intake(Enum):
    """The outcome of a snapshot part or a delta."""

    APPLIED = auto()
    GAP = auto()
    """Changes before it are missing: the instance has to send a snapshot."""
    IGNORED = auto()
    """Changes are missing, but the instance was told already and the snapshot is still to come."""


class _Held:
    """The blocks of one instance, and how far its stream of changes was followed."""

    __slots__ = ("before", "loading", "resync_asked", "row", "seq", "synced")

    def __init__(self, row: int) -> None:
        self.row = row
        """The row that the known blocks are stored under."""
        self.before: int | None = None
        """The row before the snapshot that is being loaded: still a good hint until that is complete."""
        self.seq = 0
        self.loading = False  # between the first and the last part of a snapshot
        self.synced = False  # deltas may follow
        self.resync_asked = False


class BlockIndex:
    """Key → holders for any number of instances, with at most ``keys_max`` keys.

    When the index is full, the keys that came first go, but those that were looked up or stored again lately stay.
    ``evicted`` counts the (key, holder) pairs that went: their reuse is lost, nothing else."""

    def __init__(self, keys_max: int, sets_max: int = SETS_MAX, advise: Advise | None = None) -> None:
        """Starts without holders. ``advise`` is told where in memory the keys will be."""
        self._holdings = Holdings(keys_max, sets_max, advise)
        self._held: dict[int, _Held] = {}
        """The state of each holder, by its bit."""

    def __len__(self) -> int:
        """Returns the number of different keys known, including those that only void rows have."""
        return self._holdings.table.keys

    @property
    def evicted(self) -> int:
        """Pairs that were evicted because their keys were the oldest."""
        return self._holdings.evicted

    @property
    def refused(self) -> int:
        """Pairs that were not kept because there were too many different sets of holders."""
        return self._holdings.refused

    @property
    def entries(self) -> int:
        """The number of (key, holder) pairs."""
        return sum(self._holdings.keys_under(held.row) for held in self._held.values())

    def add(self) -> int:
        """Returns the bit of a new holder, of which nothing is known until its snapshot."""
        bit = 1
        while bit in self._held:
            bit <<= 1
        self._held[bit] = _Held(self._holdings.new_row(bit))
        return bit

    def drop(self, holder: Holder) -> None:
        held = self._held.pop(holder.bit)
        self._holdings.hide(held.before)
        self._holdings.hide(held.row)

    def blocks_of(self, holder: Holder) -> int:
        """Returns how many keys the holder is known to hold."""
        return self._holdings.keys_under(self._held[holder.bit].row)

    def seq_of(self, holder: Holder) -> int:
        """Returns the sequence number of the last change applied; 0 before the first."""
        return self._held[holder.bit].seq

    def new_session(self, holder: Holder) -> None:
        """Demands a snapshot before further changes: the instance connected again, and changes may have been lost.

        What is known stays until that snapshot is complete; most of it is still true."""
        held = self._held[holder.bit]
        held.synced = held.loading = held.resync_asked = False

    def apply_snapshot(self, holder: Holder, seq: int, packed_keys: bytes, *, first: bool, last: bool) -> Intake:
        """Applies one part of the full content as of change ``seq``. After the last part, no other keys are held."""
        held = self._held[holder.bit]
        if first:
            self._holdings.hide(held.before)
            held.before = None
            if self._holdings.keys_under(held.row):
                held.before, held.row = held.row, self._holdings.new_row(holder.bit)
            held.seq = seq
            held.loading, held.synced, held.resync_asked = True, False, False
        elif not held.loading or held.seq != seq:
            return self._gap(held)
        self._holdings.store(held.row, packed_keys)
        if last:
            held.loading, held.synced = False, True
            self._holdings.hide(held.before)
            held.before = None
        return Intake.APPLIED

    def apply_delta(
        self, holder: Holder, seq: int, stored_keys: bytes, removed_keys: bytes, *, more: bool = False
    ) -> Intake:
        """Applies one change: keys now held, then keys no longer held (packed, :mod:`pinyon.core.block_keys`).

        ``more``: it is another part of the change that was applied last."""
        held = self._held[holder.bit]
        if not held.synced or seq != held.seq + (not more):
            return self._gap(held)
        held.seq = seq
        if stored_keys:
            self._holdings.store(held.row, stored_keys)
        if removed_keys:
            self._holdings.remove(held.row, removed_keys)
        return Intake.APPLIED

    def match(
        self, packed_keys: bytes, limit: int | None = None, expected: ExpectedBlocks | None = None, every: int = 1
    ) -> PrefixMatch:
        """Returns who holds how much of the beginning of a prompt with these keys, of which the first ``limit`` count.

        With ``expected``, the match also says who will hold how much soon. One key in ``every`` is looked up: the
        blocks between two of them are held by whoever holds the second one."""
        count = len(packed_keys) // KEY_BYTES
        if limit is not None and limit < count:
            count = max(0, limit)
        holdings = self._holdings
        last, match = _look_up(holdings.table, holdings.shown_of, packed_keys, count, expected or None, every)
        holdings.used(packed_keys[: match.blocks * KEY_BYTES], every, last)
        return match

    def collect(self, slots_max: int = COLLECT_SLOTS) -> bool:
        """Clears void rows from at most ``slots_max`` slots of the table. Returns whether more is left to be done."""
        return self._holdings.collect(slots_max)

    def check_integrity(self) -> None:
        """Asserts that all books agree (for tests and idle times)."""
        self._holdings.check_integrity()

    def _gap(self, held: _Held) -> Intake:
        held.synced = held.loading = False
        if held.resync_asked:
            return Intake.IGNORED
        held.resync_asked = True
        return Intake.GAP


def _look_up(
    table: KeyTable, holders_of: HoldersOf, packed_keys: bytes, keys: i64, expected: ExpectedBlocks | None, every: i64
) -> tuple[int, PrefixMatch]:
    """Follows a prompt's keys until one that nobody holds. Returns the slot of the last key that was found, or -1, and
    who holds how much of the prompt. Of the first ``keys`` keys, one in ``every`` counts."""
    runs: list[tuple[int, int]] = []
    soon_runs: list[tuple[int, int]] = []
    last_slot: i64 = -1
    before: i64 = -1
    blocks: i64 = 0
    start: i64 = 0  # the first block that the next key tells about
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
