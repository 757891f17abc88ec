"""Slicing, from requests to chains: which slices travel together, and where a large request is cut. Pure.

A chain is a run of slices with one peer, one direction and one pair of memory locations: one path, one completion. The
paper cuts at 16 KB (Mooncake §3.2.3). Here a slice costs tens of microseconds of interpreter, so the size adapts. Small
requests travel together. A large one is cut into as many pieces as keep all paths busy, but not smaller than what a
path moves in a fraction of a millisecond."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from pinyon.transfer.types.limits import TransferLimits
from pinyon.transfer.types.request import Opcode, TransferRequest
from pinyon.transfer.types.segment import PeerId, SegmentDescriptor

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


_tuple: Final = tuple.__new__
"""A short cut, ``_tuple(Slice, fields)``: ``Slice(*fields)`` costs more time in Python than all else of a slice."""


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
    limits: TransferLimits,
    locations: Mapping[bytes, str],
    streams: Callable[[SegmentDescriptor], int],
) -> list[ChainPlan]:
    """Groups requests by peer, direction and locations, keeps the order inside a group, and cuts at the bounds.

    The slices of a request cover it exactly once. Requests are assumed valid (see ``TransferEngine``). ``locations``
    are those of the local regions, by key. ``streams`` returns how many NICs a peer's chains are spread over."""
    groups: dict[Where, tuple[SegmentDescriptor, list[Slice]]] = {}
    whole: list[Slice] = []
    last_remote: SegmentDescriptor | None = None
    last_opcode: Opcode | None = None
    last_local = last_region = b""
    for index, request in enumerate(requests):
        opcode, local, local_offset, remote, region, remote_offset, length = request
        if (
            remote is not last_remote
            or opcode is not last_opcode
            or local is not last_local
            or region is not last_region
        ):
            last_remote, last_opcode, last_local, last_region = remote, opcode, local, region
            published = remote.region(region)
            there = published.location if published is not None else ""
            _, whole = groups.setdefault((remote.peer, opcode, locations[local], there), (remote, []))
        whole.append(_tuple(Slice, (index, local, local_offset, region, remote_offset, length)))
    plans: list[ChainPlan] = []
    for (_, opcode, here, there), (remote, group) in groups.items():
        _cut(group, ChainPlan(remote, opcode, [], 0, here, there), streams(remote), limits, plans)
    return plans


def chain_bytes(total: int, streams: int, limits: TransferLimits) -> int:
    """Returns the most bytes of a chain when ``total`` bytes go to one peer over ``streams`` NICs.

    With one NIC a chain per connection is enough. With several each gets a few, so that faster ones take more."""
    if streams <= 1:
        wanted, least = -(-total // limits.connections_per_peer), limits.stripe_min_bytes
    else:
        wanted, least = -(-total // (streams * _CHAINS_PER_NIC)), min(_NIC_STRIPE_MIN_BYTES, limits.stripe_min_bytes)
    return min(limits.max_frame_bytes, max(least, wanted))


def _cut(group: list[Slice], head: ChainPlan, streams: int, limits: TransferLimits, plans: list[ChainPlan]) -> None:
    """Cuts a group of whole requests, one after another, into chains that are appended to ``plans``."""
    total = sum([part[5] for part in group])
    most_bytes, most_slices = chain_bytes(total, streams, limits), limits.max_frame_requests
    if total <= most_bytes and len(group) <= most_slices:  # the code below would leave it whole
        plans.append(head._replace(slices=group, nbytes=total))
        return
    slices: list[Slice] = []
    nbytes = 0
    for whole in group:
        request, local, local_offset, region, remote_offset, length = whole
        while True:
            # A request no larger than a chain stays whole: if it does not fit, the next chain takes it.
            taken = length if length < most_bytes else most_bytes
            if slices and (nbytes + taken > most_bytes or len(slices) == most_slices):
                plans.append(head._replace(slices=slices, nbytes=nbytes))
                slices, nbytes = [], 0
            part = whole
            if taken != whole[5]:
                part = _tuple(Slice, (request, local, local_offset, region, remote_offset, taken))
            slices.append(part)
            nbytes += taken
            length -= taken
            if not length:
                break
            local_offset += taken
            remote_offset += taken
    if slices:
        plans.append(head._replace(slices=slices, nbytes=nbytes))
