"""API keys: who may ask, and for which tenant.

Keys are kept as SHA-256 digests and looked up by digest: how long a lookup takes tells nothing about how much of a
guessed key is right.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

from pinyon.core.errors import InvalidArgument, Unauthenticated

__all__ = ["PUBLIC_TENANT", "ApiKeys", "load_api_keys"]

PUBLIC_TENANT = "public"

KEY_CHARS_MAX = 512
TENANT_CHARS_MAX = 128
KEYS_MAX = 100_000
FILE_BYTES_MAX = 32 << 20


class ApiKeys:
    """``keys`` maps API key to tenant; None means that no key is asked for."""

    def __init__(self, keys: Mapping[str, str] | None = None) -> None:
        self._tenants = None if keys is None else {_digest(key): tenant for key, tenant in keys.items()}

    @property
    def required(self) -> bool:
        return self._tenants is not None

    def tenant(self, authorization: str) -> str:
        """The tenant named by an ``Authorization`` header's value. Raises :class:`Unauthenticated`."""
        if self._tenants is None:
            return PUBLIC_TENANT
        scheme, _, key = authorization.partition(" ")
        key = key.strip()
        if scheme.lower() != "bearer" or not key:
            raise Unauthenticated("You didn't provide an API key: send it as 'Authorization: Bearer KEY'.")
        tenant = self._tenants.get(_digest(key)) if len(key) <= KEY_CHARS_MAX else None
        if tenant is None:
            raise Unauthenticated("Incorrect API key provided.")
        return tenant


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogatepass")).digest()


def load_api_keys(path: str) -> ApiKeys:
    """Keys from a file: a JSON object ``{key: tenant}``, or lines ``key tenant`` (``#`` begins a comment line).

    An empty path means that no key is asked for. Raises :class:`InvalidArgument` if the file is not as above; the
    message never holds a key.
    """
    if not path:
        return ApiKeys()
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise InvalidArgument(f"cannot read the API keys file: {error.strerror}", field="api_keys_file") from None
    if len(raw) > FILE_BYTES_MAX:
        raise _bad(f"is larger than {FILE_BYTES_MAX} bytes")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise _bad("is not UTF-8") from None
    pairs = _from_json(text) if text.lstrip().startswith("{") else _from_lines(text)
    if not pairs:
        raise _bad("holds no key")
    if len(pairs) > KEYS_MAX:
        raise _bad(f"holds more than {KEYS_MAX} keys")
    keys: dict[str, str] = {}
    for number, (key, tenant) in enumerate(pairs, 1):
        if not isinstance(tenant, str) or not 0 < len(tenant) <= TENANT_CHARS_MAX or not tenant.isprintable():
            raise _bad(f"entry {number}: the tenant must be 1 to {TENANT_CHARS_MAX} printable characters")
        if not 0 < len(key) <= KEY_CHARS_MAX or not key.isprintable() or " " in key:
            raise _bad(f"entry {number}: the key must be 1 to {KEY_CHARS_MAX} printable characters without spaces")
        if keys.setdefault(key, tenant) != tenant:
            raise _bad(f"entry {number}: the key belongs to another tenant already")
    return ApiKeys(keys)


def _from_json(text: str) -> list[tuple[str, object]]:
    try:
        pairs: object = json.loads(text, object_pairs_hook=lambda found: found)
    except (ValueError, RecursionError):
        raise _bad("begins like JSON but is not valid JSON") from None
    assert isinstance(pairs, list)
    return pairs


def _from_lines(text: str) -> list[tuple[str, object]]:
    pairs: list[tuple[str, object]] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2:
            raise _bad(f"line {number} is not 'KEY TENANT'")
        pairs.append((words[0], words[1]))
    return pairs


def _bad(what: str) -> InvalidArgument:
    return InvalidArgument(f"the API keys file {what}", field="api_keys_file")
