"""Which instance holds which block: the conductor's view of all caches, built from their snapshots and changes.

A key's holders are one ``int`` with a bit per instance, which nobody outside this file looks at: who asks names the
instance, or a :class:`Holders` set of them. The index is a hint: it lags behind the instances by a report,
and a reader finds out at the source whether a block is really there. So it may forget the oldest keys when it is full,
and it never needs to be written to disk.

Nothing here takes long at once. What a holder had is cleared away in portions (:meth:`BlockIndex.collect`); lookups do
not see a holder from the moment it was dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from enum import Enum, auto
from itertools import islice
from struct import Struct

from pinyon.core.block_keys import KEY_BYTES, BlockKey, unpack_keys
from pinyon.placement.expected import ExpectedBlocks
from pinyon.placement.prefix_match import NO_MATCH, Holder, PrefixMatch, bits

__all__ = ["COLLECT_KEYS", "BlockIndex", "Intake"]

COLLECT_KEYS = 4096
"""Cleared away in one go: ~5 ms."""
_EVICT_PAIRS = 1024
# Of the prompts looked up last, so many keys count as in use.
_RECENT_KEYS = 16_384
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


class _Held:
    """What one instance holds, and how far its stream of changes was followed."""

    __slots__ = ("before", "keys", "loading", "resync_asked", "seq", "synced")

    def __init__(self) -> None:
        self.keys: set[BlockKey] = set()
        self.before: set[BlockKey] = set()
        """Held before the snapshot that is being loaded: still a good hint until that is complete."""
        self.seq = 0
        self.loading = False  # between the first and the last part of a snapshot
        self.synced = False  # deltas may follow
        self.resync_asked = False


class BlockIndex:
    """Key → holders for any number of instances, with at most ``entries_max`` (key, holder) pairs.

    When it is full, the keys that came first go, but those of prompts that were looked up lately stay. ``evicted``
    counts the pairs that went: their reuse is lost, nothing else.
    """

    def __init__(self, entries_max: int) -> None:
        self._entries_max = entries_max
        self._masks: dict[BlockKey, int] = {}  # the oldest in front
        self._held: dict[int, _Held] = {}
        self._mask_objects: dict[int, int] = {}
        self._void: deque[tuple[int, set[BlockKey], _Held | None]] = deque()
        """Keys to be cleared of a bit; with a holder, those that it does not hold after all."""
        self._void_keys = 0
        self._dropped = 0
        """Bits of dropped holders that are not clear yet."""
        self._recent: deque[bytes] = deque()
        self._recent_keys = 0
        self.entries = 0
        self.evicted = 0

    def __len__(self) -> int:
        """Different keys known."""
        return len(self._masks)

    def add(self) -> int:
        """The bit of a new holder, of which nothing is known until its snapshot."""
        bit = 1
        while bit in self._held or bit & self._dropped:
            bit <<= 1
        self._held[bit] = _Held()
        return bit

    def drop(self, holder: Holder) -> None:
        """Forget a holder with all it holds. Its bit is free again when all of that is cleared away."""
        bit = holder.bit
        held = self._held.pop(bit)
        self._dropped |= bit
        self.entries -= len(held.keys)
        self._clear_later(bit, held.before, None)
        self._clear_later(bit, held.keys, None)
        held.keys, held.before = set(), set()
        self._free(bit)
        self.collect()

    def collect(self, keys_max: int = COLLECT_KEYS) -> bool:
        """Clear away at most ``keys_max`` keys of what is void. Returns whether more is left."""
        void = self._void
        while void and keys_max > 0:
            bit, keys, held = void[0]
            count = min(len(keys), keys_max)
            gone = {keys.pop() for _ in range(count)}
            self._void_keys -= count
            keys_max -= max(1, count)
            if held is not None:
                gone -= held.keys
                gone -= held.before
            self._unmark(gone, bit)
            if not keys:
                void.popleft()
                self._free(bit)
        return bool(void)

    def blocks_of(self, holder: Holder) -> int:
        """Keys the holder is known to hold."""
        return len(self._held[holder.bit].keys)

    def seq_of(self, holder: Holder) -> int:
        """Sequence number of the last change applied; 0 before the first."""
        return self._held[holder.bit].seq

    def new_session(self, holder: Holder) -> None:
        """The instance connected again: its changes may have gone missing, so only a snapshot continues the stream.

        What is known stays until that snapshot is complete; most of it is still true.
        """
        held = self._held[holder.bit]
        held.synced = held.loading = held.resync_asked = False

    def apply_snapshot(self, holder: Holder, seq: int, packed_keys: bytes, *, first: bool, last: bool) -> Intake:
        """One part of a full content as of change ``seq``. After the last part, only what the parts named is held."""
        bit, held = holder.bit, self._held[holder.bit]
        if first:
            self.entries -= len(held.keys)
            self._clear_later(bit, held.before, held)
            held.keys, held.before = set(), held.keys
            held.seq = seq
            held.loading, held.synced, held.resync_asked = True, False, False
        elif not held.loading or held.seq != seq:
            return self._gap(held)
        self._store(bit, held, packed_keys)
        if last:
            held.loading, held.synced = False, True
            self._clear_later(bit, held.before, held)
            held.before = set()
            self.collect()
        return Intake.APPLIED

    def apply_delta(
        self, holder: Holder, seq: int, stored_keys: bytes, removed_keys: bytes, *, more: bool = False
    ) -> Intake:
        """One change: keys now held, then keys no longer held (packed, :mod:`pinyon.core.block_keys`).

        ``more``: another part of the change that was applied last.
        """
        bit, held = holder.bit, self._held[holder.bit]
        if not held.synced or seq != held.seq + (not more):
            return self._gap(held)
        held.seq = seq
        if stored_keys:
            self._store(bit, held, stored_keys)
        if removed_keys:
            gone = held.keys.intersection(unpack_keys(removed_keys))
            held.keys -= gone
            self.entries -= len(gone)
            self._unmark(gone, bit)
        return Intake.APPLIED

    def match(
        self, packed_keys: bytes, limit: int | None = None, expected: ExpectedBlocks | None = None
    ) -> PrefixMatch:
        """Who holds the beginning of a prompt with these keys; only the first ``limit`` keys count. ``expected``: and
        who holds how much of it soon."""
        count = len(packed_keys) // KEY_BYTES
        if limit is not None and limit < count:
            count = max(0, limit)
        runs, blocks = self._walk(packed_keys, count)
        if self._dropped:
            runs, blocks = _without(self._dropped, runs, blocks)
        if blocks and self.entries * 2 > self._entries_max:
            self._remember(packed_keys[: blocks * KEY_BYTES])
        soon = self._soon(packed_keys, count, expected) if expected else None
        return PrefixMatch(runs, blocks, soon) if blocks or soon is not None else NO_MATCH

    def _soon(self, packed_keys: bytes, count: int, expected: ExpectedBlocks) -> PrefixMatch | None:
        """None: nothing more is expected."""
        held_by, expected_by, there = self._masks.get, expected.masks.get, ~self._dropped
        runs: list[tuple[int, int]] = []
        before: tuple[int | None, int | None] = (None, None)
        more, end = False, count
        for at in range(0, count, _CHUNK_KEYS):
            width = min(_CHUNK_KEYS, count - at)
            keys = _CHUNKS[width].unpack_from(packed_keys, at * KEY_BYTES)
            held, soon = list(map(held_by, keys)), list(map(expected_by, keys))
            if at and soon.count(before[1]) == width and held.count(before[0]) == width:
                continue  # the run goes on
            more = more or soon.count(None) != width
            for offset, masks in enumerate(zip(held, soon, strict=True)):
                if masks != before or not runs:
                    mask = ((masks[0] or 0) & there) | (masks[1] or 0)
                    if not mask:
                        end = at + offset
                        break
                    runs.append((at + offset, mask))
                    before = masks
            else:
                continue
            break
        return PrefixMatch(runs, end) if more and runs else None

    def _walk(self, packed_keys: bytes, count: int) -> tuple[list[tuple[int, int]], int]:
        """Runs of equal holders, and where they end: at the first key nobody holds, so a cold prompt costs a lookup."""
        get = self._masks.get
        # the first key alone: most prompts that miss, miss here
        previous = get(packed_keys[:KEY_BYTES]) if count else None
        if previous is None:
            return [], 0
        runs = [(0, previous)]
        at = 1
        while at < count:
            width = min(_CHUNK_KEYS, count - at)
            masks = list(map(get, _CHUNKS[width].unpack_from(packed_keys, at * KEY_BYTES)))
            if masks.count(previous) != width:  # else: the run goes on
                for offset, mask in enumerate(masks):
                    if mask != previous:
                        if mask is None:
                            return runs, at + offset
                        runs.append((at + offset, mask))
                        previous = mask
            at += width
        return runs, count

    def check_integrity(self) -> None:
        """Assert that both directions agree (for tests and idle times)."""
        pairs = {(key, bit) for key, mask in self._masks.items() for bit in bits(mask)}
        known = {(key, bit) for bit, held in self._held.items() for key in held.keys}
        hints = {(key, bit) for bit, held in self._held.items() for key in held.before}
        void = {(key, bit) for bit, keys, _ in self._void for key in keys}
        assert known <= pairs <= known | hints | void
        assert self.entries == len(known) <= self._entries_max
        assert self._void_keys == sum(len(keys) for _, keys, _ in self._void)
        assert all(self._masks.values())
        assert not any(bit & self._dropped for bit in self._held)

    def _store(self, bit: int, held: _Held, packed_keys: bytes) -> None:
        masks, own, shared = self._masks, held.keys, self._shared_masks()
        fresh = [key for key in dict.fromkeys(unpack_keys(packed_keys)) if key not in own]
        if len(fresh) > self._entries_max:
            self.evicted += len(fresh) - self._entries_max
            del fresh[self._entries_max :]
        over = self.entries + len(fresh) - self._entries_max
        if over > 0:
            self._evict(over)
        if self._void_keys > self._entries_max:  # whoever collects does not keep up
            self.collect(2 * len(fresh))
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

    def _evict(self, pairs: int) -> None:
        """Forget at least so many pairs, by key: those that came first, less those looked up lately."""
        masks, left = self._masks, self.entries - pairs
        left -= min(_EVICT_PAIRS, left // 16)  # some more, as finding the front of the dict is what costs
        recent: set[BlockKey] = set()
        for keys in self._recent:
            recent.update(unpack_keys(keys))
        while self.entries > left:
            for key in list(islice(masks, _EVICT_PAIRS)):
                mask = masks.pop(key)
                if key in recent:  # once: then it has no more right than others
                    recent.remove(key)
                    masks[key] = mask
                    continue
                for bit in bits(mask):
                    held = self._held.get(bit)
                    if held is None:
                        continue
                    held.before.discard(key)
                    if key in held.keys:
                        held.keys.remove(key)
                        self.entries -= 1
                        self.evicted += 1
                if self.entries <= left:
                    break

    def _remember(self, packed_keys: bytes) -> None:
        self._recent.append(packed_keys)
        self._recent_keys += len(packed_keys) // KEY_BYTES
        while self._recent_keys > _RECENT_KEYS:
            self._recent_keys -= len(self._recent.popleft()) // KEY_BYTES

    def _shared_masks(self) -> dict[int, int]:
        """One object per value: equal masks are then compared by identity, which makes a lookup twice as fast."""
        if len(self._mask_objects) >= _MASK_OBJECTS_MAX:
            self._mask_objects.clear()
        return self._mask_objects

    def _unmark(self, keys: Iterable[BlockKey], bit: int) -> None:
        """None of the ``keys`` is the holder's any more."""
        masks, shared, others = self._masks, self._shared_masks(), ~bit
        for key in keys:
            known = masks.get(key)
            if known is None:  # evicted meanwhile
                continue
            mask = known & others
            if mask:
                masks[key] = shared.setdefault(mask, mask)
            else:
                del masks[key]

    def _clear_later(self, bit: int, keys: set[BlockKey], held: _Held | None) -> None:
        if keys:
            self._void.append((bit, keys, held))
            self._void_keys += len(keys)

    def _free(self, bit: int) -> None:
        """The bit of a dropped holder, if nothing of it is left."""
        if not any(other == bit for other, _, _ in self._void):
            self._dropped &= ~bit

    def _gap(self, held: _Held) -> Intake:
        held.synced = held.loading = False
        if held.resync_asked:
            return Intake.IGNORED
        held.resync_asked = True
        return Intake.GAP


def _without(dropped: int, runs: list[tuple[int, int]], blocks: int) -> tuple[list[tuple[int, int]], int]:
    """The same for who is left."""
    left: list[tuple[int, int]] = []
    for start, mask in runs:
        holders = mask & ~dropped
        if not holders:
            return left, start
        left.append((start, holders))
    return left, blocks
