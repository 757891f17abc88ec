"""The addresses of registered memory as messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from pinyon.api.common.v1 import common_pb2
from pinyon.core.errors import InvalidArgument
from pinyon.transfer import Nic, RegionDescriptor, SegmentDescriptor, Topology

_MAX_REMEMBERED_BYTES = 16 << 10


def segment_to_proto(segment: SegmentDescriptor) -> common_pb2.Segment:
    return common_pb2.Segment(
        host=segment.host,
        port=segment.port,
        boot_id=segment.boot_id.hex(),
        regions=[region_to_proto(region) for region in segment.regions],
        nics=[common_pb2.Nic(**nic._asdict()) for nic in segment.nics],
        topology=[
            common_pb2.MemoryAffinity(location=location, preferred_nics=preferred, secondary_nics=secondary)
            for location, (preferred, secondary) in (segment.topology.to_dict() if segment.topology else {}).items()
        ],
        shm_address=segment.shm,
        host_id=segment.host_id,
    )


def region_to_proto(region: RegionDescriptor) -> common_pb2.Region:
    return common_pb2.Region(key=region.key, location=region.location, length_bytes=region.length)


def region_from_proto(message: common_pb2.Region) -> RegionDescriptor:
    """Returns a region. Raises :class:`InvalidArgument` for anything else."""
    return RegionDescriptor(message.key, message.location, message.length_bytes)


def segment_from_proto(message: common_pb2.Segment) -> SegmentDescriptor:
    """Returns a segment. Raises :class:`InvalidArgument` for anything else."""
    # Every Acquire and PutStart answers with a whole segment, in which only the regions are new. Parsing the rest takes
    # 120 us with 8 NICs and 10 memory locations, so it is cached.
    rest = common_pb2.Segment()
    rest.CopyFrom(message)
    rest.ClearField("regions")
    key = rest.SerializeToString(deterministic=True)
    parse = _without_regions if len(key) <= _MAX_REMEMBERED_BYTES else _without_regions.__wrapped__
    regions = tuple(map(region_from_proto, message.regions))
    return replace(parse(key), regions=regions)


@lru_cache(maxsize=128)
def _without_regions(serialized: bytes) -> SegmentDescriptor:
    """Returns the segment of a process, without its regions."""
    message = common_pb2.Segment.FromString(serialized)
    try:
        boot_id = bytes.fromhex(message.boot_id)
    except ValueError:
        raise InvalidArgument("boot_id is not hexadecimal", field="segment.boot_id") from None
    return SegmentDescriptor(
        message.host,
        message.port,
        boot_id,
        (),
        tuple(Nic(nic.name, nic.transport, nic.address, nic.port, nic.network) for nic in message.nics),
        _topology(message.topology),
        message.shm_address,
        message.host_id,
    )


def _topology(rows: Sequence[common_pb2.MemoryAffinity]) -> Topology | None:
    if not rows:
        return None
    return Topology.from_dict({row.location: [list(row.preferred_nics), list(row.secondary_nics)] for row in rows})
