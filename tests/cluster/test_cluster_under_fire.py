"""Services are killed, frozen and told to end: no request fails but those that only the victim could finish.

The short version of ``./dev chaos faults``, which also measures times (docs/notebook/faults.md); here nothing depends
on the machine's speed. The folder that a failure names has the evidence."""

from __future__ import annotations

import functools
import random
from dataclasses import replace

import pytest

from tests.chaos.clusters import CONFIGURATIONS, Configuration
from tests.chaos.evidence import Evidence
from tests.chaos.jobs import ExactJobs
from tests.chaos.run_faults import FaultResult, run_configuration
from tests.chaos.victims import Pace
from tests.forks import forked
from tests.long import usually
from tests.small_model import small_card

SEED = "4711"
PACE = Pace(calm_s=1.0, after_s=1.0)
STRIKES = {
    "split": [
        ("conductor", "kill"),
        ("lb-0", "drain"),
        ("prefill-0", "kill"),
        ("decode-0", "freeze"),
        ("redis", "kill"),
    ],
    "mixed": [("mixed-0", "kill")],
    "exact": [("decode-0", "kill"), ("lb-0", "kill")],
}


def calmer(configuration: Configuration) -> Configuration:
    """Returns it with fewer requests, or answers of a smaller model: each client still asks at a fault and its end."""
    if configuration.name == "exact":
        return replace(configuration, jobs=functools.partial(ExactJobs, count=10, card=small_card()))
    clients = tuple(replace(each, period_s=usually(3, long=2) * each.period_s) for each in configuration.clients)
    return replace(configuration, clients=clients)


@pytest.mark.parametrize("name", STRIKES)
async def test_no_request_fails_while_services_come_and_go(name, tmp_path):
    print(f"seed {SEED!r}")
    strikes = random.Random(SEED).sample(STRIKES[name], len(STRIKES[name]))
    results: list[FaultResult] = []
    with Evidence(tmp_path, SEED) as evidence:
        await run_configuration(
            calmer(CONFIGURATIONS[name]),
            strikes,
            SEED,
            evidence,
            PACE,
            lambda text: None,
            results.append,
            launch=forked.with_small_model if name == "exact" else forked,
        )
    assert [(result.victim, result.fault) for result in results] == strikes
    for result in results:
        assert not result.problems, (result.problems, result.evidence)
        assert not result.left, (result.left, result.evidence)
        for row in result.rows:
            assert not row.failed, (row, result.evidence)
            assert row.gap_s is not None, (row, result.evidence)
            assert row.requests > row.only_copy
            assert not row.only_copy or row.victim == "lb-0"
