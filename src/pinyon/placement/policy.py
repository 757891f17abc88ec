"""The values that a placement policy is asked with and answers with: requests, pools, decisions and moves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import inf
from typing import Final

from librt.vecs import vec
from mypy_extensions import i64

from pinyon.core.layout import KvLayout
from pinyon.core.request import UNKNOWN_CLASS, RequestClass
from pinyon.placement.considered import CostColumns
from pinyon.placement.instances import InstanceState, Sources
from pinyon.placement.prefix_match import PrefixMatch

ON_HOST_MAX: Final = 64
"""The maximum number of instances of one host that are told apart from those elsewhere."""
OWN_TIME_PATIENCE: Final = 0.25
"""The wait allowed where a prompt alone takes longer than the default TTFT limit, as a share of that time."""


# Not frozen: a frozen dataclass takes five times as long to make.
@dataclass(slots=True, unsafe_hash=True)
class PlacementRequest:
    """One request to place; never changed. ``block_keys`` are packed; the tenant is in the keys already (their chain's
    namespace).

    ``max_tokens`` 0 is unknown. An SLO of 0 is off. ``exclude`` names instances not to use in any way.
    ``ttft_slo_named``: the limit is the request's own, and kept to the letter. Else it is the conductor's default,
    which is there against load and refuses no request for the length of its prompt."""

    request_id: str
    model: str
    prompt_tokens: int
    block_keys: bytes = b""
    max_tokens: int = 0
    ttft_slo_s: float = 0.0
    tbt_slo_s: float = 0.0
    exclude: frozenset[str] = frozenset()
    no_reuse: bool = False
    request_class: RequestClass = UNKNOWN_CLASS
    ttft_slo_named: bool = True

    def ttft_limit_s(self, own_s: float) -> float:
        """Returns the longest acceptable TTFT of a request whose prompt alone takes ``own_s`` to move and compute."""
        if self.ttft_slo_s <= 0:
            return inf
        if self.ttft_slo_named:
            return self.ttft_slo_s
        return max(self.ttft_slo_s, own_s * (1 + OWN_TIME_PATIENCE))

    def reusable_blocks(self, block_tokens: int) -> int:
        """Returns how many leading blocks may be reused: the last token must be computed, its logits give the next."""
        return 0 if self.no_reuse else (self.prompt_tokens - 1) // block_tokens

    def keys_max(self, block_tokens: int) -> int:
        """Returns how many keys there may be: only full blocks of the prompt have keys."""
        return self.prompt_tokens // block_tokens

    def reused_tokens(self, blocks: int, block_tokens: int) -> int:
        """Returns how many tokens of the prompt are reused with so many leading blocks."""
        return blocks * block_tokens


class Fetch:
    """Prompt blocks ``[first_block, first_block + block_count)``, all from one source; never changed."""

    __slots__ = ("block_count", "first_block", "source")

    # written out, as PlacementDecision is
    def __init__(self, source: InstanceState, first_block: int, block_count: int) -> None:
        self.source, self.first_block, self.block_count = source, first_block, block_count

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Fetch):
            return NotImplemented
        mine, theirs = (self.first_block, self.block_count), (other.first_block, other.block_count)
        return self.source is other.source and mine == theirs

    def __hash__(self) -> int:
        return hash((self.source, self.first_block, self.block_count))


class PlacementDecision:
    """The instances where a request runs, and the times that were predicted for it; not changed once it is made.

    ``local_blocks``: leading blocks the prefill instance is believed to hold when it begins: now, or computed for
    others by then. ``fetches``: what it fetches, in block order, from those on without a gap. ``shared_blocks``:
    leading blocks of the prompt that are there for others where it is decoded, and that a step reads once for all.

    Seconds: ``queue_s`` until its turn comes, ``transfer_s`` to fetch, ``prefill_s`` to compute, ``tbt_s`` between
    tokens. ``room_s``: the wait for KV blocks, first those of the decode instance, then those of a prefill instance
    elsewhere."""

    __slots__ = (
        *("alternate", "considered", "decode", "doubts_transfer", "drain_s", "fetches", "local_blocks", "policy"),
        *("prefill", "prefill_s", "queue_s", "room_s", "shared_blocks", "tbt_s", "transfer_s", "trial"),
    )

    # written out: one is made for each request, and what ``dataclass`` makes is never compiled
    def __init__(
        self,
        prefill: InstanceState,
        decode: InstanceState,
        local_blocks: int = 0,
        fetches: tuple[Fetch, ...] = (),
        policy: str = "",
        queue_s: float = 0.0,
        transfer_s: float = 0.0,
        prefill_s: float = 0.0,
        tbt_s: float = 0.0,
        shared_blocks: int = 0,
    ) -> None:
        self.prefill, self.decode, self.local_blocks, self.fetches = prefill, decode, local_blocks, fetches
        self.policy, self.queue_s, self.transfer_s, self.prefill_s = policy, queue_s, transfer_s, prefill_s
        self.tbt_s, self.shared_blocks = tbt_s, shared_blocks
        self.alternate: InstanceState | None = None
        """An alternative to the prefill instance: the second one of a pair (DualMap §3.2)."""
        self.doubts_transfer = False
        """True if it fetches although computing seems faster by what is known of the reader, to learn whether it is."""
        self.trial: tuple[float, float] | None = None
        """The value that a learning policy tried with this request, and the seconds by which the outcome is judged."""
        self.considered: CostColumns | None = None
        """The policy's findings, for explanations; None: it keeps none."""
        self.drain_s = 0.0
        """Seconds from when the first node of a pipeline has computed its part of the prompt until all have; others
        wait for ``prefill_s`` only. Policies leave it out, as the instances they choose from are alike in it."""
        waits_ms = decode.load.room_wait_ms
        self.room_s = (waits_ms if prefill is decode else waits_ms + prefill.load.room_wait_ms) * 1e-3

    def with_drain(self, request: PlacementRequest, pool: Pool) -> PlacementDecision:
        """Returns the decision, with the drain time that a pipeline of nodes needs."""
        if self.prefill.info.stages > 1:
            reused = request.reused_tokens(self.reused_blocks, pool.layout.block_tokens)
            self.drain_s = self.prefill.drain_s(request.prompt_tokens, reused, self.queue_s)
        return self

    @property
    def ttft_s(self) -> float:
        return self.room_s + self.transfer_s + self.queue_s + self.prefill_s + self.drain_s

    @property
    def own_s(self) -> float:
        """The part of the TTFT that no idle cluster would spare the request."""
        return self.transfer_s + self.prefill_s + self.drain_s

    @property
    def reused_blocks(self) -> int:
        return self.local_blocks + sum(span.block_count for span in self.fetches)


