from pinyon.transfer.engine import TransferEngine
from pinyon.transfer.handle import TransferGroup, TransferHandle
from pinyon.transfer.links.tls import TlsContexts
from pinyon.transfer.memory.grant import Grant
from pinyon.transfer.memory.region import Access, Region
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
from pinyon.transfer.types.nic import Nic, Path
from pinyon.transfer.types.options import Network, Transports
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
