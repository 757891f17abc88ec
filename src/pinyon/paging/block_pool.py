"""A pool of equal blocks and which key each one holds (Mooncake §3.2.1; vLLM's block pool is the model).

Every block is in exactly one state::

    free ──allocate──▶ used, unkeyed ──publish──▶ used, keyed ◀──acquire/release──▶ cached
     ▲                      │ release                                                  │
     └──────────────────────┴──────────────── evicted by allocate, or removed ─────────┘

A used block has at least one reference; a cached block has none, keeps its key and content, and may be evicted. The
pool knows block numbers and keys, never memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pinyon.eviction.evictor import Evictor
from pinyon.eviction.policy import NO_TRAITS, EvictionPolicy, Refit, Traits, Use, at_once
from pinyon.paging.key_changes import KeyChanges

__all__ = ["BlockPool"]


class BlockPool:
    """Blocks ``0 .. num_blocks - 1``. Not thread-safe: one owner.

    ``now_s`` and ``traits`` only reach the eviction policy; policies that go by order ignore them.
    """

    def __init__(
        self, num_blocks: int, eviction: EvictionPolicy[bytes], refit: Refit = at_once, *, spares: bool = False
    ) -> None:
        """``spares``: what is wanted is spared, up to half of the blocks."""
        if num_blocks <= 0:
            raise ValueError(f"num_blocks must be positive, got {num_blocks}")
        if len(eviction):
            raise ValueError("the eviction policy belongs to another pool")
        self._total = num_blocks
        self.eviction = Evictor(eviction, refit, num_blocks // 2 if spares else 0)
        """To look at."""
        self._free = list(range(num_blocks - 1, -1, -1))
        self._refs = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._traits = [NO_TRAITS] * num_blocks
        self._offsets = [0] * num_blocks
        self._by_key: dict[bytes, int] = {}
        self._changes = KeyChanges()

    # -- reading

    def match_prefix(self, keys: Sequence[bytes]) -> int:
        """How many leading blocks are held. Takes nothing."""
        by_key = self._by_key
        for index, key in enumerate(keys):
            if key not in by_key:
                return index
        return len(keys)

    def need(self, keys: Sequence[bytes], total: int) -> tuple[int, int]:
        """Of ``total`` blocks, of which the first ones are the leading run of ``keys`` that is held: how many that are,
        and by how many fewer blocks can be had afterwards."""
        by_key, refs = self._by_key, self._refs
        held = used = 0
        for key in keys[:total]:
            block = by_key.get(key)
            if block is None:
                break
            held += 1
            used += refs[block] > 0  # one that nobody uses is not to be evicted then
        return held, total - used

    def acquire(
        self,
        keys: Sequence[bytes],
        *,
        allow_gaps: bool = False,
        now_s: float = 0.0,
        use: Use | None = None,
    ) -> list[tuple[int, int]]:
        """``(index in keys, block)`` of the leading run that is held, with one reference each.

        With ``allow_gaps``, of every key that is held. ``use``: of the request that reads them; None: no request does.
        """
        by_key, refs = self._by_key, self._refs
        found: list[tuple[int, int]] = []
        revived: list[bytes] = []
        for index, key in enumerate(keys):
            block = by_key.get(key)
            if block is None:
                if allow_gaps:
                    continue
                break
            if not refs[block]:
                revived.append(key)
            refs[block] += 1
            found.append((index, block))
        if revived:
            self.eviction.pinned(revived, now_s)
        if use is not None and found:
            first = use.first
            whole = len(found) == len(keys)
            used = keys if whole else [keys[index] for index, _ in found]
            offsets = range(first, first + len(keys)) if whole else [first + index for index, _ in found]
            self.eviction.used(used, now_s, use.traits, offsets)
        return found

    def want(self, keys: Sequence[bytes]) -> int:
        """A request that waits will use the leading run of these that is held: other blocks are evicted before it.

        Returns how many keys that are, to be given back to :meth:`unwant`. See :meth:`Evictor.want`.
        """
        return self.eviction.want(keys[: self.match_prefix(keys)])

    def unwant(self, keys: Sequence[bytes]) -> None:
        """The request has got them, or waits no more."""
        self.eviction.unwant(keys)

    # -- writing

    def allocate(self, count: int, *, now_s: float = 0.0) -> list[int] | None:
        """``count`` blocks without a key, one reference each. Evicts cached blocks as needed.

        ``None`` when free and cached blocks do not suffice; nothing has changed then.
        """
        if count < 0:
            raise ValueError(f"count must not be negative, got {count}")
        if count > len(self._free) + len(self.eviction):
            return None
        missing = count - len(self._free)
        if missing > 0:
            self.eviction.learn(now_s)
            victims = self.eviction.victims(missing, now_s)
            if len(victims) != missing:
                raise RuntimeError("the eviction policy lost a key")
            for key in victims:
                self._free.append(self._forget(key))
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._refs[block] = 1
        return blocks

    def publish(
        self, block: int, key: bytes, *, traits: Traits = NO_TRAITS, offset: int = 0, now_s: float = 0.0
    ) -> int:
        """The block's content is complete and never changes again: ``key`` is readable from now on.

        If another block holds the key, that one keeps it and this one stays unkeyed. Returns the block that holds it.
        Raises ``ValueError`` if the block is not in use or holds another key.
        """
        if not self._refs[block]:
            raise ValueError(f"block {block} is not in use")
        holder = self._by_key.setdefault(key, block)
        if holder != block:
            return holder
        present = self._keys[block]
        if present is None:
            self._keys[block] = key
            self._traits[block] = traits
            self._offsets[block] = offset
            self.eviction.stored((key,), now_s, traits, (offset,))
            self.eviction.pinned((key,), now_s)
            self._changes.add(key)
        elif present != key:
            del self._by_key[key]
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
        refs, present, by_key = self._refs, self._keys, self._by_key
        fresh: list[bytes] = []
        offsets: list[int] = []
        held: list[int] = []
        try:
            for offset, (block, key) in enumerate(zip(blocks, keys, strict=True), first):
                if not refs[block] or present[block] is not None or key in by_key:
                    if self.publish(block, key, traits=traits, offset=offset, now_s=now_s) != block:
                        held.append(offset - first)
                    continue
                by_key[key] = block
                present[block] = key
                self._traits[block] = traits
                self._offsets[block] = offset
                fresh.append(key)
                offsets.append(offset)
        finally:
            self.eviction.stored(fresh, now_s, traits, offsets)
            self.eviction.pinned(fresh, now_s)
            self._changes.add_all(fresh)
        return held

    def release(self, blocks: Iterable[int], *, now_s: float = 0.0) -> None:
        """One reference less on each. At none, a keyed block is cached (evictable) and an unkeyed one is free.

        Give the blocks in prompt order: the last ones will be evicted first, because a block without those before it
        is of no use. Raises ``ValueError`` for a block without references (nothing after it is released).
        """
        refs, keys = self._refs, self._keys
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
            self.eviction.unpinned(cached, now_s)

    def remove(self, key: bytes, *, now_s: float = 0.0) -> bool:
        """Forget the key. Its block is free as soon as nobody uses it. Whether it was held."""
        if key not in self._by_key:
            return False
        self.eviction.dropped((key,), now_s)
        block = self._forget(key)
        if not self._refs[block]:
            self._free.append(block)
        return True

    def _forget(self, key: bytes) -> int:
        """Its block, which has no key now."""
        block = self._by_key.pop(key)
        self._keys[block] = None
        self._traits[block] = NO_TRAITS
        self._changes.remove(key)
        return block

    def switch(self, eviction: EvictionPolicy[bytes], now_s: float) -> None:
        """From now on this one chooses. See :meth:`Evictor.switch`."""
        in_use = [key for key, block in self._by_key.items() if self._refs[block]]
        self.eviction.switch(eviction, in_use, self._known_of, now_s)

    def _known_of(self, key: bytes) -> tuple[Traits, int]:
        block = self._by_key[key]
        return self._traits[block], self._offsets[block]

    # -- telling others

    def drain_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Net ``(stored, removed)`` keys since the last call, see :class:`KeyChanges`."""
        return self._changes.drain()

    def keys(self) -> list[bytes]:
        """All keys held."""
        return list(self._by_key)

    def __contains__(self, key: object) -> bool:
        return key in self._by_key

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
        return len(self.eviction)

    @property
    def used(self) -> int:
        """Blocks with references."""
        return self._total - len(self._free) - len(self.eviction)

    def check_integrity(self) -> None:
        """Raises ``RuntimeError`` if the books do not balance. O(blocks): for idle moments and tests."""
        free = set(self._free)
        faults = [
            (len(free) != len(self._free), "a block is free twice"),
            (any(self._refs[block] or self._keys[block] is not None for block in free), "a free block is in use"),
            (any(refs < 0 for refs in self._refs), "a negative reference count"),
            (
                any(self._keys[block] != key for key, block in self._by_key.items())
                or len(self._by_key) != sum(key is not None for key in self._keys),
                "keys and blocks disagree",
            ),
            (
                any(
                    (self._keys[block] in self.eviction) != (not self._refs[block] and self._keys[block] is not None)
                    for block in range(self._total)
                ),
                "evictable is not what is cached",
            ),
            (
                len(free) + len(self.eviction) + sum(refs > 0 for refs in self._refs) != self._total,
                "free + cached + used is not the total",
            ),
            (
                any(
                    traits is not NO_TRAITS and key is None
                    for key, traits in zip(self._keys, self._traits, strict=True)
                ),
                "traits of a block without a key",
            ),
        ]
        broken = [text for wrong, text in faults if wrong]
        if broken:
            raise RuntimeError(f"block pool: {'; '.join(broken)}")
