"""The work of all instances side by side, so that a policy looks at a thousand of them as quickly as at ten.

Each column is a ``vec``, whose elements compiled loops read and write as C does."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final

from librt.vecs import extend, vec
from mypy_extensions import i64

from pinyon.core.compiled import compiled
from pinyon.placement.shared_prefixes import SharedPrefixes
from pinyon.placement.transfer_cost import PATH_KINDS

ROWS_MIN = 64
CLASSES: Final = 28
"""The number of classes of prompts by microseconds of prefill. Each class takes up to twice as long as the one before;
the last one begins at 2^26, about a minute."""
COEFFICIENTS: Final = 3
PREFILL_US_MAX: Final = 1 << 40
"""Twelve days: longer predictions count as this much, so that sums of very many fit 63 bits."""


def size_class(prefill_us: i64, near: i64 = 0) -> i64:
    """Returns the class of a prompt that takes ``prefill_us``; takes one step if it is next to the class ``near``."""
    if not compiled():  # in compiled code, numbers have no bit_length
        return min(CLASSES - 1, int(prefill_us).bit_length())
    size = near
    while size > 0 and prefill_us < i64(1) << (size - 1):
        size -= 1
    while size < CLASSES - 1 and prefill_us >= i64(1) << size:
        size += 1
    return size


def whole_us(seconds: float) -> i64:
    """Returns ``seconds``, which must not be negative, as whole microseconds, twelve days at most.

    Rounds like ``round``, which is as slow in compiled code as in Python."""
    wanted = min(seconds * 1e6, float(PREFILL_US_MAX))
    whole = i64(wanted)
    rest = wanted - float(whole)
    if rest > 0.5 or (rest == 0.5 and whole & 1):
        whole += 1
    return whole


class Loads:
    """The columns of a load table, present or past, from which a request's own times are computed."""

    def __init__(
        self,
        queued_us: vec[i64],
        ends_s: vec[float],
        reported_s: vec[float],
        room_s: vec[float],
        coefficients: vec[float],
        transfer: vec[float],
        version: int = 0,
    ) -> None:
        self.queued_us = queued_us
        """Predicted time of prompts placed there and not yet being computed; whole, so that it returns to zero."""
        self.ends_s = ends_s
        """The time when the present computation is expected to end; in the past if there is none."""
        self.reported_s = reported_s
        """Seconds of queue, as reported by the instance."""
        self.room_s = room_s
        """Seconds until a new request has KV memory, as reported by the instance."""
        self.coefficients = coefficients
        """The prefill cost model's coefficients, row by row."""
        self.transfer = transfer
        """The transfer cost model's coefficients, row by row, for each kind of path: a start, and seconds per byte."""
        self.version = version
        """The version of these coefficients; it counts changes after somebody kept them."""

    @property
    def own_bytes(self) -> int:
        """The bytes of a copy, without the coefficients, which successive copies with one ``version`` share."""
        return 32 * len(self.room_s)

    @property
    def learned_bytes(self) -> int:
        """The bytes of the coefficients."""
        return 8 * (len(self.coefficients) + len(self.transfer))


