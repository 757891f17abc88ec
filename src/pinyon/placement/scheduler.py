"""The scheduler: one request in, one placement out, by pools, policy, admission, and what is in flight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from pinyon.core.block_keys import KEY_BYTES
from pinyon.core.errors import InvalidArgument, NotFound, Rejected, Unavailable
from pinyon.core.key_sample import key_sample
from pinyon.placement.admission import is_late, is_slow, probe_pool, rejection
from pinyon.placement.at_one import at_one
from pinyon.placement.costs import OWN_TIME, Costs
from pinyon.placement.decode_selection import decode_blocks
from pinyon.placement.fleet import Fleet
from pinyon.placement.instances import InstanceState
from pinyon.placement.interface import LearningPlacement, PlacementPolicy, Rebalancing
from pinyon.placement.policy import Move, PlacementDecision, PlacementRequest, Pool, Queues, Waiting
from pinyon.placement.prefix_match import NO_MATCH, PrefixMatch

SETTLING_RETRY_S = 0.5

Consider = Callable[[PlacementRequest, PlacementDecision, Pool, PrefixMatch], None]


class Scheduler:
    """The placement of requests on a fleet by one policy."""

    def __init__(self, fleet: Fleet, policy: PlacementPolicy, rng: Random | None = None) -> None:
        """Starts with a policy. ``rng``: the policy's source of chance; by default one of a fixed seed."""
        self._fleet = fleet
        self._rng = rng or Random(0)
        self.consider: Consider | None = None
        """A callback for each decision, before it is judged and counted: what it saw of the fleet is still so."""
        self.use(policy)

    def use(self, policy: PlacementPolicy) -> None:
        """Places by this policy from now on."""
        self._policy = policy
        self._rebalancing = policy if isinstance(policy, Rebalancing) else None
        self._fleet.inflight.heard = policy.prefilled if isinstance(policy, LearningPlacement) else None

    def schedule(self, request: PlacementRequest, now_s: float) -> PlacementDecision:
        """Decides on a placement, and counts it as in flight.

        Raises :class:`NotFound` (model), :class:`InvalidArgument` (does not fit into any instance),
        :class:`Unavailable` (no instance), :class:`Rejected` (SLO), :class:`ResourceExhausted` (in-flight limit). While
        the fleet is settling, refusals that a further instance may prove wrong are :class:`Unavailable`."""
        fleet = self._fleet
        fleet.inflight.shares_no_more(request.request_id)
        decision, pool, match = self._settled(request, now_s)
        if decision.doubts_transfer:  # the next such fetch is later, even if nothing is learned from this one
            decision.prefill.transfer_learned_s = now_s
        block_tokens = pool.layout.block_tokens
        blocks = decode_blocks(request, block_tokens) - decision.shared_blocks
        held = match.held_by(decision.prefill)
        expected = shared = b""
        if not (request.no_reuse or request.request_class.no_store):
            expected = key_sample(request.block_keys, fleet.sample_of(pool.layout), held)
            shared = request.block_keys
        kept = request if decision.alternate is not None else None  # only a request with an alternate may move
        fleet.inflight.add(request.request_id, decision, blocks, now_s, expected, kept, decoded_keys=shared)
        if decision.prefill.info.keeps_to_itself:  # nothing reports the begin: the predicted time ends by itself
            fleet.inflight.begin_prefill(request.request_id, decision.prefill, now_s)
        return decision

    def decide(self, request: PlacementRequest, now_s: float) -> PlacementDecision:
        """Returns the decision of :meth:`schedule` without counting it: the caller does so."""
        return self._settled(request, now_s)[0]

    def decide_at(
        self, request: PlacementRequest, prefill: InstanceState, alternate: InstanceState | None, now_s: float
    ) -> PlacementDecision:
        """Returns a decision for a request that moves to this instance, which computes it with what it holds."""
        pool = next(each for each in self._fleet.pools(request.model) if prefill in each.prefills)
        decision = at_one("moved", request, pool, self._match(request, pool), prefill, now_s, alternate)
        return decision.with_drain(request, pool)

    def moves(self, request: PlacementRequest, decision: PlacementDecision, queues: Queues, now_s: float) -> list[Move]:
        """Returns what should wait elsewhere, now that the request was placed so; empty if the policy moves nothing."""
        policy = self._rebalancing
        if policy is None or decision.alternate is None:
            return []
        pool = next((each for each in self._fleet.pools(request.model) if decision.prefill in each.prefills), None)
        if pool is None:
            return []
        return policy.moves(request, decision, Waiting(pool, queues, lambda each: self._match(each, pool), now_s))

    def _settled(self, request: PlacementRequest, now_s: float) -> tuple[PlacementDecision, Pool, PrefixMatch]:
        self._fleet.inflight.check_room(now_s)
        try:
            return self._decide(request, now_s)
        except (NotFound, InvalidArgument, Rejected) as refusal:
            if self._fleet.settling:
                raise Unavailable("instances are still registering", retry_after_s=SETTLING_RETRY_S) from refusal
            raise

    def _decide(self, request: PlacementRequest, now_s: float) -> tuple[PlacementDecision, Pool, PrefixMatch]:
        pools = self._fleet.pools(request.model)
        _check_keys(request, pools)
        refused: list[tuple[PlacementDecision, Pool, PrefixMatch]] = []
        for pool, match in self._soonest_first(request, _usable(request, pools), now_s):
            decision = self._place(request, pool, match, now_s)
            if self.consider is not None:
                self.consider(request, decision, pool, match)
            if not is_late(request, decision) and not is_slow(request, decision):
                return decision, pool, match
            refused.append((decision, pool, match))
        probe = self._probe(request, refused, now_s)
        if probe is None:
            raise rejection(request, [each for each, _, _ in refused])
        return probe

    def _place(self, request: PlacementRequest, pool: Pool, match: PrefixMatch, now_s: float) -> PlacementDecision:
        return self._policy.place(request, pool, match, now_s, self._rng).with_drain(request, pool)

    def _soonest_first(
        self, request: PlacementRequest, pools: list[Pool], now_s: float
    ) -> list[tuple[Pool, PrefixMatch]]:
        """Returns the pools, each with who holds the prompt, by the earliest possible first token. A policy is asked
        for the next pool only if nothing in the one before is in time: it may count requests. Several exist while
        weights or layouts change."""
        found = [(pool, self._match(request, pool)) for pool in pools]
        if len(found) > 1:
            found.sort(key=lambda each: _soonest_s(request, each[0], each[1], now_s))
        return found

    def _match(self, request: PlacementRequest, pool: Pool) -> PrefixMatch:
        reusable = request.reusable_blocks(pool.layout.block_tokens)
        if not reusable:
            return NO_MATCH
        every = self._fleet.sample_of(pool.layout)
        return self._fleet.index.match(request.block_keys, reusable, self._fleet.inflight.expected, every)

    def _probe(
        self, request: PlacementRequest, refused: list[tuple[PlacementDecision, Pool, PrefixMatch]], now_s: float
    ) -> tuple[PlacementDecision, Pool, PrefixMatch] | None:
        """Returns a placement in spite of its SLO, on instances that are due to be measured, or None."""
        for decision, pool, match in refused:
            late, slow = is_late(request, decision), is_slow(request, decision)
            due = probe_pool(pool, now_s, prefills=late, decodes=slow)
            if not due.prefills or not due.decodes:
                continue
            probe = self._place(request, due, match, now_s)
            if (is_late(request, probe) and not late) or (is_slow(request, probe) and not slow):
                continue
            if self.consider is not None:
                # the policy's findings are about the instances that it was asked about
                self.consider(request, probe, pool if probe.considered is None else due, match)
            # even if its measurement never comes, the next probe is later
            if late:
                probe.prefill.prefill_learned_s = now_s
            if slow:
                probe.decode.decode_learned(now_s)
            return probe, pool, match
        return None


