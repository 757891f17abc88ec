"""One request in, one placement out: pools, policy, admission, and the account of what is in flight."""

from __future__ import annotations

from dataclasses import replace

from pinyon.core.block_keys import KEY_BYTES
from pinyon.core.errors import InvalidArgument, NotFound, Rejected, Unavailable
from pinyon.placement.admission import is_late, is_slow, rejection
from pinyon.placement.decode_selection import decode_blocks
from pinyon.placement.fleet import Fleet
from pinyon.placement.instances import InstanceState
from pinyon.placement.policy import PlacementDecision, PlacementPolicy, PlacementRequest, Pool
from pinyon.placement.prefix_match import NO_MATCH, PrefixMatch
from pinyon.placement.probing import probe_pool

__all__ = ["Scheduler"]

SETTLING_RETRY_S = 0.5


class Scheduler:
    """Places requests on a fleet by one policy."""

    def __init__(self, fleet: Fleet, policy: PlacementPolicy) -> None:
        self._fleet = fleet
        self._policy = policy

    def use(self, policy: PlacementPolicy) -> None:
        """From now on this one places."""
        self._policy = policy

    def schedule(self, request: PlacementRequest, now_s: float) -> PlacementDecision:
        """Decide and count the placement as in flight.

        Raises :class:`NotFound` (model), :class:`InvalidArgument` (does not fit into any instance),
        :class:`Unavailable` (no instance), :class:`Rejected` (SLO), :class:`ResourceExhausted` (in-flight limit).
        While the fleet is settling, those that an instance still to come may prove wrong are :class:`Unavailable`.
        """
        fleet = self._fleet
        fleet.inflight.check_room(now_s)
        try:
            decision, pool, match = self._decide(request, now_s)
        except (NotFound, InvalidArgument, Rejected) as refusal:
            if fleet.settling:
                raise Unavailable("instances are still registering", retry_after_s=SETTLING_RETRY_S) from refusal
            raise
        if decision.doubts_transfer:  # the next one is later, even if nothing is learned from this one
            decision.prefill.transfer_learned_s = now_s
        block_tokens = pool.layout.block_tokens
        blocks = decode_blocks(request, block_tokens)
        held = match.held_by(decision.prefill)
        expected = b"" if request.no_reuse or request.request_class.no_store else request.block_keys[held * KEY_BYTES :]
        fleet.inflight.add(request.request_id, decision, blocks, now_s, expected)
        return decision

    def _decide(self, request: PlacementRequest, now_s: float) -> tuple[PlacementDecision, Pool, PrefixMatch]:
        pools = self._fleet.pools(request.model)
        _check_keys(request, pools)
        best: tuple[PlacementDecision, Pool, PrefixMatch] | None = None
        refused: list[tuple[PlacementDecision, Pool, PrefixMatch]] = []
        for pool in _usable(request, pools):
            reusable = request.reusable_blocks(pool.layout.block_tokens)
            match = self._fleet.index.match(request.block_keys, reusable) if reusable else NO_MATCH
            decision = self._policy.place(request, pool, match, now_s)
            if is_late(request, decision) or is_slow(request, decision):
                refused.append((decision, pool, match))
            elif best is None or decision.ttft_s < best[0].ttft_s:
                best = decision, pool, match
        if best is None:
            best = self._probe(request, refused, now_s)
        if best is None:
            raise rejection(request, [each for each, _, _ in refused])
        return best

    def _probe(
        self, request: PlacementRequest, refused: list[tuple[PlacementDecision, Pool, PrefixMatch]], now_s: float
    ) -> tuple[PlacementDecision, Pool, PrefixMatch] | None:
        """A placement in spite of its SLO, on instances that are due to be measured."""
        for decision, pool, match in refused:
            late, slow = is_late(request, decision), is_slow(request, decision)
            due = probe_pool(pool, now_s, prefills=late, decodes=slow)
            if not due.prefills or not due.decodes:
                continue
            probe = self._policy.place(request, due, match, now_s)
            if (is_late(request, probe) and not late) or (is_slow(request, probe) and not slow):
                continue
            # even if its measurement never comes, the next probe is later
            if late:
                probe.prefill.prefill_learned_s = now_s
            if slow:
                probe.decode.decode_learned_s = now_s
            return probe, pool, match
        return None


def _check_keys(request: PlacementRequest, pools: tuple[Pool, ...]) -> None:
    """Only full blocks of the prompt have keys. Raises :class:`InvalidArgument`."""
    keys = len(request.block_keys) // KEY_BYTES
    full_blocks = request.prompt_tokens // min(pool.layout.block_tokens for pool in pools)
    if keys > full_blocks:
        raise InvalidArgument(
            f"{keys} keys, but a prompt of {request.prompt_tokens} tokens has {full_blocks} full blocks",
            field="block_keys",
        )


def _usable(request: PlacementRequest, pools: tuple[Pool, ...]) -> list[Pool]:
    """The pools less excluded instances and those the request does not fit into; never empty."""
    exclude = request.exclude
    remaining: list[Pool] = []
    for pool in pools:
        kept = pool.without(exclude) if exclude else pool
        if kept.prefills and kept.decodes:
            remaining.append(kept)
    excluded = Unavailable("every instance that could take the request is excluded", retry_after_s=1.0)
    if not remaining:
        raise excluded
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
            raise excluded  # it is too large only for those that are left
        raise _too_large(request, remaining)
    return fitting


def _narrowed(request: PlacementRequest, pool: Pool) -> Pool:
    """The pool less the instances that the request does not fit into."""
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
