"""Ports that stay reserved while no process listens there."""

from __future__ import annotations

import errno
import socket

import pytest

from launch.ports import HeldPorts


def test_who_names_a_held_port_listens_there_again_and_again() -> None:
    with HeldPorts() as ports:
        port = ports.take("127.0.0.1")
        for _ in range(3):
            with socket.create_server(("127.0.0.1", port)) as server:
                with socket.create_connection(server.getsockname(), timeout=60):
                    pass
                with pytest.raises(OSError, match="in use") as caught, socket.create_server(("127.0.0.1", port)):
                    pass
                assert caught.value.errno == errno.EADDRINUSE


def test_a_held_port_is_no_free_one() -> None:
    with HeldPorts() as ports:
        port = ports.take("127.0.0.1")
        assert ports.take("127.0.0.1") != port
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))  # as the system does when it looks for a free port


def test_ipv6_addresses_are_held_in_brackets_or_not() -> None:
    with HeldPorts() as ports:
        assert len({ports.take("::1"), ports.take("[::1]")}) == 2


def test_a_host_that_is_not_here_leaves_nothing_open() -> None:
    with HeldPorts() as ports, pytest.raises(OSError, match="assign"):
        ports.take("192.0.2.1")
