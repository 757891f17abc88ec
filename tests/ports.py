"""Ports for servers that start late, or stop and start again, in a test."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator

import pytest

TRIES = 100


@contextlib.contextmanager
def kept_port(length: int = 1) -> Iterator[int]:
    """Yields the first of ``length`` consecutive ports of 127.0.0.1 that the kernel gives to nobody else meanwhile.

    Each port is bound here but has no listener: a server that sets SO_REUSEADDR, as all do, can listen there."""
    for _ in range(TRIES):
        with contextlib.ExitStack() as stack:
            first = 0
            try:
                for place in range(length):
                    keeper = stack.enter_context(socket.socket())
                    keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    keeper.bind(("127.0.0.1", first and first + place))
                    first = first or keeper.getsockname()[1]
            except (OSError, OverflowError):  # another process has one of the ports, or the numbers end here
                continue
            yield first
            return
    raise AssertionError(f"no {length} free ports in a row")


@pytest.fixture
def free_ports() -> Iterator[Callable[[int], int]]:
    """A function that takes a count and returns the first of that many consecutive ports, kept until the test ends."""
    with contextlib.ExitStack() as stack:
        yield lambda length: stack.enter_context(kept_port(length))
