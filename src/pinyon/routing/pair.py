"""The choice of a prefill and a decode instance when no conductor answers.

The conductor knows what instances hold and predicts times. A load balancer knows what it sent where, and what load the
instances report. From that, its routing policy chooses the prefill instance, then a decode instance to which KV can
move from there. A mixed instance with room to decode keeps the request, and no KV moves."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from pinyon.core.request import Role
from pinyon.routing.layer import Layer
from pinyon.routing.target import Routed, Target


@dataclass(frozen=True, slots=True)
class PairCandidate:
    """An instance that may take requests.

    ``group`` names weights and KV layout: KV moves only inside a group. ``max_batch`` and ``max_context`` (tokens) are
    0 when the instance named none."""

    instance_id: str
    address: str
    role: Role
    group: str
    max_batch: int = 0
    max_context: int = 0


@dataclass(frozen=True, slots=True)
class Pair:
    """The prefill and the decode instance of a request, possibly the same."""

    prefill: PairCandidate
    decode: PairCandidate


@dataclass(frozen=True, slots=True)
class InstanceGroup:
    """Instances between which KV can move; a mixed instance is in both lists."""

    name: str
    prefills: list[PairCandidate] = field(default_factory=list)
    decodes: list[PairCandidate] = field(default_factory=list)


def serving_groups(
    candidates: Sequence[PairCandidate], total_tokens: int, exclude: Collection[str] = (), avoided: Collection[str] = ()
) -> list[InstanceGroup]:
    """Returns the groups that can serve ``total_tokens`` (prompt and generation) without the excluded instances.

    Instances that have just failed (``avoided``) are included only where no group could serve without them."""
    groups: dict[str, InstanceGroup] = {}
    for candidate in candidates:
        if candidate.instance_id in exclude or 0 < candidate.max_context < total_tokens:
            continue
        group = groups.get(candidate.group)
        if group is None:
            group = groups[candidate.group] = InstanceGroup(candidate.group)
        if candidate.role.prefills:
            group.prefills.append(candidate)
        if candidate.role.decodes:
            group.decodes.append(candidate)
    serving = [group for group in groups.values() if group.prefills and group.decodes]
    if not avoided:
        return serving
    sound = [
        InstanceGroup(group.name, _without(group.prefills, avoided), _without(group.decodes, avoided))
        for group in serving
    ]
    return [group for group in sound if group.prefills and group.decodes] or [
        InstanceGroup(every.name, some.prefills or every.prefills, some.decodes or every.decodes)
        for every, some in zip(serving, sound, strict=True)
    ]


def _without(candidates: Sequence[PairCandidate], avoided: Collection[str]) -> list[PairCandidate]:
    return [candidate for candidate in candidates if candidate.instance_id not in avoided]


def choose_pair(groups: Sequence[InstanceGroup], layer: Layer, request: Routed, now_s: float) -> Pair | None:
    """Returns a pair from one of the groups (:func:`serving_groups`), or None when there are none.

    The pair has room by the layer's pushing rule, or is a full mixed instance whose cache the policy thinks worth
    waiting for. If there is no such pair, any instances of the layer are chosen."""
    pair = _choose(groups, layer, request, layer.available(now_s), layer.full(now_s))
    return _choose(groups, layer, request, layer, ()) if pair is None else pair


def _choose(
    groups: Sequence[InstanceGroup],
    layer: Layer,
    request: Routed,
    with_room: Iterable[Target],
    without_room: Iterable[Target],
) -> Pair | None:
    able, full = {each.name: each for each in with_room}, {each.name: each for each in without_room}
    prefills: dict[str, tuple[PairCandidate, InstanceGroup]] = {}
    for group in groups:
        if any(each.instance_id in able for each in group.decodes):
            for each in group.prefills:
                if each.instance_id in able:
                    prefills[each.instance_id] = each, group
    targets = [able[name] for name in prefills]
    alone = {
        each.instance_id: each
        for group in (groups if full else ())
        for each in group.prefills
        if each.instance_id in full and each in group.decodes
    }
    waits_for = layer.policy.waits_for(request, targets, [full[name] for name in alone])
    if waits_for is not None:
        return Pair(alone[waits_for.name], alone[waits_for.name])
    if not targets:
        return None
    prefill, group = prefills[layer.policy.choose(request, targets).name]
    decodes = {each.instance_id: each for each in group.decodes if each.instance_id in able}
    if prefill.instance_id in decodes:
        return Pair(prefill, prefill)
    chosen = layer.policy.choose(Routed(), [able[name] for name in decodes])
    return Pair(prefill, decodes[chosen.name])
