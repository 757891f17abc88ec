"""The shm messages: what was packed is parsed, and anything else is a WireError."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinyon.transfer import WireError
from pinyon.transfer.transports.shm import wire as shm_wire
from pinyon.transfer.transports.shm.wire import Seal, ShmPlace, ShmRequestHead
from pinyon.transfer.types.limits import MAX_FRAME_BYTES, MAX_FRAME_REQUESTS
from pinyon.transfer.types.request import Reason
from pinyon.transfer.types.spans import MAX_SPANS, Spans, merge_ranges

keys = st.binary(min_size=16, max_size=16)
addresses = st.integers(0, (1 << 62) - 1)
sizes = st.integers(1, 4096)
ids = st.integers(0, (1 << 64) - 1)
seals = st.builds(Seal, addresses, keys)


def split(data: bytes) -> tuple[ShmRequestHead, memoryview]:
    head = shm_wire.parse_request(data[: shm_wire.HEAD_BYTES])
    return head, memoryview(data)[shm_wire.HEAD_BYTES : shm_wire.HEAD_BYTES + head.body_bytes]


@given(st.sampled_from([shm_wire.OK, shm_wire.UNREACHABLE]), addresses)
def test_proofs(code, address) -> None:
    assert shm_wire.parse_proof(shm_wire.pack_proof(code, address)) == (code, address)


@given(ids, st.lists(keys, min_size=1, max_size=40))
def test_resolves(message_id, asked) -> None:
    data = shm_wire.pack_resolve(message_id, asked)
    head, body = split(data)
    assert head == (shm_wire.RESOLVE, 0, len(asked), message_id, 0)
    assert shm_wire.parse_keys(body, head) == asked


@given(ids, st.lists(st.tuples(keys, addresses, sizes, addresses), min_size=1, max_size=40))
def test_writes(message_id, parts) -> None:
    nbytes = sum(part[2] for part in parts)
    data = shm_wire.pack_write(message_id, [part[:3] for part in parts], [part[3] for part in parts], nbytes)
    head, body = split(data)
    ranges, here = shm_wire.parse_ranges(body, head)
    assert ranges == [part[:3] for part in parts]
    assert list(here) == [part[3] for part in parts]


spans = st.lists(st.tuples(addresses, sizes), min_size=1, max_size=5).map(lambda ranges: merge_ranges(ranges, 1 << 63))
places = st.builds(ShmPlace, st.just(0), st.integers(0, 1 << 61), seals, spans) | st.sampled_from(
    [ShmPlace(Reason.UNKNOWN_REGION), ShmPlace(Reason.ACCESS_DENIED)]
)


@given(ids, st.lists(places, min_size=1, max_size=40))
def test_places(message_id, given_places) -> None:
    request = ShmRequestHead(shm_wire.RESOLVE, 0, len(given_places), message_id, 0)
    data = shm_wire.pack_places(request, given_places)
    head, body = data[: shm_wire.HEAD_BYTES], data[shm_wire.HEAD_BYTES :]
    assert shm_wire.parse_answer(head, shm_wire.RESOLVE, len(given_places), message_id) == (shm_wire.OK, len(body))
    assert shm_wire.parse_places(body, len(given_places)) == given_places


@pytest.mark.parametrize(
    "place",
    [
        ShmPlace(0),  # opens nothing
        ShmPlace(Reason.ACCESS_DENIED, spans=Spans((0,), (1,))),  # a refusal that opens something
        ShmPlace(9),
        ShmPlace(0, spans=Spans((0, 4), (4, 8))),  # one span in two
        ShmPlace(0, spans=Spans((8, 0), (9, 1))),
        ShmPlace(0, spans=Spans((8,), (8,))),
        ShmPlace(0, 1 << 62, spans=Spans((1 << 62,), ((1 << 62) + 1,))),  # beyond the address space
        ShmPlace(0, 0, Seal((1 << 63) - 8, bytes(16)), Spans((0,), (1,))),
    ],
)
def test_places_that_make_no_sense(place) -> None:
    request = ShmRequestHead(shm_wire.RESOLVE, 0, 1, 1, 0)
    with pytest.raises(WireError):
        shm_wire.parse_places(shm_wire.pack_places(request, [place])[shm_wire.HEAD_BYTES :], 1)


def test_an_answer_has_a_bounded_number_of_spans() -> None:
    def head(nbytes: int) -> bytes:
        return shm_wire._HEAD.pack(shm_wire.MAGIC, shm_wire.RESOLVE | shm_wire.REPLY_BIT, 0, 2, 1, nbytes)

    most = 2 * shm_wire.PLACE_BYTES + MAX_SPANS * shm_wire.SPAN_BYTES
    assert shm_wire.parse_answer(head(most), shm_wire.RESOLVE, 2, 1) == (shm_wire.OK, most)
    for wrong in (most + 1, 2 * shm_wire.PLACE_BYTES - 1):
        with pytest.raises(WireError):
            shm_wire.parse_answer(head(wrong), shm_wire.RESOLVE, 2, 1)


@given(ids, st.none() | st.binary(min_size=1, max_size=40))
def test_answers_to_writes(message_id, refusals) -> None:
    count = len(refusals) if refusals else 3
    data = shm_wire.pack_answer(ShmRequestHead(shm_wire.WRITE, 0, count, message_id, count), refusals)
    answer = shm_wire.parse_answer(data[: shm_wire.HEAD_BYTES], shm_wire.WRITE, count, message_id)
    assert answer == ((shm_wire.SOME_REFUSED, count) if refusals else (shm_wire.OK, 0))
    for wrong in ((shm_wire.RESOLVE, count, message_id), (shm_wire.WRITE, count + 1, message_id)):
        with pytest.raises(WireError):
            shm_wire.parse_answer(data[: shm_wire.HEAD_BYTES], *wrong)
    with pytest.raises(WireError):
        shm_wire.parse_answer(data[: shm_wire.HEAD_BYTES], shm_wire.WRITE, count, message_id ^ 1)


@given(st.binary(max_size=200), st.integers(0, 5))
def test_noise_is_a_wire_error(noise, count) -> None:
    for parse in (
        shm_wire.parse_proof,
        shm_wire.parse_request,
        lambda data: shm_wire.parse_answer(data, shm_wire.WRITE, count, 1),
        lambda data: shm_wire.parse_places(data, count),
        lambda data: shm_wire.parse_keys(memoryview(data), ShmRequestHead(shm_wire.RESOLVE, 0, count, 1, 0)),
        lambda data: shm_wire.parse_ranges(memoryview(data), ShmRequestHead(shm_wire.WRITE, 0, count + 1, 1, 1)),
    ):
        with suppress(WireError):
            parse(noise)


@given(st.integers(0, shm_wire.HEAD_BYTES + shm_wire.RANGE_BYTES - 1), st.integers(1, 255), ids)
def test_a_changed_write_is_another_valid_one_or_a_wire_error(at, change, message_id) -> None:
    data = bytearray(shm_wire.pack_write(message_id, [(b"k" * 16, 5, 7)], [4096], 7))
    data[at] ^= change
    with suppress(WireError):
        head, body = split(bytes(data))
        ranges, here = shm_wire.parse_ranges(body, head) if head.kind == shm_wire.WRITE else ([], ())
        assert sum(length for _, _, length in ranges) <= MAX_FRAME_BYTES
        assert all(address < 1 << 63 for address in here)


@pytest.mark.parametrize(
    "change",
    [
        {"ranges": 0},
        {"ranges": MAX_FRAME_REQUESTS + 1},
        {"ranges": 8},  # more ranges than bytes
        {"nbytes": MAX_FRAME_BYTES + 1},
        {"nbytes": 0},
        {"kind": 3},
        {"code": 1},
        {"kind": shm_wire.RESOLVE},  # it has no payload
    ],
)
def test_bounds_of_requests(change) -> None:
    message = ShmRequestHead(shm_wire.WRITE, 0, 2, 1, 7)._replace(**change)
    with pytest.raises(WireError):
        shm_wire.parse_request(shm_wire._HEAD.pack(shm_wire.MAGIC, *message))


@pytest.mark.parametrize(
    ("ranges", "here", "nbytes"),
    [
        ([(b"k" * 16, 0, 3), (b"k" * 16, 0, 4)], [0, 0], 8),  # 7 bytes
        ([(b"k" * 16, 0, 0), (b"k" * 16, 0, 4)], [0, 0], 4),
        ([(b"k" * 16, 0, 3), (b"k" * 16, 0, 4)], [0, (1 << 63) - 4], 7),
    ],
)
def test_ranges_that_make_no_sense(ranges, here, nbytes) -> None:
    head, body = split(shm_wire.pack_write(1, ranges, here, nbytes))
    with pytest.raises(WireError):
        shm_wire.parse_ranges(body, head)
