"""Block keys: 128-bit chained XXH3 over token blocks (Mooncake §3.2.1).

``key[i] = XXH3_128(key[i-1] + tokens of block i as little-endian u32)`` with ``(i + 1) % 256`` for its last byte. The
chain starts from the namespace, which is the digest of (model fingerprint, KV layout, tenant) and ends in 0. Equal keys
mean equal prefixes inside one namespace, and another tenant's keys never match.

So a key tells its block's place in the prompt: processes that store or evict blocks, and know no prompts, can report
the keys at regular places (:mod:`pinyon.core.key_sample`). The other 120 bits are enough: of 2^40 keys, two are equal
with a chance of 2^-41.

With a cluster secret, the start is an HMAC under it. Without the secret it is impossible to tell from keys to which
prompts they belong, or to make keys that match (docs/use/security.md says what that is worth).

Keys travel packed: ``n`` keys are ``16 * n`` bytes, in block order."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from itertools import chain
from struct import Struct
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from mypy_extensions import i64
from xxhash import xxh3_128_digest

KEY_BYTES: Final = 16
_MANY = Struct(f"{KEY_BYTES}s" * 64)  # unpacks four times as fast as one by one

_PLACES = tuple(bytes((place,)) for place in range(256))

BlockKey = bytes
"""A key of 16 raw bytes."""


def namespace(
    model_fingerprint: str, layout_id: str, tenant: str, secret: bytes = b"", cache_salt: str = ""
) -> BlockKey:
    """Returns the chain's start for one (model, KV layout, tenant, salt).

    Fields are length-prefixed, so no two namespaces collide. ``secret`` is the cluster's; empty if there is none."""
    parts = ("pinyon-v1", model_fingerprint, layout_id, tenant, *((cache_salt,) if cache_salt else ()))
    data = b"".join(len(raw).to_bytes(4, "little") + raw for raw in (part.encode("utf-8") for part in parts))
    digest = hmac.digest(secret, data, "sha256")[:KEY_BYTES] if secret else xxh3_128_digest(data)
    return digest[:-1] + _PLACES[0]


def variant(root: BlockKey, kind: str, name: str) -> BlockKey:
    """Returns the chain's start for what changes the KV of all tokens, such as an adapter (``lora``) of that name."""
    return xxh3_128_digest(root + f"{kind}:{name}".encode("utf-8", "replace"))[:-1] + _PLACES[0]


def salt_of(tenant: str, cache_salt: str, secret: bytes) -> str:
    """Returns the ``cache_salt`` by which an OpenAI-compatible engine keeps a tenant's requests with this salt apart;
    empty if both are empty. It is no key, and nobody without the secret can make it."""
    return "pinyon:" + namespace("", "salt", tenant, secret, cache_salt).hex() if tenant or cache_salt else ""


def secret_id(secret: bytes) -> str:
    """Returns a name that does not reveal the secret; processes with the same one make the same keys. Empty for
    none."""
    return hmac.digest(secret, b"pinyon-v1 block key secret", "sha256")[:8].hex() if secret else ""


def tokens_to_bytes(tokens: npt.ArrayLike) -> bytes:
    """Returns tokens as little-endian u32, the form that is hashed and that ``*_le32`` proto fields carry."""
    return np.asarray(tokens, dtype="<u4").tobytes()


def chain_block_keys(parent: BlockKey, tokens_le32: bytes, block_tokens: int) -> list[BlockKey]:
    """Returns the keys of all full blocks of ``tokens_le32`` (u32 little-endian); a partial last block has no key.

    ``parent`` is the namespace, or the key of the block before these tokens."""
    if block_tokens <= 0:
        raise ValueError(f"block_tokens must be positive, got {block_tokens}")
    # In compiled code, each use of a module-level name is a dictionary lookup, and a non-native int is a new object.
    digest, places = xxh3_128_digest, _PLACES
    keys: list[BlockKey] = []
    key, place, begin = parent, i64(parent[-1]), i64(0)
    step: i64 = 4 * block_tokens
    end, size = step, i64(len(tokens_le32))
    while end <= size:
        place = (place + 1) & 0xFF
        key = digest(key + tokens_le32[begin:end])[:-1] + places[place]
        keys.append(key)
        begin = end
        end += step
    return keys


def pack_keys(keys: Sequence[BlockKey]) -> bytes:
    return b"".join(keys)


def unpack_keys(packed: bytes) -> list[BlockKey]:
    """Returns the keys in ``packed``. Raises ``ValueError`` if it is not a whole number of keys."""
    if len(packed) % KEY_BYTES:
        raise ValueError(f"packed block keys must be a multiple of {KEY_BYTES} bytes, got {len(packed)}")
    if len(packed) < _MANY.size:
        return [packed[i : i + KEY_BYTES] for i in range(0, len(packed), KEY_BYTES)]
    whole = len(packed) - len(packed) % _MANY.size
    keys: list[BlockKey] = list(chain.from_iterable(_MANY.iter_unpack(memoryview(packed)[:whole])))
    keys += [packed[i : i + KEY_BYTES] for i in range(whole, len(packed), KEY_BYTES)]
    return keys


SHARED_PREFIXES_MAX: Final = 4
"""The maximum number of prefixes in a report."""


class SharedPrefix(NamedTuple):
    """A prefix that several of an instance's decoding requests share, as the instance reports it."""

    key: BlockKey
    """The key of the last block."""
    blocks: int
    """The length of the prefix: FEATHER's depth of the tip."""
    requests: int
    """The number of requests that are decoded, or have KV memory and will be."""
