"""Errors of the transfer engine, on the project's error tree: each is one of the core errors too, so the edges
translate it by attribute. From ``TransferRefused`` on: what ``raise_for_failure`` raises for a finished transfer."""

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
