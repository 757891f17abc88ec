"""Explanations of why a request was placed where it was: the other instances at that moment, and a sentence.

Times of the other instances come from the cost models as they stood at the decision. Where the policy fetches, each is
the shorter of two: fetching all that others hold, and computing. If a fetch was priced for many instances at once and
examined for none, its time is "about" so long: other traffic and paths may make it longer. For the policy ``pinyon``,
the sentence says what other requests would lose, and whether the pair or the limit decided. For another policy, its
name stands for its criteria (a threshold, a ring)."""

from __future__ import annotations

from dataclasses import dataclass

from pinyon.placement.admission import is_late, is_slow
from pinyon.placement.considered import CostColumns
from pinyon.placement.costs import Costs, CostTerms
from pinyon.placement.decision_log import LoggedDecision, Seen
from pinyon.placement.kvcache_centric import KvCacheCentric
from pinyon.placement.policy import PlacementDecision

CANDIDATES_MAX = 8
SOONEST = 5
"""The number of candidates shown because they are soonest; the others shown hold most of the prompt."""
NANO_S = 1e-9
WAIT_S = 0.005
"""Shorter waits are not worth mentioning."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An instance that could have computed the prompt. Blocks are leading blocks of the prompt, times are seconds."""

    instance_id: str
    held_blocks: int
    expected_blocks: int
    """Blocks that the instance held, or was computing for other requests."""
    fetched_blocks: int
    room_s: float
    queue_s: float
    transfer_s: float
    prefill_s: float
    drain_s: float
    others_s: float = 0.0
    """Seconds that other requests would lose because of this one."""
    about: bool = False
    """True if the fetch time is an estimate."""

    @property
    def ttft_s(self) -> float:
        return self.room_s + self.queue_s + self.transfer_s + self.prefill_s + self.drain_s


@dataclass(frozen=True, slots=True)
class Explanation:
    """The explanation of one decision. If no policy was asked, ``chosen`` is None and ``others`` is empty."""

    because: str
    chosen: Candidate | None
    """The chosen instance with the decision's own numbers."""
    others: tuple[Candidate, ...]
    """The soonest first, at most :data:`CANDIDATES_MAX`; the other instance of a pair is always among them."""
    could: int
    """The number of all instances that could have computed the prompt."""
    probe: bool
    """True if the request was placed in spite of its limits, so that the instance is measured again."""


def explain(logged: LoggedDecision) -> Explanation:
    """Returns what is known of a decision. Looks at every instance of the pool: a few ms for a thousand of them."""
    seen = logged.seen
    if seen is None:
        return Explanation(f"refused: {logged.error}", None, (), 0, False)
    decision = seen.decision
    probe = not logged.code and (is_late(logged.request, decision) or is_slow(logged.request, decision))
    chosen, others = _candidates(logged, seen)
    because = _because(logged, seen, chosen, others, probe)
    return Explanation(because, chosen, tuple(_shown(seen, others)), 1 + len(others), probe)


def _candidates(logged: LoggedDecision, seen: Seen) -> tuple[Candidate, list[Candidate]]:
    """Returns the chosen instance, and all others, the soonest first."""
    decision, prefills, match = seen.decision, seen.pool.prefills, seen.match
    columns = decision.considered or _estimated(logged, seen)
    place = prefills.index(decision.prefill)
    decode_room_s = 0.0 if decision.prefill is decision.decode else decision.room_s - columns.room_s[place]
    candidates: list[Candidate] = []
    for at, state in enumerate(prefills):
        room_s, wait_s, local = columns.room_s[at], columns.wait_s[at], columns.local[at]
        transfer_s, prefill_s = columns.transfer_s[at], columns.prefill_s[at]
        lost_s = columns.cost_s[at] - (room_s + wait_s + transfer_s + prefill_s)
        if state is not decision.decode:
            room_s += decode_room_s
        candidates.append(
            Candidate(
                *(state.info.instance_id, match.held_by(state), local, columns.reach[at] - local),
                *(room_s, wait_s, transfer_s, prefill_s, decision.drain_s),
                max(0.0, round(lost_s, 9)),
                columns.fetches(at) and at not in columns.exact,
            )
        )
    chosen = _chosen(decision, candidates.pop(place))
    candidates.sort(key=lambda each: (round(each.ttft_s, 9), each.instance_id))
    return chosen, candidates


def _estimated(logged: LoggedDecision, seen: Seen) -> CostColumns:
    """Returns estimates of the instances' costs, for a policy that keeps no findings about them."""
    fetches = seen.decision.policy == KvCacheCentric.name or bool(seen.decision.fetches)
    terms = CostTerms(0.0, fetches, order=False, near=False)
    return Costs(terms, logged.request, seen.pool, seen.match, logged.at_s, seen.loads).columns


def _chosen(decision: PlacementDecision, found: Candidate) -> Candidate:
    """Returns the chosen candidate with the decision's own numbers."""
    return Candidate(
        found.instance_id, found.held_blocks, decision.local_blocks, decision.reused_blocks - decision.local_blocks,
        decision.room_s, decision.queue_s, decision.transfer_s, decision.prefill_s, decision.drain_s, found.others_s,
    )  # fmt: skip


