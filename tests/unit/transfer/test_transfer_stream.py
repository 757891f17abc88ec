"""A stream's buffers: small where the bytes do not leave the host."""

from __future__ import annotations

import socket

import pytest

from pinyon.transfer import TransferLimits
from pinyon.transfer.links.stream import Stream

LIMITS = TransferLimits(stall_s=1.0, socket_buffer_bytes=1 << 20, spin_s=0.0)


def buffers(stream: Stream) -> list[int]:
    return [stream.sock.getsockopt(socket.SOL_SOCKET, each) for each in (socket.SO_SNDBUF, socket.SO_RCVBUF)]


@pytest.mark.parametrize(("source", "shrink"), [("127.0.0.1", True), ("127.0.0.2", False)])
def test_only_links_within_one_address_have_small_buffers(source: str, shrink: bool) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname(), source_address=(source, 0)) as sock,
    ):
        stream = Stream(sock, LIMITS)
        before = buffers(stream)
        stream.keep_little()
        assert [now < then for now, then in zip(buffers(stream), before, strict=True)] == [shrink] * 2


def test_a_link_that_broke_meanwhile_keeps_its_buffers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sock = socket.create_connection(listener.getsockname())
        stream = Stream(sock, LIMITS)
        stream.close(hard=True)
    stream.keep_little()
