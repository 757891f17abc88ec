"""Random batches against byte arrays, random slicing plans, random bytes at the parsers."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pinyon.messages.segment import segment_from_proto, segment_to_proto
from pinyon.transfer import (
    Nic,
    Opcode,
    RegionDescriptor,
    SegmentDescriptor,
    Topology,
    TransferLimits,
    TransferRequest,
    TransferStatus,
    WireError,
)
from pinyon.transfer.chains.slicing import plan_chains
from pinyon.transfer.links import handshake
from pinyon.transfer.transports.tcp import wire
from pinyon.transfer.types.limits import MAX_FRAME_BYTES
from tests.long import usually
from tests.unit.transfer.conftest import PATIENT, VARIANTS

SIZE = 4096
SMALL = replace(PATIENT, max_frame_bytes=700, stripe_min_bytes=64, max_frame_requests=5)
"""Limits with tiny frames, so that small random batches are cut at every place."""


@pytest.fixture(scope="module", params=list(VARIANTS))
def pair(request: pytest.FixtureRequest):
    near, far = bytearray(SIZE), bytearray(SIZE)
    variant = VARIANTS[request.param]
    variant.skip_if_it_cannot_be()
    with variant.engine(SMALL) as engine, variant.engine(SMALL) as other:
        server = engine if variant.same_process else other
        yield (
            engine,
            near,
            far,
            engine.register_local_memory(near),
            server.register_local_memory(far),
            server.descriptor(),
        )


KINDS = ("good", "good", "good", "unknown key")
OFFSETS = SIZE + 51
"""Offsets, some of which reach outside the remote region."""
LENGTHS = 1500


def move(first: int, second: int) -> tuple[Opcode, int, int, int, str]:
    """Decodes one move from two numbers instead of five: drawing takes most of an example's time."""
    rest, local_offset = divmod(first, SIZE)
    opcode, kind = divmod(rest, len(KINDS))
    length, remote_offset = divmod(second, OFFSETS)
    return list(Opcode)[opcode], local_offset, remote_offset, length + 1, KINDS[kind]


moves = st.builds(move, st.integers(0, len(Opcode) * len(KINDS) * SIZE - 1), st.integers(0, OFFSETS * LENGTHS - 1))


EXAMPLES = usually(45 if "PINYON_RDMA_GUEST" not in os.environ else 12, long=150)
"""The number of examples; an emulated processor takes a third of a second for one."""


@settings(max_examples=EXAMPLES)
@given(
    batches=st.lists(st.lists(moves, min_size=1, max_size=30), min_size=1, max_size=4),
    salt=st.binary(min_size=8, max_size=8),
)
def test_batches_do_what_byte_arrays_do(pair, batches, salt) -> None:
    engine, near, far, local, remote, segment = pair
    near[:] = (salt * SIZE)[:SIZE]
    far[:] = (salt[::-1] * SIZE)[:SIZE]
    for batch in batches:
        expected_near, expected_far = bytearray(near), bytearray(far)
        requests, statuses = [], []
        # Requests of one batch are unordered, so keep only those that do not overlap another's writes.
        used_near, used_far = bytearray(SIZE), bytearray(2 * SIZE)
        for opcode, local_offset, remote_offset, length, kind in batch:
            length = min(length, SIZE - local_offset)
            end_near, end_far = local_offset + length, remote_offset + length
            if any(used_near[local_offset:end_near]) or any(used_far[remote_offset:end_far]):
                continue
            used_near[local_offset:end_near] = used_far[remote_offset:end_far] = b"\1" * length
            key = remote.key if kind == "good" else bytes(16)
            requests.append(TransferRequest(opcode, local.key, local_offset, segment, key, remote_offset, length))
            allowed = kind == "good" and remote_offset + length <= SIZE
            statuses.append(TransferStatus.COMPLETED if allowed else TransferStatus.REFUSED)
            if allowed and opcode is Opcode.READ:
                expected_near[local_offset : local_offset + length] = far[remote_offset : remote_offset + length]
            elif allowed:
                expected_far[remote_offset : remote_offset + length] = near[local_offset : local_offset + length]
        results = engine.transfer(requests)
        # A request cut into slices may be refused in part: its accepted slices have moved, so check only whole ones.
        assert [one.status for one in results] == statuses
        if not any(
            status is TransferStatus.REFUSED and request.length > SMALL.stripe_min_bytes
            for request, status in zip(requests, statuses, strict=True)
        ):
            assert near == expected_near
            assert far == expected_far


