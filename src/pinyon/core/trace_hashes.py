"""Hashes of a prompt and its client that leave the serving process for a trace ("KVCache cache in the wild" §3.1).

All hashes use a salt that only this trace has. So they cannot be compared with block keys, with another trace, or with
a guess. The writer of the file turns the hashes into numbers (``pinyon_lab.traces.recording``).

The paper hashes by SipHash. Here blocks have the chained XXH3 of block keys, which starts from an HMAC under the salt.
These hashes are never published. They only must not collide, for which 128 bits are enough."""

from __future__ import annotations

import hmac

from xxhash import xxh3_128_digest

from pinyon.core.block_keys import KEY_BYTES, chain_block_keys, namespace, pack_keys
from pinyon.core.request import RequestClass

BLOCK_TOKENS = 16
"""The block size of the format ``qwen``, whatever the size of the suite's KV blocks."""


def hashed_blocks(salt: bytes, model: str, asked: RequestClass, tokens_le32: bytes) -> bytes:
    """Returns packed hashes of all blocks, the last perhaps partial; equal hashes mean an equal prefix to share."""
    start = namespace(model, "", asked.tenant, salt, asked.cache_salt)
    keys = chain_block_keys(start, tokens_le32, BLOCK_TOKENS)
    rest = tokens_le32[4 * BLOCK_TOKENS * len(keys) :]
    if rest:
        keys.append(xxh3_128_digest((keys[-1] if keys else start) + rest))
    return pack_keys(keys)


def hashed_name(salt: bytes, *names: str) -> bytes:
    """Returns a hash of a name that consists of these parts; empty if all parts are empty."""
    if not any(names):
        return b""
    data = b"".join(len(raw).to_bytes(4, "little") + raw for raw in (name.encode() for name in names))
    return hmac.digest(salt, data, "sha256")[:KEY_BYTES]
