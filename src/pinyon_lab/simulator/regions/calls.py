"""A request on its way through regions, and its outcome."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from pinyon.routing.layer import Layer
from pinyon.routing.target import Routed, Target
from pinyon_lab.simulator.attempt import SimRequest
from pinyon_lab.simulator.regions.programs import ProgramStep, routing_keys


@dataclass(eq=False, slots=True)
class Hop:
    """A push of a request from the load balancer of ``region`` to ``name``, an instance or another region."""

    region: str
    name: str
    target: Target | None
    open: bool = True
    """True until the end of the request is known where it was pushed from."""

    def end(self) -> None:
        if self.open:
            self.open = False
            Layer.ended(self.target)


@dataclass(eq=False, slots=True)
class ClientCall:
    """A client's request. ``ended`` is called once, at the client, with whether the request was answered."""

    number: int
    region: str
    user: str
    step: ProgramStep
    sent_s: float
    ended: Callable[[bool], None]
    ends: list[str] = field(default_factory=list)
    """The ways in which the call ended; exactly one when the run is over."""
    first_s: float = -1.0
    """The time at which the first token reached the client; -1: not yet."""
    forwards: int = 0
    """The number of times that the call went to another region, on all its ways."""
    hops: list[Hop] = field(default_factory=list)
    exclude: tuple[str, ...] = ()
    """Instances and regions to which the call must not go."""
    hits: int = -1
    """The prompt tokens that the first instance held; -1: the call reached no instance."""
    routed: Routed = field(init=False)
    request: SimRequest = field(init=False)

    def __post_init__(self) -> None:
        self.routed = Routed(routing_keys(self.step.keys), self.user)
        step, output_tokens = self.step, max(1, self.step.output_tokens)
        self.request = SimRequest(self.number, step.keys, step.tokens, output_tokens, self.sent_s, answer=step.answer)

    def forwarded_to(self, region: str) -> bool:
        """Returns whether the call is in ``region`` because another region's load balancer sent it there."""
        return bool(self.hops) and self.hops[-1].name == region

    def instance(self) -> str:
        """Returns the name of the instance where the call is, or was last; "": none."""
        return self.hops[-1].name if self.hops else ""


class CallOutcome(NamedTuple):
    """The outcome of one request. Times in seconds; a TTFT of -1: there is no first token."""

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
