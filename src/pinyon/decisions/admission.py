"""Admission to KV memory: a batching policy chooses among waiting requests, and the blocks of the chosen are reserved.

Waiting requests do not hold up running ones: the blocks of these grow (:func:`pinyon.decisions.make_room`), and some
blocks are left to them when others are admitted.

Whatever returns blocks may make room for a request: :meth:`Admission.admit` says for which."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from pinyon.batching import (
    BATCHING_POLICIES,
    BatchingPolicy,
    BatchRequest,
    BlockNeed,
    DecodedPrefixes,
    HeldBlocks,
    StepSeen,
)
from pinyon.paging import BlockPool, Reservation, Reservations

RECENT = 16
"""The number of last admitted requests whose needs predict the next one's. After so many more, the first request with a
prefix that all share no longer counts."""
USUAL_WEIGHT = 0.125
"""The weight of the request that ended last in the mean growth."""


class BlockGrant(NamedTuple):
    """The blocks that the request with this number holds from now on."""

    number: int
    reservation: Reservation
    passed_over_s: float
    """Seconds for which later requests went before this one."""


class Admission:
    """The requests that wait for KV memory, and those that have it. ``slots``: the maximum number of admitted requests
    that are decoded here. ``headroom``: blocks left to running requests."""

    def __init__(
        self,
        policy: Callable[[HeldBlocks], BatchingPolicy],
        pool: BlockPool,
        reservations: Reservations,
        slots: int,
        headroom: int,
    ) -> None:
        self._pool = pool
        self._reservations = reservations
        self._slots = slots
        self._headroom = headroom
        self._policy = policy(self)
        self._waiting: dict[int, BatchRequest] = {}
        self._wanted: dict[int, int] = {}
        """The number of leading blocks that are kept from eviction for each waiting request."""
        self._new: BatchRequest | None = None
        """A request that waits alone, if nothing was asked of the pool since it came. Its blocks are not protected yet,
        as it mostly gets them at once."""
        self._decoded: set[int] = set()
        """Admitted requests that take a slot."""
        self._requests: dict[int, BatchRequest] = {}
        """The admitted requests, as they were when admitted."""
        self._blocks: dict[int, int] = {}
        """Blocks of each admitted request."""
        self._grown = 0
        """The total of blocks that the admitted requests have received since their admission."""
        self._anew: deque[int] = deque(maxlen=RECENT)
        """The blocks that the admission of each of the last admitted requests took from others."""
        self._usual_growth = 0.0
        """The mean growth, in blocks, of the requests that ended last."""
        self.waiting_prompts = 0
        """Waiting prompts that are computed for other instances."""
        self._last = -1
        """A bound: no admitted request has a larger number."""
        self.prefixes = DecodedPrefixes()
        """Prefixes of the requests that take a slot."""

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def admitted(self) -> int:
        """Requests that were admitted and have not ended."""
        return self._policy.running

    @property
    def decoded(self) -> int:
        """Admitted requests that are decoded here, now or later: each has a slot."""
        return len(self._decoded)

    @property
    def free_slots(self) -> int:
        return self._slots - len(self._decoded)

    @property
    def next_blocks(self) -> float:
        """The mean number of blocks that others lose if one more request is admitted; 0 if none ever was. It is the
        mean that the last requests took on admission, without blocks that were in use, plus the mean growth of the
        requests that are here. While none is here, the growth is that of the requests that ended last."""
        if not self._anew:
            return 0.0
        admitted = len(self._blocks)
        growth = self._grown / admitted if admitted else self._usual_growth
        return sum(self._anew) / len(self._anew) + growth

    def enqueue(self, request: BatchRequest) -> None:
        """Adds a waiting request. Raises ``ValueError`` if its number is known or the pool is too small."""
        if request.blocks > self._pool.total:
            raise ValueError(f"{request.blocks} blocks are more than the pool's {self._pool.total}")
        self._policy.enqueue(request)
        self._spare_new()
        alone = not self._waiting
        self._waiting[request.number] = request
        self.waiting_prompts += not request.decodes
        self._wanted[request.number], self._new = 0, request
        if not alone:
            self._spare_new()

    def withdraw(self, number: int) -> None:
        """Removes a waiting request. Raises ``KeyError`` if it does not wait."""
        request = self._waiting.pop(number)
        self.waiting_prompts -= not request.decodes
        self._policy.remove(number)
        self._unwant(request)

    def end(self, number: int) -> None:
        """Removes an admitted request whose blocks were given back or never will be. Raises ``KeyError`` for others."""
        if number in self._waiting or not self._policy.remove(number):
            raise KeyError(number)
        self._decoded.discard(number)
        self.prefixes.remove(number)
        grown = self._blocks.pop(number) - self._requests.pop(number).blocks
        self._grown -= grown
        self._usual_growth += USUAL_WEIGHT * (grown - self._usual_growth)

    def grow(self, number: int, count: int, now_s: float) -> list[int] | None:
        """Returns ``count`` more blocks for an admitted request; None without room. Raises ``KeyError`` for others."""
        held = self._blocks[number]
        self._spare_new()
        blocks = self._reservations.grow(count, now_s)
        if blocks is not None:
            self._blocks[number] = held + count
            self._grown += count
        return blocks

    def admit(self, now_s: float) -> list[BlockGrant]:
        """Admits waiting requests for which there is room now, and returns their grants in order."""
        grants: list[BlockGrant] = []
        while self._waiting:
            chosen = self._policy.admit(self.free_slots, self.room_blocks, now_s)
            if not chosen:
                break
            before = len(grants)
            for number in chosen:
                if (grant := self._grant(number, now_s)) is None:
                    break
                grants.append(grant)
            granted = len(grants) - before
            if not granted:
                raise RuntimeError("the batching policy admitted somebody for whom there is no room")
            # The first ones had blocks evicted which these were to reuse, so these wait again.
            for number in chosen[granted:]:
                self._policy.remove(number)
                self._policy.enqueue(self._waiting[number])
        self._spare_new()
        return grants

    def _grant(self, number: int, now_s: float) -> BlockGrant | None:
        """Reserves the blocks of a waiting request. Returns None without room: it waits on."""
        request = self._waiting[number]
        used = self._pool.used
        reservation = self._reservations.reserve(
            request.block_keys[: request.reusable], request.blocks, now_s, request.traits, computes=request.computes
        )
        if reservation is None:
            return None
        del self._waiting[number]
        self.waiting_prompts -= not request.decodes
        self._unwant(request)  # the request holds the blocks itself now
        if request.decodes:
            self._decoded.add(number)
            self.prefixes.add(number, request.block_keys[: request.reusable])
        self._blocks[number] = request.blocks
        self._anew.append(self._pool.used - used)
        self._requests[number] = request
        self._last = max(self._last, number) if len(self._blocks) > 1 else number
        return BlockGrant(number, reservation, self._policy.passed_over_s(number))

    def _spare_new(self) -> None:
        if self._new is not None:
            request, self._new = self._new, None
            self._wanted[request.number] = self._pool.want(request.block_keys[: request.reusable])

    def _unwant(self, request: BatchRequest) -> None:
        if self._new is request:
            self._new = None
        self._pool.unwant(request.block_keys[: self._wanted.pop(request.number)])

    @property
    def room_blocks(self) -> int:
        """The number of blocks that new requests may take."""
        pool = self._pool
        return max(0, pool.free + pool.cached - (self._headroom if pool.used else 0))

    def room_for(self, blocks: int) -> int:
        """Returns how many requests of ``blocks`` uncached blocks each would have room if they entered now. The first
        one to enter an unused pool leaves no headroom; those behind it do."""
        pool = self._pool
        free = pool.free + pool.cached
        return max((free - self._headroom) // blocks, min(1, free // blocks) if not pool.used else 0)

    def switch(self, choice: str, now_s: float) -> None:
        """Switches to another policy, which gets all waiting requests in order of arrival and all admitted ones.
        O(their keys). Raises ``ValueError`` for an unknown policy."""
        policy = BATCHING_POLICIES.make(choice).policy(self)
        for number in sorted(self._requests):
            policy.adopt(self._requests[number], now_s)
        for number in sorted(self._waiting):
            request = self._waiting[number]
            if self._policy.gave_way(number):  # the new policy has to know that, too
                policy.adopt(request, now_s)
                policy.remove(number)
            policy.enqueue(request)
        self._policy = policy

    def observe(self, step: StepSeen) -> None:
        """Tells the policy of a step: see :meth:`BatchingPolicy.observe`."""
        self._policy.observe(step)

    # -- who gives way to a waiting request

    def claimant(self) -> int | None:
        """Returns the policy's claimant, if it still waits: see :meth:`BatchingPolicy.claimant`."""
        number = self._policy.claimant()
        return number if number in self._waiting else None

    def lacks(self, number: int) -> int:
        """Returns the blocks that a waiting request lacks; 0: it may enter. Raises ``KeyError`` if it does not wait."""
        return max(0, self.need(self._waiting[number]).missing - self.room_blocks)

    def held(self, numbers: Iterable[int]) -> int:
        return sum(self._blocks[number] for number in numbers)

    # -- what the policy looks at

    def need(self, request: BatchRequest) -> BlockNeed:
        """Returns the request's need: see :class:`pinyon.batching.policy.HeldBlocks`."""
        keys = request.block_keys[: request.reusable]
        return BlockNeed(*self._pool.need(keys, request.blocks, promised=request.computes))

    def behind(self, number: int) -> int:
        """Returns the blocks of requests admitted after this one: see :class:`pinyon.batching.policy.HeldBlocks`."""
        if number > self._last:  # usual for waiting requests, and asked at every release
            return 0
        return sum([blocks for other, blocks in self._blocks.items() if other > number])

    def check_integrity(self) -> None:
        """Raises ``RuntimeError`` if the books, apart from the pool's, do not balance. O(requests): for tests."""
        if self._policy.waiting != len(self._waiting) or self._wanted.keys() != self._waiting.keys():
            raise RuntimeError("admission: the policy's line, or the spared blocks, are not of those that wait")
        if len(self.prefixes) != len(self._decoded):
            raise RuntimeError("admission: the requests with known prefixes are not the decoded ones")
        if self._grown != sum([held - self._requests[number].blocks for number, held in self._blocks.items()]):
            raise RuntimeError("admission: the total growth in blocks is not the sum of each request's growth")
        if self.waiting_prompts != sum([not request.decodes for request in self._waiting.values()]):
            raise RuntimeError("admission: the number of waiting prompts is wrong")
        if len(self._decoded) > min(self._slots, self._policy.running):
            raise RuntimeError("admission: more requests are decoded than there are slots or admitted requests")
