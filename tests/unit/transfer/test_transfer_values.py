"""The pure parts of the transfer engine: descriptors, limits, batch states, slicing, wire format."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pinyon.api.common.v1 import common_pb2
from pinyon.core.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, Unavailable
from pinyon.messages.segment import segment_from_proto
from pinyon.transfer import (
    InvalidTransfer,
    Opcode,
    Reason,
    RegionDescriptor,
    SegmentDescriptor,
    TransferFailed,
    TransferLimits,
    TransferRefused,
    TransferRequest,
    TransferResult,
    TransferStatus,
    TransferTimeout,
    WireError,
    raise_for_failure,
)
from pinyon.transfer.chains.batch import BatchProgress
from pinyon.transfer.chains.slicing import Slice, plan_chains
from pinyon.transfer.links import handshake
from pinyon.transfer.transports.tcp import wire
from pinyon.transfer.types.limits import MAX_FRAME_BYTES, MAX_FRAME_REQUESTS

KEY, BOOT = bytes(range(16)), bytes(16)
SEGMENT = SegmentDescriptor("10.0.0.1", 7000, BOOT, (RegionDescriptor(KEY, "cpu:0", 4096),))


def test_a_segment_finds_its_regions_by_key() -> None:
    assert SEGMENT.region(KEY) == SEGMENT.regions[0]
    assert SEGMENT.region(bytes(16)) is None


@pytest.mark.parametrize(
    "broken",
    [
        {"port": 0},
        {"host": ""},
        {"boot_id": "00"},
        {"boot_id": "zz"},
        {"regions": [common_pb2.Region(key=bytes(1), location="cpu:0", length_bytes=1)]},
        {"regions": [common_pb2.Region(key=KEY, location="cpu:0", length_bytes=0)]},
        {"regions": [common_pb2.Region(key=KEY, location="", length_bytes=1)]},
    ],
)
def test_bad_segment_is_an_invalid_argument(broken: dict[str, Any]) -> None:
    good: dict[str, Any] = {"host": "10.0.0.1", "port": 7000, "boot_id": BOOT.hex()}
    assert segment_from_proto(common_pb2.Segment(**good)) == replace(SEGMENT, regions=())
    with pytest.raises(InvalidArgument):
        segment_from_proto(common_pb2.Segment(**(good | broken)))


def test_limits_are_positive_and_within_the_protocol() -> None:
    with pytest.raises(InvalidTransfer, match="stall_s"):
        TransferLimits(stall_s=0)
    with pytest.raises(InvalidTransfer):
        TransferLimits(max_frame_bytes=MAX_FRAME_BYTES + 1)
    with pytest.raises(InvalidTransfer):
        TransferLimits(max_frame_requests=MAX_FRAME_REQUESTS + 1)


def test_failures_raise_by_status() -> None:
    ok = TransferResult(TransferStatus.COMPLETED, 1)
    raise_for_failure([ok, ok])
    for status, kind, core in (
        (TransferStatus.REFUSED, TransferRefused, FailedPrecondition),
        (TransferStatus.FAILED, TransferFailed, Unavailable),
        (TransferStatus.TIMEOUT, TransferTimeout, DeadlineExceeded),
    ):
        with pytest.raises(kind) as caught:
            raise_for_failure([ok, TransferResult(status, 0, Reason.STALLED)])
        assert isinstance(caught.value, core)


def part(index: int, length: int) -> Slice:
    return Slice(index, KEY, 0, KEY, 0, length)


def test_batch_gives_each_request_one_final_status() -> None:
    batch = BatchProgress([10, 20, 5])
    assert {result.status for result in batch.results()} == {TransferStatus.PENDING}
    finals, moved = batch.slices_done([part(0, 4), part(1, 20)], TransferStatus.COMPLETED, Reason.NONE)
    assert (finals, moved) == ({(TransferStatus.COMPLETED, Reason.NONE): 1}, 24)
    assert [result.status.is_final for result in batch.results()] == [False, True, False]
    batch.slices_done([part(0, 3)], TransferStatus.TIMEOUT, Reason.STALLED)
    finals, _ = batch.slices_done([part(0, 3)], TransferStatus.FAILED, Reason.CONNECTION_LOST)
    assert finals == {(TransferStatus.TIMEOUT, Reason.STALLED): 1}  # the first failure decides
    assert batch.results()[0] == TransferResult(TransferStatus.TIMEOUT, 4, Reason.STALLED)
    with pytest.raises(AssertionError):
        batch.slices_done([part(0, 1)], TransferStatus.COMPLETED, Reason.NONE)
    batch.slices_done([part(2, 5)], TransferStatus.COMPLETED, Reason.NONE, bytes([Reason.OUT_OF_RANGE]))
    assert batch.results()[2] == TransferResult(TransferStatus.REFUSED, 0, Reason.OUT_OF_RANGE)
    assert all(result.status.is_final for result in batch.results())


def test_small_requests_stay_whole_and_large_ones_are_cut() -> None:
    limits = TransferLimits(max_frame_bytes=100, stripe_min_bytes=100, max_frame_requests=3)

    def plan(*lengths: int) -> list[list[int]]:
        requests = [TransferRequest(Opcode.WRITE, KEY, 0, SEGMENT, KEY, 0, length) for length in lengths]
        plans = plan_chains(requests, limits, {KEY: "cpu:0"}, lambda _: 1)
        return [[one.length for one in chain.slices] for chain in plans]

    assert plan(60, 60, 40) == [[60], [60, 40]]
    assert plan(250) == [[100], [100], [50]]
    assert plan(1, 1, 1, 1) == [[1, 1, 1], [1]]
    assert plan(30, 130) == [[30], [100], [30]]


def test_frames_round_trip() -> None:
    for ranges, checksum in (([(KEY, 5, 7), (BOOT, 1 << 40, 9)], True), ([(KEY, 5, 16)], False)):
        frame = wire.Frame(Opcode.READ, len(ranges), 3, 16, checksum)
        data = wire.pack_frame(frame, ranges)
        assert wire.parse_frame(data) == frame
        assert wire.parse_descriptors(memoryview(data)[wire.FRAME_HEADER_BYTES :], frame) == ranges


def test_replies_round_trip() -> None:
    frame = wire.Frame(Opcode.READ, 2, 3, 16, checksum=True)
    reply = wire.pack_reply(frame, None, 16)
    assert wire.parse_reply(reply, frame) == (wire.ALL_OK, 16)
    assert wire.parse_reply(wire.pack_reply(frame, b"\x00\x01", 7), frame) == (wire.SOME_REFUSED, 7)
    for other in (
        frame._replace(opcode=Opcode.WRITE),
        frame._replace(requests=1),
        frame._replace(frame_id=4),
        frame._replace(payload=15),
    ):
        with pytest.raises(WireError):
            wire.parse_reply(reply, other)


def test_only_a_checked_write_can_have_a_bad_checksum() -> None:
    frame = wire.Frame(Opcode.WRITE, 1, 3, 16, checksum=True)
    bad = wire.pack_reply(frame, None, 0, code=wire.BAD_CHECKSUM)
    assert wire.parse_reply(bad, frame) == (wire.BAD_CHECKSUM, 0)
    for other in (frame._replace(checksum=False), frame._replace(opcode=Opcode.READ)):
        data = wire.pack_reply(other, None, 0, code=wire.BAD_CHECKSUM)
        with pytest.raises(WireError):
            wire.parse_reply(data, other)
    assert wire.parse_trailer(wire.pack_trailer(1 << 63)) == 1 << 63


@pytest.mark.parametrize(
    "values",
    [
        (0, 1, 1, 0, 1, 1),  # magic
        (wire.FRAME_MAGIC, 3, 0, 1, 1, 1),  # opcode
        (wire.FRAME_MAGIC, 1, 2, 1, 1, 1),  # flags
        (wire.FRAME_MAGIC, 1, 0, 0, 1, 1),  # no requests
        (wire.FRAME_MAGIC, 1, 0, MAX_FRAME_REQUESTS + 1, 1, 1 << 20),
        (wire.FRAME_MAGIC, 1, 0, 1, 1, MAX_FRAME_BYTES + 1),
        (wire.FRAME_MAGIC, 1, 0, 2, 1, 1),  # fewer bytes than ranges
    ],
)
def test_bad_frame_headers(values: tuple[int, ...]) -> None:
    with pytest.raises(WireError):
        wire.parse_frame(wire._FRAME.pack(*values))


def test_descriptors_must_add_up() -> None:
    for lengths, total in (((5, 0), 5), ((0,), 1), ((5, 6), 12), ((1 << 63, 1 << 63), 2)):
        data = wire.pack_frame(wire.Frame(2, len(lengths), 1, total), [(KEY, 0, length) for length in lengths])
        with pytest.raises(WireError):
            wire.parse_descriptors(memoryview(data)[wire.FRAME_HEADER_BYTES :], wire.parse_frame(data))


def test_handshake_proofs_are_bound_to_role_and_nonces() -> None:
    hello = handshake.pack_hello(handshake.Hello(1, 0, BOOT, BOOT, KEY, True))
    reply = handshake.pack_hello_reply(handshake.HelloCode.OK, BOOT, KEY, hello, b"secret")
    assert handshake.verify_server(b"secret", hello, reply)
    assert not handshake.verify_server(b"other", hello, reply)
    assert not handshake.verify_server(b"secret", hello.replace(KEY, BOOT), reply)
    proof = handshake.client_mac(b"secret", hello, reply)
    assert handshake.verify_client(b"secret", hello, reply, proof)
    assert not handshake.verify_client(b"secret", hello, reply, reply[-handshake.MAC_BYTES :])
    assert not handshake.verify_client(b"other", hello, reply, proof)
