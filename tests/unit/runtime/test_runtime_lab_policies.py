"""The laboratory's policies are no choice of a service; they have their names where the laboratory is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pinyon.batching import BATCHING_POLICIES
from pinyon.core.policies import Registry
from pinyon.eviction import EVICTION_POLICIES
from pinyon.placement.policies import PLACEMENT_POLICIES

PLACEMENT = ("algorithm1", "cache_affinity", "preble", "dynamo", "min_ttft", "random")
BATCHING = ("oracle", "lpm", "dfs_weight", "sglang_fcfs", "dynamic")
EVICTION = ("fifo", "lfu", "gdfs", "s3fifo", "sieve")
LOOK = """
import sys
from services.conductor.settings import ConductorSettings
from services.kvstore.settings import KvStoreSettings
from services.lb.settings import LbSettings
from services.worker.settings import WorkerSettings
from pinyon.runtime.setting_sources import load_settings

service, option, *choices = sys.argv[1:]
settings = {
    "worker": WorkerSettings, "conductor": ConductorSettings, "kvstore": KvStoreSettings, "lb": LbSettings
}[service]
for choice in choices:
    try:
        load_settings(settings, [option, choice], {})
    except SystemExit as stopped:
        print(choice, stopped.code)
assert not any(name.startswith("pinyon_lab") for name in sys.modules)
"""


@pytest.mark.parametrize(
    ("service", "option", "choices"),
    [
        ("worker", "--batching", [*BATCHING, "feather:by_tip=true", "feather:stop=q_learning"]),
        (
            "conductor",
            "--placement",
            [*PLACEMENT, "dualmap:choice=min_ttft", "dualmap:rebalance=false"]
            + [f"pinyon:{part}=false" for part in ("fetch", "order", "pair")],
        ),
        ("lb", "--routing", ["cache_aware:first=true"]),
        ("kvstore", "--eviction", [*EVICTION]),
    ],
)
def test_a_service_does_not_offer_what_is_to_compare_with(service: str, option: str, choices: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOOK, service, option, *choices], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.splitlines() == [f"{choice} 2" for choice in choices]


@pytest.mark.parametrize(
    ("registry", "names"),
    [(BATCHING_POLICIES, BATCHING), (EVICTION_POLICIES, EVICTION), (PLACEMENT_POLICIES, PLACEMENT)],
)
def test_the_laboratory_offers_them(registry: Registry[object], names: tuple[str, ...]) -> None:
    assert set(names) <= set(registry.names)
    for name in names:
        assert registry.make(name) is not None


def test_a_running_service_takes_them_as_it_takes_anybodys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PINYON_POLICY_MODULES", "pinyon_lab.policies")
    for name in ("Dynamic:tbt_s=0.2", "Feather:stop=q_learning", "Lpm", "Oracle", "SglangDfsWeight", "SglangFcfs"):
        assert BATCHING_POLICIES.checked(f"pinyon_lab.policies.batching:{name}")
    for name in ("Algorithm1", "CacheAffinity", "Dynamo", "LabDualMap", "LabPinyon:fetch=false", "Preble:share=0.4"):
        assert PLACEMENT_POLICIES.checked(f"pinyon_lab.policies.placement:{name}")
    for name in ("plain:MinTtft", "plain:RandomChoice"):
        assert PLACEMENT_POLICIES.make(f"pinyon_lab.policies.{name}") is not None
    for name in ("eviction:Fifo", "eviction:Gdfs", "eviction:Lfu", "s3fifo:S3Fifo", "sieve:SievePolicy"):
        assert EVICTION_POLICIES.make(f"pinyon_lab.policies.{name}") is not None
