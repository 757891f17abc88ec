"""The policy "first come, first served", which does not leave room idle that the first request cannot use."""

from __future__ import annotations

from pinyon.batching.interface import WaitingLine
from pinyon.batching.policy import BatchRequest, HeldBlocks, StepSeen
from pinyon.batching.waiting_line import ByNumber, passed_over_max_s

LOOK_AHEAD = 8
"""The maximum number of requests without room that are passed over."""
PATIENCE_S = 1.0
"""The least seconds before others give way: most end soon by themselves, and giving way means recomputing."""
PASSED_MAX_S = 10.0
"""Seconds for which prompts for other instances may pass a decoded request (:func:`passed_over_max_s`)."""
PATIENT_STAYS = 2.0
"""The number of mean stays before others give way, if that is longer than :data:`PATIENCE_S`.

Where requests stay long, giving way every second would make all recompute again and again, and none would end."""
PATIENCE_MAX_S = 60.0
STAY_WEIGHT = 0.05
"""The weight of the request that ended last in the mean stay."""


class Fcfs:
    """A policy of first come, first served; see :class:`pinyon.batching.interface.BatchingPolicy`.

    A request without room holds up those behind it only if it would have room without the requests that came later. It
    waits until these end or, if that takes much longer than a usual stay, until they give way. While requests that came
    earlier take too much room, later ones may use what is left, and the request gets it back when its turn comes.

    A prompt for another instance holds up the others for a moment in any case. Otherwise, two instances would stand
    still if each were full of requests that wait for prompts on the other. For the same reason, such prompts may pass a
    decoded request without room, until others give way to it or it has waited for its limit. A request that lacks only
    a slot does not hold up prompts for other instances, which need none.

    Decoded requests may wait in another ``line`` than the order of arrival."""

    def __init__(self, holdings: HeldBlocks, line: WaitingLine | None = None) -> None:
        self._holdings = holdings
        self._decoded: WaitingLine = ByNumber() if line is None else line
        self._foreign: WaitingLine = ByNumber()
        self._running: dict[int, float | None] = {}
        """The time since which each request is here; None for prompts of other instances."""
        self._gone: dict[int, float] = {}
        """The times when requests removed since the last ``admit`` began; they have ended, or wait again."""
        self._stay_s = 0.0
        """The mean seconds for which ended requests were here."""
        self._claimant: int | None = None
        self._since_s: dict[int, float] = {}
        """The times at which waiting requests were first passed over."""

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
            # This runs at every release, so it must cost little while there is no room.
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
                # Requests behind a prompt for another instance may be waiting for prompts there. None of them ends by
                # itself then, and the mean stay says nothing.
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
        """Updates the mean stay from requests that ended. Those that gave way count at their end."""
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