def _soonest_s(request: PlacementRequest, pool: Pool, match: PrefixMatch, now_s: float) -> float:
    """Returns the seconds until a first token could be there, by what waits and by what instances hold themselves."""
    return min(Costs(OWN_TIME, request, pool, match, now_s).columns.cost_s)


def _check_keys(request: PlacementRequest, pools: tuple[Pool, ...]) -> None:
    """Raises :class:`InvalidArgument` if there are more keys than full blocks of the prompt: only those have keys."""
    keys = len(request.block_keys) // KEY_BYTES
    smallest = pools[0].layout.block_tokens
    for pool in pools:
        smallest = min(smallest, pool.layout.block_tokens)
    full_blocks = request.keys_max(smallest)
    if keys > full_blocks:
        raise InvalidArgument(
            f"{keys} keys, but a prompt of {request.prompt_tokens} tokens has {full_blocks} full blocks",
            field="block_keys",
        )


def _usable(request: PlacementRequest, pools: tuple[Pool, ...]) -> list[Pool]:
    """Returns the pools less excluded instances and those the request does not fit into; never empty."""
    exclude = request.exclude
    remaining: list[Pool] = []
    for pool in pools:
        kept = pool.without(exclude) if exclude else pool
        if kept.prefills and kept.decodes:
            remaining.append(kept)
    if not remaining:
        raise _excluded()
    fitting: list[Pool] = []
    for pool in remaining:
        kept = pool
        if request.prompt_tokens + max(1, request.max_tokens) > pool.room_tokens:
            kept = _narrowed(request, pool)
        if kept.prefills and kept.decodes:
            fitting.append(kept)
    if not fitting:
        whole = (_narrowed(request, pool) for pool in pools) if exclude else ()
        if any(pool.prefills and pool.decodes for pool in whole):
            raise _excluded()  # it is too large only for those that are left
        raise _too_large(request, remaining)
    return fitting


