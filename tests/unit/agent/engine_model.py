"""A model of an engine's prefix cache: it stores and evicts copies of blocks, and says so in either encoding."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pinyon.core.block_keys import chain_block_keys, namespace, tokens_to_bytes, variant
from services.agent.cache_events import _MEMBERS

BLOCK_TOKENS = 4
START = partial(namespace, "weights", "layout", "", b"secret")


@dataclass(frozen=True)
class Prompt:
    """A prompt; ``image_at`` is the block from which on it depends on an image."""

    tokens: tuple[int, ...]
    salt: str = ""
    lora: str = ""
    image_at: int = 1 << 30

    def keys(self) -> list[bytes]:
        """Returns the keys of the blocks that have one."""
        root = START(self.salt)
        if self.lora:
            root = variant(root, "lora", f"{self.lora}\0")
        return chain_block_keys(root, tokens_to_bytes(self.tokens), BLOCK_TOKENS)[: self.image_at]

    def names(self, raw: bool) -> list[int | bytes]:
        """Returns the engine's own hashes of the blocks."""
        found: list[int | bytes] = []
        last = b""
        for at in range(len(self.tokens) // BLOCK_TOKENS):
            block = self.tokens[at * BLOCK_TOKENS : (at + 1) * BLOCK_TOKENS]
            last = hashlib.sha256(repr((last, block, self.extra(at), self.lora)).encode()).digest()
            found.append(last if raw else int.from_bytes(last[:8], "big"))
        return found

    def extra(self, at: int) -> list[Any] | None:
        keys: list[Any] = [self.lora] if self.lora else []
        if at == self.image_at:
            keys.append(["image", 2])
        if not at and self.salt:
            keys.append(self.salt)
        return keys or None


@dataclass
class EngineModel:
    """The engine. Its copies are in the order in which they were stored."""

    maps: bool = True
    raw: bool = False
    copies: list[tuple[int | bytes, bytes | None]] = field(default_factory=list)
    """The hash and our key, if there is one, of each copy of a block."""

    def held(self) -> set[bytes]:
        return {key for _, key in self.copies if key is not None}

    def event(self, kind: str, **members: Any) -> Any:
        if self.maps:
            return {"type": kind, **members}
        return [kind, *(members.get(name) for name in _MEMBERS[kind])]

    def store(self, prompt: Prompt, first: int = 0) -> list[Any]:
        """Stores the prompt's blocks from the ``first`` on, or from an earlier one that is missing."""
        names = prompt.names(self.raw)
        keys = [*prompt.keys(), *[None] * len(names)]
        here = {name for name, _ in self.copies}
        first = next((at for at in range(min(first, len(names))) if names[at] not in here), min(first, len(names)))
        if first == len(names):
            return []
        self.copies += list(zip(names[first:], keys[first:], strict=False))
        return [
            self.event(
                "BlockStored",
                block_hashes=names[first:],
                parent_block_hash=names[first - 1] if first else None,
                token_ids=list(prompt.tokens[first * BLOCK_TOKENS : len(names) * BLOCK_TOKENS]),
                block_size=BLOCK_TOKENS,
                lora_id=5 if prompt.lora else None,
                lora_name=prompt.lora or None,
                medium="GPU",
                extra_keys=[prompt.extra(at) for at in range(first, len(names))],
                group_idx=0,
            )
        ]

    def evict(self, at: int) -> list[Any]:
        """Removes one copy."""
        if not self.copies:
            return []
        name, _ = self.copies.pop(at % len(self.copies))
        return [self.event("BlockRemoved", block_hashes=[name], medium="GPU", group_idx=0)]

    def clear(self) -> list[Any]:
        self.copies.clear()
        return [self.event("AllBlocksCleared")]

    def elsewhere(self) -> list[Any]:
        """Returns events about blocks that the engine does not compute with, and of an unknown kind."""
        stored = {"parent_block_hash": None, "token_ids": [1] * BLOCK_TOKENS, "block_size": BLOCK_TOKENS}
        names = [name for name, _ in self.copies[:2]]
        return [
            self.event("BlockStored", block_hashes=[1], medium="CPU", **stored),
            self.event("BlockStored", block_hashes=[2], group_idx=1, **stored),
            self.event("BlockRemoved", block_hashes=names, medium="CPU"),
            self.event("BlockRemoved", block_hashes=names, group_idx=1),
            {"type": "BlockMoved", "block_hashes": names} if self.maps else ["BlockMoved", names],
        ]
