"""The transfer engine: every byte of KV between processes (Mooncake §3.2.2, §3.2.3). See docs/transfer.md.

The edges (engine, transports) load on first use, so a pure room that imports a value from here pulls in no socket.
Type checkers read ``__init__.pyi``.
"""

from importlib import import_module
from typing import Any

from pinyon.transfer.types.errors import (
    EngineClosed,
    InvalidTransfer,
    TransferCancelled,
    TransferError,
    TransferFailed,
    TransferLimitReached,
    TransferRefused,
    TransferTimeout,
    WireError,
)
from pinyon.transfer.types.limits import TransferLimits
from pinyon.transfer.types.nic import Nic
from pinyon.transfer.types.options import Network, Transports
from pinyon.transfer.types.path import Path
from pinyon.transfer.types.request import (
    Opcode,
    Reason,
    TransferRequest,
    TransferResult,
    TransferStatus,
    raise_for_failure,
)
from pinyon.transfer.types.segment import RegionDescriptor, SegmentDescriptor
from pinyon.transfer.types.stats import LATENCY_BUCKETS_S, PathStats, TransferStats
from pinyon.transfer.types.topology import Topology

__all__ = [
    "LATENCY_BUCKETS_S",
    "Access",
    "EngineClosed",
    "Grant",
    "InvalidTransfer",
    "Network",
    "Nic",
    "Opcode",
    "Path",
    "PathStats",
    "Reason",
    "Region",
    "RegionDescriptor",
    "SegmentDescriptor",
    "TlsContexts",
    "TlsFiles",
    "Topology",
    "TransferCancelled",
    "TransferEngine",
    "TransferError",
    "TransferFailed",
    "TransferGroup",
    "TransferHandle",
    "TransferLimitReached",
    "TransferLimits",
    "TransferRefused",
    "TransferRequest",
    "TransferResult",
    "TransferStats",
    "TransferStatus",
    "TransferTimeout",
    "Transports",
    "WireError",
    "raise_for_failure",
]

_EDGES = {
    "Access": "pinyon.transfer.memory.region",
    "Grant": "pinyon.transfer.memory.grant",
    "Region": "pinyon.transfer.memory.region",
    "TlsContexts": "pinyon.transfer.links.tls",
    "TlsFiles": "pinyon.transfer.links.tls",
    "TransferEngine": "pinyon.transfer.engine",
    "TransferGroup": "pinyon.transfer.group",
    "TransferHandle": "pinyon.transfer.handle",
}


def __getattr__(name: str) -> Any:
    module = _EDGES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(module), name)
    globals()[name] = value  # the next access does not come here
    return value
