"""A pool of equal KV blocks and the key that each block holds (Mooncake §3.2.1; modelled on vLLM's block pool).

Every block is in exactly one state::

    free ──allocate──▶ used, unkeyed ──publish──▶ used, keyed ◀──acquire/release──▶ cached
     ▲                      │ release                                                  │
     └──────────────────────┴──────────────── evicted by allocate, or removed ─────────┘

A used block has at least one reference. A cached block has none, keeps its key and content, and may be evicted. With a
:class:`pinyon.paging.SecondTier`, evicted content is kept there and comes back when it is acquired. The pool knows
block numbers and keys, never memory."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from pinyon.eviction.evictor import Evictor
from pinyon.eviction.interface import NO_TRAITS, EvictionPolicy, Known, Refit, Traits, Use, at_once
from pinyon.eviction.runs import runs
from pinyon.paging.contents import Contents, Promises
from pinyon.paging.key_changes import KeyChanges
from pinyon.paging.second_tier import SecondTier


class BlockPool:
    """The blocks ``0 .. num_blocks - 1``. Not thread-safe: one owner.

    ``now_s`` and ``traits`` only reach the eviction policy; policies that go by order ignore them. With ``spares``,
    keys that waiting requests want are spared from eviction, up to half of the blocks."""

    def __init__(
        self,
        num_blocks: int,
        eviction: EvictionPolicy[bytes],
        below: SecondTier | None = None,
        refit: Refit = at_once,
        *,
        spares: bool = False,
    ) -> None:
        if num_blocks <= 0:
            raise ValueError(f"num_blocks must be positive, got {num_blocks}")
        if len(eviction):
            raise ValueError("the eviction policy belongs to another pool")
        self.total = num_blocks
        """The number of blocks; callers only read it."""
        self.eviction = Evictor(eviction, refit)
        """The evictor of the keys that are in blocks; callers only read it."""
        self.below = below
        """The second tier, if there is one; callers only read it."""
        self.of_all = self.eviction if below is None else below.eviction
        """The evictor of the keys of both tiers; callers only read it."""
        self._evictors = (self.eviction,) if below is None else (self.eviction, below.eviction)
        for evictor in self._evictors if spares else ():
            evictor.spared_max = num_blocks // 2
        self._free = list(range(num_blocks - 1, -1, -1))
        self._refs = [0] * num_blocks
        self._contents = Contents(num_blocks)
        self._promises = Promises(num_blocks)
        self._changes = KeyChanges()
        self.hits = 0
        """Blocks that requests found since the start, including those promoted for them."""

    # -- reading

    def match_prefix(self, keys: Sequence[bytes]) -> int:
        """Returns how many leading blocks are held. Takes no reference."""
        by_key, below = self._contents.block_of, self.below or ()
        index = 0
        for key in keys:
            if key not in by_key and key not in below:
                break
            index += 1
        return index

    def need(self, keys: Sequence[bytes], total: int, *, promised: bool = False) -> tuple[int, int]:
        """Returns how many of ``total`` blocks are held, and how many available blocks reserving them would take.

        The held blocks are the leading run of ``keys`` that is held. With ``promised``, the promised blocks that follow
        this run need no new blocks either."""
        by_key, refs, below = self._contents.block_of, self._refs, self.below or ()
        held = used = 0
        for key in keys[:total]:
            block = by_key.get(key)
            if block is not None:
                used += refs[block] > 0  # a cached block is evictable now and no longer afterwards
            elif key not in below:  # a key in the second tier needs a block
                break
            held += 1
        if promised and len(self._promises):
            used += len(self._promises.run(keys[held:total]))
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
        """Returns ``(index in keys, block)`` of the leading run that is held, with one reference each.

        With ``allow_gaps``, returns every key that is held. A key in the second tier gets a block; if ``promote`` is
        false or there is no room, it counts as not held. The blocks are read by the request that ``use`` describes;
        None: by no request."""
        if self.below is None and not allow_gaps:
            return list(enumerate(self.acquire_run(keys, now_s, use)))
        by_key, refs = self._contents.block_of, self._refs
        below: Container[bytes] = self.below if self.below is not None and promote else ()
        found: list[tuple[int, int]] = []
        revived: list[bytes] = []
        promoted: dict[bytes, int] = {}
        later: list[int] = []  # places in ``found`` of keys to be promoted
        room = len(self._free) + len(self.eviction)
        for index, key in enumerate(keys):
            block = by_key.get(key)
            if block is None or not refs[block]:
                full = len(revived) + len(promoted) >= room and key not in promoted
                if full or (block is None and key not in below):
                    if allow_gaps:
                        continue
                    break
                if block is None:
                    promoted[key] = index
                    later.append(len(found))
                    found.append((index, 0))
                    continue
                revived.append(key)
            refs[block] += 1
            found.append((index, block))
        self.eviction.pinned(revived, now_s)
        if self.below is not None:
            self.below.eviction.pinned([*revived, *promoted], now_s)
            self._promote(keys, list(promoted.values()), self.below, now_s, use)
        for place in later:
            index = found[place][0]
            block = by_key[keys[index]]
            refs[block] += 1
            found[place] = (index, block)
        if use is not None and found:
            self.hits += len(found)
            if use.traits is not None:
                self._contents.used((block for _, block in found), use.traits)
            indexes = range(len(keys)) if len(found) == len(keys) else [index for index, _ in found]
            for evictor in self._evictors:
                told: Sequence[int] = indexes
                if promoted and evictor is self.eviction:  # promoted keys have just been stored there for this use
                    told = [index for index in indexes if keys[index] not in promoted]
                used = keys if told == range(len(keys)) else [keys[index] for index in told]
                if used:
                    evictor.used(used, now_s, use.traits, [use.first + index for index in told])
        return found

    def acquire_run(self, keys: Sequence[bytes], now_s: float, use: Use | None) -> list[int]:
        """Returns the blocks of the leading run that is held; see :meth:`acquire`."""
        if self.below is not None:
            return [block for _, block in self.acquire(keys, now_s=now_s, use=use)]
        by_key, refs = self._contents.block_of, self._refs
        blocks: list[int] = []
        revived: list[bytes] = []
        for key in keys:
            block = by_key.get(key)
            if block is None:
                break
            if not refs[block]:
                revived.append(key)
            refs[block] += 1
            blocks.append(block)
        self.eviction.pinned(revived, now_s)
        if use is not None and blocks:
            count = len(blocks)
            self.hits += count
            if use.traits is not None:
                self._contents.used(blocks, use.traits)
            used = keys if count == len(keys) else keys[:count]
            self.eviction.used(used, now_s, use.traits, range(use.first, use.first + count))
        return blocks

    def _promote(
        self, keys: Sequence[bytes], places: Sequence[int], below: SecondTier, now_s: float, use: Use | None
    ) -> None:
        """Gives blocks to the keys at these places of a prompt; if too few are free, other keys move to the second
        tier."""
        excess = len(places) - len(self._free)
        demoted = self.eviction.victims(excess, now_s) if excess > 0 else []
        alike: list[tuple[Traits, list[int]]] = []  # neighbouring places, the deepest first
        for place in reversed(places):
            key = keys[place]
            if self._free:
                block = self._free.pop()
                known = below.promote(key, block)
            else:
                other = demoted.pop()
                block, others = self._contents.take(other)
                known, kept = below.exchange(key, block, other, others, now_s)
                if not kept:
                    self._changes.remove(other)
            traits = known.traits if use is None or use.traits is None else use.traits
            self._contents.put(block, key, traits, known.place, known.after)
            if not alike or alike[-1][0] != traits or alike[-1][1][-1] != place + 1:
                alike.append((traits, []))
            alike[-1][1].append(place)
        for traits, run in alike:
            start, end = run[-1], run[0] + 1
            offsets = [self._contents.known_of(key).place for key in keys[start:end]]
            self.eviction.stored(keys[start:end], now_s, traits, offsets, keys[start - 1] if start else None)
        self.eviction.pinned([keys[place] for place in places], now_s)

    def want(self, keys: Sequence[bytes]) -> int:
        """Keeps the held leading run of ``keys`` for a waiting request: other keys of both tiers are evicted first.

        Returns the length of the run, which is to be given back to :meth:`unwant`. See :meth:`Evictor.want`."""
        keys = keys[: self.match_prefix(keys)]
        (count,) = {evictor.want(keys) for evictor in self._evictors}
        return count

    def unwant(self, keys: Sequence[bytes]) -> None:
        """Ends the sparing of these keys: the request has acquired them or no longer waits."""
        for evictor in self._evictors:
            evictor.unwant(keys)

    # -- writing

    def promise(self, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Records that the holders of these blocks, which have no content yet, will publish them under these keys.

        A holder may also leave the publishing to others that obtained the blocks by :meth:`share`."""
        self._promises.add(keys, blocks)

    def share(self, keys: Sequence[bytes]) -> list[int]:
        """Returns the blocks promised for the leading ``keys``, referenced once more; one holder computes them."""
        blocks = self._promises.run(keys)
        for block in blocks:
            self._refs[block] += 1
        return blocks

    def allocate(self, count: int, *, now_s: float = 0.0) -> list[int] | None:
        """Returns ``count`` blocks without a key, with one reference each. Evicts cached blocks as needed.

        Returns None, and changes nothing, when free and cached blocks do not suffice."""
        if count < 0:
            raise ValueError(f"count must not be negative, got {count}")
        if count > len(self._free) + len(self.eviction):
            return None
        if count > len(self._free):
            if self.below is None:
                gone = self._victims(self.eviction, count - len(self._free), now_s)
                self._changes.remove_all(gone)
                self._free += self._contents.take_all(gone)
            else:
                self._demote(count, self.below, now_s)
        free, refs = self._free, self._refs
        blocks = [free.pop() for _ in range(count)]
        for block in blocks:
            refs[block] = 1
        return blocks

    @staticmethod
    def _victims(evictor: Evictor[bytes], count: int, now_s: float) -> list[bytes]:
        evictor.learn(now_s)
        victims = evictor.victims(count, now_s)
        if len(victims) != count:
            raise RuntimeError("the eviction policy lost a key")
        return victims

    def _demote(self, count: int, below: SecondTier, now_s: float) -> None:
        """Makes ``count`` blocks free: moves contents to the second tier, and drops some if both tiers are full."""
        excess = count - len(self._free) - below.free
        for key in self._victims(below.eviction, excess, now_s) if excess > 0 else ():
            self._changes.remove(key)
            if not below.forget(key):
                self.eviction.dropped((key,), now_s)
                self._free.append(self._contents.take(key)[0])
        missing = count - len(self._free)
        for key in self._victims(self.eviction, missing, now_s) if missing > 0 else ():
            block, known = self._contents.take(key)
            self._free.append(block)
            if not below.demote(block, key, known, now_s):
                self._changes.remove(key)

    def publish_all(
        self,
        blocks: Sequence[int],
        keys: Sequence[bytes],
        *,
        traits: Traits = NO_TRAITS,
        first: int = 0,
        now_s: float = 0.0,
        after: bytes | None = None,
    ) -> list[int]:
        """Publishes blocks whose content is complete and never changes again: their keys are readable from now on.

        The blocks follow each other in a prompt, from the place ``first`` on; ``after`` is the key before them, if
        there is one. If another block holds a key already, that block keeps it and the new one stays unkeyed. A key
        that is published leaves the second tier. Returns the indexes of the keys that other blocks hold. Raises
        ``ValueError`` if a block is not in use or holds another key; nothing after it is published."""
        if self._are_new(blocks, keys):
            self._contents.put_all(blocks, keys, traits, first, after)
            self._promises.end_all(blocks)
            self.eviction.stored_pinned(keys, now_s, traits, range(first, first + len(keys)), after)
            self._changes.add_all(keys)
            return []
        refs, present, by_key = self._refs, self._contents.key_of, self._contents.block_of
        put: list[int] = []
        came_up: list[int] = []
        held: list[int] = []
        try:
            for index, (block, key) in enumerate(zip(blocks, keys, strict=True)):
                if not refs[block]:
                    raise ValueError(f"block {block} is not in use")
                if by_key.get(key, block) != block:
                    held.append(index)
                    continue
                if present[block] is None:
                    self._contents.put(block, key, traits, first + index, keys[index - 1] if index else after)
                    self._promises.end(block)
                    put.append(index)
                    if self.below is not None and self.below.forget(key):
                        came_up.append(index)
                elif present[block] != key:
                    raise ValueError(f"block {block} holds another key")
        finally:
            new = set(put)
            for evictor in self._evictors:
                for start, end, told in runs(range(len(keys)), new):
                    if told:
                        before = keys[start - 1] if start else after
                        evictor.stored(keys[start:end], now_s, traits, range(first + start, first + end), before)
                evictor.pinned([keys[index] for index in put], now_s)
                new.difference_update(came_up)  # the evictor of both tiers knows them already
            self._changes.add_all([keys[index] for index in put if index in new])
        return held

    def _are_new(self, blocks: Sequence[int], keys: Sequence[bytes]) -> bool:
        """Returns whether there is one tier, no key is held, and all blocks are in use and unkeyed: the usual case."""
        if self.below is not None or not keys or not self._contents.block_of.keys().isdisjoint(keys):
            return False
        refs, present = self._refs, self._contents.key_of
        for block in blocks:
            if not refs[block] or present[block] is not None:
                return False
        return len(set(keys)) == len(keys) == len(blocks) == len(set(blocks))

    def release(self, blocks: Iterable[int], *, now_s: float = 0.0) -> None:
        """Drops one reference of each block. At none, a keyed block is cached (evictable) and an unkeyed one is free.

        Give the blocks in prompt order: the last ones will be evicted first, because a block without those before it is
        useless. Raises ``ValueError`` for a block without references; the blocks before it keep theirs."""
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
                        self._promises.end(block)
                        self._free.append(block)
                    else:
                        cached.append(key)
        finally:
            cached.reverse()
            for evictor in self._evictors:
                evictor.unpinned(cached, now_s)

    def remove(self, key: bytes, *, now_s: float = 0.0) -> bool:
        """Forgets the key and returns whether it was held. Its block is free as soon as nobody uses it."""
        if key not in self:
            return False
        self._changes.remove(key)
        if self.below is not None:
            self.below.eviction.dropped((key,), now_s)
            if self.below.forget(key):
                return True
        self.eviction.dropped((key,), now_s)
        block = self._contents.take(key)[0]
        if not self._refs[block]:
            self._free.append(block)
        return True

    def switch(
        self, eviction: EvictionPolicy[bytes], now_s: float, of_both: EvictionPolicy[bytes] | None = None
    ) -> None:
        """Replaces the eviction policy, see :meth:`Evictor.switch`. ``of_both`` replaces that of both tiers."""
        if (of_both is None) != (self.below is None):
            raise ValueError("one eviction policy is needed, and another one if there is a second tier")
        policies = (eviction,) if of_both is None else (eviction, of_both)
        if any(map(len, policies)):
            raise ValueError("the eviction policy belongs to another pool")
        in_use = [key for key, block in self._contents.block_of.items() if self._refs[block]]
        for evictor, policy in zip(self._evictors, policies, strict=True):
            evictor.switch(policy, in_use, self._known_of, now_s)

    def _known_of(self, key: bytes) -> Known:
        tier = self.below if self.below is not None and key in self.below else self._contents
        return tier.known_of(key)

    # -- reporting

    def drain_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Returns the net ``(stored, removed)`` keys since the last call, see :class:`KeyChanges`."""
        return self._changes.drain()

    def keys(self) -> list[bytes]:
        """Returns all keys held, in both tiers."""
        return [*self._contents.block_of, *(self.below.keys() if self.below is not None else ())]

    def __contains__(self, key: object) -> bool:
        return key in self._contents.block_of or (self.below is not None and key in self.below)

    def references(self, block: int) -> int:
        """Returns the number of references to this block."""
        return self._refs[block]

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
        return self.total - len(self._free) - len(self.eviction)

    @property
    def evicted(self) -> int:
        """Blocks whose content was lost to make room, since the start."""
        return self.of_all.evicted
