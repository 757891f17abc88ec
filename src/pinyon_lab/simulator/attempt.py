"""A request, and its attempts at the instances on which it was placed."""

from __future__ import annotations

from dataclasses import dataclass, field

from pinyon.core.block_keys import BlockKey
from pinyon.core.request import UNKNOWN_CLASS, RequestClass
from pinyon.eviction import NO_TRAITS, Traits
from pinyon.paging import Reservation
from pinyon.placement.policy import PlacementDecision
from pinyon_lab.simulator.workload import key_of

OWN_IDS = -(1 << 100)
"""The upper bound of ids of blocks that no trace names."""


@dataclass(eq=False, slots=True)
class SimRequest:
    """The wishes of a client and the outcome. Times are of the virtual clock."""

    number: int
    keys: tuple[BlockKey, ...]
    """The keys of the prompt's full blocks, and of the blocks that generated tokens have filled."""
    tokens: int
    max_tokens: int
    """The number of tokens to generate, always in full."""
    arrived_s: float
    traits: Traits = NO_TRAITS
    request_class: RequestClass = UNKNOWN_CLASS
    answer: tuple[BlockKey, ...] = ()
    """The keys of blocks that the answer will fill, as far as a later prompt of the trace continues with them."""
    keeps: bool = True
    """True if the request's blocks may be reused."""
    attempt: Attempt | None = None
    """The attempt of the placement in force."""
    placed_s: float = 0.0
    """The time of the first placement."""
    attempts: int = 0
    exclude: set[str] = field(default_factory=set)
    entered: bool = False
    """True once the front knows the request."""
    queued: bool = False
    """True while the request waits in the front's queue."""
    generated: int = 0
    intervals: list[tuple[float, int]] = field(default_factory=list)
    """The times between tokens: seconds, and how many of that length follow each other."""
    last_token_s: float = 0.0
    first_token_s: float = -1.0
    """The time of the first token; -1: there is none."""
    ended_s: float = -1.0
    hit_tokens: int = 0
    """The prompt tokens that the prefill instance held, in the first attempt."""
    fetched_tokens: int = 0
    """The prompt tokens that were fetched from elsewhere, in the first attempt."""
    computing_s: float = 0.0
    """The time of steps with chunks of the prompt, in all attempts."""
    ends: list[str] = field(default_factory=list)
    """The ways in which the request ended; exactly one when the run is over."""

    def filled(self, block_tokens: int) -> int:
        """Gives keys to the blocks that generated tokens have filled since the last call, and returns their number.
        Blocks that no later prompt names get keys that no other request has."""
        had, whole = len(self.keys), (self.tokens + self.generated - 1) // block_tokens
        if whole <= had or not self.keeps:
            return 0
        for index in range(had, whole):
            place = index - self.tokens // block_tokens
            own = key_of(OWN_IDS - (self.number << 20) - index)
            self.keys += (self.answer[place] if place < len(self.answer) else own,)
        return whole - had


@dataclass(eq=False, slots=True)
class Attempt:
    """A request at the instances of one placement, by boot; ``number`` names its decode part, ``job`` its prefill."""

    request: SimRequest
    number: int
    job: int
    decision: PlacementDecision
    prefill: str
    decode: str
    tokens: int
    """The length of the prompt: the request's, and the tokens that were generated before."""
    room: Reservation | None = None
    """The reserved KV blocks of the decode instance."""
    job_room: Reservation | None = None
    """The reserved KV blocks of the prefill instance; the same object as ``room`` if one instance does both."""
    room_number: int = 0
    """The number under which the attempt asks the prefill instance for KV blocks."""
    roomless: bool = False
    pushing: int = 0
    """The number of transfers to the decode instance under way."""
    pushed: int = 0
    """The leading tokens whose KV is at the decode instance or on its way there."""
    computed: bool = False
    told: int = 0
    """The number of leading blocks that a store was told of."""
    computing_s: float = 0.0
    """The attempt's share, by tokens, of the times of steps with its chunks; in a pipeline, on the first node."""
    drain_s: float = 0.0
    """The time of the last chunk in the further nodes of a pipeline."""
    over: bool = False

    @property
    def id(self) -> str:
        return f"{self.request.number}~{self.number}"

    @property
    def together(self) -> bool:
        return self.prefill == self.decode

    @property
    def names(self) -> tuple[str, str]:
        """The names of the prefill and the decode instance, without their boots."""
        return self.prefill.rpartition("/")[0], self.decode.rpartition("/")[0]

    def reusable(self, block_tokens: int) -> int:
        """Returns the number of leading blocks that can be reused: the last token is always computed."""
        return min(len(self.request.keys), (self.tokens - 1) // block_tokens)
