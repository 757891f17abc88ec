"""A line of requests that wait for KV memory. Those that share most with admitted requests come first (FEATHER §4.2).

The chunked hash tree says which request lacks least of what admitted requests hold. That request takes the least room,
and makes the batches of steps (:mod:`pinyon.batching.rounds`) larger rather than more numerous. No request is passed
over for longer than a limit: with the paper's loop, a popular prefix could run forever."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum

from pinyon.batching.chunked_hash_tree import LEVELS_MAX, ChunkedHashTree
from pinyon.batching.engine_step import GROUPED
from pinyon.batching.policy import BatchRequest
from pinyon.batching.stopping import Always, Bandit, Heuristic, StoppingPolicy
from pinyon.batching.waiting_line import AgainFirst, passed_over_max_s
from pinyon.core.policies import check_bounds


@dataclass(frozen=True, slots=True)
class SharedPrefixSettings:
    """Options of :class:`BySharedPrefix`. ``chunk_blocks``: full blocks of a prompt that are one level of the tree.

    ``passed_over_s``: a request is next when later ones have gone before it for so many seconds. That limit is at most
    half of the time to the deadline of its first token (:func:`passed_over_max_s`)."""

    chunk_blocks: int = 4
    passed_over_s: float = 10.0

    def __post_init__(self) -> None:
        check_bounds(self, chunk_blocks=(1, 4096), passed_over_s=(0, 3600))


class StoppingRule(StrEnum):
    """The rule by which ``feather`` decides that a batch takes no more requests."""

    BANDIT = "bandit"
    HEURISTIC = "heuristic"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class FeatherSettings(SharedPrefixSettings):
    """Options of the whole policy ``feather``; ``stop`` is the rule by which a batch takes no more requests."""

    stop: StoppingRule = StoppingRule.BANDIT

    def stopping(self, kernel: str = "") -> StoppingPolicy:
        """Returns the rule for a ``kernel``: the way in which the engine's decode attention reads shared KV.

        If each group of a batch reads its own prefix once (``grouped``, as in PAT), a larger batch makes no prefix
        dearer. Rules that keep the batch from growing are of no use then, and learning rules find that out."""
        if self.stop is StoppingRule.BANDIT:
            return Bandit()
        return Heuristic() if self.stop is StoppingRule.HEURISTIC and kernel != GROUPED else Always()


class BySharedPrefix(AgainFirst):
    """A :class:`pinyon.batching.interface.WaitingLine` by shared prefix; requests that gave way come first, by arrival.

    If the request whose turn it is has no room, no other is asked. The ``tree`` says whose turn it is."""

    def __init__(self, settings: SharedPrefixSettings, tree: ChunkedHashTree[int] | None = None) -> None:
        super().__init__()
        self._settings = settings
        self._tree: ChunkedHashTree[int] = ChunkedHashTree(1) if tree is None else tree
        """The tree in which new requests wait, and admitted ones are active."""
        self._running: set[int] = set()
        self._unpassed: OrderedDict[int, None] = OrderedDict()
        """New requests before which no later one has gone yet, in order of arrival."""
        self._passed_s: dict[int, float] = {}
        """The times since which the other new requests are passed over."""
        self._due: list[tuple[float, int]] = []
        """A heap of the times when these requests' limits end, including some requests that have left."""
        self._now_s = 0.0
        self._waited_s: dict[int, float] = {}
        """The seconds for which requests taken since the last ``begin`` had been passed over."""

    def _path(self, request: BatchRequest) -> tuple[bytes, ...]:
        chunk = self._settings.chunk_blocks
        return request.block_keys[chunk - 1 : chunk * LEVELS_MAX : chunk]

    def add(self, request: BatchRequest, again: bool) -> None:
        if again:
            self._again.add(request, again)
            return
        number = request.number
        self._new[number] = request
        self._unpassed[number] = None
        self._tree.insert_hashes(number, self._path(request))

    def remove(self, number: int) -> bool:
        if number not in self._new:
            return self._again.remove(number)
        self._tree.remove(number)
        self._leave(number)
        return True

    def _leave(self, number: int) -> None:
        del self._new[number]
        self._unpassed.pop(number, None)
        self._passed_s.pop(number, None)

    def begin(self, now_s: float, room_blocks: int) -> None:
        self._now_s = now_s
        self._waited_s.clear()

    def passed_over_s(self, number: int) -> float:
        return self._waited_s.get(number, 0.0)

    def at(self, place: int) -> BatchRequest | None:
        request = self._again.at(place)
        if request is not None or place > len(self._again):
            return request
        due = self._due
        while due and due[0][1] not in self._passed_s:
            heapq.heappop(due)
        if due and self._now_s >= due[0][0]:
            return self._new[due[0][1]]
        best = self._tree.find_best()
        return None if best is None else self._new[best.request]

    def adopt(self, request: BatchRequest) -> None:
        self._tree.insert_hashes(request.number, self._path(request))
        self._run(request.number)

    def _run(self, number: int) -> None:
        self._tree.add_to_batch(number)
        self._running.add(number)

    def take(self, number: int, room_blocks: int) -> None:
        request = self._again.get(number)
        if request is None:
            began_s = self._passed_s.get(number)
            if began_s is not None:
                self._waited_s[number] = self._now_s - began_s
            self._leave(number)
            self._pass_over_before(number)
        else:
            self._again.take(number, room_blocks)
            self._tree.insert_hashes(number, self._path(request))
        self._run(number)

    def _pass_over_before(self, number: int) -> None:
        """Marks as passed over, once each, the requests that came before this one."""
        while self._unpassed:
            first = next(iter(self._unpassed))
            if first > number:
                return
            del self._unpassed[first]
            self._passed_s[first] = self._now_s
            limit_s = passed_over_max_s(self._new[first], self._settings.passed_over_s)
            heapq.heappush(self._due, (self._now_s + limit_s, first))

    def ended(self, number: int) -> None:
        if number in self._running:
            self._running.remove(number)
            self._tree.finish(number)
