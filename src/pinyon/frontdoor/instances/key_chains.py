"""Block keys of prompts, with a cache for recurring prefixes.

A system prompt or an earlier turn recurs with every request. A run of blocks that was seen before, after the same key,
costs one hash here instead of one per block. The result equals that of :func:`pinyon.core.block_keys.chain_block_keys`,
packed.
"""

from __future__ import annotations

import os
from collections import OrderedDict

from xxhash import xxh3_128_digest

from pinyon.core.block_keys import KEY_BYTES, BlockKey, chain_block_keys

RUN_BLOCKS = 32
"""The number of blocks that are looked up together."""
RUNS_MAX = 8192
"""The default size of the cache, about 6 MiB."""


class KeyChains:
    """The cache of at most ``runs`` runs of block keys; the least recently used is evicted first."""

    def __init__(self, runs: int = RUNS_MAX) -> None:
        self._limit = runs
        self._runs: OrderedDict[bytes, bytes] = OrderedDict()
        # A secret seed: with a known one, a client could make a prompt that is mistaken for another one.
        self._seed = int.from_bytes(os.urandom(8), "little")

    def __len__(self) -> int:
        return len(self._runs)

    def packed(self, start: BlockKey, tokens_le32: bytes, block_tokens: int) -> bytes:
        """Returns the 16-byte keys of all full blocks of ``tokens_le32`` (little-endian u32) in namespace ``start``."""
        step = 4 * block_tokens * RUN_BLOCKS
        runs, seed = self._runs, self._seed
        parts: list[bytes] = []
        key, position = start, 0
        for end in range(step, len(tokens_le32) + 1, step):
            run = tokens_le32[position:end]
            name = xxh3_128_digest(key + run, seed)
            found = runs.get(name)
            if found is None:
                found = b"".join(chain_block_keys(key, run, block_tokens))
                if len(runs) >= self._limit:
                    runs.popitem(last=False)
                runs[name] = found
            else:
                runs.move_to_end(name)
            parts.append(found)
            key, position = found[-KEY_BYTES:], end
        parts += chain_block_keys(key, tokens_le32[position:], block_tokens)
        return b"".join(parts)
