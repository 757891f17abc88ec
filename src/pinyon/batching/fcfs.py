"""First come, first served, but room that the first request cannot use is not left idle."""

from __future__ import annotations

from pinyon.batching.interface import WaitingLine
from pinyon.batching.policy import BatchRequest, HeldBlocks, StepSeen
from pinyon.batching.waiting_line import ByNumber, passed_over_max_s

LOOK_AHEAD = 8
"""Requests without room that are passed over, at most."""
PATIENCE_S = 1.0
"""The least seconds before others give way: most end soon by themselves, and giving way means computing again."""
PASSED_MAX_S = 10.0
"""Seconds for which prompts for other instances may go before a decoded request (:func:`passed_over_max_s`)."""
PATIENT_STAYS = 2.0
"""Mean stays before others give way, if that is longer than :data:`PATIENCE_S`.

Where requests stay long, giving way every second would have all computed again and again, and none would end."""
PATIENCE_MAX_S = 60.0
STAY_WEIGHT = 0.05
"""Weight of the last request in the mean stay."""


class Fcfs:
    """A policy of first come, first served; see :class:`pinyon.batching.interface.BatchingPolicy`.

    A request without room holds up those behind it only if it would have room without those that came after it. Those
    are to end, or, if that takes much longer than a request does, to give way. As long as what came before it takes too
    much, others may have what is left; it gets that back when its turn comes.

    A prompt for another instance holds up the others for a moment in any case. Otherwise, two instances full of
    requests that wait for each other's prompts would stand still. For the same reason, such prompts pass a decoded
    request until others are to give way for it, or it has waited for its limit. A request that lacks only a slot holds
    up none that needs none.

    Decoded requests may stand in another ``line`` than that in which they came."""

    def __init__(self, holdings: HeldBlocks, line: WaitingLine | None = None) -> None:
        self._holdings = holdings
        self._decoded: WaitingLine = ByNumber() if line is None else line
        self._foreign: WaitingLine = ByNumber()
        self._running: dict[int, float | None] = {}
        """Times since which decoded requests are here; None for prompts of other instances."""
        self._gone: dict[int, float] = {}
        """Times of requests removed since the last ``admit``: they have ended, or wait again."""
        self._stay_s = 0.0
        """Mean seconds that requests which ended were here."""
        self._claimant: int | None = None
        self._since_s: dict[int, float] = {}
        """Times at which waiting requests were passed over first."""

    @property
    def waiting(self) -> int:
        return len(self._decoded) + len(self._foreign)

    @property
    def running(self) -> int:
        return len(self._running)

    def enqueue(self, request: BatchRequest) -> None:
        number = request.number
        if number in self._decoded or number in self._foreign or number in self._running:
            raise ValueError(f"request {number} is enqueued already")
        self._line(request).add(request, again=number in self._gone)

    def adopt(self, request: BatchRequest, now_s: float) -> None:
        self._running[request.number] = now_s if request.decodes else None
        if request.decodes:
            self._decoded.adopt(request)

    def _line(self, request: BatchRequest) -> WaitingLine:
        return self._decoded if request.decodes else self._foreign

    def admit(self, slots: int, room_blocks: int, now_s: float) -> list[int]:
        self._claimant = None
        self._measure(now_s)
        self._decoded.begin(now_s, room_blocks)
        chosen = self._choose(slots, room_blocks, now_s)
        self._decoded.end()
        return chosen

    def _choose(self, slots: int, room_blocks: int, now_s: float) -> list[int]:
        patience_s = min(max(PATIENCE_S, PATIENT_STAYS * self._stay_s), PATIENCE_MAX_S)
        chosen: list[int] = []
        passed = [0, 0]  # per line: prompts for other instances, decoded requests
        while passed[0] + passed[1] < LOOK_AHEAD and (request := self._next(slots, passed)) is not None:
            number = request.number
            # This runs at every release: it must cost little while there is no room.
            missing = request.blocks - request.reusable
            behind = self._holdings.behind(number) if missing > room_blocks else 0
            if missing <= room_blocks + behind:
                missing = self._holdings.need(request).missing
            if missing <= room_blocks:
                room_blocks -= missing
                self._line(request).take(number, room_blocks)
                slots -= request.decodes
                self._since_s.pop(number, None)
                self._running[number] = self._gone.pop(number, now_s) if request.decodes else None
                chosen.append(number)
                continue
            passed[request.decodes] += 1
            waited_s = now_s - self._since_s.setdefault(number, now_s)
            if missing <= room_blocks + (behind or self._holdings.behind(number)):
                # Requests behind a prompt for another instance may wait in turn: then none ends by itself, and how long
                # they stay says nothing.
                long = waited_s >= (patience_s if request.decodes else PATIENCE_S)
                if long and self._line(request).claims(number):
                    self._claimant = number
                    break
                if request.decodes and waited_s < passed_over_max_s(request, PASSED_MAX_S):
                    slots = 0  # no other decoded request; a prompt for another instance gives its room back soon
                    continue
                break
            if not request.decodes and waited_s < PATIENCE_S:
                break
        return chosen

    def _measure(self, now_s: float) -> None:
        """Updates the mean stay by requests that ended. One that gave way waits again, and counts at its end."""
        for number in [number for number in self._gone if number not in self._decoded]:
            stay_s = now_s - self._gone.pop(number)
            self._stay_s += (STAY_WEIGHT if self._stay_s else 1.0) * (stay_s - self._stay_s)

    def _next(self, slots: int, passed: list[int]) -> BatchRequest | None:
        """Returns the first request behind those that were passed over."""
        foreign = self._foreign.at(passed[0])
        decoded = self._decoded.at(passed[1]) if slots > 0 else None
        if foreign is None or decoded is None:
            return foreign or decoded
        return foreign if foreign.number < decoded.number else decoded

    def claimant(self) -> int | None:
        return self._claimant

    def passed_over_s(self, number: int) -> float:
        return self._decoded.passed_over_s(number)

    def gave_way(self, number: int) -> bool:
        return number in self._gone and number in self._decoded

    def remove(self, number: int) -> bool:
        for line in (self._decoded, self._foreign):
            if line.remove(number):
                self._since_s.pop(number, None)
                self._gone.pop(number, None)
                return True
        if number not in self._running:
            return False
        began_s = self._running.pop(number)
        if began_s is not None:
            self._gone[number] = began_s
            self._decoded.ended(number)
        return True

    def observe(self, step: StepSeen) -> None:
        """Ignores the step: this policy does not depend on it."""