def _excluded() -> Unavailable:
    return Unavailable("every instance that could take the request is excluded", retry_after_s=1.0)


def _narrowed(request: PlacementRequest, pool: Pool) -> Pool:
    """Returns the pool less the instances that the request does not fit into."""
    block_tokens = pool.layout.block_tokens
    prefills = tuple(state for state in pool.prefills if _prompt_fits(request, state, block_tokens))
    decodes = tuple(state for state in pool.decodes if _decode_fits(request, state, block_tokens))
    return replace(pool, prefills=prefills, decodes=decodes)


def _prompt_fits(request: PlacementRequest, state: InstanceState, block_tokens: int) -> bool:
    info = state.info
    if 0 < info.max_context_tokens <= request.prompt_tokens:
        return False
    return not info.capacity_blocks or request.prompt_tokens <= info.capacity_blocks * block_tokens


def _decode_fits(request: PlacementRequest, state: InstanceState, block_tokens: int) -> bool:
    if not _prompt_fits(request, state, block_tokens):
        return False
    capacity, context = state.info.capacity_blocks, state.info.max_context_tokens
    tokens = request.prompt_tokens + max(1, request.max_tokens)
    return not capacity or (min(tokens, context) if context else tokens) <= capacity * block_tokens


def _too_large(request: PlacementRequest, pools: list[Pool]) -> InvalidArgument:
    for pool in pools:
        states = (*pool.prefills, *pool.decodes)
        if all(_prompt_fits(request, state, pool.layout.block_tokens) for state in states):
            return InvalidArgument(
                f"prompt and max_tokens together ({request.prompt_tokens} + {request.max_tokens} tokens) exceed the KV "
                "memory of every instance",
                field="max_tokens",
            )
    return InvalidArgument(
        f"the prompt of {request.prompt_tokens} tokens is longer than the instances of this model take",
        field="prompt_tokens",
    )
