"""API keys: which clients may send requests, for which tenant, and with which defaults for their requests.

Keys are stored as SHA-256 digests and looked up by digest, so the time of a lookup reveals nothing about how much of a
guessed key is right."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256

from pinyon.core.errors import InvalidArgument, Unauthenticated
from pinyon.runtime.api_keys import KEY_CHARS_MAX, PUBLIC, Client, read_api_keys
from pinyon.runtime.logging import get_logger

__all__ = ["PUBLIC", "ApiKeys", "Client", "load_api_keys"]

_log = get_logger("lb.auth")


class ApiKeys:
    """The accepted API keys. ``keys`` maps API key to client; None means that no key is required."""

    def __init__(self, keys: Mapping[str, Client] | None = None) -> None:
        self._clients = None if keys is None else {_digest(key): client for key, client in keys.items()}

    def renew(self, newer: ApiKeys) -> None:
        """Accepts the keys of ``newer`` from now on; requests that were let in before go on."""
        self._clients = newer._clients

    def client(self, authorization: str) -> Client:
        """Returns the client that an ``Authorization`` header's value names. Raises :class:`Unauthenticated`."""
        if self._clients is None:
            return PUBLIC
        scheme, _, key = authorization.partition(" ")
        key = key.strip()
        if scheme.lower() != "bearer" or not key:
            raise Unauthenticated("You didn't provide an API key: send it as 'Authorization: Bearer KEY'.")
        client = self._clients.get(_digest(key)) if len(key) <= KEY_CHARS_MAX else None
        if client is None:
            raise Unauthenticated("Incorrect API key provided.")
        return client


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogatepass")).digest()


def load_api_keys(path: str, *, shared: bool = False) -> ApiKeys:
    """Returns the keys in a file; an empty path means that no key is required. Raises as :func:`read_api_keys` does.

    ``shared``: several processes let in the same clients. Raises :class:`InvalidArgument` then if a key has limits per
    minute."""
    if not path:
        return ApiKeys()
    keys = read_api_keys(path)
    if shared and any(client.rpm or client.tpm for client in keys.values()):
        raise InvalidArgument(
            "the API keys file names limits per minute, which would be counted by each process by itself",
            field="processes",
        )
    if any(client.geographies for client in keys.values()):
        _log.warning("the API keys file names geographies: they bind load balancers that have a --region")
    return ApiKeys(keys)
