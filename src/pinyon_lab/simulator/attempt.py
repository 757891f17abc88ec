"""A request, and its way through the instances that it was placed on."""

from __future__ import annotations

from dataclasses import dataclass, field

from pinyon.core.block_keys import BlockKey
from pinyon.core.request import UNKNOWN_CLASS, RequestClass
from pinyon.eviction import NO_TRAITS, Traits
from pinyon.paging import Reservation
from pinyon.placement.policy import PlacementDecision
from pinyon_lab.simulator.workload import key_of

OWN_IDS = -(1 << 100)
"""Below it, those of blocks that no trace names."""


@dataclass(eq=False, slots=True)
class Request:
    """What a client wants, and what came of it. Times are of the virtual clock."""

    number: int
    keys: tuple[BlockKey, ...]
    """Of the prompt's full blocks, and of those that were filled by what was generated."""
    tokens: int
    max_tokens: int
    """Generated: always so many."""
    arrived_s: float
    traits: Traits = NO_TRAITS
    request_class: RequestClass = UNKNOWN_CLASS
    answer: tuple[BlockKey, ...] = ()
    """Of blocks that will be filled: known where a later prompt of the trace goes on with them."""
    keeps: bool = True
    """What is computed for it may be used again."""
    attempt: Attempt | None = None
    """Of the placement in force."""
    placed_s: float = 0.0
    """When it was placed first."""
    attempts: int = 0
    exclude: set[str] = field(default_factory=set)
    entered: bool = False
    """The front knows of it."""
    queued: bool = False
    """At the front."""
    generated: int = 0
    intervals: list[tuple[float, int]] = field(default_factory=list)
    """Between tokens: how long, and how many such ones in a row."""
    last_token_s: float = 0.0
    first_token_s: float = -1.0
    """-1: there is none."""
    ended_s: float = -1.0
    hit_tokens: int = 0
    """Of the first attempt, held where it was computed."""
    fetched_tokens: int = 0
    """Likewise, held elsewhere."""
    computing_s: float = 0.0
    """Of steps with chunks of its prompt, in all attempts."""
    ends: list[str] = field(default_factory=list)
    """How it ended; exactly one when all is over."""

    def filled(self, block_tokens: int) -> int:
        """More has been computed: the blocks that are whole now have keys, of which so many are new. Where no later
        prompt names them, nobody else has those keys."""
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
    """A request at the instances of one placement, by their boots. ``number`` names its decode part, ``job`` its
    prompt."""

    request: Request
    number: int
    job: int
    decision: PlacementDecision
    prefill: str
    decode: str
    tokens: int
    """Of the prompt: the request's, and what was generated before."""
    room: Reservation | None = None
    """Of the decode instance."""
    job_room: Reservation | None = None
    """Of the prefill instance; the same one where the two are one."""
    room_number: int = 0
    """Under which it asks the prefill instance for room."""
    roomless: bool = False
    pushing: int = 0
    """Transfers to the decode instance under way."""
    pushed: int = 0
    """Leading tokens that are there or on their way."""
    computed: bool = False
    told: int = 0
    """Leading blocks that a store was told of."""
    computing_s: float = 0.0
    """Of steps with its chunks; where they pass through several nodes, its tokens' share of those of the first one."""
    drain_s: float = 0.0
    """Of its last chunk, through the further nodes."""
    over: bool = False

    @property
    def id(self) -> str:
        return f"{self.request.number}~{self.number}"

    @property
    def together(self) -> bool:
        return self.prefill == self.decode

    @property
    def names(self) -> tuple[str, str]:
        """Of both instances, whatever their boots."""
        return self.prefill.rpartition("/")[0], self.decode.rpartition("/")[0]

    def reusable(self, block_tokens: int) -> int:
        """Leading blocks: the last token is always computed."""
        return min(len(self.request.keys), (self.tokens - 1) // block_tokens)
