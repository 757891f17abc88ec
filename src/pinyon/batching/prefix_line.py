"""A line of requests that wait for KV memory: first those that share most with what is here (FEATHER §4.2).

The chunked hash tree says which request misses least of what the admitted ones have. That one takes the least room, and
makes the batches of steps (:mod:`pinyon.batching.rounds`) larger rather than more. None is passed over for longer than
a limit: the paper's loop would let a popular prefix run forever."""

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

    ``passed_over_s``: a request is next after waiting so long while later ones went first. That wait is at
    most half of the time to the deadline of its first token (:func:`passed_over_max_s`)."""

    chunk_blocks: int = 4
    passed_over_s: float = 10.0

    def __post_init__(self) -> None:
        check_bounds(self, chunk_blocks=(1, 4096), passed_over_s=(0, 3600))


class StoppingRule(StrEnum):
    """The rule by which ``feather`` decides that a batch stays as it is."""

    BANDIT = "bandit"
    HEURISTIC = "heuristic"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class FeatherSettings(SharedPrefixSettings):
    """Options of the whole policy ``feather``: with ``stop``, the rule by which a batch stays as it is."""

    stop: StoppingRule = StoppingRule.BANDIT

    def stopping(self, kernel: str = "") -> StoppingPolicy:
        """Returns the rule for a ``kernel``: how the engine's decode attention reads shared KV.

        Where each group of a batch reads its own prefix once (``grouped``, as PAT does), a larger batch costs no prefix
        anything. Rules that keep it from growing are of no use, and those that learn find that out."""
        if self.stop is StoppingRule.BANDIT:
            return Bandit()
        return Heuristic() if self.stop is StoppingRule.HEURISTIC and kernel != GROUPED else Always()


class BySharedPrefix(AgainFirst):
    """A :class:`pinyon.batching.interface.WaitingLine` by shared prefix, after those that gave way, as they came.

    If the request whose turn it is has no room, no other is asked. The ``tree`` says which is next."""

    def __init__(self, settings: SharedPrefixSettings, tree: ChunkedHashTree[int] | None = None) -> None:
        super().__init__()
        self._settings = settings
        self._tree: ChunkedHashTree[int] = ChunkedHashTree(1) if tree is None else tree
        """Tree in which new requests wait, and taken ones are active."""
        self._running: set[int] = set()
        self._unpassed: OrderedDict[int, None] = OrderedDict()
        """New requests that no later one went before yet, in order of arrival."""
        self._passed_s: dict[int, float] = {}
        """Times since which the others were passed over."""
        self._due: list[tuple[float, int]] = []
        """Heap of when their limits end, also of some that have left."""
        self._now_s = 0.0
        self._waited_s: dict[int, float] = {}
        """Seconds that requests taken since the last ``begin`` had been passed over."""

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
        """Marks earlier requests as passed over, each for the first time once."""
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
