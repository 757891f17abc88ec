"""The prefill work of all instances in arrays, so that a policy looks at a thousand of them as quickly as at ten."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["LoadTable"]

ROWS_MIN = 64
COEFFICIENTS = 3


class LoadTable:
    """One row for each instance, named by a number that nobody else has meanwhile."""

    def __init__(self, rows: int = ROWS_MIN) -> None:
        self.queued_us = np.zeros(rows, np.int64)
        """Predicted for what was placed there and is not being computed yet; whole, so that it returns to zero."""
        self.ends_s = np.zeros(rows)
        """When what is being computed is expected to end; in the past where nothing is."""
        self.reported_s = np.zeros(rows)
        """The queue by the instance's own word."""
        self.room_s = np.zeros(rows)
        """Until a new request has KV memory, by the instance's own word."""
        self.decoding = np.zeros(rows, np.int64)
        """Requests that are decoded there or wait for it, likewise."""
        self.coefficients = np.zeros((rows, COEFFICIENTS))
        """Of the prefill cost model: seconds, seconds per token, seconds per token²."""

    def add(self, row: int) -> None:
        """Begins empty."""
        rows = len(self.queued_us)
        if row >= rows:
            more = max(row + 1, 2 * rows) - rows
            self.queued_us = np.append(self.queued_us, np.zeros(more, np.int64))
            self.ends_s = np.append(self.ends_s, np.zeros(more))
            self.reported_s = np.append(self.reported_s, np.zeros(more))
            self.room_s = np.append(self.room_s, np.zeros(more))
            self.decoding = np.append(self.decoding, np.zeros(more, np.int64))
            self.coefficients = np.append(self.coefficients, np.zeros((more, COEFFICIENTS)), axis=0)
        self.queued_us[row] = self.decoding[row] = 0
        self.ends_s[row] = self.reported_s[row] = self.room_s[row] = 0.0
        self.coefficients[row] = 0.0

    def queues_s(self, rows: NDArray[np.intp], now_s: float) -> NDArray[np.float64]:
        """Seconds of work before a new request: what was placed there less what is done of it, or what the instance
        says, if that is more: it also covers what came past this conductor, or from before it restarted."""
        rest_s = np.maximum(self.ends_s[rows] - now_s, 0.0)
        queues_s: NDArray[np.float64] = np.maximum(self.queued_us[rows] * 1e-6 + rest_s, self.reported_s[rows])
        return queues_s

    def queue_s(self, row: int, now_s: float) -> float:
        """As :meth:`queues_s`, of one."""
        rest_s = max(0.0, float(self.ends_s[row]) - now_s)
        return max(int(self.queued_us[row]) * 1e-6 + rest_s, float(self.reported_s[row]))
