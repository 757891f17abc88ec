"""Errors of the transfer engine. Each is also one of the project's core errors, so the edges translate it by attribute.

``raise_for_failure`` raises ``TransferRefused`` and the classes after it for a finished transfer."""

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
    """The base of all errors that the transfer engine raises on purpose."""


class InvalidTransfer(TransferError, InvalidArgument):
    """The caller's request, buffer or limit is wrong; ``field`` names it."""


class WireError(TransferError, InvalidArgument):
    """Bytes from a peer break the protocol. The connection that they came from cannot be used any more."""


class TransferLimitReached(TransferError, ResourceExhausted):
    """A bound of :class:`pinyon.transfer.TransferLimits` is reached; nothing was submitted."""


class EngineClosed(TransferError, FailedPrecondition):
    """The engine is not running."""


class TransferRefused(TransferError, FailedPrecondition):
    """The peer refused the request. It will refuse the same request again."""


class TransferFailed(TransferError, Unavailable):
    """The peer is gone or the connection broke; another replica may work."""


class TransferTimeout(TransferError, DeadlineExceeded):
    """The transfer moved no byte for the stall limit, or passed its total deadline."""


class TransferCancelled(TransferError, Cancelled):
    """The transfer was stopped by the caller or by ``close``."""
