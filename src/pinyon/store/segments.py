"""Registered memory between proto and the transfer engine's values."""

from __future__ import annotations

from pinyon.api.common.v1 import common_pb2
from pinyon.core.errors import InvalidArgument
from pinyon.transfer import RegionDescriptor, SegmentDescriptor

__all__ = ["segment_from_proto", "segment_to_proto"]


def segment_to_proto(segment: SegmentDescriptor) -> common_pb2.Segment:
    return common_pb2.Segment(
        host=segment.host,
        port=segment.port,
        boot_id=segment.boot_id.hex(),
        regions=[
            common_pb2.Region(key=region.key, location=region.location, length_bytes=region.length)
            for region in segment.regions
        ],
    )


def segment_from_proto(message: common_pb2.Segment) -> SegmentDescriptor:
    """Raises :class:`InvalidArgument` for anything that is no segment."""
    try:
        boot_id = bytes.fromhex(message.boot_id)
    except ValueError:
        raise InvalidArgument("boot_id is not hexadecimal", field="segment.boot_id") from None
    return SegmentDescriptor(
        message.host,
        message.port,
        boot_id,
        tuple(RegionDescriptor(region.key, region.location, region.length_bytes) for region in message.regions),
    )
