"""Which instances can serve a request together: those between which KV can move."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from pinyon.core.request import Role


@dataclass(frozen=True, slots=True)
class Candidate:
    """One instance that may take requests.

    ``group`` names weights and KV layout: KV moves only inside a group. ``max_batch`` and ``max_context`` (tokens) are
    0 when the instance named none.
    """

    instance_id: str
    address: str
    role: Role
    group: str
    max_batch: int = 0
    max_context: int = 0


@dataclass(frozen=True, slots=True)
class Pair:
    """Who computes the prompt and who generates; may be one instance."""

    prefill: Candidate
    decode: Candidate


@dataclass(frozen=True, slots=True)
class Group:
    """Instances between which KV can move; a mixed one is in both lists."""

    name: str
    prefills: list[Candidate] = field(default_factory=list)
    decodes: list[Candidate] = field(default_factory=list)


def serving_groups(
    candidates: Sequence[Candidate],
    total_tokens: int,
    exclude: Collection[str] = (),
    avoided: Collection[str] = (),
) -> list[Group]:
    """Groups that can serve a request of ``total_tokens`` (prompt and generation) without the excluded instances.

    Those that just failed (``avoided``) are there only where it does not go without them.
    """
    groups: dict[str, Group] = {}
    for candidate in candidates:
        if candidate.instance_id in exclude or 0 < candidate.max_context < total_tokens:
            continue
        group = groups.get(candidate.group)
        if group is None:
            group = groups[candidate.group] = Group(candidate.group)
        if candidate.role.prefills:
            group.prefills.append(candidate)
        if candidate.role.decodes:
            group.decodes.append(candidate)
    serving = [group for group in groups.values() if group.prefills and group.decodes]
    if not avoided:
        return serving
    sound = [
        Group(group.name, _without(group.prefills, avoided), _without(group.decodes, avoided)) for group in serving
    ]
    return [group for group in sound if group.prefills and group.decodes] or [
        Group(every.name, some.prefills or every.prefills, some.decodes or every.decodes)
        for every, some in zip(serving, sound, strict=True)
    ]


def _without(candidates: Sequence[Candidate], avoided: Collection[str]) -> list[Candidate]:
    return [candidate for candidate in candidates if candidate.instance_id not in avoided]
