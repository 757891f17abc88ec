"""Routing keys: they identify the prefixes that prompts have in common, in any region (SkyWalker §3.2).

Block keys (:mod:`pinyon.core.block_keys`) depend on weights and KV layout, which two regions need not share. Routing
keys depend on the model's name, the tenant and the cluster's secret, so a load balancer has one kind of key for its own
instances and for other regions. Keys choose where a request goes, name no KV and never leave the process. If two
prompts collide, that costs one prefill, and nothing else.

``key[i] = XXH3_64(key[i-1] + chunk i)``, and the chain starts from :func:`routing_root`. Equal keys mean equal
prefixes. A chunk consists of tokens where there is a tokenizer, and of bytes for servers that have their own; a last
partial chunk has no key. Keys are packed: ``n`` of them are ``8 * n`` bytes.

With a single region, a prompt's block keys serve as well (:func:`keys_of_blocks`), as they are computed anyway."""

from __future__ import annotations

import hmac
from typing import Final

import numpy as np
from mypy_extensions import i64
from xxhash import xxh3_64_digest

KEY_BYTES: Final = 8
CHUNK_TOKENS: Final = 64
CHUNK_BYTES: Final = 256
"""Roughly :data:`CHUNK_TOKENS` tokens of English text."""
KEYS_MAX: Final = 2048
"""Keys of one prompt; the rest of a prompt does not affect its route."""


def routing_root(model: str, tenant: str, secret: bytes = b"", cache_salt: str = "") -> bytes:
    """Returns the start of the key chain for a tenant's prompts for a model.

    Fields are length-prefixed, so no two combinations collide. ``secret`` is the cluster's: without it, nobody can make
    prompts that collide with another's in a trie."""
    parts = ("pinyon-route-v1", model, tenant, cache_salt)
    data = b"".join([len(raw).to_bytes(4, "little") + raw for raw in [part.encode("utf-8") for part in parts]])
    return hmac.digest(secret, data, "sha256")[:KEY_BYTES] if secret else xxh3_64_digest(data)


def token_keys(root: bytes, tokens_le32: bytes, chunk_tokens: int = CHUNK_TOKENS) -> bytes:
    """Returns the keys of little-endian u32 tokens. Raises ``ValueError`` if ``chunk_tokens`` is not positive."""
    return byte_keys(root, tokens_le32, 4 * chunk_tokens)


def byte_keys(root: bytes, text: bytes, chunk_bytes: int = CHUNK_BYTES) -> bytes:
    """Returns the keys of the full chunks of ``text``. Raises ``ValueError`` if ``chunk_bytes`` is not positive."""
    if chunk_bytes <= 0:
        raise ValueError(f"chunks must have a size, got {chunk_bytes}")
    keys: list[bytes] = []
    # Compiled code looks up module names in a dictionary each time, and allocates every int that is not native.
    key, digest = root, xxh3_64_digest
    step, begin = i64(chunk_bytes), i64(0)
    end, size = step, step * min(len(text) // chunk_bytes, KEYS_MAX)
    while end <= size:
        key = digest(key + text[begin:end])
        keys.append(key)
        begin = end
        end += step
    return b"".join(keys)


def keys_of_blocks(packed_keys: bytes) -> bytes:
    """Returns the keys of packed block keys (:mod:`pinyon.core.block_keys`): half of each block's key."""
    return np.frombuffer(packed_keys, "<u8")[: 2 * KEYS_MAX : 2].tobytes()
