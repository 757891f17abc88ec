"""The transfer engine: every byte of KV between processes (Mooncake §3.2.2, §3.2.3). See docs/design/transfer.md.

Names load on first use, so a pure room that imports a value from here pulls in no socket. Type checkers read
``__init__.pyi``."""

from importlib import import_module
from typing import Any

_WHERE = {
    "engine": "TransferEngine",
    "handle": "TransferGroup TransferHandle",
    "links.tls": "TlsContexts",
    "memory.grant": "Grant",
    "memory.region": "Access Region",
    "types.errors": "EngineClosed InvalidTransfer TransferCancelled TransferError TransferFailed TransferLimitReached "
    "TransferRefused TransferTimeout WireError",
    "types.limits": "TransferLimits",
    "types.nic": "Nic Path",
    "types.options": "Network Transports",
    "types.request": "Opcode Reason TransferRequest TransferResult TransferStatus raise_for_failure",
    "types.segment": "RegionDescriptor SegmentDescriptor",
    "types.stats": "LATENCY_BUCKETS_S PathStats TransferStats",
    "types.topology": "Topology",
}
_MODULES = {name: f"{__name__}.{module}" for module, names in _WHERE.items() for name in names.split()}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value  # the next access does not come here
    return value
