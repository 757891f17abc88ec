"""Pairs of engines that READ by NIXL, or by a fake of it in tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pinyon.transfer import TransferEngine, Transports
from tests.unit.transfer.conftest import PATIENT, Pair


@contextmanager
def nixl_pair(far: bytes) -> Iterator[Pair]:
    """Yields two engines, the second of which has this memory.

    The READs of the first engine go by NIXL, its WRITEs by tcp.
    """
    engine, server = (TransferEngine(transports=Transports(("tcp",), nixl="prefer"), limits=PATIENT) for _ in range(2))
    with engine, server:
        here, there = bytearray(len(far)), bytearray(far)
        local, remote = engine.register_local_memory(here), server.register_local_memory(there)
        yield Pair(engine, server, here, there, local, remote, server.descriptor())
