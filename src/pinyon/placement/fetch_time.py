"""The predicted time of a fetch that begins now: the reader's paths, the sources, and what is on its way already.

Whoever sends, or reads, several things at once gives each a fair share. Until a read of ``B`` bytes is over, each of
the others beside it moves ``B`` bytes at most; so the bytes before it are

    min(bytes of all others, B x how many they are)

at the source and at the reader. It waits for the longer one of the two: the same bytes may be in both."""

from __future__ import annotations

from collections.abc import Iterable

from pinyon.core.request import Role
from pinyon.placement.instances import InstanceState
from pinyon.placement.transfer_cost import HOST, NETWORK, SSD, STORE, PathKind

FAULT_RATIO = 1.5
"""A slow read is taken to have waited for its source if that sends so many times slower than the reader's path."""


def path_kind(reader: InstanceState, source: InstanceState) -> PathKind:
    """Returns the kind of path between a reader and a source."""
    if source.info.on_ssd:
        return SSD
    if reader.host and reader.host == source.host:
        return STORE if source.info.role is Role.STORE else HOST
    return NETWORK


def fetch_s(reader: InstanceState, spans: Iterable[tuple[InstanceState, int]]) -> float:
    """Returns the seconds until the reader has these bytes from the sources, which it asks one after the other."""
    seconds = sources_s = network_s = 0.0
    shared = 0
    for source, size in spans:
        kind = path_kind(reader, source)
        start_s, byte_s = reader.transfer_model.coefficients(kind)
        if kind is NETWORK or kind is SSD:
            send_s = source.send_rate.per_byte_s
            byte_s = max(byte_s, send_s)
            sources_s += min(source.sending_bytes, source.sendings * size) * (send_s or byte_s)
            network_s = max(network_s, byte_s)
            shared += size
        seconds += start_s + byte_s * size
    return seconds + max(sources_s, min(reader.reading_bytes, reader.readings * shared) * network_s)


def learn_fetch(reader: InstanceState, source: InstanceState, size_bytes: int, seconds: float, now_s: float) -> None:
    """Learns from one measured read. Other traffic that is on its way now stands for the traffic during the read. The
    read itself counts as under way until its prompt is computed, so it is subtracted."""
    kind = path_kind(reader, source)
    if not kind.shared:
        reader.transfer_model.observe(size_bytes, seconds, kind)
        return
    sending = min(source.sending_bytes - size_bytes, (source.sendings - 1) * size_bytes)
    reading = min(reader.reading_bytes - size_bytes, (reader.readings - 1) * size_bytes)
    sending, reading = max(0, sending), max(0, reading)
    start_s, byte_s = reader.transfer_model.coefficients(kind)
    source.send_rate.observe(size_bytes + sending, seconds - start_s, now_s, byte_s * size_bytes)
    slow = source.send_rate.per_byte_s > FAULT_RATIO * byte_s
    if slow and kind is PathKind.NETWORK and reader.transfer_model.samples:
        return  # it tells of the source: reads from other sources are no slower for it
    reader.transfer_model.observe(size_bytes + max(sending, reading), seconds, kind)