@dataclass
class Pool:
    """Schedulable instances between which KV can move: one model, one set of weights, one layout; never changed.

    ``prefills`` and ``decodes`` are ordered by instance id; a mixed instance is in both. ``asked``: the bits of those
    of the ``sources`` that may be asked for this request. ``together``: an instance that prefills a request also
    decodes it, if it decodes at all; any other one hands its KV over."""

    layout: KvLayout
    prefills: tuple[InstanceState, ...]
    decodes: tuple[InstanceState, ...]
    sources: Sources
    asked: int
    room_tokens: int
    """Prompt plus generation that every executor of the pool can hold, in tokens."""
    group_prefills: int
    """The number of prefill instances in all, also those that cannot or should not take this request, or any now."""
    together: bool = False

    row_numbers: vec[i64] = field(init=False, repr=False, compare=False)
    """Rows of the prefill instances in the load table."""
    decode_row_numbers: vec[i64] = field(init=False, repr=False, compare=False)
    last_row: int = field(init=False, repr=False, compare=False)
    """The largest row of the prefill instances."""
    hands_over: vec[bool] = field(init=False, repr=False, compare=False)
    """True for the prefill instances that hand KV over. Empty if none does, as in any pool that is not ``together``."""

    # Kept here and not by ``cached_property``, which mypyc compiles to a property without a cache.
    _place_of: Mapping[str, int] | None = field(init=False, repr=False, compare=False)
    _decode_place_of: Mapping[int, int] | None = field(init=False, repr=False, compare=False)
    _places_near: dict[int, vec[i64]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._place_of = self._decode_place_of = None  # mypyc sets no default of a field that is not of the constructor
        rows = [state.row for state in self.prefills]
        self.row_numbers, self.last_row = vec[i64](rows), max(rows, default=-1)
        self.decode_row_numbers = vec[i64]([state.row for state in self.decodes])
        only = [not state.info.role.decodes for state in self.prefills]
        self.hands_over = vec[bool](only if self.together and True in only else [])

    @property
    def place_of(self) -> Mapping[str, int]:
        """Places of the prefill instances, by their ids."""
        if self._place_of is None:
            self._place_of = {state.info.instance_id: place for place, state in enumerate(self.prefills)}
        return self._place_of

    @property
    def decode_place_of(self) -> Mapping[int, int]:
        """Places of the decode instances, by their rows in the load table."""
        if self._decode_place_of is None:
            self._decode_place_of = {state.row: place for place, state in enumerate(self.decodes)}
        return self._decode_place_of

    def places_near(self, bit: int) -> vec[i64]:
        """Returns the places of other prefill instances on the host of the source with this bit; of very many, some."""
        row = bit.bit_length()
        places = self._places_near.get(row)
        if places is None:
            near = (each for each in self.sources.near_to(bit) if each.bit != bit)
            found = (self.place_of.get(each.info.instance_id) for each in near)
            places = vec[i64](list(islice((each for each in found if each is not None), ON_HOST_MAX)))
            self._places_near[row] = places
        return places

    def stride(self, key_tokens: int) -> int:
        """Returns ``key_tokens`` in whole blocks, at least one. The paper's blocks have 512 tokens (DualMap A.2.1), an
        instance's may have fewer."""
        return max(1, key_tokens // self.layout.block_tokens)

    def asked_by(self, reader: InstanceState) -> int:
        """Returns the bits of the sources that did not just fail the reader, which may be one of them; none for a
        reader that keeps to itself."""
        if reader.info.keeps_to_itself:
            return 0
        failed = reader.load.failed_sources
        return self.asked & ~self.sources.at(failed) if failed else self.asked

    def without(self, exclude: frozenset[str]) -> Pool:
        """Returns the pool less some instances, as executors and as sources."""
        return replace(
            self,
            prefills=tuple(state for state in self.prefills if state.info.instance_id not in exclude),
            decodes=tuple(state for state in self.decodes if state.info.instance_id not in exclude),
            asked=self.asked & ~self.sources.named(exclude),
        )


@dataclass(frozen=True, slots=True)
class WaitingPrompt:
    """A request whose prompt is not being computed yet, and the decision that placed it where it is."""

    request: PlacementRequest
    decision: PlacementDecision
    placed_s: float
    """The time when it was placed first."""


Queues = Callable[[InstanceState], Sequence[WaitingPrompt]]
"""A function that returns the requests waiting at an instance, in the order of service as far as that is known."""


class Waiting:
    """The requests that wait at the instances of a pool at one time. ``match`` looks up who holds a prompt."""

    __slots__ = ("_known", "_queues", "match", "now_s", "pool")

    def __init__(
        self, pool: Pool, queues: Queues, match: Callable[[PlacementRequest], PrefixMatch], now_s: float
    ) -> None:
        self.pool, self._queues, self.match, self.now_s = pool, queues, match, now_s
        self._known: dict[InstanceState, Sequence[WaitingPrompt]] = {}

    def at(self, state: InstanceState) -> Sequence[WaitingPrompt]:
        """Returns the requests waiting there. They are listed once: the caller may have to collect them."""
        if state not in self._known:
            self._known[state] = self._queues(state)
        return self._known[state]


@dataclass(frozen=True, slots=True)
class Move:
    """A waiting request that should move from one instance to another."""

    request: PlacementRequest
    source: InstanceState
    target: InstanceState
