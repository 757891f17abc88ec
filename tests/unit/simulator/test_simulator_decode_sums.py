"""The decoded tokens of a simulated engine's steps, by hand."""

from __future__ import annotations

import pytest

from pinyon.core.request import Role
from pinyon.eviction import NO_TRAITS
from pinyon.placement.policies import PLACEMENT_POLICIES
from pinyon.profiles.engine_profile import EngineProfile
from pinyon.profiles.machine_profile import load_machine
from pinyon_lab.simulator.cluster import SimCluster
from pinyon_lab.simulator.cluster_settings import ClusterSettings
from pinyon_lab.simulator.workload import Arrival


@pytest.mark.parametrize(("share", "kv_tokens"), [(1.0, 2 * (49 + 50 + 51)), (0.5, 2 * (49 + 50 + 51) - 2 * 16)])
def test_steps_tokens_seconds_and_kv(share: float, kv_tokens: float) -> None:
    """Two prompts of 48 tokens share 32, and each generates four tokens, of which the first comes with the prompt.

    The second prompt is computed beside the first request's first decode: four steps, two of which decode both. With
    0.5, those two steps save half of the shared tokens."""
    engine = EngineProfile("", "", "", 0.0, 1e-3, 0.0, 0.01, 0.0, 1e-4, share)
    settings = ClusterSettings((Role.MIXED,), 16, 16_384)
    cluster = SimCluster(settings, load_machine("tiny"), engine, PLACEMENT_POLICIES.make("round_robin"))
    first = Arrival(0.0, 48, 1, (1, 2, 3), NO_TRAITS)
    cluster.run([first, *(Arrival(10.0, 48, 4, (1, 2, block), NO_TRAITS) for block in (4, 5))])
    (one,) = cluster.members.engines.values()
    sums = one.decode_sums
    assert sums.tokens == 6
    assert sums.steps == 4
    assert sums.kv_tokens == pytest.approx(kv_tokens)
    assert sums.seconds == pytest.approx(4 * 0.01 + 1e-4 * kv_tokens)
