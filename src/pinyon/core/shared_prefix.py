"""A prefix that several of an instance's decoding requests share, as the instance reports it."""

from __future__ import annotations

from typing import Final, NamedTuple

from pinyon.core.block_keys import BlockKey

SHARED_PREFIXES_MAX: Final = 4
"""The maximum number of prefixes in a report."""


class SharedPrefix(NamedTuple):
    key: BlockKey
    """The key of the last block."""
    blocks: int
    """The length of the prefix: FEATHER's depth of the tip."""
    requests: int
    """The number of requests that are decoded, or have KV memory and will be."""
