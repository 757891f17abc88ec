"""The work of all instances in arrays, so that a policy looks at a thousand of them as quickly as at ten."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pinyon.placement.transfer_cost import PATH_KINDS

__all__ = ["LoadTable", "PastLoads"]

ROWS_MIN = 64
CLASSES = 28
"""Of prompts by the microseconds that they take, each up to twice as long as the one before; the last one from two
minutes on."""
COEFFICIENTS = 3
COLUMNS = 4


class PastLoads(NamedTuple):
    """What a load table said at one time, by row; see there. Never changed."""

    columns: NDArray[np.float64]
    coefficients: NDArray[np.float64]
    transfer: NDArray[np.float64]

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
        self.ahead_us = np.zeros((rows, CLASSES), np.int64)
        """Of what is queued, what prompts take that are of this class or shorter."""
        self.behind = np.zeros((rows, CLASSES), np.int64)
        """Prompts that are longer than this class."""
        self.short_first = np.zeros(rows, np.bool_)
        """Whether short ones are computed before long ones there; else as they come."""
        self.decoding = np.zeros(rows, np.int64)
        """Requests that are decoded there or wait for it, by the instance's own word."""
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
        self._lent = False
        """Somebody keeps the coefficients as they are: before they change they are copied."""

    def add(self, row: int, blocks_max: int = 0) -> None:
        """Begins empty. A limit of 0 is none that is known."""
        rows = len(self.queued_us)
        if row >= rows:
            more = max(row + 1, 2 * rows) - rows
            self._hold(np.append(self._held, np.zeros((COLUMNS, more)), axis=1))
            for name in _TABLES:
                had = getattr(self, name)
                setattr(self, name, np.append(had, np.zeros((more, *had.shape[1:]), had.dtype), axis=0))
        self._own_coefficients()
        self._held[:, row] = 0
        for name in _TABLES:
            getattr(self, name)[row] = 0
        self.blocks_max[row] = blocks_max or np.inf

    def learned(self, row: int, prefill: tuple[float, ...]) -> None:
        """The coefficients of one."""
        self._own_coefficients()
        self.coefficients[row] = prefill

    def transfers_learned(self, row: int, paths: Sequence[tuple[float, float]]) -> None:
        """Those of its paths."""
        self._own_coefficients()
        self.transfer[row] = paths

    def past(self) -> PastLoads:
        """What it says now, to be kept. Asked at each decision: what changes with every request is copied (32 bytes a
        row), coefficients only when they change."""
        self._lent = True
        return PastLoads(self._held.copy(), self.coefficients, self.transfer)

    def _own_coefficients(self) -> None:
        """They are about to change."""
        if self._lent:
            self.coefficients, self.transfer = self.coefficients.copy(), self.transfer.copy()
            self._lent = False

    def _hold(self, held: NDArray[np.float64]) -> None:
        """Columns side by side, for all of them to be copied at once."""
        self._held = held
        self.queued_us, self.ends_s, self.reported_s, self.room_s = _columns(held)

    def queues_s(self, rows: NDArray[np.intp], now_s: float) -> NDArray[np.float64]:
        """Seconds of work before a new request: what was placed there less what is done of it, or what the instance
        says, if that is more: it also covers what came past this conductor, or from before it restarted."""
        return _queues_s(self.queued_us[rows], self.ends_s[rows], self.reported_s[rows], now_s)

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
        queued_s, reported_s = self.queued_us.take(rows) * 1e-6, self.reported_s.take(rows)
        rest_s = np.maximum(self.ends_s.take(rows) - now_s, 0.0)
        short_first = self.short_first.take(rows)
        some = np.count_nonzero(short_first)
        if not some:
            waits_s: NDArray[np.float64] = np.maximum(queued_s + rest_s, reported_s)
            return waits_s, np.zeros(len(rows), np.int64)
        sizes = np.minimum(np.frexp(np.rint(prefills_s * 1e6))[1], CLASSES - 1)
        if some < len(rows):
            sizes = np.where(short_first, sizes, CLASSES - 1)
        places = rows * CLASSES + sizes
        # what the instance knows of and the table does not may be of any length: its own word less the queue, and less
        # the rest of what is computed, where that is more than nothing
        known_s = queued_s + rest_s
        waits_s = self.ahead_us.reshape(-1).take(places) * 1e-6 + (np.maximum(reported_s, known_s) - queued_s)
        return waits_s, self.behind.reshape(-1).take(places)

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


_TABLES = (
    *("ahead_us", "behind", "short_first", "decoding", "coefficients", "batch", "blocks", "blocks_max", "slots"),
    *("tbt_s", "tbt_token_s", "decode_learned_s", "host", "transfer", "reading_bytes", "readings"),
)
"""A row for each instance, beside the columns that are copied."""


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
