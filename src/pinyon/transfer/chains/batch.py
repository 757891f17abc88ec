"""The life of a batch's requests: each ends in exactly one final status. Pure; the engine serialises the calls."""

from __future__ import annotations

from collections.abc import Sequence

from pinyon.transfer.chains.slicing import Slice
from pinyon.transfer.types.errors import InvalidTransfer, TransferLimitReached
from pinyon.transfer.types.request import Reason, TransferResult, TransferStatus

_WAITING = TransferResult(TransferStatus.WAITING, 0)


class BatchState:
    """Statuses of up to ``capacity`` requests, submitted in one or more calls, each moved in one or more slices.

    A request is final when its last slice is: until then its local memory may still be touched, so no status says
    otherwise. Of several unsuccessful slices the first decides the status.
    """

    __slots__ = ("_failures", "_left", "_moved", "capacity", "unfinished")

    def __init__(self, capacity: int) -> None:
        if capacity <= 0:
            raise InvalidTransfer("a batch holds at least one request", field="size")
        self.capacity = capacity
        self.unfinished = 0
        """Submitted requests without a final status."""
        self._left: list[int] = []
        self._moved: list[int] = []
        self._failures: dict[int, tuple[TransferStatus, Reason]] = {}

    def admit(self, lengths: Sequence[int]) -> int:
        """Take the next places for requests of these lengths; the index of the first. Raises TransferLimitReached: more
        than the batch was allocated for."""
        first = len(self._left)
        if first + len(lengths) > self.capacity:
            raise TransferLimitReached(f"the batch holds {self.capacity} requests, {first} are submitted")
        self._left += lengths
        self._moved += [0] * len(lengths)
        self.unfinished += len(lengths)
        return first

    def slices_done(
        self, slices: Sequence[Slice], status: TransferStatus, reason: Reason, refusals: bytes | None = None
    ) -> tuple[dict[tuple[TransferStatus, Reason], int], int]:
        """Account for slices that ended alike, except those with a code in ``refusals`` (one per slice, 0 = none).

        Returns how many requests became final and how, and the bytes moved.
        """
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
        self.unfinished -= sum(finals.values())
        return finals, moved_bytes

    def result(self, index: int) -> TransferResult:
        """Raises InvalidTransfer: no such place in the batch."""
        if not 0 <= index < self.capacity:
            raise InvalidTransfer(f"the batch holds {self.capacity} requests, no index {index}", field="index")
        if index >= len(self._left):
            return _WAITING
        if self._left[index]:
            return TransferResult(TransferStatus.PENDING, self._moved[index])
        status, reason = self._failures.get(index, (TransferStatus.COMPLETED, Reason.NONE))
        return TransferResult(status, self._moved[index], reason)

    def results(self) -> list[TransferResult]:
        """Of all submitted requests."""
        if not self.unfinished and not self._failures:
            # The usual end of a batch of thousands of like requests: results are immutable, so equal ones are shared.
            shared = {length: TransferResult(TransferStatus.COMPLETED, length) for length in set(self._moved)}
            return [shared[length] for length in self._moved]
        return [self.result(index) for index in range(len(self._left))]
