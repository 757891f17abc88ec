"""KVCache-centric scheduling (Mooncake Algorithm 1 and §4.2)."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import ClassVar, NamedTuple

from pinyon.core.orders import FETCH_SPANS_MAX
from pinyon.placement.admission import transfer_doubt
from pinyon.placement.decode_selection import select_decode
from pinyon.placement.fetch_plan import FetchPlanner
from pinyon.placement.instances import InstanceState
from pinyon.placement.policy import Fetch, PlacementDecision, PlacementRequest, Pool
from pinyon.placement.prefix_match import PrefixMatch
from pinyon.placement.threshold_tuner import ThresholdTuner


@dataclass(frozen=True, slots=True)
class KvCacheCentricSettings:
    """The options. ``balancing_threshold``: a prefix is fetched if it is more than this many times as long as the local
    one.

    The paper names no value ("adjusted manually"). What is reused is always more than best_len / threshold. So with 2
    at least half of the best prefix is reused, and at least half of every fetched prefix is new to its reader.

    ``sharing_patience``: rather than compute a prefix a second time, the request waits for an instance that is
    computing it, if the TTFT gets longer by at most this share.

    ``adapt``: the threshold begins at ``balancing_threshold``; from there it follows what is measured
    (:mod:`pinyon.placement.threshold_tuner`).
    """

    balancing_threshold: float = 2.0
    sharing_patience: float = 0.25
    adapt: bool = False

    def __post_init__(self) -> None:
        if not self.balancing_threshold >= 1:
            raise ValueError(f"balancing_threshold must be at least 1, got {self.balancing_threshold}")
        if not self.sharing_patience >= 0:
            raise ValueError(f"sharing_patience must be at least 0, got {self.sharing_patience}")


class _Option(NamedTuple):
    """One instance that may compute the prompt."""

    ttft_s: float
    cached_blocks: int
    state: InstanceState
    local: int
    prefix: int
    queue_s: float
    transfer_s: float
    prefill_s: float
    doubted: tuple[int, float, float] | None
    """Prefix, transfer and prefill times of a fetch that is predicted to be slower than computing."""


class KvCacheCentric:
    """The policy that takes the prefill instance with the shortest predicted TTFT = transfer + queue + prefill.

    For each instance the prefix is the one it holds, or the best one anyone holds. The latter must be more than
    ``balancing_threshold`` times as long, *and* fetching the difference must take less time than computing it. Where
    the paper differs or is silent:

    - best_len / 0 is infinite when best_len > 0, else 0 (erratum);
    - the best prefix is what all sources hold together, not what the best single one holds: a store spreads the blocks
      of one prompt over its nodes. It ends where its fetch would take more spans than a worker takes;
    - Algorithm 1 fetches whenever the ratio exceeds the threshold; §4.2 also compares the two times (its sentence has
      the comparison the wrong way round), and so do we;
    - an instance's own prefix includes what it is computing or fetching for others by then (§4.1: its cache is updated
      at placement). Requests that come together with one new prefix would still go to as many idle instances, each a
      little sooner done. All of them would be busy with the same prefix: see ``sharing_patience``;
    - a fetch that would be slower is made all the same now and then, when nothing was measured for long;
    - the last prompt token is always computed: its logits give the first token.
    """

    name: ClassVar[str] = "kvcache_centric"

    def __init__(self, settings: KvCacheCentricSettings = KvCacheCentricSettings()) -> None:
        self._threshold = settings.balancing_threshold
        self._patience = settings.sharing_patience
        self._tuner = ThresholdTuner(settings.balancing_threshold) if settings.adapt else None

    @property
    def threshold(self) -> float:
        return self._threshold if self._tuner is None else self._tuner.threshold

    def prefilled(self, decision: PlacementDecision, seconds: float) -> None:
        """Learns from a trial: see :class:`pinyon.placement.interface.Learning`."""
        if self._tuner is not None and decision.trial is not None:
            threshold, alone_s = decision.trial
            self._tuner.learn(threshold, seconds, alone_s)

    def place(
        self, request: PlacementRequest, pool: Pool, match: PrefixMatch, now_s: float, rng: Random
    ) -> PlacementDecision:
        tokens = request.prompt_tokens
        block_tokens = pool.layout.block_tokens
        held = match.blocks
        threshold = self._threshold if self._tuner is None else self._tuner.draw(rng)
        soon = match.soon
        planner = FetchPlanner(pool, match)
        best: _Option | None = None
        sharing: _Option | None = None
        for state in pool.prefills:
            queue_s = state.prefill_queue_s(now_s)
            k0, k1, k2 = state.prefill_model.coefficients
            local = match.held_by(state)
            shares = False
            if soon is not match and (expected := soon.held_by(state)) > local:
                local, shares = expected, True
                queue_s += state.inflight_transfer_us * 1e-6  # some of it may still be on its way there
            wait_s = queue_s + state.load.room_wait_ms * 1e-3
            prefix = local
            reused = local * block_tokens
            rest = tokens - reused
            prefill_s = k0 + k1 * rest + k2 * rest * (tokens + reused)
            transfer_s, doubted = 0.0, None
            if held > threshold * local:  # the extent is at most held
                reach = match.extent(local, pool.asked_by(state) & ~state.bit, FETCH_SPANS_MAX)
                if reach > threshold * local:
                    reused = reach * block_tokens
                    rest = tokens - reused
                    short_s = k0 + k1 * rest + k2 * rest * (tokens + reused)
                    if best is not None and not shares and wait_s + short_s > best.ttft_s:
                        continue  # however soon the blocks are there
                    fetch_s = planner.fetch_s(state, local, reach)
                    if fetch_s + short_s < prefill_s:
                        prefix, transfer_s, prefill_s = reach, fetch_s, short_s
                    elif fetch_s * transfer_doubt(
                        state, now_s
                    ) + short_s < prefill_s and wait_s + fetch_s + short_s <= request.ttft_limit_s(fetch_s + short_s):
                        doubted = reach, fetch_s, short_s
            ttft_s = transfer_s + wait_s + prefill_s
            # of equal times, the instance with the emptier cache, then the smaller id (the pool's order)
            cached = state.load.cached_blocks
            if best is None or (ttft_s, cached) < best[:2]:
                best = _Option(ttft_s, cached, state, local, prefix, queue_s, transfer_s, prefill_s, doubted)
            if shares and (sharing is None or (ttft_s, cached) < sharing[:2]):
                sharing = _Option(ttft_s, cached, state, local, prefix, queue_s, transfer_s, prefill_s, doubted)
        assert best is not None, "a pool has at least one prefill instance"
        if sharing is not None and self._worth_waiting(request, sharing, best):
            best = sharing
        _, _, state, local, prefix, queue_s, transfer_s, prefill_s, doubted = best
        if doubted is not None:  # after the choice, in which an instance in doubt counts as if it computed
            prefix, transfer_s, prefill_s = doubted
        fetches: tuple[Fetch, ...] = ()
        if prefix > local:
            fetches = planner.plan(state, local, prefix)
        decode, tbt_s, shared = select_decode(request, pool, match, state, now_s)
        decision = PlacementDecision(
            state, decode, local, fetches, self.name, queue_s, transfer_s, prefill_s, tbt_s, shared
        )
        decision.doubts_transfer = doubted is not None
        if self._tuner is not None:
            decision.trial = threshold, state.prefill_model.predict_s(tokens, 0)
        return decision

    def _worth_waiting(self, request: PlacementRequest, sharing: _Option, best: _Option) -> bool:
        """Returns whether waiting saves computing, and costs the request little enough."""
        if sharing.prefill_s >= best.prefill_s or sharing.ttft_s > best.ttft_s * (1 + self._patience):
            return False
        return sharing.ttft_s <= request.ttft_limit_s(sharing.transfer_s + sharing.prefill_s)
