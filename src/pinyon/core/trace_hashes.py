"""What of a prompt, and of who asked, leaves the process that serves, for a trace ("KVCache cache in the wild" §3.1).

All is hashed with a salt that this one trace has: what leaves cannot be compared with block keys, with another trace,
or with a guess. Who writes the file makes numbers of the hashes (``pinyon_lab.traces.recording``).

The paper hashes by SipHash. Here blocks have the chained XXH3 of block keys, which starts from an HMAC under the salt:
its numbers are never published, so all it must do is not to collide, and 128 bits are enough for that.
"""

from __future__ import annotations

import hmac

from xxhash import xxh3_128_digest

from pinyon.core.block_keys import KEY_BYTES, chain_block_keys, namespace, pack_keys
from pinyon.core.request import RequestClass

BLOCK_TOKENS = 16
"""Of the format ``qwen``, whatever the size of the suite's KV blocks."""


def hashed_blocks(salt: bytes, model: str, asked: RequestClass, tokens_le32: bytes) -> bytes:
    """Packed, of the prompt's blocks, the last one perhaps not full. Equal ones: an equal prefix that may be shared."""
    start = namespace(model, "", asked.tenant, salt, asked.cache_salt)
    keys = chain_block_keys(start, tokens_le32, BLOCK_TOKENS)
    rest = tokens_le32[4 * BLOCK_TOKENS * len(keys) :]
    if rest:
        keys.append(xxh3_128_digest((keys[-1] if keys else start) + rest))
    return pack_keys(keys)


def hashed_name(salt: bytes, *names: str) -> bytes:
    """Of who or what is called so; empty if all of them are."""
    if not any(names):
        return b""
    data = b"".join(len(raw).to_bytes(4, "little") + raw for raw in (name.encode() for name in names))
    return hmac.digest(salt, data, "sha256")[:KEY_BYTES]