def _shown(seen: Seen, others: list[Candidate]) -> list[Candidate]:
    if len(others) <= CANDIDATES_MAX:
        return others
    alternate = seen.decision.alternate
    names = {each.instance_id for each in others[:SOONEST]}
    if alternate is not None:
        names.add(alternate.info.instance_id)
    for each in sorted(others, key=lambda each: -each.expected_blocks):
        if len(names) >= CANDIDATES_MAX:
            break
        names.add(each.instance_id)
    return [each for each in others if each.instance_id in names]


# -- sentences


def _because(logged: LoggedDecision, seen: Seen, chosen: Candidate, others: list[Candidate], probe: bool) -> str:
    decision = seen.decision
    blocks = logged.request.prompt_tokens // seen.pool.layout.block_tokens
    name = chosen.instance_id
    if logged.code:
        return f"refused: {logged.error}; {name} would have been the one: {_state(chosen, blocks)}"
    where = f"went to {name}"
    if decision.decode is not decision.prefill:
        where += f" (decodes on {decision.decode.info.instance_id}{_with_others(logged, seen)})"
    elif decision.shared_blocks:
        where += f" (decodes there{_with_others(logged, seen)})"
    if probe:
        return f"{where} although it was predicted to be late or slow there: it had not been measured for some time"
    if not others:
        return f"{where} because it was the only one that could take it: {_state(chosen, blocks)}"
    best = others[0]
    alternate = decision.alternate
    if alternate is not None:
        other = next((each for each in others if each.instance_id == alternate.info.instance_id), None)
        if other is not None:
            return f"{where} because of the pair of its prefix, {name} and {other.instance_id}, {decision.policy} " + (
                f"took this one: {_state(chosen, blocks)}; {_other(other, blocks)}"
            )
    found = decision.considered
    if found is not None and seen.pool.prefills[found.cheapest] is not decision.prefill:
        cheapest = seen.pool.prefills[found.cheapest].info.instance_id
        other = next(each for each in others if each.instance_id == cheapest)
        why = f"{cheapest}, which costs least, would have been late" if found.in_time else "of the pair of its prefix"
        return f"{where} because {why}: {_taken(chosen, blocks)}; {_other(other, blocks)}"
    if found is not None and chosen.ttft_s > best.ttft_s + NANO_S:
        said = f"{decision.policy} counts what others lose, too: {_taken(chosen, blocks)}"
        return f"{where} because {said}; {_other(best, blocks)}"
    why = "" if found is not None else f"{decision.policy} chose it: "
    said = _taken(chosen, blocks)
    if abs(chosen.ttft_s - best.ttft_s) <= NANO_S and not best.about:
        return f"{where} because {why}{said}; {best.instance_id} would have taken as long"
    return f"{where} because {why}{said}; {_other(best, blocks)}"


def _with_others(logged: LoggedDecision, seen: Seen) -> str:
    """Returns words about the KV that the request's decoding shares; empty if it shares none."""
    shared, tokens = seen.decision.shared_blocks * seen.pool.layout.block_tokens, logged.request.prompt_tokens
    if not shared:
        return ""
    return f" beside others that begin with the same {shared} of {tokens} tokens, whose KV is read once"


def _taken(each: Candidate, blocks: int) -> str:
    lost = f", others lose {_time(each.others_s)}" if each.others_s >= WAIT_S else ""
    return f"{_state(each, blocks)}, first token in {_time(each.ttft_s)}{lost}"


def _state(each: Candidate, blocks: int) -> str:
    parts = [f"it {_holds(each, blocks)}"]
    if each.fetched_blocks:
        parts.append(f"fetches {each.fetched_blocks}")
    wait_s = each.room_s + each.queue_s
    parts.append(f"{_time(wait_s)} of others' work waits there" if wait_s >= WAIT_S else "nobody waits there")
    return ", ".join(parts[:-1]) + f" and {parts[-1]}"


def _holds(each: Candidate, blocks: int) -> str:
    if not blocks:
        return "holds no block (the prompt is shorter than one)"
    coming = each.expected_blocks - each.held_blocks
    more = f" ({coming} of them soon, from prompts before it)" if coming > 0 else ""
    return f"holds {each.expected_blocks} of {blocks} blocks{more}"


def _other(each: Candidate, blocks: int) -> str:
    """Returns words about the time that another instance would have taken, and why."""
    reasons = []
    if each.room_s >= WAIT_S:
        reasons.append(f"wait for memory {_time(each.room_s)}")
    if each.queue_s >= WAIT_S:
        reasons.append(f"queue {_time(each.queue_s)}")
    about = "about " if each.about else ""
    if each.fetched_blocks:
        reasons.append(f"fetching {each.fetched_blocks} blocks {about}{_time(each.transfer_s)}")
    reasons.append(_holds(each, blocks))
    if each.others_s >= WAIT_S:
        reasons.append(f"others would have lost {_time(each.others_s)}")
    return f"{each.instance_id} would have taken {about}{_time(each.ttft_s)} ({', '.join(reasons)})"


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"
