"""A request on its way through regions, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from pinyon.routing.layer import Layer
from pinyon.routing.target import Target
from pinyon.routing.target_policy import Routed
from pinyon_lab.simulator.attempt import Request
from pinyon_lab.simulator.regions.programs import Step, routing_keys


class Hop:
    """One push: by the load balancer of ``region`` to ``name``, an instance or another region."""

    __slots__ = ("name", "open", "region", "target")

    def __init__(self, region: str, name: str, target: Target | None) -> None:
        self.region, self.name, self.target = region, name, target
        self.open = True
        """Not known to have ended, where it was pushed from."""

    def end(self) -> None:
        if self.open:
            self.open = False
            Layer.ended(self.target)


class Call:
    """``ended`` is called once, at the client, with whether it has an answer."""

    __slots__ = (
        "ended",
        "ends",
        "epoch",
        "exclude",
        "first_s",
        "forwards",
        "front",
        "hits",
        "hops",
        "number",
        "region",
        "request",
        "routed",
        "sent_s",
        "step",
        "tries",
    )  # fmt: skip

    def __init__(
        self, number: int, region: str, user: str, step: Step, now_s: float, ended: Callable[[bool], None]
    ) -> None:
        self.number, self.region, self.step, self.sent_s = number, region, step, now_s
        self.routed = Routed(routing_keys(step.keys), user)
        self.ended = ended
        self.ends: list[str] = []
        """How it ended; exactly one when all is over."""
        self.first_s = -1.0
        """When its first token was at the client; -1: not yet."""
        self.epoch = 0
        """Grows whenever its way breaks: what was on that is of no concern any more."""
        self.tries = 0
        self.forwards = 0
        """Of all its ways: how often it went to another region."""
        self.front = ""
        """The region of the load balancer that the client sent it to; "": none."""
        self.hops: list[Hop] = []
        self.exclude: tuple[str, ...] = ()
        """What it broke at last."""
        self.hits = -1
        """Tokens of its prompt that the first instance had; -1: it was at none."""
        self.request = self._fresh(now_s)

    def _fresh(self, now_s: float) -> Request:
        step = self.step
        return Request(self.number, step.keys, step.tokens, max(1, step.output_tokens), now_s, answer=step.answer)

    def restart(self, now_s: float) -> None:
        """Nobody knows any more what was generated."""
        self.request = self._fresh(now_s)

    def forwarded_to(self, region: str) -> bool:
        """It is in that one because another one's load balancer sent it there."""
        return bool(self.hops) and self.hops[-1].name == region

    def instance(self) -> str:
        """Where it is, or was at last."""
        return self.hops[-1].name if self.hops else ""


class Served(NamedTuple):
    """One request that has ended. Times in seconds; a TTFT of -1: it has no first token."""

    number: int
    region: str
    sent_s: float
    ttft_s: float
    e2e_s: float
    tokens: int
    output_tokens: int
    hit_tokens: int
    instance: str
    forwarded: bool
    end: str
