"""The blocks that an engine holds, by our keys, as far as its events tell."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pinyon.core.block_keys import BlockKey, chain_block_keys, variant
from pinyon.paging.key_changes import KeyChanges
from services.agent.cache_events import BlockHash, Stored, read_events

SLICE_BLOCKS = 1024
"""The number of blocks after which others get their turn."""
FULL_ATTENTION = ("full_attention", "mla_attention", "sink_full_attention")
"""The kinds of layers that keep the KV of the whole prompt, as vLLM names them."""
COUNTED = {
    "events": "KV cache events applied",
    "gaps": "Times that batches of events were missing",
    "replays": "Times that batches were asked for again",
    "restarts": "Restarts of the server that were noticed",
    "drops": "Times that all that was known was dropped, as it could be out of date",
    "skipped_blocks": "Stored blocks that got no key",
    "malformed_batches": "Batches that made no sense",
}
"""The counts over all lives of a server, with their meanings."""


@dataclass(eq=False)
class EngineBlocks:
    """The blocks of one life of an engine.

    Batches are numbered from 0 on. ``missing`` says for one that came by subscription which ones to have replayed
    before it. ``take`` applies one, replayed or not. Without those before it, all that was known is dropped.

    The engine may hold several copies of a block, each of which it removes by itself. If it has several groups of
    layers, the first one with full attention counts, as others drop what has left their window."""

    start: Callable[[str], BlockKey]
    """Makes the start of a key chain from the salt of a request without tenant."""
    block_tokens: int
    copies_max: int
    counts: dict[str, int]
    adapters: Mapping[str, str] = field(default_factory=dict)
    """The paths of the adapters that the engine has, by name."""
    changes: KeyChanges = field(default_factory=KeyChanges)
    _keys: dict[BlockHash, BlockKey] = field(default_factory=dict)
    _copies: dict[BlockKey, int] = field(default_factory=dict)
    _total: int = 0
    """The number of copies of all blocks."""
    next: int = 0
    """The number of the next batch."""
    _group: int | None = None
    """The group of layers that counts, once it is known."""
    _last: int = -1
    """The number of the last batch that came by subscription."""

    def __len__(self) -> int:
        return len(self._copies)

    def keys(self) -> list[BlockKey]:
        return list(self._copies)

    def begin(self) -> None:
        """Forgets everything: the next batch is the first of the engine's life."""
        self._empty()
        self.next, self._last, self._group = 0, -1, None

    def missing(self, number: int) -> int | None:
        """Returns the first batch that is missing before this one, which came by subscription; None if none is.

        Such numbers grow, unless another life of the engine has begun."""
        if number <= self._last:
            self.counts["restarts"] += 1
            self.begin()
        self._last = number
        if number <= self.next:
            return None
        self.counts["gaps"] += 1
        return self.next

    def take(self, number: int, batch: Any) -> Generator[None]:
        """Applies a decoded batch unless it is known; the caller lets others have their turn at each yield. If it ends
        there, half a batch is known, so everything is dropped."""
        if number < self.next:
            return
        if number > self.next:
            self._drop()
        self.next = number + 1
        try:
            events = read_events(batch)
        except ValueError:
            self.counts["malformed_batches"] += 1
            self._drop()
            return
        try:
            for event in events:
                self.counts["events"] += 1
                if isinstance(event, Stored):
                    if self._counts(event):
                        yield from self._store(event)
                elif event.hashes is None:
                    self._empty()
                elif event.group == (self._group or 0):
                    self._remove(event.hashes)
                    yield
        except GeneratorExit:
            self._drop()
            raise
        if max(self._total, len(self._keys)) > self.copies_max:  # more than there are: events mean something else
            self._drop()

    def _counts(self, event: Stored) -> bool:
        """Returns whether the event is about the group of layers that counts."""
        if self._group is None and event.attention in FULL_ATTENTION:
            self._group = event.group
            if event.group:  # what is known is of the first group
                self._empty()
        return event.group == (self._group or 0)

    def _drop(self) -> None:
        self.counts["drops"] += 1
        self._empty()

    def _empty(self) -> None:
        self.changes.remove_all(list(self._copies))
        self._copies.clear()
        self._keys.clear()
        self._total = 0

    def _store(self, event: Stored) -> Generator[None]:
        if event.parent is not None:
            key = self._keys.get(event.parent)
        else:
            key = self.start(event.salt)
            if event.lora:
                path = self.adapters.get(event.lora)
                key = None if path is None else variant(key, "lora", f"{event.lora}\0{path}")
        size, hashes = 4 * self.block_tokens, event.hashes[: event.plain]
        if key is None or event.block_tokens != self.block_tokens or len(event.tokens) != size * len(event.hashes):
            hashes = []
        self.counts["skipped_blocks"] += len(event.hashes) - len(hashes)
        for at in range(0, len(hashes), SLICE_BLOCKS):
            part = hashes[at : at + SLICE_BLOCKS]
            tokens = event.tokens[size * at : size * (at + len(part))]
            keys = chain_block_keys(key or b"", tokens, self.block_tokens)
            for name, key in zip(part, keys, strict=True):
                old = self._keys.get(name, key)
                if old != key and (copies := self._copies.pop(old, 0)):  # the name has got another content
                    self._total -= copies
                    self.changes.remove(old)
                self._keys[name] = key
                if key not in self._copies:
                    self.changes.add(key)
                self._copies[key] = self._copies.get(key, 0) + 1
            self._total += len(part)
            yield

    def _remove(self, names: list[BlockHash]) -> None:
        for name in names:
            key = self._keys.get(name, b"")
            if copies := self._copies.get(key):  # else the block was skipped
                self._copies[key] = copies - 1
                self._total -= 1
                if copies == 1:
                    del self._copies[key], self._keys[name]
                    self.changes.remove(key)
