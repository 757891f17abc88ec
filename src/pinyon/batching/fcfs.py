"""First come, first served, and room that the first cannot use is not left idle."""

from __future__ import annotations

from pinyon.batching.interface import WaitingLine
from pinyon.batching.policy import BatchRequest, Holdings, StepSeen
from pinyon.batching.waiting_line import ByNumber, passed_over_max_s

LOOK_AHEAD = 8
"""Requests without room that are looked behind."""
PATIENCE_S = 1.0
"""Before others give way, at least: most end soon by themselves, and who gives way is computed again."""
PASSED_MAX_S = 10.0
"""For so long prompts for other instances may take room before one that waits for it: see :func:`passed_over_max_s`."""
PATIENT_STAYS = 2.0
"""Or as long as so many requests are decoded one after the other. Where that takes long, giving way every second would
have everybody computed again and again, and nobody would end."""
PATIENCE_MAX_S = 60.0
STAY_WEIGHT = 0.05
"""Of the last one, in the mean time that a request is here."""


class Fcfs:
    """See :class:`pinyon.batching.interface.BatchingPolicy`.

    A request without room keeps those behind it waiting only if it would have room without others that came after it:
    they are to end, or, if that takes much longer than a request does, to give way. As long as what came before it
    takes too much, others may have what is left; it gets that back when its turn comes. A prompt for another instance
    keeps the others waiting for a moment in any case: two instances full of requests that wait for each other's prompts
    would stand still. For the same reason such prompts pass one that is decoded, until others are to give way for it,
    or it has waited for its limit. Who lacks only a slot keeps nobody waiting who needs none.

    Those that are decoded may stand in another ``line`` than that in which they came.
    """

    def __init__(self, holdings: Holdings, line: WaitingLine | None = None) -> None:
        self._holdings = holdings
        self._decoded: WaitingLine = ByNumber() if line is None else line
        self._foreign: WaitingLine = ByNumber()
        self._running: dict[int, float | None] = {}
        """Since when those that are decoded are here; None: the others."""
        self._gone: dict[int, float] = {}
        """Likewise, of those that were removed since the last ``admit``: they have ended, or wait again."""
        self._stay_s = 0.0
        """Mean time that a request is here, of those that ended."""
        self._claimant: int | None = None
        self._since_s: dict[int, float] = {}
        """When those that wait were passed over for the first time."""

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
        passed = [0, 0]  # of those for other instances, and of those that are decoded: the first ones of each line
        while passed[0] + passed[1] < LOOK_AHEAD and (request := self._next(slots, passed)) is not None:
            number = request.number
            # Asked at every release: it must cost little while there is no room.
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
                # For a prompt of another instance those behind it may wait in turn: then nobody ends by himself, and
                # how long they stay says nothing.
                long = waited_s >= (patience_s if request.decodes else PATIENCE_S)
                if long and self._line(request).claims(number):
                    self._claimant = number
                    break
                if request.decodes and waited_s < passed_over_max_s(request, PASSED_MAX_S):
                    slots = 0  # nobody else who needs one; a prompt for another instance gives its room back soon
                    continue
                break
            if not request.decodes and waited_s < PATIENCE_S:
                break
        return chosen

    def _measure(self, now_s: float) -> None:
        """How long those that have ended were here. Who gave way waits again, and is not counted before its end."""
        for number in [number for number in self._gone if number not in self._decoded]:
            stay_s = now_s - self._gone.pop(number)
            self._stay_s += (STAY_WEIGHT if self._stay_s else 1.0) * (stay_s - self._stay_s)

    def _next(self, slots: int, passed: list[int]) -> BatchRequest | None:
        """The first one behind those that were passed over."""
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
        """It does not depend on that."""
