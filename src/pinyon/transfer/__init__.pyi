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
from pinyon.transfer.limits import TransferLimits
from pinyon.transfer.request import (
    Opcode,
    Reason,
    TransferRequest,
    TransferResult,
    TransferStatus,
    raise_for_failure,
)
from pinyon.transfer.segment import RegionDescriptor, SegmentDescriptor
from pinyon.transfer.stats import LATENCY_BUCKETS_S, TransferStats
from pinyon.transfer.transports.completion import TransferGroup, TransferHandle
from pinyon.transfer.transports.memory import Access, Region

__all__ = [
    "LATENCY_BUCKETS_S",
    "Access",
    "EngineClosed",
    "InvalidTransfer",
    "Opcode",
    "Reason",
    "Region",
    "RegionDescriptor",
    "SegmentDescriptor",
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
