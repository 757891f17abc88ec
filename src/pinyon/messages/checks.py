"""Checks of fields that several messages share; each raises :class:`InvalidArgument`."""

from __future__ import annotations

from pinyon.core.address import parse_address
from pinyon.core.block_keys import KEY_BYTES, BlockKey, unpack_keys
from pinyon.core.errors import InvalidArgument

ID_CHARS_MAX = 128
ADDRESS_CHARS_MAX = 300
"""The maximum length of an address; a host name has at most 253 characters."""


def check_text(text: str, field: str, limit: int = ID_CHARS_MAX) -> str:
    """Returns a text of at most ``limit`` characters."""
    if len(text) > limit:
        raise InvalidArgument(f"must have at most {limit} characters, got {len(text)}", field=field)
    return text


def check_id(text: str, field: str) -> str:
    """Returns an id, which must not be empty."""
    if not 0 < len(text) <= ID_CHARS_MAX:
        raise InvalidArgument(f"must have 1 to {ID_CHARS_MAX} characters, got {len(text)}", field=field)
    return text


def check_address(address: str, field: str) -> str:
    """Returns an address ``host:port``."""
    try:
        parse_address(check_text(address, field, ADDRESS_CHARS_MAX))
    except InvalidArgument as error:
        raise InvalidArgument(error.message, field=field) from None
    return address


def check_keys(packed: bytes, field: str) -> bytes:
    """Returns packed keys, still packed, if the last one is complete."""
    if len(packed) % KEY_BYTES:
        raise InvalidArgument(f"must be a multiple of {KEY_BYTES} bytes, got {len(packed)}", field=field)
    return packed


def keys_from_proto(packed: bytes, at_most: int, field: str = "keys") -> list[BlockKey]:
    """Returns 1 to ``at_most`` unpacked keys."""
    keys = unpack_keys(check_keys(packed, field))
    if not 0 < len(keys) <= at_most:
        raise InvalidArgument(f"1 to {at_most} keys are allowed, got {len(keys)}", field=field)
    return keys
