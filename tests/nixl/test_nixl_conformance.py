"""The suites that all transports share, with READs by the real NIXL and WRITEs by tcp, two engines in one process."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pinyon.transfer import TransferEngine, TransferLimits, Transports
from tests.integration import test_transfer_grants as grants
from tests.unit.transfer import test_transfer_conformance as conformance
from tests.unit.transfer.conftest import PATIENT, Pair


@pytest.fixture
def make_pair() -> Iterator[Callable[..., Pair]]:
    engines: list[TransferEngine] = []

    def start(limits: TransferLimits) -> TransferEngine:
        engine = TransferEngine(
            transports=Transports(("tcp",), nixl="prefer", nixl_without_authentication=True),
            secret=b"cluster secret",
            limits=limits,
        )
        engine.start()
        engines.append(engine)
        return engine

    def make(size: int = 1 << 20, limits: TransferLimits = PATIENT) -> Pair:
        engine, server = start(limits), start(limits)
        near, far = bytearray(size), bytearray(size)
        local, remote = engine.register_local_memory(near), server.register_local_memory(far)
        return Pair(engine, server, near, far, local, remote, server.descriptor())

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def pair() -> Iterator[grants.Pair]:
    yield from grants.pairs({"transports": Transports(("tcp",), nixl="prefer")}, same_process=False)


def of_a_transport(module: Any, fixture: str) -> dict[str, Any]:
    tests = {name: test for name, test in vars(module).items() if name.startswith("test_")}
    return {name: test for name, test in tests.items() if fixture in inspect.signature(test).parameters}


globals().update(of_a_transport(conformance, "make_pair"))
globals().update(of_a_transport(grants, "pair"))
