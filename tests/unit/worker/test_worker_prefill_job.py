"""The computing time that a prefill instance reports beside a read that it waited for."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from pinyon.core.compiled import compiled
from services.worker.orders.abort import Abort
from services.worker.prefill.job import PrefillJob

pytestmark = pytest.mark.skipif(compiled(), reason="fakes stand where compiled code has its own classes")


@pytest.mark.parametrize(("stalled_s", "left_s"), [(0.2, 0.3), (0.6, 0.0)])
async def test_computing_takes_no_less_than_no_time(stalled_s: float, left_s: float) -> None:
    reading = asyncio.get_running_loop().create_future()
    reading.set_result(None)
    layered = SimpleNamespace(reading=reading, came=True, arrivals=SimpleNamespace(stalled_s=stalled_s))
    job = SimpleNamespace(abort=Abort(), order=SimpleNamespace(tokens=()), _compute_s=0.5, _publish=Mock())
    await PrefillJob._settle_layers(job, layered, 0)  # type: ignore[arg-type]
    assert job._compute_s == pytest.approx(left_s)
