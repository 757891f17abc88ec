"""The RDMA control messages against arbitrary and damaged bytes: values within their bounds, or WireError."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pinyon.transfer import WireError
from pinyon.transfer.transports.rdma import wire as rdma_wire
from pinyon.transfer.transports.rdma.wire import Half, RdmaCode, RdmaOp, RegionGrant
from pinyon.transfer.types.segment import KEY_BYTES
from pinyon.transfer.types.spans import merge_ranges

halves = st.builds(
    Half,
    st.integers(1, (1 << 128) - 1).map(lambda number: number.to_bytes(16, "big")),
    st.integers(0, 0xFFFF),
    st.integers(2, (1 << 24) - 1),
    st.integers(0, (1 << 24) - 1),
    st.integers(1, 5),
    st.integers(1, 255),
    st.integers(1 << 16, 1 << 31),
)
names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=63)
refusals = st.integers(1, 3).map(RegionGrant)
grants = st.one_of(
    refusals,
    st.just(RegionGrant(0)),
    st.builds(
        lambda access, ranges, keys: RegionGrant(
            0, access, spans := merge_ranges(ranges, 1 << 62), tuple(keys[: len(spans.starts)])
        ),
        st.integers(1, 3),
        st.lists(st.tuples(st.integers(0, 1 << 61), st.integers(1, 1 << 61)), min_size=1, max_size=4),
        st.lists(st.tuples(st.integers(0, 0xFFFFFFFF), st.integers(0, 1 << 63)), min_size=4, max_size=4),
    ),
)
keys = st.lists(st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES), min_size=1, max_size=20)

PARSERS: list[Callable[[bytes], object]] = [
    rdma_wire.parse_request,
    lambda data: rdma_wire.parse_reply(data, RdmaOp.PAIR, 1),
    lambda data: rdma_wire.parse_reply(data, RdmaOp.RESOLVE, 7),
    rdma_wire.parse_pair,
    rdma_wire.parse_half,
    rdma_wire.parse_keys,
    lambda data: rdma_wire.parse_grants(data, 2),
]


@given(names, halves)
def test_pairs_round_trip(name: str, half: Half) -> None:
    message = rdma_wire.pack_pair(name, half)
    header = rdma_wire.parse_request(message[: rdma_wire.HEADER_BYTES])
    body = message[rdma_wire.HEADER_BYTES :]
    assert rdma_wire.body_bytes(header, reply=False) == len(body)
    assert rdma_wire.parse_pair(body) == (name, half)


@given(keys, st.lists(grants, min_size=1, max_size=20))
def test_keys_and_grants_round_trip(asked: list[bytes], granted: list[RegionGrant]) -> None:
    request = rdma_wire.pack_resolve(asked)
    assert rdma_wire.parse_request(request[: rdma_wire.HEADER_BYTES]).parts == len(asked)
    assert rdma_wire.parse_keys(request[rdma_wire.HEADER_BYTES :]) == asked
    reply = rdma_wire.pack_resolved(RdmaCode.OK, granted)
    rdma_wire.parse_reply(reply[: rdma_wire.HEADER_BYTES], RdmaOp.RESOLVE, len(granted))
    assert rdma_wire.parse_grants(reply[rdma_wire.HEADER_BYTES :], len(granted)) == granted


@pytest.mark.parametrize("parse", PARSERS)
@given(st.data())
def test_arbitrary_bytes_parse_or_are_refused(parse: Callable[[bytes], object], data: st.DataObject) -> None:
    sizes = st.sampled_from([rdma_wire.HEADER_BYTES, rdma_wire.PAIR_BYTES, rdma_wire.PAIRED_BYTES, KEY_BYTES, 32])
    message = data.draw(
        st.one_of(st.binary(max_size=400), sizes.flatmap(lambda size: st.binary(min_size=size, max_size=size)))
    )
    with suppress(WireError):
        parse(message)


@given(names, halves, st.integers(0), st.integers(0, 255))
@example("a", Half(b"\x01" * 16, 0, 2, 0, 1, 1, 1 << 16), 263, 0xFF)
def test_a_damaged_pair_stays_within_its_bounds(name: str, half: Half, where: int, value: int) -> None:
    message = bytearray(rdma_wire.pack_pair(name, half))
    message[where % len(message)] = value
    try:
        header = rdma_wire.parse_request(message[: rdma_wire.HEADER_BYTES])
        if header.op is not RdmaOp.PAIR:
            return
        hca, parsed = rdma_wire.parse_pair(bytes(message[rdma_wire.HEADER_BYTES :]))
    except WireError:
        return
    assert 0 < len(hca) <= 64
    assert 1 < parsed.queue_pair < 1 << 24
    assert parsed.first_packet < 1 << 24
    assert 1 <= parsed.mtu <= 5
    assert 1 << 16 <= parsed.max_message <= 1 << 31


@given(st.lists(grants, min_size=1, max_size=4), st.integers(0), st.integers(0, 255))
def test_damaged_grants_stay_within_the_address_space(granted: list[RegionGrant], where: int, value: int) -> None:
    body = bytearray(rdma_wire.pack_resolved(RdmaCode.OK, granted)[rdma_wire.HEADER_BYTES :])
    body[where % len(body)] = value
    try:
        parsed = rdma_wire.parse_grants(bytes(body), len(granted))
    except WireError:
        return
    assert len(parsed) == len(granted)
    for code, access, (starts, ends), keys in parsed:
        assert bool(access) == bool(keys)
        assert code == 0 or not access
        last = -1
        for start, end, (_, address) in zip(starts, ends, keys, strict=True):
            assert last < start < end
            assert address + end - start <= 1 << 64
            last = end
