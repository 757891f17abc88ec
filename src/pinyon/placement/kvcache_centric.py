"""KVCache-centric scheduling (Mooncake Algorithm 1 and §4.2)."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from random import Random
from typing import ClassVar

from pinyon.placement.costs import OWN_TIME, Costs
from pinyon.placement.policy import PlacementDecision, PlacementRequest, Pool
from pinyon.placement.prefix_match import PrefixMatch
from pinyon.placement.threshold_tuner import ThresholdTuner


@dataclass(frozen=True, slots=True)
class KvCacheCentricSettings:
    """The options. ``balancing_threshold``: a prefix is fetched if it is more than this many times as long as the local
    one.

    The paper names no value ("adjusted manually"). The reused length always exceeds best_len / threshold. So with 2, at
    least half of the best prefix is reused, and at least half of every fetched prefix is new to its reader.

    ``sharing_patience``: rather than have its prefix computed twice, the request waits for an instance that is
    computing it, if that lengthens the TTFT by at most this share.

    ``adapt``: the threshold begins at ``balancing_threshold``; from there it follows measurements
    (:mod:`pinyon.placement.threshold_tuner`)."""

    balancing_threshold: float = 2.0
    sharing_patience: float = 0.25
    adapt: bool = False

    def __post_init__(self) -> None:
        if not self.balancing_threshold >= 1:
            raise ValueError(f"balancing_threshold must be at least 1, got {self.balancing_threshold}")
        if not self.sharing_patience >= 0:
            raise ValueError(f"sharing_patience must be at least 0, got {self.sharing_patience}")


class KvCacheCentric:
    """The policy that takes the prefill instance with the shortest predicted TTFT = transfer + queue + prefill.

    For each instance, the prefix is its own, or the best one that anyone holds. The latter is used if it is more than
    ``balancing_threshold`` times as long *and* fetching the difference takes less time than computing it. Where the
    paper differs or is silent:

    - best_len / 0 is infinite when best_len > 0, else 0 (erratum);
    - the best prefix is what all sources hold together, not what the best single one holds: a store spreads the blocks
      of one prompt over its nodes. The prefix ends where its fetch would take more spans than a worker accepts;
    - Algorithm 1 fetches whenever the ratio exceeds the threshold; §4.2 also compares the two times (its sentence has
      the comparison the wrong way round), and so do we;
    - an instance's own prefix includes what it will have computed or fetched for earlier requests (§4.1: its cache is
      updated at placement). Still, requests that come together with one new prefix would go to as many idle instances,
      to end a little sooner. All of these would be busy with the same prefix: hence ``sharing_patience``;
    - now and then a slower fetch is made all the same, when nothing was measured for long;
    - the last prompt token is always computed: its logits give the first token."""

    name: ClassVar[str] = "kvcache_centric"

    def __init__(self, settings: KvCacheCentricSettings = KvCacheCentricSettings()) -> None:
        self._threshold = settings.balancing_threshold
        self._patience = settings.sharing_patience
        self._tuner = ThresholdTuner(settings.balancing_threshold) if settings.adapt else None

    def prefilled(self, decision: PlacementDecision, seconds: float) -> None:
        """Learns from a trial fetch: see :class:`pinyon.placement.interface.LearningPlacement`."""
        if self._tuner is not None and decision.trial is not None:
            threshold, alone_s = decision.trial
            self._tuner.learn(threshold, seconds, alone_s)

    def place(
        self, request: PlacementRequest, pool: Pool, match: PrefixMatch, now_s: float, rng: Random
    ) -> PlacementDecision:
        held, soon = match.blocks, match.soon
        threshold = self._threshold if self._tuner is None else self._tuner.draw(rng)
        costs = Costs(OWN_TIME, request, pool, match, now_s)
        columns = costs.columns
        best = sharing = -1
        least = least_sharing = inf, 0
        """The least time to first token. Ties go to the emptier cache, then to the smaller id."""
        for place, state in enumerate(pool.prefills):
            local: int = columns.local[place]
            shares = soon is not match and local > match.held_by(state)
            if shares:
                columns.wait_s[place] += state.inflight_transfer_us * 1e-6  # part of the prefix may still be on its way
            wait_s = columns.wait_s[place] + columns.room_s[place]
            if held > threshold * local:  # what can be fetched is at most ``held``
                reach = costs.reach_of(place)
                if reach > threshold * local:
                    short_s = costs.short_s(place, reach)
                    if not shares and wait_s + short_s > least[0]:
                        continue  # too late, however soon the blocks arrive
                    fetch_s = costs.planner.fetch_s(state, local, reach)
                    if fetch_s + short_s < columns.prefill_s[place]:
                        columns.reach[place] = reach
                        columns.transfer_s[place], columns.prefill_s[place] = fetch_s, short_s
            columns.cost_s[place] = columns.transfer_s[place] + wait_s + columns.prefill_s[place]
            found = columns.cost_s[place], state.load.cached_blocks
            if found < least:
                best, least = place, found
            if shares and found < least_sharing:
                sharing, least_sharing = place, found
        assert best >= 0, "a pool has at least one prefill instance"
        if sharing >= 0 and self._worth_waiting(costs, sharing, best):
            best = sharing
        decision = costs.decision(best, self.name, threshold)
        if self._tuner is not None:
            decision.trial = threshold, decision.prefill.prefill_model.predict_s(request.prompt_tokens, 0)
        return decision

    def _worth_waiting(self, costs: Costs, sharing: int, best: int) -> bool:
        """Returns whether waiting saves computing, at little enough cost for the request."""
        columns = costs.columns
        prefill_s, ttft_s = columns.prefill_s[sharing], columns.cost_s[sharing]
        if prefill_s >= columns.prefill_s[best] or ttft_s > columns.cost_s[best] * (1 + self._patience):
            return False
        return ttft_s <= costs.request.ttft_limit_s(columns.transfer_s[sharing] + prefill_s)
