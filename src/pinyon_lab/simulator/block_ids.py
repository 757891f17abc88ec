"""Ids of a trace's blocks as block keys, and back."""

from __future__ import annotations

from collections.abc import Iterable

from pinyon.core.block_keys import KEY_BYTES, BlockKey

__all__ = ["ids_of", "key_of"]


def key_of(block: int) -> BlockKey:
    return block.to_bytes(KEY_BYTES, "little", signed=True)


def ids_of(keys: Iterable[BlockKey]) -> list[int]:
    return [int.from_bytes(key, "little", signed=True) for key in keys]
