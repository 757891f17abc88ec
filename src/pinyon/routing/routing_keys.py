"""Routing keys: what prompts have in common, whichever region computes them (SkyWalker §3.2).

Block keys (:mod:`pinyon.core.block_keys`) depend on weights and KV layout, which two regions need not share. Routing
keys depend on the model's name, the tenant and the cluster's secret, so a load balancer has one kind of key for its own
instances and for other regions. Keys choose where a request goes, name no KV and never leave the process: two prompts
taken for one cost a prefill, and nothing else.

``key[i] = XXH3_64(key[i-1] + chunk i)``, and the chain starts from :func:`routing_root`. Equal keys mean equal
prefixes. A chunk is of tokens where there is a tokenizer, of bytes for servers that have their own; a last partial
chunk has none. Keys are packed: ``n`` of them are ``8 * n`` bytes.

Where there is one region, a prompt's block keys do as well (:func:`keys_of_blocks`): they are made anyway.
"""

from __future__ import annotations

import hmac
from typing import Final

import numpy as np
from mypy_extensions import i64
from xxhash import xxh3_64_digest

KEY_BYTES: Final = 8
CHUNK_TOKENS: Final = 64
CHUNK_BYTES: Final = 256
"""About as many tokens' worth of English."""
KEYS_MAX: Final = 2048
"""Of one prompt; what comes after them does not matter to where it goes."""


def routing_root(model: str, tenant: str, secret: bytes = b"", cache_salt: str = "") -> bytes:
    """Where the keys of a tenant's prompts for a model start. Fields are length-prefixed: no two of these collide.

    ``secret`` is the cluster's: without it nobody can make prompts that meet another's in a trie.
    """
    parts = ("pinyon-route-v1", model, tenant, cache_salt)
    data = b"".join([len(raw).to_bytes(4, "little") + raw for raw in [part.encode("utf-8") for part in parts]])
    return hmac.digest(secret, data, "sha256")[:KEY_BYTES] if secret else xxh3_64_digest(data)


def token_keys(root: bytes, tokens_le32: bytes, chunk_tokens: int = CHUNK_TOKENS) -> bytes:
    """Of tokens as little-endian u32. Raises ``ValueError`` if ``chunk_tokens`` is not positive."""
    return byte_keys(root, tokens_le32, 4 * chunk_tokens)


def byte_keys(root: bytes, text: bytes, chunk_bytes: int = CHUNK_BYTES) -> bytes:
    """Of the full chunks of ``text``. Raises ``ValueError`` if ``chunk_bytes`` is not positive."""
    if chunk_bytes <= 0:
        raise ValueError(f"chunks must have a size, got {chunk_bytes}")
    keys: list[bytes] = []
    # Compiled, names of the module are looked up in a dictionary each time, and ints that are not native made anew.
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
    """Of packed block keys (:mod:`pinyon.core.block_keys`): a block is a chunk, and half of its key is the chunk's."""
    return np.frombuffer(packed_keys, "<u8")[: 2 * KEYS_MAX : 2].tobytes()
