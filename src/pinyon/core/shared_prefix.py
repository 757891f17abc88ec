"""A prefix that several of the requests share that an instance decodes, as it reports it."""

from __future__ import annotations

from typing import Final, NamedTuple

from pinyon.core.block_keys import BlockKey

SHARED_PREFIXES_MAX: Final = 4
"""Of a report."""


class SharedPrefix(NamedTuple):
    key: BlockKey
    """Of its last block."""
    blocks: int
    """How long it is: FEATHER's depth of the tip."""
    requests: int
    """That are decoded, or have KV memory and will be."""
