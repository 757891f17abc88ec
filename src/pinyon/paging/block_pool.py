"""A pool of equal blocks and which key each one holds (Mooncake §3.2.1; vLLM's block pool is the model).

Every block is in exactly one state::

    free ──allocate──▶ used, unkeyed ──publish──▶ used, keyed ◀──acquire/release──▶ cached
     ▲                      │ release                                                  │
     └──────────────────────┴──────────────── evicted by allocate, or removed ─────────┘

A used block has at least one reference; a cached block has none, keeps its key and content, and may be evicted. With
a :class:`pinyon.paging.SecondTier`, its content is not lost then, and comes back when it is acquired. The pool knows
block numbers and keys, never memory.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from pinyon.eviction.policy import NO_TRAITS, EvictionPolicy, Traits, Use, hand_over, learner
from pinyon.paging.contents import Contents
from pinyon.paging.key_changes import KeyChanges
from pinyon.paging.second_tier import SecondTier

__all__ = ["BlockPool"]


class BlockPool:
    """Blocks ``0 .. num_blocks - 1``. Not thread-safe: one owner.

    ``now_s`` and ``traits`` only reach the eviction policy; policies that go by order ignore them.
    """

    def __init__(self, num_blocks: int, eviction: EvictionPolicy[bytes], below: SecondTier | None = None) -> None:
        if num_blocks <= 0:
            raise ValueError(f"num_blocks must be positive, got {num_blocks}")
        if len(eviction):
            raise ValueError("the eviction policy belongs to another pool")
        self._total = num_blocks
        self._eviction = eviction
        self.below = below
        """To look at."""
        self._policies = (eviction,) if below is None else (eviction, below.eviction)
        self._learners = [learner(each) for each in self._policies]
        self._free = list(range(num_blocks - 1, -1, -1))
        self._refs = [0] * num_blocks
        self._contents = Contents(num_blocks)
        self._changes = KeyChanges()
        self._evicted = 0
        self._hits = 0

    # -- reading

    def match_prefix(self, keys: Sequence[bytes]) -> int:
        """How many leading blocks are held. Takes nothing."""
        by_key, below = self._contents.block_of, self.below or ()
        for index, key in enumerate(keys):
            if key not in by_key and key not in below:
                return index
        return len(keys)

    def need(self, keys: Sequence[bytes], total: int) -> tuple[int, int]:
        """Of ``total`` blocks, of which the first ones are the leading run of ``keys`` that is held: how many that are,
        and by how many fewer blocks can be had afterwards."""
        by_key, refs, below = self._contents.block_of, self._refs, self.below or ()
        held = used = 0
        for key in keys[:total]:
            block = by_key.get(key)
            if block is not None:
                used += refs[block] > 0  # one that nobody uses is not to be evicted then
            elif key not in below:  # one that is needs a block
                break
            held += 1
        return held, total - used

    def acquire(
        self,
        keys: Sequence[bytes],
        *,
        allow_gaps: bool = False,
        promote: bool = True,
        now_s: float = 0.0,
        use: Use | None = None,
    ) -> list[tuple[int, int]]:
        """``(index in keys, block)`` of the leading run that is held, with one reference each.

        With ``allow_gaps``, of every key that is held. What is in the second tier gets a block, unless ``promote`` is
        false or there is no room; else it counts as not held. ``use``: of the request that reads them; None: no request
        does.
        """
        by_key, refs = self._contents.block_of, self._refs
        below: Container[bytes] = self.below if self.below is not None and promote else ()
        found: list[tuple[int, int]] = []
        revived: list[bytes] = []
        promoted: dict[bytes, None] = {}
        later: list[int] = []  # places in ``found`` of what is to be promoted
        room = len(self._free) + len(self._eviction)
        for index, key in enumerate(keys):
            block = by_key.get(key)
            if block is None or not refs[block]:
                full = len(revived) + len(promoted) >= room and key not in promoted
                if full or (block is None and key not in below):
                    if allow_gaps:
                        continue
                    break
                if block is None:
                    promoted[key] = None
                    later.append(len(found))
                    found.append((index, 0))
                    continue
                revived.append(key)
            refs[block] += 1
            found.append((index, block))
        self._eviction.pinned(revived, now_s)
        if self.below is not None:
            self.below.eviction.pinned([*revived, *promoted], now_s)
            self._promote(list(promoted), self.below, now_s)
        for place in later:
            index = found[place][0]
            block = by_key[keys[index]]
            refs[block] += 1
            found[place] = (index, block)
        if use is not None and found:
            self._hits += len(found)
            first = use.first
            whole = len(found) == len(keys)
            used = keys if whole else [keys[index] for index, _ in found]
            offsets = range(first, first + len(keys)) if whole else [first + index for index, _ in found]
            for policy in self._policies:
                policy.used(used, now_s, use.traits, offsets)
        return found

    def _promote(self, keys: list[bytes], below: SecondTier, now_s: float) -> None:
        """They get blocks, which there are; as many others take their places there, as far as that is needed."""
        demoted = self._eviction.victims(len(keys) - len(self._free), now_s) if len(keys) > len(self._free) else []
        for key in reversed(keys):  # as if they were stored in one go: the deepest first
            if self._free:
                block = self._free.pop()
                traits, offset = below.promote(key, block)
            else:
                other = demoted.pop()
                block, others, place = self._contents.take(other)
                (traits, offset), kept = below.exchange(key, block, other, others, place, now_s)
                if not kept:
                    self._lost(other)
            self._contents.put(block, key, traits, offset)
            self._eviction.stored((key,), now_s, traits, (offset,))
        self._eviction.pinned(keys, now_s)

    # -- writing

    def allocate(self, count: int, *, now_s: float = 0.0) -> list[int] | None:
        """``count`` blocks without a key, one reference each. Evicts cached blocks as needed.

        ``None`` when free and cached blocks do not suffice; nothing has changed then.
        """
        if count < 0:
            raise ValueError(f"count must not be negative, got {count}")
        if count > len(self._free) + len(self._eviction):
            return None
        if count > len(self._free):
            for learn in self._learners:
                learn(now_s)
            if self.below is None:
                for key in self._victims(self._eviction, count - len(self._free), now_s):
                    self._lost(key)
                    self._free.append(self._contents.take(key)[0])
            else:
                self._demote(count, self.below, now_s)
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._refs[block] = 1
        return blocks

    @staticmethod
    def _victims(policy: EvictionPolicy[bytes], count: int, now_s: float) -> list[bytes]:
        victims = policy.victims(count, now_s)
        if len(victims) != count:
            raise RuntimeError("the eviction policy lost a key")
        return victims

    def _demote(self, count: int, below: SecondTier, now_s: float) -> None:
        """Make so many blocks free: some contents are lost, if both tiers are full, and others move down."""
        excess = count - len(self._free) - below.free
        for key in self._victims(below.eviction, excess, now_s) if excess > 0 else ():
            self._lost(key)
            if not below.forget(key):
                self._eviction.dropped((key,), now_s)
                self._free.append(self._contents.take(key)[0])
        missing = count - len(self._free)
        for key in self._victims(self._eviction, missing, now_s) if missing > 0 else ():
            block, traits, offset = self._contents.take(key)
            self._free.append(block)
            if not below.demote(block, key, traits, offset, now_s):
                self._lost(key)

    def _lost(self, key: bytes) -> None:
        self._changes.remove(key)
        self._evicted += 1

    def publish(
        self, block: int, key: bytes, *, traits: Traits = NO_TRAITS, offset: int = 0, now_s: float = 0.0
    ) -> int:
        """The block's content is complete and never changes again: ``key`` is readable from now on.

        If another block holds the key, that one keeps it and this one stays unkeyed; the second tier does not keep it.
        Returns the block that holds it.
        Raises ``ValueError`` if the block is not in use or holds another key.
        """
        if not self._refs[block]:
            raise ValueError(f"block {block} is not in use")
        holder = self._contents.block_of.get(key, block)
        if holder != block:
            return holder
        present = self._contents.key_of[block]
        if present is None:
            self._contents.put(block, key, traits, offset)
            known = self.below is not None and self.below.forget(key)
            for policy in self._policies:
                if policy is self._eviction or not known:
                    policy.stored((key,), now_s, traits, (offset,))
                policy.pinned((key,), now_s)
            if not known:
                self._changes.add(key)
        elif present != key:
            raise ValueError(f"block {block} holds another key")
        return block

    def publish_all(
        self,
        blocks: Sequence[int],
        keys: Sequence[bytes],
        *,
        traits: Traits = NO_TRAITS,
        first: int = 0,
        now_s: float = 0.0,
    ) -> list[int]:
        """:meth:`publish` for each, with offsets from ``first`` on; in one go, because a chunk has dozens.

        Returns the indexes of those whose key another block holds.
        """
        refs, present, by_key, below = self._refs, self._contents.key_of, self._contents.block_of, self.below or ()
        fresh: list[bytes] = []
        offsets: list[int] = []
        held: list[int] = []
        try:
            for offset, (block, key) in enumerate(zip(blocks, keys, strict=True), first):
                if not refs[block] or present[block] is not None or key in by_key or key in below:
                    if self.publish(block, key, traits=traits, offset=offset, now_s=now_s) != block:
                        held.append(offset - first)
                    continue
                self._contents.put(block, key, traits, offset)
                fresh.append(key)
                offsets.append(offset)
        finally:
            for policy in self._policies:
                policy.stored(fresh, now_s, traits, offsets)
                policy.pinned(fresh, now_s)
            self._changes.add_all(fresh)
        return held

    def release(self, blocks: Iterable[int], *, now_s: float = 0.0) -> None:
        """One reference less on each. At none, a keyed block is cached (evictable) and an unkeyed one is free.

        Give the blocks in prompt order: the last ones will be evicted first, because a block without those before it
        is of no use. Raises ``ValueError`` for a block without references (nothing after it is released).
        """
        refs, keys = self._refs, self._contents.key_of
        cached: list[bytes] = []
        try:
            for block in reversed(list(blocks)):
                left = refs[block] - 1
                if left < 0:
                    raise ValueError(f"block {block} is not in use")
                refs[block] = left
                if not left:
                    key = keys[block]
                    if key is None:
                        self._free.append(block)
                    else:
                        cached.append(key)
        finally:
            cached.reverse()
            for policy in self._policies:
                policy.unpinned(cached, now_s)

    def remove(self, key: bytes, *, now_s: float = 0.0) -> bool:
        """Forget the key. Its block is free as soon as nobody uses it. Whether it was held."""
        if key not in self:
            return False
        self._changes.remove(key)
        if self.below is not None:
            self.below.eviction.dropped((key,), now_s)
            if self.below.forget(key):
                return True
        self._eviction.dropped((key,), now_s)
        block = self._contents.take(key)[0]
        if not self._refs[block]:
            self._free.append(block)
        return True

    def switch(
        self, eviction: EvictionPolicy[bytes], now_s: float, of_both: EvictionPolicy[bytes] | None = None
    ) -> None:
        """From now on this one chooses, see :func:`pinyon.eviction.policy.hand_over`; and ``of_both`` of the keys of
        both tiers, if there are two."""
        if (of_both is None) != (self.below is None):
            raise ValueError("one eviction policy is needed, and another one if there is a second tier")
        if len(eviction) or (of_both is not None and len(of_both)):
            raise ValueError("the eviction policy belongs to another pool")
        in_use = [key for key, block in self._contents.block_of.items() if self._refs[block]]
        hand_over(self._eviction, eviction, in_use, self._known_of, now_s)
        self._eviction, self._policies = eviction, (eviction,)
        if self.below is not None and of_both is not None:
            hand_over(self.below.eviction, of_both, in_use, self._known_of, now_s)
            self.below.eviction = of_both
            self._policies = (eviction, of_both)
        self._learners = [learner(each) for each in self._policies]

    def _known_of(self, key: bytes) -> tuple[Traits, int]:
        if self.below is not None and key in self.below:
            return self.below.known_of(key)
        return self._contents.known_of(key)

    # -- telling others

    def drain_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Net ``(stored, removed)`` keys since the last call, see :class:`KeyChanges`."""
        return self._changes.drain()

    def keys(self) -> list[bytes]:
        """All keys held."""
        return [*self._contents.block_of, *(self.below.keys() if self.below is not None else ())]

    def __contains__(self, key: object) -> bool:
        return key in self._contents.block_of or (self.below is not None and key in self.below)

    def references(self, block: int) -> int:
        """How many hold this block."""
        return self._refs[block]

    @property
    def total(self) -> int:
        return self._total

    @property
    def free(self) -> int:
        """Blocks without content."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Blocks kept only for reuse."""
        return len(self._eviction)

    @property
    def used(self) -> int:
        """Blocks with references."""
        return self._total - len(self._free) - len(self._eviction)

    @property
    def evicted(self) -> int:
        """Blocks whose content was lost to make room, since the start."""
        return self._evicted

    @property
    def hits(self) -> int:
        """Blocks that requests found, since the start; those that were promoted for them among them."""
        return self._hits

    def check_integrity(self) -> None:
        """Raises ``RuntimeError`` if the books do not balance. O(blocks): for idle moments and tests."""
        free = set(self._free)
        faults = [
            (len(free) != len(self._free), "a block is free twice"),
            (
                any(self._refs[block] or self._contents.key_of[block] is not None for block in free),
                "a free block is in use",
            ),
            (any(refs < 0 for refs in self._refs), "a negative reference count"),
            (
                any(
                    (self._contents.key_of[block] in self._eviction)
                    != (not self._refs[block] and self._contents.key_of[block] is not None)
                    for block in range(self._total)
                ),
                "evictable is not what is cached",
            ),
            (
                len(free) + len(self._eviction) + sum(refs > 0 for refs in self._refs) != self._total,
                "free + cached + used is not the total",
            ),
        ]
        broken = [text for wrong, text in faults if wrong] + self._contents.faults()
        if (below := self.below) is not None:
            broken += below.faults()
            both = len(below.eviction) != len(self._eviction) + len(below)
            broken += ["a key in both tiers"] * any(key in below for key in self._contents.block_of)
            broken += ["evictable in both tiers is not what is cached in both"] * both
        if broken:
            raise RuntimeError(f"block pool: {'; '.join(broken)}")
