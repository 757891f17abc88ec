"""The client that a connection belongs to, by its socket and by what trusted proxies say."""

from __future__ import annotations

import pytest

from pinyon.core.errors import InvalidArgument
from pinyon.http.answer import HttpError
from pinyon.http.peers import SIGNATURE, PeerPlaces, TrustedProxies, read_proxy_line


def forwarded(*values: str, name: str = "x-forwarded-for") -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for value in values]


@pytest.mark.parametrize(
    ("fields", "client"),
    [
        ([], "10.0.0.1"),
        (forwarded("1.2.3.4"), "1.2.3.4"),
        (forwarded("6.6.6.6, 1.2.3.4"), "1.2.3.4"),  # an address that the client wrote itself is not believed
        (forwarded("6.6.6.6, 1.2.3.4, 10.0.0.9"), "1.2.3.4"),
        (forwarded("6.6.6.6", "1.2.3.4"), "1.2.3.4"),
        (forwarded("1.2.3.4, unknown"), "10.0.0.1"),
        (forwarded("1.2.3.4, unknown, 10.0.0.9"), "10.0.0.9"),
        (forwarded("1.2.3.4:5678"), "1.2.3.4"),
        (forwarded("[2001:db8::1]:80"), "2001:db8::1"),
        (forwarded("2001:db8::1"), "2001:db8::1"),
        (forwarded("::ffff:1.2.3.4"), "1.2.3.4"),
        (forwarded("for=1.2.3.4", name="forwarded"), "10.0.0.1"),  # the other header is not trusted
        (forwarded(", ".join(["10.0.0.9"] * 1000)), "10.0.0.9"),
    ],
)
def test_whom_a_proxy_asks_for(fields, client):
    assert TrustedProxies("10.0.0.0/8, ::1").client("10.0.0.1", fields) == client


@pytest.mark.parametrize(
    ("value", "client"),
    [
        ("for=1.2.3.4", "1.2.3.4"),
        ('proto=https;For="[2001:db8::1]:4711", for=10.0.0.7', "2001:db8::1"),
        ("for=_hidden", "10.0.0.1"),
        ("proto=https", "10.0.0.1"),
        ("for=1.1.1.1;for=2.2.2.2", "10.0.0.1"),
    ],
)
def test_the_standard_header(value, client):
    assert TrustedProxies("10.0.0.0/8", "forwarded").client("10.0.0.1", forwarded(value, name="forwarded")) == client


def test_who_is_trusted():
    assert not TrustedProxies().trusts("127.0.0.1")
    proxies = TrustedProxies("10.0.0.0/8,2001:db8::/32")
    assert [proxies.trusts(name) for name in ("10.1.2.3", "::ffff:10.1.2.3", "2001:db8::1", "11.0.0.1", "", "x")] == [
        True, True, True, False, False, False,
    ]  # fmt: skip
    with pytest.raises(InvalidArgument):
        TrustedProxies("10.0.0.1/8")


def test_peers_are_counted_and_forgotten():
    peers = PeerPlaces(2)
    assert [peers.take("1.2.3.4") for _ in range(3)] == ["1.2.3.4", "1.2.3.4", None]
    assert [peers.take(f"2001:db8::{n}") for n in range(3)] == ["2001:db8::/64", "2001:db8::/64", None]
    assert peers.take("2001:db8:0:1::1") is not None
    peers.give("1.2.3.4")
    assert peers.take("1.2.3.4") is not None
    for _ in range(2):
        peers.give("1.2.3.4")
        peers.give("2001:db8::/64")
    peers.give("2001:db8:0:1::/64")
    assert len(peers) == 0


V2 = SIGNATURE + b"\x21\x11\0\x0c" + bytes([1, 2, 3, 4, 5, 6, 7, 8]) + b"\0\1\0\2"


@pytest.mark.parametrize(
    ("data", "address"),
    [
        (b"PROXY TCP4 1.2.3.4 5.6.7.8 1 2\r\n", "1.2.3.4"),
        (b"PROXY TCP6 2001:db8::1 ::1 1 2\r\n", "2001:db8::1"),
        (b"PROXY UNKNOWN\r\n", ""),
        (V2, "1.2.3.4"),
        (SIGNATURE + b"\x20\0\0\0", ""),
        (SIGNATURE + b"\x21\x21\0\x24" + bytes(15) + b"\1" + bytes(20), "::1"),
    ],
)
def test_proxy_headers(data, address):
    for end in range(len(data)):
        assert read_proxy_line(data[:end]) is None
    assert read_proxy_line(data + b"GET") == (address, len(data))


@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/1.1\r\n", b"PROXY TCP4 x 5.6.7.8 1 2\r\n", b"PROXY TCP4\r\n", b"PROXY " + b"x" * 200,
     SIGNATURE + b"\x11\x11\0\x0c", SIGNATURE + b"\x21\x11\xff\xff"],
)  # fmt: skip
def test_what_is_no_proxy_header(data):
    with pytest.raises(HttpError):
        read_proxy_line(data)
