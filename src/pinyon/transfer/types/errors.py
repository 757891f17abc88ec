"""Errors of the transfer engine, on the project's error tree.

::

    TransferError                 base; also one of the core errors, so the edges translate it by attribute
    ├── InvalidTransfer           InvalidArgument     a request, buffer or limit that makes no sense (names the field)
    ├── WireError                 InvalidArgument     bytes from the network that do not parse; the connection is closed
    ├── TransferLimitReached      ResourceExhausted   too many batches, requests, regions
    ├── EngineClosed              FailedPrecondition  not started, or closed
    └── what a finished transfer raises through ``raise_for_failure``:
        ├── TransferRefused       FailedPrecondition  the peer answered no: wrong key, range, boot id, secret
        ├── TransferFailed        Unavailable         the peer is gone, the connection broke
        ├── TransferTimeout       DeadlineExceeded    no progress, or the total deadline passed
        └── TransferCancelled     Cancelled           the caller (or ``close``) stopped it
"""

from __future__ import annotations

from pinyon.core.errors import (
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    PinyonError,
    ResourceExhausted,
    Unavailable,
)

__all__ = [
    "EngineClosed",
    "InvalidTransfer",
    "TransferCancelled",
    "TransferError",
    "TransferFailed",
    "TransferLimitReached",
    "TransferRefused",
    "TransferTimeout",
    "WireError",
]


class TransferError(PinyonError):
    """Base of everything this room raises on purpose."""


class InvalidTransfer(TransferError, InvalidArgument):
    """The caller's request, buffer or limit is wrong; ``field`` names it."""


class WireError(TransferError, InvalidArgument):
    """Bytes from a peer break the protocol. The connection they came from cannot be used any more."""


class TransferLimitReached(TransferError, ResourceExhausted):
    """A bound of :class:`pinyon.transfer.TransferLimits` is reached; nothing was submitted."""


class EngineClosed(TransferError, FailedPrecondition):
    """The engine is not running."""


class TransferRefused(TransferError, FailedPrecondition):
    """The peer said no. The same request will be refused again."""


class TransferFailed(TransferError, Unavailable):
    """The peer is gone or the connection broke; another replica may work."""


class TransferTimeout(TransferError, DeadlineExceeded):
    """No byte moved for the stall limit, or the total deadline passed."""


class TransferCancelled(TransferError, Cancelled):
    """Stopped by the caller or by ``close``."""
