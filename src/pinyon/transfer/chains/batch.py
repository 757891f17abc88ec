"""The life of a batch's requests: each ends in exactly one final status. Pure; the engine serialises the calls."""

from __future__ import annotations

from collections.abc import Sequence

from pinyon.transfer.chains.slicing import Slice
from pinyon.transfer.types.request import Reason, TransferResult, TransferStatus


class BatchProgress:
    """Statuses of requests that were submitted together, each moved in one or more slices.

    A request is final when its last slice is: until then its local memory may still be touched. Of several unsuccessful
    slices the first decides the status."""

    __slots__ = ("_failures", "_left", "_moved")

    def __init__(self, lengths: list[int]) -> None:
        """Keeps the requests' ``lengths`` in bytes, and changes this list."""
        self._left = lengths
        self._moved = [0] * len(lengths)
        self._failures: dict[int, tuple[TransferStatus, Reason]] = {}

    def slices_done(
        self, slices: Sequence[Slice], status: TransferStatus, reason: Reason, refusals: bytes | None = None
    ) -> tuple[dict[tuple[TransferStatus, Reason], int], int]:
        """Accounts for slices that ended alike, except those with a code in ``refusals`` (one per slice, 0 = none).

        Returns how many requests became final and how, and the bytes moved."""
        finals: dict[tuple[TransferStatus, Reason], int] = {}
        left, moved, failures = self._left, self._moved, self._failures
        completed = moved_bytes = 0
        for position, (index, _, _, _, _, length) in enumerate(slices):
            rest = left[index] - length
            if length <= 0 or rest < 0:
                raise AssertionError(f"request {index}: a slice of {length} bytes ended, {left[index]} were left")
            left[index] = rest
            if refusals is not None and refusals[position]:
                failures.setdefault(index, (TransferStatus.REFUSED, Reason(refusals[position])))
            elif status is TransferStatus.COMPLETED:
                moved[index] += length
                moved_bytes += length
            else:
                failures.setdefault(index, (status, reason))
            if not rest:
                if index in failures:
                    finals[failures[index]] = finals.get(failures[index], 0) + 1
                else:
                    completed += 1
        if completed:
            finals[TransferStatus.COMPLETED, Reason.NONE] = completed
        return finals, moved_bytes

    def results(self) -> list[TransferResult]:
        """Returns the present state of every request."""
        if not self._failures and not any(self._left):
            # Batches of thousands of like requests usually end so: results are immutable, so equal ones are shared.
            shared = {length: TransferResult(TransferStatus.COMPLETED, length) for length in set(self._moved)}
            return [shared[length] for length in self._moved]
        return [self._result(index) for index in range(len(self._left))]

    def _result(self, index: int) -> TransferResult:
        if self._left[index]:
            return TransferResult(TransferStatus.PENDING, self._moved[index])
        status, reason = self._failures.get(index, (TransferStatus.COMPLETED, Reason.NONE))
        return TransferResult(status, self._moved[index], reason)
