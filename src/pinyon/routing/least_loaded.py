"""Where a request runs when no conductor answers: the least busy pair the load balancer knows of.

The conductor knows what instances hold and predicts times; this policy knows neither. It compares what the load
balancer itself has in flight on each instance, per slot of its batch, and then the (possibly old) load that instances
reported.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from pinyon.core.request import Role

__all__ = ["Candidate", "Pair", "choose_pair"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One instance that may take requests.

    ``group`` names weights and KV layout: KV moves only inside a group. ``reported`` is the number of requests in its
    last report; ``max_batch`` and ``max_context`` (tokens) are 0 when the instance named none.
    """

    instance_id: str
    address: str
    role: Role
    group: str
    reported: int = 0
    max_batch: int = 0
    max_context: int = 0


@dataclass(frozen=True, slots=True)
class Pair:
    """Who computes the prompt and who generates; may be one instance."""

    prefill: Candidate
    decode: Candidate


def choose_pair(
    candidates: Sequence[Candidate],
    in_flight: Mapping[str, int],
    total_tokens: int,
    exclude: Collection[str] = (),
) -> Pair | None:
    """The least busy pair of one group that takes ``total_tokens`` (prompt and generation), or None.

    ``in_flight`` counts the caller's own requests by instance id. Ties go to the smaller id, so the same arguments give
    the same pair; a mixed instance that is best at both keeps the request to itself, and no KV moves.
    """
    groups: dict[str, tuple[list[Candidate], list[Candidate]]] = {}
    for candidate in candidates:
        if candidate.instance_id in exclude or 0 < candidate.max_context < total_tokens:
            continue
        prefills, decodes = groups.setdefault(candidate.group, ([], []))
        if candidate.role.prefills:
            prefills.append(candidate)
        if candidate.role.decodes:
            decodes.append(candidate)

    def busy(candidate: Candidate) -> tuple[float, int, str]:
        own = in_flight.get(candidate.instance_id, 0)
        return own / (candidate.max_batch or 1), candidate.reported, candidate.instance_id

    best: tuple[float, float, str] | None = None
    pair: Pair | None = None
    for group, (prefills, decodes) in groups.items():
        if not prefills or not decodes:
            continue
        prefill, decode = min(prefills, key=busy), min(decodes, key=busy)
        rank = (busy(decode)[0], busy(prefill)[0], group)
        if best is None or rank < best:
            best, pair = rank, Pair(prefill, decode)
    return pair
