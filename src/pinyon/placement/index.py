"""Which instance holds which block: the conductor's view of all caches, built from their snapshots and changes.

A key's holders are one ``int`` with a bit per instance. The index is a hint: it lags behind the instances by a report,
and a reader finds out at the source whether a block is really there. So it may refuse entries when it is full, and it
never needs to be written to disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, auto
from struct import Struct

from pinyon.core.block_keys import KEY_BYTES, BlockKey, unpack_keys

__all__ = ["NO_MATCH", "BlockIndex", "Intake", "PrefixMatch", "bits"]

_CHUNK_KEYS = 64
_MASK_OBJECTS_MAX = 65_536
_CHUNKS = tuple(Struct(f"{KEY_BYTES}s" * width) for width in range(_CHUNK_KEYS + 1))


class Intake(Enum):
    """What became of a snapshot part or a delta."""

    APPLIED = auto()
    GAP = auto()
    """Something is missing before it: the instance has to send a snapshot."""
    IGNORED = auto()
    """As GAP, but the instance was told already and the snapshot is still to come."""


class PrefixMatch:
    """Who holds how much of a prompt's beginning.

    ``runs`` are ``(first block, holders)`` where the set of holders changes; every block before ``blocks`` has a holder
    and the one after has none. ``leading`` maps an instance's bit to the blocks it holds without a gap from the start.
    """

    __slots__ = ("blocks", "leading", "runs")

    def __init__(self, runs: list[tuple[int, int]], blocks: int) -> None:
        self.runs = runs
        self.blocks = blocks
        self.leading: dict[int, int] = {}
        if not runs:
            return
        unbroken = runs[0][1]
        for start, holders in runs:
            lost = unbroken & ~holders
            if lost:
                unbroken &= holders
                for bit in bits(lost):
                    self.leading[bit] = start
        for bit in bits(unbroken):
            self.leading[bit] = blocks

    def extent(self, first_block: int, sources: int) -> int:
        """End of the blocks from ``first_block`` on of which each is held by one of ``sources`` (a mask of bits)."""
        end = first_block
        for index, (_, holders) in enumerate(self.runs):
            run_end = self.runs[index + 1][0] if index + 1 < len(self.runs) else self.blocks
            if run_end <= first_block:
                continue
            if not holders & sources:
                break
            end = run_end
        return end


NO_MATCH = PrefixMatch([], 0)


def bits(mask: int) -> Iterator[int]:
    """The single bits of a mask, lowest first."""
    while mask:
        low = mask & -mask
        yield low
        mask ^= low


class _Holder:
    """What one instance holds, and how far its stream of changes was followed."""

    __slots__ = ("keys", "loading", "resync_asked", "seq", "synced")

    def __init__(self) -> None:
        self.keys: set[BlockKey] = set()
        self.seq = 0
        self.loading = False  # between the first and the last part of a snapshot
        self.synced = False  # deltas may follow
        self.resync_asked = False


class BlockIndex:
    """Key → holders for any number of instances, with at most ``entries_max`` (key, holder) pairs.

    Pairs beyond the limit are skipped and counted in ``skipped``: their reuse is lost, nothing else.
    """

    def __init__(self, entries_max: int) -> None:
        self._entries_max = entries_max
        self._masks: dict[BlockKey, int] = {}
        self._holders: dict[int, _Holder] = {}
        self._mask_objects: dict[int, int] = {}
        self.entries = 0
        self.skipped = 0

    def __len__(self) -> int:
        """Different keys known."""
        return len(self._masks)

    def add(self, bit: int) -> None:
        """A new holder, of which nothing is known until its snapshot. ``bit`` is a power of two not in use."""
        if bit in self._holders:
            raise ValueError(f"bit {bit:#x} is in use")
        self._holders[bit] = _Holder()

    def drop(self, bit: int) -> None:
        """Forget a holder with all it holds; afterwards its bit is free again."""
        self._clear(bit, self._holders[bit])
        del self._holders[bit]

    def blocks_of(self, bit: int) -> int:
        """Keys the holder is known to hold."""
        return len(self._holders[bit].keys)

    def seq_of(self, bit: int) -> int:
        """Sequence number of the last change applied; 0 before the first."""
        return self._holders[bit].seq

    def new_session(self, bit: int) -> None:
        """The instance connected again: its changes may have gone missing, so only a snapshot continues the stream.

        What is known stays until that snapshot begins; most of it is still true.
        """
        holder = self._holders[bit]
        holder.synced = holder.loading = holder.resync_asked = False

    def apply_snapshot(self, bit: int, seq: int, packed_keys: bytes, *, first: bool, last: bool) -> Intake:
        """One part of a full content as of change ``seq``. The first part voids what was known."""
        holder = self._holders[bit]
        if first:
            self._clear(bit, holder)
            holder.seq = seq
            holder.loading, holder.synced, holder.resync_asked = True, False, False
        elif not holder.loading or holder.seq != seq:
            return self._gap(holder)
        self._store(bit, holder, packed_keys)
        if last:
            holder.loading, holder.synced = False, True
        return Intake.APPLIED

    def apply_delta(self, bit: int, seq: int, stored_keys: bytes, removed_keys: bytes) -> Intake:
        """One change: keys now held, then keys no longer held (packed, :mod:`pinyon.core.block_keys`)."""
        holder = self._holders[bit]
        if not holder.synced or seq != holder.seq + 1:
            return self._gap(holder)
        holder.seq = seq
        if stored_keys:
            self._store(bit, holder, stored_keys)
        if removed_keys:
            for key in unpack_keys(removed_keys):
                if key in holder.keys:
                    holder.keys.remove(key)
                    self._unmark(key, bit)
        return Intake.APPLIED

    def match(self, packed_keys: bytes, limit: int | None = None) -> PrefixMatch:
        """Who holds the beginning of a prompt with these keys; only the first ``limit`` keys count.

        One walk that ends at the first key nobody holds: a cold prompt costs one lookup.
        """
        get = self._masks.get
        count = len(packed_keys) // KEY_BYTES
        if limit is not None and limit < count:
            count = max(0, limit)
        if not count:
            return NO_MATCH
        # the first key alone: most prompts that miss, miss here
        previous = get(packed_keys[:KEY_BYTES])
        if previous is None:
            return NO_MATCH
        runs = [(0, previous)]
        at = 1
        while at < count:
            width = min(_CHUNK_KEYS, count - at)
            masks = list(map(get, _CHUNKS[width].unpack_from(packed_keys, at * KEY_BYTES)))
            if masks.count(previous) != width:  # else: the run goes on
                for offset, mask in enumerate(masks):
                    if mask != previous:
                        if mask is None:
                            return PrefixMatch(runs, at + offset)
                        runs.append((at + offset, mask))
                        previous = mask
            at += width
        return PrefixMatch(runs, count)

    def check_integrity(self) -> None:
        """Assert that both directions agree (for tests and idle times)."""
        pairs = {(key, bit) for key, mask in self._masks.items() for bit in bits(mask)}
        assert pairs == {(key, bit) for bit, holder in self._holders.items() for key in holder.keys}
        assert self.entries == len(pairs) <= self._entries_max
        assert all(self._masks.values())

    def _store(self, bit: int, holder: _Holder, packed_keys: bytes) -> None:
        masks, own = self._masks, holder.keys
        for key in unpack_keys(packed_keys):
            if key in own:
                continue
            if self.entries >= self._entries_max:
                self.skipped += 1
                continue
            own.add(key)
            masks[key] = self._shared(masks.get(key, 0) | bit)
            self.entries += 1

    def _shared(self, mask: int) -> int:
        """One object per value: equal masks are then compared by identity, which makes a lookup twice as fast."""
        if len(self._mask_objects) >= _MASK_OBJECTS_MAX:
            self._mask_objects.clear()
        return self._mask_objects.setdefault(mask, mask)

    def _unmark(self, key: BlockKey, bit: int) -> None:
        mask = self._masks[key] & ~bit
        if mask:
            self._masks[key] = self._shared(mask)
        else:
            del self._masks[key]
        self.entries -= 1

    def _clear(self, bit: int, holder: _Holder) -> None:
        for key in holder.keys:
            self._unmark(key, bit)
        holder.keys = set()

    def _gap(self, holder: _Holder) -> Intake:
        holder.synced = holder.loading = False
        if holder.resync_asked:
            return Intake.IGNORED
        holder.resync_asked = True
        return Intake.GAP
