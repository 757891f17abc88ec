"""The sources from which reused blocks are read."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

FETCH_SPANS_MAX: Final = 256
"""The maximum number of spans of a prompt, in the conductor's plans and for workers; further blocks are computed."""


class KvSource(StrEnum):
    """The kind of process from which reused KV comes."""

    PEER = "peer"
    STORE = "store"


@dataclass(frozen=True, slots=True)
class FetchSpan:
    """The blocks ``[first, end)`` of a prompt to read from one source, whose gRPC address is ``address``."""

    source_id: str
    address: str
    source: KvSource
    first: int
    end: int