@given(
    lengths=st.lists(st.integers(1, 5000), min_size=1, max_size=40),
    frame=st.integers(1, 3000),
    per_frame=st.integers(1, 10),
    stripe=st.integers(1, 2000),
)
def test_slices_cover_each_request_once(lengths, frame, per_frame, stripe) -> None:
    limits = TransferLimits(max_frame_bytes=frame, max_frame_requests=per_frame, stripe_min_bytes=stripe)
    segments = [SegmentDescriptor("10.0.0.1", 1, bytes(16)), SegmentDescriptor("10.0.0.2", 1, bytes(16))]
    requests = [
        TransferRequest(Opcode(1 + i % 2), bytes(16), 7 * i, segments[i % 3 == 0], bytes(16), 11 * i, length)
        for i, length in enumerate(lengths)
    ]
    covered = dict.fromkeys(range(len(lengths)), 0)
    for chain in plan_chains(requests, limits, {bytes(16): "cpu:0"}, lambda _: 1 + stripe % 3):
        assert 0 < len(chain.slices) <= per_frame
        assert sum(part.length for part in chain.slices) == chain.nbytes <= frame
        for part in chain.slices:
            request = requests[part.request]
            assert (request.remote, request.opcode) == (chain.remote, chain.opcode)
            done = covered[part.request]
            assert (part.local_offset, part.remote_offset) == (
                request.local_offset + done,
                request.remote_offset + done,
            )
            covered[part.request] += part.length
    assert list(covered.values()) == lengths


@given(data=st.binary(max_size=300))
def test_parsers_raise_nothing_but_wire_errors(data) -> None:
    for parse in (handshake.parse_hello, handshake.parse_hello_reply, handshake.parse_accept, wire.parse_frame):
        with suppress(WireError):
            parse(data)
    for opcode in Opcode:
        with suppress(WireError):
            wire.parse_reply(data, wire.Frame(opcode, 1, 1, 1, checksum=True))


@given(
    head=st.tuples(
        st.just(wire.FRAME_MAGIC), st.integers(0, 3), st.integers(0, 2), st.integers(0, 3), st.integers(0, 9),
        st.integers(0, 600),
    ),
    data=st.binary(min_size=64, max_size=64),
)  # fmt: skip
def test_accepted_frames_stay_within_the_bounds(head, data) -> None:
    try:
        frame = wire.parse_frame(wire._FRAME.pack(*head))
        ranges = wire.parse_descriptors(memoryview(data)[: frame.requests * wire.DESCRIPTOR_BYTES], frame)
    except WireError:
        return
    assert len(ranges) == frame.requests
    assert sum(one.length for one in ranges) == frame.payload <= MAX_FRAME_BYTES


@given(
    keys=st.lists(st.binary(min_size=16, max_size=16), max_size=4),
    port=st.integers(1, 65535),
    host=st.text(min_size=1, max_size=20),
    rails=st.integers(0, 5),
    topology=st.sampled_from([None, Topology({"cpu:0": (("nic0",), ("nic1",)), "*": ((), ())})]),
    shm=st.sampled_from(["", "@pinyon"]),
)
def test_descriptors_round_trip(keys, port, host, rails, topology, shm) -> None:
    regions = tuple(RegionDescriptor(key, "cpu:0", 1 + index) for index, key in enumerate(keys))
    nics = tuple(Nic(f"nic{i}", "tcp", f"10.0.{i}.1", port, f"10.0.{i}.0/24") for i in range(rails))
    segment = SegmentDescriptor(host, port, bytes(16), regions, nics, topology, shm, shm and "host")
    assert segment_from_proto(segment_to_proto(segment)) == segment
    assert [segment.nic(nic.name) for nic in nics] == list(nics)
    assert segment.nic("").address == host
