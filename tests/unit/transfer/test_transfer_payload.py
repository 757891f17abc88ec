"""A frame's payload between two sockets: every byte, in order, and the verdict of its checksum."""

from __future__ import annotations

import random
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from pinyon.transfer import TransferLimits
from pinyon.transfer.links.stream import Stream
from pinyon.transfer.transports.tcp.payload import HEAD_START_BYTES, receive_payload, send_payload
from pinyon.transfer.types.errors import WireError

LIMITS = TransferLimits(stall_s=5.0, socket_buffer_bytes=1 << 18, spin_s=0.0)
PIECE = 256 << 10
HEAD = b"the header of it"
SEED = 77
SIZES = st.lists(
    st.sampled_from([1, 1000, 64 << 10, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE + 5]), min_size=1, max_size=6
)


@contextmanager
def link() -> Iterator[tuple[Stream, Stream]]:
    pair = socket.socketpair()
    try:
        yield Stream(pair[0], LIMITS), Stream(pair[1], LIMITS)
    finally:
        for sock in pair:
            sock.close()


def soon() -> float:
    return time.monotonic() + 20.0


def cut(data: bytes, sizes: list[int]) -> list[memoryview]:
    ends = [sum(sizes[: count + 1]) for count in range(len(sizes))]
    return [memoryview(bytearray(data[end - size : end])) for size, end in zip(sizes, ends, strict=True)]


def wire_bytes(data: bytes) -> bytes:
    return HEAD + data + struct.pack("!Q", xxh3_64_intdigest(data, SEED))


@settings(max_examples=25, deadline=None)
@given(SIZES)
def test_what_is_sent_is_header_bytes_and_their_checksum(sizes: list[int]) -> None:
    data = random.Random(1).randbytes(sum(sizes))
    with link() as (near, far), ThreadPoolExecutor(1) as pool:
        sent = pool.submit(send_payload, near, HEAD, cut(data, sizes), SEED, soon())
        got = memoryview(bytearray(len(HEAD) + len(data) + 8))
        far.receive([got], soon())
        sent.result()
    assert got == wire_bytes(data)


@settings(max_examples=25, deadline=None)
@given(SIZES, st.integers(0, HEAD_START_BYTES), st.booleans(), st.integers(0, 1 << 30))
def test_bytes_arrive_in_their_place_and_a_wrong_one_is_noticed(
    sizes: list[int], early: int, singly: bool, wrong: int
) -> None:
    data = random.Random(2).randbytes(sum(sizes))
    for flip in (None, wrong % (len(data) + 8)):
        stream_bytes = bytearray(wire_bytes(data)[len(HEAD) :])
        if flip is not None:
            stream_bytes[flip] ^= 0x10
        first = min(early, len(stream_bytes))
        buffers = cut(bytes(len(data)), sizes)
        with link() as (near, far), ThreadPoolExecutor(1) as pool:
            sent = pool.submit(near.send, [bytes(stream_bytes[first:])], soon())
            intact = receive_payload(far, buffers, SEED, soon(), memoryview(stream_bytes)[:first], singly=singly)
            sent.result()
        assert intact is (flip is None)
        if flip is None or flip >= len(data):
            assert b"".join(buffers) == data


@pytest.mark.parametrize("nbytes", [100, PIECE, PIECE + 9])
def test_bytes_after_the_checksum_break_the_protocol(nbytes: int) -> None:
    data = bytes(nbytes)
    early = wire_bytes(data)[len(HEAD) :] + b"x"
    with link() as (_, far), pytest.raises(WireError):
        receive_payload(far, cut(data, [nbytes]), SEED, soon(), memoryview(bytearray(early)))
