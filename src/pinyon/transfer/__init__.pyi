from pinyon.transfer.engine import TransferEngine
from pinyon.transfer.errors import (
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
from pinyon.transfer.group import TransferGroup
from pinyon.transfer.handle import TransferHandle
from pinyon.transfer.host.nic import Nic
from pinyon.transfer.host.topology import Topology
from pinyon.transfer.limits import TransferLimits
from pinyon.transfer.links.tls import TlsContexts, TlsFiles
from pinyon.transfer.memory.grant import Grant
from pinyon.transfer.memory.region import Access, Region
from pinyon.transfer.path import Path
from pinyon.transfer.request import (
    Opcode,
    Reason,
    TransferRequest,
    TransferResult,
    TransferStatus,
    raise_for_failure,
)
from pinyon.transfer.segment import RegionDescriptor, SegmentDescriptor
from pinyon.transfer.stats import LATENCY_BUCKETS_S, PathStats, TransferStats

__all__ = [
    "LATENCY_BUCKETS_S",
    "Access",
    "EngineClosed",
    "Grant",
    "InvalidTransfer",
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
    "WireError",
    "raise_for_failure",
]
