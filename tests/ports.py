"""A port for what stops and starts again in a test."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept_port() -> Iterator[int]:
    """A port of 127.0.0.1 that the kernel gives to nobody else meanwhile, also while its server is away: it is bound
    here, too, and not listened at. A server that sets SO_REUSEADDR, as all do, can listen there."""
    with socket.socket() as keeper:
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keeper.bind(("127.0.0.1", 0))
        yield keeper.getsockname()[1]
