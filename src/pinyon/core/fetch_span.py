"""Where reused blocks are read from."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

FETCH_SPANS_MAX: Final = 256
"""Spans of one prompt: the conductor plans no more, a worker takes no more. What lies behind them is computed."""


class KvSource(StrEnum):
    """What kind of process reused KV comes from."""

    PEER = "peer"
    STORE = "store"


@dataclass(frozen=True, slots=True)
class FetchSpan:
    """Blocks ``[first, end)`` of the prompt to be read from one source, whose gRPC address is ``address``."""

    source_id: str
    address: str
    source: KvSource
    first: int
    end: int
