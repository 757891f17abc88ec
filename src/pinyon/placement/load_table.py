"""The work of all instances in arrays, so that a policy looks at a thousand of them as quickly as at ten."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pinyon.placement.transfer_cost import PATH_KINDS

__all__ = ["LoadTable"]

ROWS_MIN = 64
CLASSES = 28
"""Of prompts by the microseconds that they take, each up to twice as long as the one before; the last one from two
minutes on."""
COEFFICIENTS = 3


class LoadTable:
    """One row for each instance, named by a number that nobody else has meanwhile."""

    def __init__(self, rows: int = ROWS_MIN) -> None:
        self.queued_us = np.zeros(rows, np.int64)
        """Predicted for what was placed there and is not being computed yet; whole, so that it returns to zero."""
        self.ahead_us = np.zeros((rows, CLASSES), np.int64)
        """Of it, what prompts take that are of this class or shorter."""
        self.behind = np.zeros((rows, CLASSES), np.int64)
        """Prompts that are longer than this class."""
        self.short_first = np.zeros(rows, np.bool_)
        """Whether short ones are computed before long ones there; else as they come."""
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
        self.batch = np.zeros(rows, np.int64)
        """Requests decoding or about to: by its own word, or placed there and not ended, if those are more."""
        self.blocks = np.zeros(rows, np.int64)
        """KV blocks in use, likewise."""
        self.blocks_max = np.zeros(rows)
        """Without end where the instance named no limit."""
        self.slots = np.zeros(rows)
        """Share of the batch's slots with one request more; over 1, it would first wait."""
        self.tbt_s = np.zeros(rows)
        """Between tokens with one request more that brings no KV."""
        self.tbt_token_s = np.zeros(rows)
        """For each token of KV that it brings."""
        self.decode_learned_s = np.zeros(rows)
        """When the time between tokens was measured last, or should have been."""
        self.host = np.zeros(rows, np.int64)
        """A number for the host of each; 0: nobody knows."""
        self.transfer = np.zeros((rows, PATH_KINDS, 2))
        """Of the transfer cost model, for each kind of path to here: seconds, seconds per byte."""
        self.reading_bytes = np.zeros(rows)
        """Of fetches over the network by what was placed there and is not being computed yet."""
        self.readings = np.zeros(rows)
        """How many those are."""

    def add(self, row: int, blocks_max: int = 0) -> None:
        """Begins empty. A limit of 0 is none that is known."""
        rows = len(self.queued_us)
        if row >= rows:
            more = max(row + 1, 2 * rows) - rows
            for name, column in vars(self).items():
                setattr(self, name, np.append(column, np.zeros((more, *column.shape[1:]), column.dtype), axis=0))
        for column in vars(self).values():
            column[row] = 0
        self.blocks_max[row] = blocks_max or np.inf

    def queues_s(self, rows: NDArray[np.intp], now_s: float) -> NDArray[np.float64]:
        """Seconds of work before a new request: what was placed there less what is done of it, or what the instance
        says, if that is more: it also covers what came past this conductor, or from before it restarted."""
        rest_s = np.maximum(self.ends_s[rows] - now_s, 0.0)
        queues_s: NDArray[np.float64] = np.maximum(self.queued_us[rows] * 1e-6 + rest_s, self.reported_s[rows])
        return queues_s

    def enqueue(self, row: int, prefill_us: int) -> None:
        """A prompt was placed there that takes so long."""
        size = min(prefill_us.bit_length(), CLASSES - 1)
        self.queued_us[row] += prefill_us
        self.ahead_us[row, size:] += prefill_us
        self.behind[row, :size] += 1

    def dequeue(self, row: int, prefill_us: int) -> None:
        """It does not wait there any more."""
        size = min(prefill_us.bit_length(), CLASSES - 1)
        self.queued_us[row] -= prefill_us
        self.ahead_us[row, size:] -= prefill_us
        self.behind[row, :size] -= 1

    def turns(
        self, rows: NDArray[np.intp], prefills_s: NDArray[np.float64], now_s: float
    ) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """For a new prompt that takes so many seconds at each instance: seconds of work that are done before it there,
        and how many prompts it goes before. Where short ones do not go first, that is :meth:`queues_s`, and none."""
        queued_us, reported_s = self.queued_us.take(rows), self.reported_s.take(rows)
        rest_s = np.maximum(self.ends_s.take(rows) - now_s, 0.0)
        short_first = self.short_first.take(rows)
        if not short_first.any():
            waits_s: NDArray[np.float64] = np.maximum(queued_us * 1e-6 + rest_s, reported_s)
            return waits_s, np.zeros(len(rows), np.int64)
        sizes = np.minimum(np.frexp(np.rint(prefills_s * 1e6))[1], CLASSES - 1)
        places = rows * CLASSES + np.where(short_first, sizes, CLASSES - 1)
        # what the instance knows of and the table does not may be of any length
        more_s = np.maximum(reported_s - rest_s - queued_us * 1e-6, 0.0)
        return self.ahead_us.ravel().take(places) * 1e-6 + (rest_s + more_s), self.behind.ravel().take(places)

    def turn(self, row: int, prefill_s: float, now_s: float) -> tuple[float, int]:
        """The same of one instance where short ones go first."""
        size = min(round(prefill_s * 1e6).bit_length(), CLASSES - 1)
        rest_s = max(0.0, float(self.ends_s[row]) - now_s)
        more_s = max(0.0, float(self.reported_s[row]) - rest_s - int(self.queued_us[row]) * 1e-6)
        return int(self.ahead_us[row, size]) * 1e-6 + (rest_s + more_s), int(self.behind[row, size])

    def decode_shares(self, rows: NDArray[np.intp], new_blocks: int) -> NDArray[np.float64]:
        """How full each instance is with one request more, of so many KV blocks: the larger of the shares of its batch
        slots and its blocks. Over 1, the request would first wait."""
        blocks = (self.blocks.take(rows) + new_blocks) / self.blocks_max.take(rows)
        shares: NDArray[np.float64] = np.maximum(self.slots.take(rows), blocks)
        return shares

    def decodes_s(self, rows: NDArray[np.intp], new_tokens: int) -> NDArray[np.float64]:
        """Seconds between tokens at each instance with one request more, of so many tokens of KV."""
        seconds: NDArray[np.float64] = self.tbt_s.take(rows) + self.tbt_token_s.take(rows) * new_tokens
        return seconds

    def decodes_due(self, rows: NDArray[np.intp], now_s: float, after_s: float) -> NDArray[np.bool_]:
        """Which of the instances decode nothing, and were measured so long ago."""
        due: NDArray[np.bool_] = (self.batch.take(rows) == 0) & (now_s - self.decode_learned_s.take(rows) >= after_s)
        return due

    def queue_s(self, row: int, now_s: float) -> float:
        """As :meth:`queues_s`, of one."""
        rest_s = max(0.0, float(self.ends_s[row]) - now_s)
        return max(int(self.queued_us[row]) * 1e-6 + rest_s, float(self.reported_s[row]))
