"""The queue in front of everything: fair between tenants, first come, first served within one, with a bound.

Requests are numbers, so what it was told can be written down and told again. Two rules keep one tenant from being in
the way of the others:

- **Who goes next**: start-time fair queueing (Goyal et al., SIGCOMM '96), which is the virtual token counter of
  "Fairness in serving large language models" (OSDI '24) charged when a request gets its slot. A tenant that begins to
  wait starts where the others are, so nothing can be saved up; while nobody waits, nothing is counted.
- **Who is refused**: when all places are taken, a tenant that holds at least two fewer than the longest one takes over
  that one's newest place. One tenant alone may fill the queue; it does not keep others out.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict

from pinyon.core.errors import ResourceExhausted

__all__ = ["RequestQueue"]

RETRY_AFTER_MIN_S = 1.0
RETRY_AFTER_MAX_S = 30.0
TENANTS_MAX = 8192
"""Tenants without a place whose share is remembered."""
_SMOOTHING = 0.1


class _Tenant:
    """The places of one tenant, and where its next request starts in virtual time (tokens)."""

    __slots__ = ("name", "reserved", "start", "turn", "waiting")

    def __init__(self, name: str) -> None:
        self.name = name
        self.reserved: dict[int, None] = {}
        self.waiting: OrderedDict[int, int] = OrderedDict()  # number → tokens; a dict is slow to take from the front of
        self.start = 0
        self.turn = 0
        """Which entry of the heap is its present one."""

    def __len__(self) -> int:
        return len(self.reserved) + len(self.waiting)


class RequestQueue:
    """``slots`` requests are in flight at once, ``limit`` more have a place: they wait, or are being prepared.

    ``reserve`` → ``enter`` → (wait for ``leave`` of another) → ``leave``; ``cancel`` gives a place back before that.
    """

    def __init__(self, slots: int, limit: int) -> None:
        self._slots = slots
        self._limit = limit
        self._places: dict[int, _Tenant] = {}
        self._tenants: dict[str, _Tenant] = {}
        self._lengths = _Lengths()
        self._turns: list[tuple[int, int, _Tenant]] = []  # a heap of (start, turn); one valid entry per waiting tenant
        self._last_turn = 0
        self._now_tokens = 0
        self._finished: OrderedDict[str, int] = OrderedDict()
        """Where tenants that do not wait would go on, in virtual time; the oldest first."""
        self._left_s: float | None = None
        """When the last slot was handed on, if somebody still waited then."""
        self._gap_s = 0.0
        """Mean time between two slots that are handed on; 0: not known."""
        self.in_flight = 0
        self.queued = 0
        """Requests that wait for a slot."""

    def reserve(self, number: int, tenant: str, now_s: float) -> int | None:
        """Take a place. Returns the number of the request that lost its place for it, if one did.

        Raises :class:`ResourceExhausted` when the queue is full. No two that have a place have the same number.
        """
        if number in self._places:
            raise ValueError(f"request {number} has a place already")
        held, out = self._tenants.get(tenant), None
        self.check(tenant)
        if self._is_full:
            longest = self._lengths.one()
            out = next(reversed(longest.reserved or longest.waiting))
            self._remove(out)
        if held is None:
            held = self._tenants[tenant] = _Tenant(tenant)
        held.reserved[number] = None
        self._places[number] = held
        self._lengths.moved(held, len(held) - 1, len(held))
        return out

    def check(self, tenant: str) -> None:
        """Raises as :meth:`reserve` would now."""
        if self._is_full:
            held = self._tenants.get(tenant)
            if self._lengths.longest < (len(held) if held is not None else 0) + 2:
                raise self.full()

    @property
    def _is_full(self) -> bool:
        return self.in_flight + len(self._places) >= self._slots + self._limit

    @property
    def has_spare(self) -> bool:
        """A slot is free, and a place that nobody would have to give up for it."""
        return self.in_flight < self._slots and not self._is_full

    def full(self) -> ResourceExhausted:
        """What those are told who get no place, or lose theirs."""
        places = len(self._places)
        wait_s = min(RETRY_AFTER_MAX_S, max(RETRY_AFTER_MIN_S, places * self._gap_s))
        return ResourceExhausted(
            f"The queue is full ({self._limit} requests). Please try again later.", retry_after_s=wait_s
        )

    def enter(self, number: int, tokens: int, now_s: float) -> bool:
        """The request of this place is ready: whether it has a slot now; otherwise it waits.

        ``tokens`` is what it may take, prompt and generation: its share is measured by that.
        """
        tenant = self._places.get(number)
        if tenant is None or number not in tenant.reserved:
            raise ValueError(f"request {number} has no reserved place")
        if self.in_flight < self._slots:  # then nobody waits: a slot that is left goes to one who does
            self._remove(number)
            self.in_flight += 1
            return True
        del tenant.reserved[number]
        tenant.waiting[number] = max(1, tokens)
        self.queued += 1
        if len(tenant.waiting) == 1:
            tenant.start = max(self._now_tokens, self._finished.pop(tenant.name, 0))
            self._line_up(tenant)
        return False

    def leave(self, now_s: float) -> int | None:
        """A request gives its slot back: the number of the one that has it now, if one waited."""
        if not self.in_flight:
            raise ValueError("nobody has a slot")
        if not self.queued:
            self.in_flight -= 1
            return None
        self._measure(now_s)
        tenant = self._next()
        number = next(iter(tenant.waiting))
        self._now_tokens = tenant.start
        tenant.start += tenant.waiting[number]
        self._remove(number)
        if tenant.waiting:
            self._line_up(tenant)
        return number

    def cancel(self, number: int, now_s: float) -> bool:
        """Whether the request still had a place without a slot, and is gone; with a slot, it must :meth:`leave`."""
        if number not in self._places:
            return False
        self._remove(number)
        return True

    # -- the parts

    def _remove(self, number: int) -> None:
        tenant = self._places.pop(number)
        if number in tenant.reserved:
            del tenant.reserved[number]
        else:
            del tenant.waiting[number]
            self.queued -= 1
            if not self.queued:  # everyone starts equal when there is a queue again
                self._turns.clear()
                self._finished.clear()
                self._now_tokens, self._left_s = 0, None
            elif not tenant.waiting:  # also if it took the last one back: it has had its turns
                self._finished[tenant.name] = tenant.start
                if len(self._finished) > TENANTS_MAX:
                    self._finished.popitem(last=False)
        self._lengths.moved(tenant, len(tenant) + 1, len(tenant))
        if not tenant:
            del self._tenants[tenant.name]

    def _line_up(self, tenant: _Tenant) -> None:
        self._last_turn = tenant.turn = self._last_turn + 1
        if len(self._turns) > 2 * len(self._tenants) + 64:  # of tenants whose requests were cancelled
            self._turns = [entry for entry in self._turns if self._valid(entry)]
            heapq.heapify(self._turns)
        heapq.heappush(self._turns, (tenant.start, tenant.turn, tenant))

    def _next(self) -> _Tenant:
        while not self._valid(entry := heapq.heappop(self._turns)):
            pass
        return entry[2]

    @staticmethod
    def _valid(entry: tuple[int, int, _Tenant]) -> bool:
        _, turn, tenant = entry
        return turn == tenant.turn and bool(tenant.waiting)

    def _measure(self, now_s: float) -> None:
        if self._left_s is not None:
            gap_s = max(0.0, now_s - self._left_s)
            self._gap_s += _SMOOTHING * (gap_s - self._gap_s) if self._gap_s else gap_s
        self._left_s = now_s

    def check_integrity(self) -> None:
        """Raises :class:`AssertionError` if a bound is broken or somebody waits beside a free slot."""
        assert 0 <= self.in_flight <= self._slots, f"{self.in_flight} of {self._slots} slots are taken"
        held = self.in_flight + len(self._places)
        assert held <= self._slots + self._limit, f"{held} have a place, at most {self._slots + self._limit} may"
        assert not self.queued or self.in_flight == self._slots, "somebody waits beside a free slot"
        tenants = self._tenants.values()
        assert sum(map(len, tenants)) == len(self._places), "places and tenants differ"
        assert all(map(len, tenants)), "a tenant without a place is kept"
        assert sum(len(tenant.waiting) for tenant in tenants) == self.queued, "those who wait are miscounted"
        assert self._lengths.longest == max(map(len, tenants), default=0), "the longest queue is another one"
        lined_up = [entry[2] for entry in self._turns if self._valid(entry)]
        assert len(lined_up) == len(set(lined_up)) == sum(1 for tenant in tenants if tenant.waiting), "a turn is lost"


class _Lengths:
    """Tenants by the number of their places, so that the longest queue is found without looking at all."""

    def __init__(self) -> None:
        self._tenants: dict[int, dict[_Tenant, None]] = {}
        self.longest = 0

    def one(self) -> _Tenant:
        """Of the longest ones, the one that has been that for longest."""
        return next(iter(self._tenants[self.longest]))

    def moved(self, tenant: _Tenant, before: int, after: int) -> None:
        """By one place."""
        if before:
            left = self._tenants[before]
            del left[tenant]
            if not left:
                del self._tenants[before]
        if after:
            self._tenants.setdefault(after, {})[tenant] = None
        if after > self.longest or (before == self.longest and before not in self._tenants):
            self.longest = after
