"""The copies of blocks: which nodes are to get one, and which are to give one up (Mooncake §4.2). Pure.

Copies go where a reader finds them: to the next nodes by the rank of the first key, so that blocks which are read
together stay together. Zones without a copy come first. The copies to go are those that would have come last."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pinyon.core.block_keys import BlockKey
from pinyon.store.records import NodeRecord
from pinyon.store.runs import rank, weights_of

COPIES_MAX = 8
"""The largest number of copies of a block."""


class CopyPlan(NamedTuple):
    """Copies to make, by source and target, and copies to remove, by node."""

    make: dict[tuple[str, str], list[BlockKey]]
    remove: dict[str, list[BlockKey]]


def plan_copies(
    keys: Sequence[BlockKey], holders: Sequence[Iterable[str]], nodes: Sequence[NodeRecord], copies: int
) -> CopyPlan:
    """Plans that each key which has holders gets ``copies`` of them, as far as there are nodes.

    ``holders`` are each key's nodes by id, of which those among ``nodes`` count."""
    plan = CopyPlan({}, {})
    if not keys or not nodes:
        return plan
    order = rank(keys[0], weights_of(nodes))
    zone_of = {node.node_id: node.zone for node in nodes}
    for key, holding in zip(keys, holders, strict=True):
        those = set(holding)
        has = [each for each in order if each in those]
        wanted = _wanted(order, zone_of, has, copies)
        for number, target in enumerate(each for each in wanted if each not in has):
            if has:
                plan.make.setdefault((has[number % len(has)], target), []).append(key)
        for node_id in has:
            if node_id not in wanted:
                plan.remove.setdefault(node_id, []).append(key)
    return plan


def _wanted(order: Sequence[str], zone_of: dict[str, str], has: Sequence[str], copies: int) -> list[str]:
    """Returns the nodes to hold a key: those that do, as long as no copy is too many, then the best, zone by zone."""
    wanted: list[str] = []
    zones: set[str] = set()
    for candidates in (has, order):
        for fresh in (True, False):
            for each in candidates:
                if len(wanted) < copies and each not in wanted and (not fresh or zone_of[each] not in zones):
                    wanted.append(each)
                    zones.add(zone_of[each])
    return wanted
