"""Which instance holds which block: the conductor's view of all caches, built from their snapshots and changes.

A key's holders are one ``int`` with a bit per instance, which nobody outside this file looks at: who asks names the
instance, or a :class:`Holders` set of them. The index is a hint: it lags behind the instances by a report,
and a reader finds out at the source whether a block is really there. So it may refuse entries when it is full, and it
never needs to be written to disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from enum import Enum, auto
from struct import Struct
from typing import Generic, Protocol, TypeVar

from pinyon.core.block_keys import KEY_BYTES, BlockKey, unpack_keys

__all__ = ["NO_MATCH", "BlockIndex", "Holder", "Holders", "Intake", "PrefixMatch"]

_CHUNK_KEYS = 64
_MASK_OBJECTS_MAX = 65_536
_CHUNKS = tuple(Struct(f"{KEY_BYTES}s" * width) for width in range(_CHUNK_KEYS + 1))


class Holder(Protocol):
    """Whoever holds blocks; ``bit`` comes from :meth:`BlockIndex.add`."""

    @property
    def bit(self) -> int: ...


Member = TypeVar("Member", bound=Holder)


class Holders(Generic[Member]):
    """A set of holders, such as those that blocks may be fetched from."""

    __slots__ = ("_by_bit", "mask")

    def __init__(self, members: Iterable[Member]) -> None:
        self._by_bit = {member.bit: member for member in members}
        self.mask = sum(self._by_bit)

    def __iter__(self) -> Iterator[Member]:
        return iter(self._by_bit.values())

    def among(self, mask: int) -> Iterator[Member]:
        """The members whose bits are in a mask."""
        return (self._by_bit[bit] for bit in _bits(mask & self.mask))


class Intake(Enum):
    """What became of a snapshot part or a delta."""

    APPLIED = auto()
    GAP = auto()
    """Something is missing before it: the instance has to send a snapshot."""
    IGNORED = auto()
    """As GAP, but the instance was told already and the snapshot is still to come."""


class PrefixMatch:
    """Who holds how much of a prompt's beginning.

    ``runs`` are ``(first block, mask of holders)`` where the set of holders changes. Every block before ``blocks`` has
    a holder and the one after has none.
    """

    __slots__ = ("_leading", "_runs", "blocks")

    def __init__(self, runs: list[tuple[int, int]], blocks: int) -> None:
        self._runs = runs
        self.blocks = blocks
        self._leading: dict[int, int] = {}
        if not runs:
            return
        unbroken = runs[0][1]
        for start, holders in runs:
            lost = unbroken & ~holders
            if lost:
                unbroken &= holders
                for bit in _bits(lost):
                    self._leading[bit] = start
        for bit in _bits(unbroken):
            self._leading[bit] = blocks

    def held_by(self, holder: Holder) -> int:
        """Blocks it holds without a gap from the start."""
        return self._leading.get(holder.bit, 0)

    def extent_for(self, reader: Holder, first_block: int, sources: Holders[Member]) -> int:
        """End of the blocks from ``first_block`` on of which each is held by one of ``sources`` besides the reader."""
        mask = sources.mask & ~reader.bit
        runs = self._runs
        end = first_block
        for index, (_, holders) in enumerate(runs):
            run_end = runs[index + 1][0] if index + 1 < len(runs) else self.blocks
            if run_end <= first_block:
                continue
            if not holders & mask:
                break
            end = run_end
        return end

    def spans_for(
        self, reader: Holder, first_block: int, end_block: int, sources: Holders[Member]
    ) -> Iterator[tuple[int, int, Iterator[Member]]]:
        """``(first, end, who holds all of it)`` from ``first_block`` on without a gap, besides the reader.

        Each span goes as far as any one source does, so they are as few as can be. Requires ``end_block <=
        extent_for(reader, first_block, sources)``.
        """
        allowed = sources.mask & ~reader.bit
        runs = self._runs
        index = 0
        at = first_block
        while at < end_block:
            while index + 1 < len(runs) and runs[index + 1][0] <= at:
                index += 1
            holders = runs[index][1] & allowed
            end = end_block
            for start, mask in runs[index + 1 :]:
                if start >= end_block:
                    break
                narrowed = holders & mask
                if not narrowed:
                    end = start
                    break
                holders = narrowed
            yield at, end, sources.among(holders)
            at = end


NO_MATCH = PrefixMatch([], 0)


def _bits(mask: int) -> Iterator[int]:
    """The single bits of a mask, lowest first."""
    while mask:
        low = mask & -mask
        yield low
        mask ^= low


class _Held:
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
        self._held: dict[int, _Held] = {}
        self._mask_objects: dict[int, int] = {}
        self.entries = 0
        self.skipped = 0

    def __len__(self) -> int:
        """Different keys known."""
        return len(self._masks)

    def add(self) -> int:
        """The bit of a new holder, of which nothing is known until its snapshot."""
        bit = 1
        while bit in self._held:
            bit <<= 1
        self._held[bit] = _Held()
        return bit

    def drop(self, holder: Holder) -> None:
        """Forget a holder with all it holds; afterwards its bit is free again."""
        self._clear(holder.bit, self._held[holder.bit])
        del self._held[holder.bit]

    def blocks_of(self, holder: Holder) -> int:
        """Keys the holder is known to hold."""
        return len(self._held[holder.bit].keys)

    def seq_of(self, holder: Holder) -> int:
        """Sequence number of the last change applied; 0 before the first."""
        return self._held[holder.bit].seq

    def new_session(self, holder: Holder) -> None:
        """The instance connected again: its changes may have gone missing, so only a snapshot continues the stream.

        What is known stays until that snapshot begins; most of it is still true.
        """
        held = self._held[holder.bit]
        held.synced = held.loading = held.resync_asked = False

    def apply_snapshot(self, holder: Holder, seq: int, packed_keys: bytes, *, first: bool, last: bool) -> Intake:
        """One part of a full content as of change ``seq``. The first part voids what was known."""
        bit, held = holder.bit, self._held[holder.bit]
        if first:
            self._clear(bit, held)
            held.seq = seq
            held.loading, held.synced, held.resync_asked = True, False, False
        elif not held.loading or held.seq != seq:
            return self._gap(held)
        self._store(bit, held, packed_keys)
        if last:
            held.loading, held.synced = False, True
        return Intake.APPLIED

    def apply_delta(self, holder: Holder, seq: int, stored_keys: bytes, removed_keys: bytes) -> Intake:
        """One change: keys now held, then keys no longer held (packed, :mod:`pinyon.core.block_keys`)."""
        bit, held = holder.bit, self._held[holder.bit]
        if not held.synced or seq != held.seq + 1:
            return self._gap(held)
        held.seq = seq
        if stored_keys:
            self._store(bit, held, stored_keys)
        if removed_keys:
            gone = held.keys.intersection(unpack_keys(removed_keys))
            held.keys -= gone
            self._unmark(gone, bit)
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
        pairs = {(key, bit) for key, mask in self._masks.items() for bit in _bits(mask)}
        assert pairs == {(key, bit) for bit, held in self._held.items() for key in held.keys}
        assert self.entries == len(pairs) <= self._entries_max
        assert all(self._masks.values())

    def _store(self, bit: int, held: _Held, packed_keys: bytes) -> None:
        masks, own, shared = self._masks, held.keys, self._shared_masks()
        fresh = [key for key in dict.fromkeys(unpack_keys(packed_keys)) if key not in own]
        room = max(0, self._entries_max - self.entries)
        if len(fresh) > room:
            self.skipped += len(fresh) - room
            del fresh[room:]
        own.update(fresh)
        alone = shared.setdefault(bit, bit)
        for key in fresh:
            others = masks.get(key)
            if others is None:
                masks[key] = alone
            else:
                mask = others | bit
                masks[key] = shared.setdefault(mask, mask)
        self.entries += len(fresh)

    def _shared_masks(self) -> dict[int, int]:
        """One object per value: equal masks are then compared by identity, which makes a lookup twice as fast."""
        if len(self._mask_objects) >= _MASK_OBJECTS_MAX:
            self._mask_objects.clear()
        return self._mask_objects

    def _unmark(self, keys: Set[BlockKey], bit: int) -> None:
        """``keys`` are the holder's."""
        masks, shared, others = self._masks, self._shared_masks(), ~bit
        for key in keys:
            mask = masks[key] & others
            if mask:
                masks[key] = shared.setdefault(mask, mask)
            else:
                del masks[key]
        self.entries -= len(keys)

    def _clear(self, bit: int, held: _Held) -> None:
        self._unmark(held.keys, bit)
        held.keys = set()

    def _gap(self, held: _Held) -> Intake:
        held.synced = held.loading = False
        if held.resync_asked:
            return Intake.IGNORED
        held.resync_asked = True
        return Intake.GAP
