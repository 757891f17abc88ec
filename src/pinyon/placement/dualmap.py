"""DualMap (Yuan et al.): the prefix of a request names two instances, and the better one for now gets it.

Two independent rings map the prefix that names a request (:mod:`pinyon.placement.hotness_tree`) to a pair (§3.2, §3.4).
Of the pair, the instance that reuses more takes the request until it is overloaded, then the less loaded one does. If
both reuse the same, the less loaded one takes it. Where both are overloaded, waiting requests may move to the other
instance of their own pair (§3.3, A.2.2).

Where the paper differs or is silent:

- Eq. 5 takes instance number + 1 where both hashes name the same. That moves keys whenever instances come and go, so
  here it is the next other instance on the second ring. With one instance there is no pair.
- Load is in seconds of predicted computing, the paper's in tokens that are to be computed.
- "Overloaded" has two readings, ``reading``. The text compares the expected TTFT with the SLO. The implementation, it
  says, compares pending prefill tokens with what is computed within the SLO; the published code takes half of that
  (``share``). Where the chosen instance would be refused, and the other one has the request in time, the other one is
  taken. Whether both are overloaded, so that requests should move, depends for ``pending`` on the work that waits
  there, this request included. For ``expected`` it depends on the request's expected TTFT (A.2.2).
- One point per instance on a ring would give some instances many times the keys of others: hence ``virtual_nodes``.
- The published code lengthens prefixes at 6.12 % of the last 200 requests and shortens below 2 %; the text says 2 / n
  and 1 / n in a sliding window (``hotness``).
- An instance counts as held up by decoding if a request waits there and nothing was completed for ``stuck_s``, since
  the last completion or since the request came. That time is added to what is expected of its queue (A.8).
- The time that a waiting request would still take is what was predicted when it was placed there (Eq. 6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import ClassVar

import numpy as np

from pinyon.core.policies import check_bounds
from pinyon.placement.admission import is_late, is_slow
from pinyon.placement.at_one import at_one
from pinyon.placement.hotness_tree import HotnessSettings
from pinyon.placement.instances import InstanceState
from pinyon.placement.pairs import SEED_MAX, Pairs
from pinyon.placement.policy import Move, PlacementDecision, PlacementRequest, Pool, Waiting
from pinyon.placement.prefix_match import PrefixMatch

NANO_S = 1e-9
"""Times that differ by less are equal."""
EXAMINED_MAX = 512
"""The maximum number of requests of a queue that are examined."""


class Reading(StrEnum):
    """The criterion by which an instance is overloaded."""

    PENDING = "pending"
    EXPECTED = "expected"


class Hotness(StrEnum):
    """The source of the bounds by which prefixes are hot or cold."""

    PUBLISHED = "published"
    TEXT = "text"


@dataclass(frozen=True, slots=True)
class DualMapSettings:
    """The options. ``slo_s``: the SLO of requests that name none, whatever the conductor refuses them by.
    ``key_tokens``: the tokens by which prefixes grow (A.2.1), in whole blocks."""

    slo_s: float = 5.0
    reading: Reading = Reading.PENDING
    share: float = 0.5
    hotness: Hotness = Hotness.PUBLISHED
    stuck_s: float = 3.0
    virtual_nodes: int = 128
    seed: int = 0
    key_tokens: int = 512

    def __post_init__(self) -> None:
        check_bounds(self, slo_s=(1e-6, 1e6), share=(0, 1e6), stuck_s=(0, 1e6), virtual_nodes=(1, 4096))
        check_bounds(self, seed=(0, SEED_MAX), key_tokens=(1, 1 << 20))


class DualMap:
    """The policy. It remembers which prefixes are hot, and the rings of each group of instances."""

    name: ClassVar[str] = "dualmap"

    def __init__(self, settings: DualMapSettings = DualMapSettings()) -> None:
        self._settings = settings
        text = HotnessSettings(hot=0.0, cold=0.0, window_requests=0)
        hotness = text if settings.hotness is Hotness.TEXT else HotnessSettings()
        self._pairs = Pairs(hotness, settings.virtual_nodes, settings.seed, settings.key_tokens)

    def place(
        self, request: PlacementRequest, pool: Pool, match: PrefixMatch, now_s: float, rng: Random
    ) -> PlacementDecision:
        first, second = self.pair(request, pool, now_s)
        if second is None:
            return at_one(self.name, request, pool, match, first, now_s)
        both = (
            at_one(self.name, request, pool, match, first, now_s, second),
            at_one(self.name, request, pool, match, second, now_s, first),
        )
        taken = self._taken(request, both)
        if _refused(request, both[taken]) and not _refused(request, both[1 - taken]):
            taken = 1 - taken  # the other instance has it in time (§3.2)
        return both[taken]

    def pair(self, request: PlacementRequest, pool: Pool, now_s: float) -> tuple[InstanceState, InstanceState | None]:
        """Returns the request's two instances, and counts the request."""
        first, second = self._pairs.places_of(request, pool, now_s)
        return pool.prefills[first], None if second is None else pool.prefills[second]

    def _taken(self, request: PlacementRequest, both: Sequence[PlacementDecision]) -> int:
        """Returns which of the two decisions is taken, 0 or 1."""
        less, more = less_loaded(both), reuses_more(both)
        return less if more is None or self._overloaded(request, both[more]) else more

    def _slo_s(self, request: PlacementRequest) -> float:
        return request.ttft_slo_s if request.ttft_slo_named and request.ttft_slo_s else self._settings.slo_s

    def _overloaded(self, request: PlacementRequest, decision: PlacementDecision) -> bool:
        if self._settings.reading is Reading.EXPECTED:
            return decision.ttft_s > self._slo_s(request)
        return decision.room_s + decision.queue_s > self._slo_s(request) * self._settings.share

    # -- moves of waiting requests

    def moves(self, request: PlacementRequest, decision: PlacementDecision, waiting: Waiting) -> list[Move]:
        """Returns what should move after the request was placed, in a single round. If both instances of its pair are
        overloaded, requests that wait there may go to the other instance of their own pair."""
        if decision.alternate is None:
            return []
        pair = decision.prefill, decision.alternate
        if not all(self._hot(request, decision, state, waiting) for state in pair):
            return []
        planned_s: dict[InstanceState, float] = {}
        """Seconds of work that earlier moves bring to each instance."""
        return [move for state in pair for move in self._relieve(state, waiting, planned_s)]

    def _stuck_s(self, state: InstanceState, waiting: Waiting) -> float:
        """Returns for how long an instance with waiting requests completed nothing (A.8); 0 up to ``stuck_s``."""
        prompts = waiting.at(state)
        if not prompts:
            return 0.0
        interval_s = waiting.now_s - max(state.prefill_ended_s, prompts[0].placed_s)
        return interval_s if interval_s > self._settings.stuck_s else 0.0

    def _hot(
        self, request: PlacementRequest, decision: PlacementDecision, state: InstanceState, waiting: Waiting
    ) -> bool:
        """Returns whether an instance of the pair is overloaded, by the criterion of the choice."""
        slo_s = self._slo_s(request)
        if self._settings.reading is Reading.PENDING:
            return state.wait_s(waiting.now_s) + self._stuck_s(state, waiting) > slo_s * self._settings.share
        if state is not decision.prefill:
            decision = at_one(self.name, request, waiting.pool, waiting.match(request), state, waiting.now_s)
        return decision.ttft_s + self._stuck_s(state, waiting) > slo_s

    def _relieve(self, state: InstanceState, waiting: Waiting, planned_s: dict[InstanceState, float]) -> list[Move]:
        """Returns moves by descending benefit (Eq. 6), until all requests that are left should be in time."""
        now_s, pool = waiting.now_s, waiting.pool
        prompts = waiting.at(state)[:EXAMINED_MAX]
        slos_s = np.array([self._slo_s(each.request) for each in prompts])
        expected_s = np.cumsum([each.decision.prefill_s for each in prompts])
        expected_s += state.wait_s(now_s) - state.queued_prefill_us * 1e-6
        expected_s += self._stuck_s(state, waiting)
        expected_s += [now_s - each.placed_s for each in prompts]
        if not (expected_s > slos_s + NANO_S).any():
            return []
        block_tokens = pool.layout.block_tokens
        gains: list[tuple[float, int, float]] = []
        for place, each in enumerate(prompts):
            other = each.decision.alternate
            there = None if other is None else pool.place_of.get(other.info.instance_id)
            if other is None or other is state or there is None or pool.prefills[there] is not other:
                continue
            wait_s = other.wait_s(now_s) + planned_s.get(other, 0.0) + self._stuck_s(other, waiting)
            ttft_s = now_s - each.placed_s + wait_s
            bound_s = min(expected_s[place], slos_s[place]) - NANO_S
            if ttft_s < bound_s:
                reused = each.request.reused_tokens(waiting.match(each.request).soon.held_by(other), block_tokens)
                there_s = other.prefill_model.predict_s(each.request.prompt_tokens, reused)
                if ttft_s + there_s < bound_s:
                    gains.append((expected_s[place] - ttft_s - there_s, place, there_s))
        moves = []
        for _, place, there_s in sorted(gains, key=lambda gain: (-gain[0], gain[1])):
            each = prompts[place]
            other = each.decision.alternate
            assert other is not None
            wait_s = other.wait_s(now_s) + planned_s.get(other, 0.0) + self._stuck_s(other, waiting)
            if now_s - each.placed_s + wait_s + there_s >= min(expected_s[place], slos_s[place]) - NANO_S:
                continue  # earlier moves filled the queue there, or made room here
            moves.append(Move(each.request, state, other))
            planned_s[other] = planned_s.get(other, 0.0) + there_s
            expected_s[place:] -= each.decision.prefill_s
            expected_s[place] = -np.inf
            if not (expected_s > slos_s + NANO_S).any():
                break
        return moves


def less_loaded(both: Sequence[PlacementDecision]) -> int:
    """Returns which of the two decisions has less work before it; 0 if they are equal."""
    queues_s = [round(each.room_s + each.queue_s, 9) for each in both]  # rounding must not choose
    return int(queues_s[1] < queues_s[0])


def reuses_more(both: Sequence[PlacementDecision]) -> int | None:
    """Returns which of the two decisions reuses more of the prompt; None if they are equal."""
    first, second = both[0].local_blocks, both[1].local_blocks
    return None if first == second else int(second > first)


def _refused(request: PlacementRequest, decision: PlacementDecision) -> bool:
    return is_late(request, decision) or is_slow(request, decision)
