"""The prefill work of all instances in arrays, so that a policy looks at a thousand of them as quickly as at ten."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["LoadTable", "PastLoads"]

ROWS_MIN = 64
COEFFICIENTS = 3
TRANSFER_COEFFICIENTS = 2
COLUMNS = 4


class PastLoads(NamedTuple):
    """What a load table said at one time, by row; see there. Never changed."""

    columns: NDArray[np.float64]
    coefficients: NDArray[np.float64]
    transfer_coefficients: NDArray[np.float64]

    @property
    def room_s(self) -> NDArray[np.float64]:
        return _columns(self.columns)[3]

    def queues_s(self, rows: NDArray[np.intp], now_s: float) -> NDArray[np.float64]:
        """As :meth:`LoadTable.queues_s`, of then."""
        queued_us, ends_s, reported_s, _ = _columns(self.columns)
        return _queues_s(queued_us[rows], ends_s[rows], reported_s[rows], now_s)


class LoadTable:
    """One row for each instance, named by a number that nobody else has meanwhile."""

    queued_us: NDArray[np.int64]
    """Predicted for what was placed there and is not being computed yet; whole, so that it returns to zero."""
    ends_s: NDArray[np.float64]
    """When what is being computed is expected to end; in the past where nothing is."""
    reported_s: NDArray[np.float64]
    """The queue by the instance's own word."""
    room_s: NDArray[np.float64]
    """Until a new request has KV memory, by the instance's own word."""

    def __init__(self, rows: int = ROWS_MIN) -> None:
        self._hold(np.zeros((COLUMNS, rows)))
        self.decoding = np.zeros(rows, np.int64)
        """Requests that are decoded there or wait for it, likewise."""
        self.coefficients = np.zeros((rows, COEFFICIENTS))
        """Of the prefill cost model: seconds, seconds per token, seconds per token²."""
        self.transfer_coefficients = np.zeros((rows, TRANSFER_COEFFICIENTS))
        """Of the transfer cost model: seconds, seconds per byte."""
        self._lent = False
        """Somebody keeps the coefficients as they are: before they change they are copied."""

    def add(self, row: int) -> None:
        """Begins empty."""
        rows = len(self.queued_us)
        if row >= rows:
            more = max(row + 1, 2 * rows) - rows
            self._hold(np.append(self._held, np.zeros((COLUMNS, more)), axis=1))
            self.decoding = np.append(self.decoding, np.zeros(more, np.int64))
            self.coefficients = np.append(self.coefficients, np.zeros((more, COEFFICIENTS)), axis=0)
            extra = np.zeros((more, TRANSFER_COEFFICIENTS))
            self.transfer_coefficients = np.append(self.transfer_coefficients, extra, axis=0)
        self.queued_us[row] = self.decoding[row] = 0
        self.ends_s[row] = self.reported_s[row] = self.room_s[row] = 0.0
        self.learned(row, (0.0,) * COEFFICIENTS, (0.0,) * TRANSFER_COEFFICIENTS)

    def learned(self, row: int, prefill: tuple[float, ...], transfer: tuple[float, ...]) -> None:
        """The coefficients of one."""
        if self._lent:
            self.coefficients, self.transfer_coefficients = self.coefficients.copy(), self.transfer_coefficients.copy()
            self._lent = False
        self.coefficients[row] = prefill
        self.transfer_coefficients[row] = transfer

    def past(self) -> PastLoads:
        """What it says now, to be kept. Asked at each decision: what changes with every request is copied (32 bytes a
        row), coefficients only when they change."""
        self._lent = True
        return PastLoads(self._held.copy(), self.coefficients, self.transfer_coefficients)

    def _hold(self, held: NDArray[np.float64]) -> None:
        """Columns side by side, for all of them to be copied at once."""
        self._held = held
        self.queued_us, self.ends_s, self.reported_s, self.room_s = _columns(held)

    def queues_s(self, rows: NDArray[np.intp], now_s: float) -> NDArray[np.float64]:
        """Seconds of work before a new request: what was placed there less what is done of it, or what the instance
        says, if that is more: it also covers what came past this conductor, or from before it restarted."""
        return _queues_s(self.queued_us[rows], self.ends_s[rows], self.reported_s[rows], now_s)

    def queue_s(self, row: int, now_s: float) -> float:
        """As :meth:`queues_s`, of one."""
        rest_s = max(0.0, float(self.ends_s[row]) - now_s)
        return max(int(self.queued_us[row]) * 1e-6 + rest_s, float(self.reported_s[row]))


def _columns(
    held: NDArray[np.float64],
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Views; the first one has whole numbers."""
    return held[0].view(np.int64), held[1], held[2], held[3]


def _queues_s(
    queued_us: NDArray[np.int64], ends_s: NDArray[np.float64], reported_s: NDArray[np.float64], now_s: float
) -> NDArray[np.float64]:
    rest_s = np.maximum(ends_s - now_s, 0.0)
    queues_s: NDArray[np.float64] = np.maximum(queued_us * 1e-6 + rest_s, reported_s)
    return queues_s
