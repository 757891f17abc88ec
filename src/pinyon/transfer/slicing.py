"""From requests to chains: which slices travel together, and where a large request is cut. Pure.

A chain is a run of slices with one peer and one direction: one frame, one completion. Part 2 chooses a NIC per chain
here (Mooncake §3.2.3, topology-aware path selection); today a chain only picks the connection that is free first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pinyon.transfer.limits import TransferLimits
from pinyon.transfer.request import Opcode, TransferRequest
from pinyon.transfer.segment import PeerId, SegmentDescriptor

__all__ = ["ChainPlan", "Slice", "plan_chains"]


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


def plan_chains(requests: Sequence[TransferRequest], first_index: int, limits: TransferLimits) -> list[ChainPlan]:
    """Group by peer and direction, keep the order inside a group, cut at the frame bounds.

    The slices of a request cover it exactly once. Requests are assumed valid (see ``TransferEngine``).
    """
    groups: dict[tuple[PeerId, Opcode], list[tuple[int, TransferRequest]]] = {}
    last_remote: SegmentDescriptor | None = None
    last_opcode: Opcode | None = None
    members: list[tuple[int, TransferRequest]] = []
    for index, request in enumerate(requests, first_index):
        if request.remote is not last_remote or request.opcode is not last_opcode:
            last_remote, last_opcode = request.remote, request.opcode
            members = groups.setdefault((last_remote.peer, last_opcode), [])
        members.append((index, request))
    plans: list[ChainPlan] = []
    for (_, opcode), group in groups.items():
        _cut(group, opcode, limits, plans)
    return plans


def _cut(
    group: list[tuple[int, TransferRequest]], opcode: Opcode, limits: TransferLimits, plans: list[ChainPlan]
) -> None:
    remote = group[0][1].remote
    total = sum(request.length for _, request in group)
    stripe = -(-total // limits.connections_per_peer)
    most_bytes = min(limits.max_frame_bytes, max(limits.stripe_min_bytes, stripe))
    most_slices = limits.max_frame_requests
    slices: list[Slice] = []
    nbytes = 0
    for index, (_, local, local_offset, _, region, remote_offset, length) in group:
        while True:
            # Small requests stay whole: the next chain takes one that does not fit. Only a larger one is cut.
            if slices and (nbytes + min(length, most_bytes) > most_bytes or len(slices) == most_slices):
                plans.append(ChainPlan(remote, opcode, slices, nbytes))
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
        plans.append(ChainPlan(remote, opcode, slices, nbytes))
