"""A thousand requests, each with its own prompt: no process grows with them.

The short version of ``./dev soak``, which holds 20,000 requests against one per cent. With so few, bounded caches and
tables still fill, so the test only checks that nothing of a prompt's size stays per request."""

from __future__ import annotations

from launch.cluster import LocalCluster
from tests.chaos.soak import run_soak, soak_spec
from tests.forks import forked
from tests.long import usually

SEED = "2000"
REQUESTS = usually(1_000, long=2_000)
SIZES_BYTES = (200, 800)
BYTES_PER_REQUEST = 6_144
"""The load balancer's tables take 3 MB while they fill, which lasts for 1,500 requests."""


async def test_no_process_grows_with_the_requests_it_served(tmp_path):
    with LocalCluster(soak_spec(), tmp_path, forked) as cluster:
        result = await run_soak(cluster, REQUESTS, SEED, lambda count: None, SIZES_BYTES)
    assert not result.failed, result.failed[:3]
    assert result.served + result.left == REQUESTS
    growths = result.samples.growths()
    print(*growths, sep="\n")
    grown = [each for each in growths if each.bytes_per_request > BYTES_PER_REQUEST]
    assert not grown, grown
    leaked = [each for each in growths if each.files[1] > each.files[0] + 20]
    assert not leaked, leaked
