"""A request on its way through regions, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
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


@dataclass(eq=False, slots=True)
class Call:
    """``ended`` is called once, at the client, with whether it has an answer."""

    number: int
    region: str
    user: str
    step: Step
    sent_s: float
    ended: Callable[[bool], None]
    ends: list[str] = field(default_factory=list)
    """How it ended; exactly one when all is over."""
    first_s: float = -1.0
    """When its first token was at the client; -1: not yet."""
    epoch: int = 0
    """Grows whenever its way breaks: what was on that is of no concern any more."""
    tries: int = 0
    forwards: int = 0
    """Of all its ways: how often it went to another region."""
    front: str = ""
    """The region of the load balancer that the client sent it to; "": none."""
    hops: list[Hop] = field(default_factory=list)
    exclude: tuple[str, ...] = ()
    """What it broke at last."""
    hits: int = -1
    """Tokens of its prompt that the first instance had; -1: it was at none."""
    routed: Routed = field(init=False)
    request: Request = field(init=False)

    def __post_init__(self) -> None:
        self.routed = Routed(routing_keys(self.step.keys), self.user)
        self.restart(self.sent_s)

    def restart(self, now_s: float) -> None:
        """Nobody knows any more what was generated."""
        step = self.step
        tokens, output_tokens = step.tokens, max(1, step.output_tokens)
        self.request = Request(self.number, step.keys, tokens, output_tokens, now_s, answer=step.answer)

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
