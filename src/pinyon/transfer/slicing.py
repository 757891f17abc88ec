"""From requests to chains: which slices travel together, and where a large request is cut. Pure.

A chain is a run of slices with one peer, one direction and one pair of memory locations: one path, one completion. The
paper cuts at 16 KB (Mooncake §3.2.3); here a slice costs tens of microseconds of interpreter, so the size adapts:
small requests travel together, a large one is cut into as many pieces as keep all paths busy, but not smaller than what
a path moves in a fraction of a millisecond.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from pinyon.transfer.limits import TransferLimits
from pinyon.transfer.request import Opcode, TransferRequest
from pinyon.transfer.segment import PeerId, SegmentDescriptor

__all__ = ["ChainPlan", "Slice", "chain_bytes", "plan_chains", "plan_one"]

_CHAINS_PER_NIC = 4
_NIC_STRIPE_MIN_BYTES = 1 << 20


class Slice(NamedTuple):
    """A contiguous part of one request."""

    request: int
    """The request's index in its batch."""
    local: bytes
    local_offset: int
    remote_region: bytes
    remote_offset: int
    length: int


class ChainPlan(NamedTuple):
    remote: SegmentDescriptor
    opcode: Opcode
    slices: list[Slice]
    nbytes: int
    local_location: str = ""
    remote_location: str = ""


Where = tuple[PeerId, Opcode, str, str]
"""Peer, direction, location of the local memory, location of the remote memory ("" = not published)."""


def plan_chains(
    requests: Sequence[TransferRequest],
    first_index: int,
    limits: TransferLimits,
    locations: Mapping[bytes, str],
    streams: Callable[[SegmentDescriptor], int],
) -> list[ChainPlan]:
    """Group by peer, direction and locations, keep the order inside a group, cut at the bounds.

    The slices of a request cover it exactly once. Requests are assumed valid (see ``TransferEngine``).

    Args:
        locations: of the local regions, by key.
        streams: how many NICs a peer's chains are spread over.
    """
    groups: dict[Where, list[tuple[int, TransferRequest]]] = {}
    members: list[tuple[int, TransferRequest]] = []
    last: TransferRequest | None = None
    for index, request in enumerate(requests, first_index):
        if (
            last is None
            or request.remote is not last.remote
            or request.opcode is not last.opcode
            or request.local is not last.local
            or request.remote_region is not last.remote_region
        ):
            last = request
            region = request.remote.region(request.remote_region)
            there = region.location if region is not None else ""
            where = (request.remote.peer, request.opcode, locations[request.local], there)
            members = groups.setdefault(where, [])
        members.append((index, request))
    plans: list[ChainPlan] = []
    for (_, opcode, here, there), group in groups.items():
        remote = group[0][1].remote
        _cut(group, ChainPlan(remote, opcode, [], 0, here, there), streams(remote), limits, plans)
    return plans


def plan_one(
    requests: Sequence[TransferRequest],
    nbytes: int,
    limits: TransferLimits,
    locations: Mapping[bytes, str],
    streams: Callable[[SegmentDescriptor], int],
) -> ChainPlan | None:
    """The plan when one uncut chain is enough, slice i for request i; else None. The short way for small transfers."""
    remote, opcode, local, region = requests[0].remote, requests[0].opcode, requests[0].local, requests[0].remote_region
    if len(requests) > limits.max_frame_requests or nbytes > chain_bytes(nbytes, streams(remote), limits):
        return None
    slices: list[Slice] = []
    for index, one in enumerate(requests):
        if one.remote is not remote or one.opcode is not opcode or one.local != local or one.remote_region != region:
            return None
        slices.append(Slice(index, local, one.local_offset, region, one.remote_offset, one.length))
    published = remote.region(region)
    there = published.location if published is not None else ""
    return ChainPlan(remote, opcode, slices, nbytes, locations[local], there)


def chain_bytes(total: int, streams: int, limits: TransferLimits) -> int:
    """Most bytes of a chain, when ``total`` bytes go to one peer over ``streams`` NICs.

    With one NIC a chain per connection is enough. With several, each gets a few, so that the faster ones can take more.
    """
    if streams <= 1:
        wanted, least = -(-total // limits.connections_per_peer), limits.stripe_min_bytes
    else:
        wanted, least = -(-total // (streams * _CHAINS_PER_NIC)), min(_NIC_STRIPE_MIN_BYTES, limits.stripe_min_bytes)
    return min(limits.max_frame_bytes, max(least, wanted))


def _cut(
    group: list[tuple[int, TransferRequest]],
    head: ChainPlan,
    streams: int,
    limits: TransferLimits,
    plans: list[ChainPlan],
) -> None:
    total = sum(request.length for _, request in group)
    most_bytes = chain_bytes(total, streams, limits)
    most_slices = limits.max_frame_requests
    slices: list[Slice] = []
    nbytes = 0
    for index, (_, local, local_offset, _, region, remote_offset, length) in group:
        while True:
            # Small requests stay whole: the next chain takes one that does not fit. Only a larger one is cut.
            if slices and (nbytes + min(length, most_bytes) > most_bytes or len(slices) == most_slices):
                plans.append(head._replace(slices=slices, nbytes=nbytes))
                slices, nbytes = [], 0
            part = length if length < most_bytes else most_bytes
            slices.append(Slice(index, local, local_offset, region, remote_offset, part))
            nbytes += part
            length -= part
            if not length:
                break
            local_offset += part
            remote_offset += part
    if slices:
        plans.append(head._replace(slices=slices, nbytes=nbytes))