class LoadTable(Loads):
    """The load of all instances, one row each; no two live instances have the same row. Only this class writes
    ``ahead_us``, ``behind``, ``coefficients`` and ``transfer``."""

    def __init__(self) -> None:
        learned, paths = _seconds(ROWS_MIN * COEFFICIENTS), _seconds(ROWS_MIN * PATH_KINDS * 2)
        super().__init__(_numbers(ROWS_MIN), _seconds(ROWS_MIN), _seconds(ROWS_MIN), _seconds(ROWS_MIN), learned, paths)
        self.ahead_us: vec[i64] = _numbers(ROWS_MIN * CLASSES)
        """The microseconds of queued prompts in each class or in a shorter one."""
        self.behind: vec[i64] = _numbers(ROWS_MIN * CLASSES)
        """The number of queued prompts in classes longer than each class."""
        self.short_first: vec[bool] = _truths(ROWS_MIN)
        """True where short prompts are computed before long ones, otherwise in order of arrival."""
        self.decoding: vec[i64] = _numbers(ROWS_MIN)
        """Requests that the instance decodes or that wait for it, as reported by the instance."""
        self.batch: vec[i64] = _numbers(ROWS_MIN)
        """Requests decoding or about to: as reported, or as placed there and not ended, if those are more."""
        self.blocks: vec[float] = _seconds(ROWS_MIN)
        """KV blocks in use, determined in the same way."""
        self.blocks_max: vec[float] = _seconds(ROWS_MIN)
        """The limit of KV blocks; infinite if the instance named none."""
        self.slots: vec[float] = _seconds(ROWS_MIN)
        """The share of the batch's slots in use with one more request; over 1, the request would wait first."""
        self.tbt_s: vec[float] = _seconds(ROWS_MIN)
        """Seconds between tokens with one more request that brings no KV."""
        self.tbt_token_s: vec[float] = _seconds(ROWS_MIN)
        """Seconds that each token of KV that the request brings adds to the time between tokens."""
        self.tbt_request_s: vec[float] = _seconds(ROWS_MIN)
        """Seconds that each further decoded request adds to the time between tokens."""
        self.decode_learned_s: vec[float] = _seconds(ROWS_MIN)
        """The time when the time between tokens was last measured, or should have been."""
        self.prefixes = SharedPrefixes()
        """The prefixes shared by requests that are decoded there, by row."""
        self._lent = False
        """True while somebody keeps the present coefficients: then they are copied before a change."""

    def add(self, row: int, blocks_max: int = 0, short_first: bool = False) -> None:
        """Makes room for a new instance, of which nothing is queued; the callers set everything else. ``blocks_max`` 0:
        no limit is known."""
        self._own_coefficients()
        if row >= len(self.queued_us):
            self._grow(max(row + 1, 2 * len(self.queued_us)))
        self.blocks_max[row] = float(blocks_max) if blocks_max else inf
        self.short_first[row] = short_first

    def _grow(self, rows: int) -> None:
        more: i64 = rows - len(self.queued_us)
        numbers, seconds = _numbers(more), _seconds(more)
        self.ahead_us, self.behind = _wider(self.ahead_us, rows), _wider(self.behind, rows)
        self.queued_us, self.decoding = extend(self.queued_us, numbers), extend(self.decoding, numbers)
        self.batch, self.short_first = extend(self.batch, numbers), extend(self.short_first, _truths(more))
        self.ends_s, self.reported_s = extend(self.ends_s, seconds), extend(self.reported_s, seconds)
        self.room_s, self.blocks = extend(self.room_s, seconds), extend(self.blocks, seconds)
        self.blocks_max, self.slots = extend(self.blocks_max, seconds), extend(self.slots, seconds)
        self.tbt_s, self.tbt_token_s = extend(self.tbt_s, seconds), extend(self.tbt_token_s, seconds)
        self.tbt_request_s = extend(self.tbt_request_s, seconds)
        self.decode_learned_s = extend(self.decode_learned_s, seconds)
        self.coefficients = extend(self.coefficients, _seconds(more * COEFFICIENTS))
        self.transfer = extend(self.transfer, _seconds(more * PATH_KINDS * 2))

    def learned(self, row: int, prefill: Sequence[float]) -> None:
        """Stores the prefill coefficients of one row."""
        self._own_coefficients()
        at: i64 = row * COEFFICIENTS
        for value in prefill:
            self.coefficients[at] = value
            at += 1

    def transfers_learned(self, row: int, paths: Sequence[tuple[float, float]]) -> None:
        """Stores the coefficients of one row's paths."""
        self._own_coefficients()
        at: i64 = row * PATH_KINDS * 2
        for start_s, byte_s in paths:
            self.transfer[at] = start_s
            self.transfer[at + 1] = byte_s
            at += 2

    def past(self) -> Loads:
        """Returns an unchanging copy of the columns that every request changes (32 bytes a row)."""
        self._lent = True
        return Loads(
            self.queued_us[:],
            self.ends_s[:],
            self.reported_s[:],
            self.room_s[:],
            self.coefficients,
            self.transfer,
            self.version,
        )

    def _own_coefficients(self) -> None:
        """Copies the coefficients before a change if somebody keeps them."""
        if self._lent:
            self.coefficients, self.transfer = self.coefficients[:], self.transfer[:]
            self.version += 1
            self._lent = False

    def count(self, row: i64, prefill_us: i64, sign: i64 = 1) -> None:
        """Counts one more queued prompt, or one fewer."""
        self.queued_us[row] += sign * prefill_us
        ahead_us, behind, capacity = self.ahead_us, self.behind, i64(len(self.queued_us))
        size = size_class(prefill_us)
        for each in range(size):
            behind[each * capacity + row] += sign
        for each in range(size, CLASSES):
            ahead_us[each * capacity + row] += sign * prefill_us

    def turn(self, row: i64, prefill_s: float, now_s: float) -> tuple[float, int]:
        """Returns the seconds of work before a new prompt of ``prefill_s`` at an instance that computes short prompts
        first, and the number of prompts that it overtakes. Reported work that the table lacks counts in full: its
        length is unknown."""
        at = size_class(whole_us(prefill_s)) * i64(len(self.queued_us)) + row
        rest_s = max(0.0, self.ends_s[row] - now_s)
        more_s = max(0.0, self.reported_s[row] - rest_s - float(self.queued_us[row]) * 1e-6)
        return float(self.ahead_us[at]) * 1e-6 + (rest_s + more_s), self.behind[at]

    def queue_s(self, row: i64, now_s: float) -> float:
        """Returns the seconds of work before a new request: the work placed there less what is done, or the reported
        queue if longer. The report also covers older work, and work that bypassed this conductor."""
        return max(float(self.queued_us[row]) * 1e-6 + max(0.0, self.ends_s[row] - now_s), self.reported_s[row])


def _numbers(count: i64) -> vec[i64]:
    return vec[i64]([0] * count)


def _seconds(count: i64) -> vec[float]:
    return vec[float]([0.0] * count)


def _truths(count: i64) -> vec[bool]:
    return vec[bool]([False] * count)


def _wider(numbers: vec[i64], rows: i64) -> vec[i64]:
    """Returns the columns of all classes with more rows."""
    had = i64(len(numbers)) // CLASSES
    wider = _numbers(rows * CLASSES)
    for size in range(CLASSES):
        for row in range(had):
            wider[size * rows + row] = numbers[size * had + row]
    return wider
