"""The holdings that a batching policy asks, as a test says, prompts of letters, and an order that counts turns."""

from __future__ import annotations

from collections.abc import Iterator

from pinyon.batching import BatchRequest, BlockNeed
from pinyon.batching.interface import ServiceOrder


class Books:
    """The blocks that requests hold. Nothing is held or shared unless a test says so."""

    def __init__(self) -> None:
        self.shared: dict[int, int] = {}
        """The blocks that each request shares with running requests, by request number."""
        self.held: dict[int, int] = {}
        """The blocks of each admitted request."""

    def need(self, request: BatchRequest) -> BlockNeed:
        shared = self.shared.get(request.number, 0)
        return BlockNeed(shared, request.blocks - shared)

    def behind(self, number: int) -> int:
        return sum(blocks for other, blocks in self.held.items() if other > number)


def keys_of(letters: str) -> tuple[bytes, ...]:
    """Returns the keys of a prompt: each letter is a block that is known by all blocks before it."""
    return tuple(letters[: end + 1].encode() for end in range(len(letters)))


class Counting:
    """An order of service that keeps the turns it is asked for."""

    short_first = True

    def __init__(self, order: ServiceOrder[int]) -> None:
        self.asked: list[int] = []
        self._order = order
        self.add, self.take, self.remove = order.add, order.take, order.remove

    def turns(self, now_s: float) -> Iterator[int]:
        for number in self._order.turns(now_s):
            self.asked.append(number)
            yield number

    def __iter__(self) -> Iterator[int]:
        return iter(self._order)
