"""The suites that all transports share, over RDMA: host a's devices here, host b's there, one process."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pinyon.transfer import Network, TransferEngine, TransferLimits
from tests.property import test_transfer_model as model
from tests.rdma.inside.rdma_nics import rdma_nic
from tests.unit.transfer import test_transfer_conformance as conformance
from tests.unit.transfer.conftest import PATIENT, Pair


def start(host: str, limits: TransferLimits) -> TransferEngine:
    nics = [rdma_nic(f"{host}0"), rdma_nic(f"{host}1")]
    engine = TransferEngine(network=Network(nics), transports=("rdma",), secret=b"cluster secret", limits=limits)
    engine.start()
    return engine


@pytest.fixture
def make_pair() -> Iterator[Callable[..., Pair]]:
    engines: list[TransferEngine] = []

    def make(size: int = 1 << 20, limits: TransferLimits = PATIENT) -> Pair:
        engine, server = start("a", limits), start("b", limits)
        engines.extend((engine, server))
        near, far = bytearray(size), bytearray(size)
        local, remote = engine.register_local_memory(near), server.register_local_memory(far)
        return Pair(engine, server, near, far, local, remote, server.descriptor())

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Any, ...]]:
    near, far = bytearray(model.SIZE), bytearray(model.SIZE)
    engine, server = start("a", model.SMALL), start("b", model.SMALL)
    yield (
        engine,
        near,
        far,
        engine.register_local_memory(near),
        server.register_local_memory(far),
        server.descriptor(),
    )
    engine.close()
    server.close()


def of_a_transport(module: Any, fixture: str) -> dict[str, Any]:
    tests = {name: test for name, test in vars(module).items() if name.startswith("test_")}
    return {name: test for name, test in tests.items() if fixture in inspect.signature(test).parameters}


globals().update(of_a_transport(conformance, "make_pair"))
globals().update(of_a_transport(model, "pair"))
