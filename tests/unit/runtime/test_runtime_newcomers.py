"""The newcomers that make room when too many have not identified themselves yet."""

from __future__ import annotations

from functools import partial

import pytest

from pinyon.core.address import is_loopback, network_of
from pinyon.runtime.http2.listener import Newcomers


class Door:
    def __init__(self, share: int) -> None:
        self.newcomers = Newcomers(share)
        self.ended: list[str] = []

    def enter(self, *names: str) -> None:
        """Enters the names, whose first letters are their addresses."""
        for name in names:
            self.newcomers.enter(name, name[0], partial(self.ended.append, name))


def test_beyond_its_share_an_address_ends_its_oldest() -> None:
    door = Door(2)
    door.enter("a1", "b1", "a2", "a3", "a4", "b2")
    assert door.ended == ["a1", "a2"]
    assert len(door.newcomers._addresses) == 4


def test_the_oldest_of_the_most_crowded_address_makes_room() -> None:
    door = Door(9)
    door.enter("b1", "a1", "a2", "a3", "b2", "c1")
    assert [door.newcomers.make_room() for _ in range(2)] == [True, True]
    assert door.ended == ["a1", "b1"]


def test_who_is_known_is_not_ended() -> None:
    door = Door(2)
    door.enter("a1", "a2")
    for _ in range(2):
        door.newcomers.leave("a1")
    door.enter("a3", "a4")
    while door.newcomers.make_room():
        pass
    assert door.ended == ["a2", "a3", "a4"]


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("2001:db8::1", "2001:db8::/64"),
        ("2001:db8::ffff:1%eth0", "2001:db8::/64"),
        ("::ffff:10.0.0.7", "10.0.0.7"),
        ("no:address", "no:address"),
    ],
)
def test_an_ipv6_network_of_64_bits_is_one_peer(host: str, network: str) -> None:
    assert network_of(host) == network


def test_a_mapped_loopback_address_is_one_of_this_machine() -> None:
    for host in ("127.0.0.1", "::1", "::ffff:127.0.0.1", "localhost"):
        assert is_loopback(host)
    for host in ("::ffff:10.0.0.1", "10.0.0.1", "::", "elsewhere", ""):
        assert not is_loopback(host)
