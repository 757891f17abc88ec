"""Clients that leave are noticed on every hop, whatever the size of their request.

``./dev chaos leave`` measures how soon. Here each hop must stop long before the answer would end."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from launch.cluster import LocalCluster
from tests.chaos.jobs import PacedJobs
from tests.chaos.leaving import MOMENTS, leave_once, leaving_spec
from tests.cluster.observe import wait_idle
from tests.forks import forked
from tests.long import usually

SEED = 77
ALL = [*itertools.product(MOMENTS, (2_000, 90_000)), ("prompt", 200_000), ("stream", 200_000)]
EACH = [each for number, each in enumerate(ALL) if number // 2 % 2 == number % 2]
"""Every moment once, and both sizes equally often; the largest size during prefill."""


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """A cluster with one service of each kind, whose answers take most of a minute."""
    with LocalCluster(leaving_spec(), tmp_path_factory.mktemp("leaving-logs"), forked) as running:
        yield running


@pytest.mark.parametrize(("moment", "size_bytes"), ALL if usually(0, long=1) else EACH)
async def test_every_hop_stops_when_the_client_has_left(slow, size_bytes, moment):
    random_ = random.Random(f"{SEED} {size_bytes} {moment}")
    result = await leave_once(slow, PacedJobs(random_), random_, size_bytes, moment)
    assert None not in result.noticed_s.values(), result
    await wait_idle(slow)
