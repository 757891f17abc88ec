"""Every policy can be chosen by name on its service's command line, and nonsense ends with status 2."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from pinyon.batching import BATCHING_POLICIES
from pinyon.eviction import EVICTION_POLICIES
from pinyon.placement.policies import PLACEMENT_POLICIES
from pinyon.routing.policies import ROUTING_POLICIES
from pinyon.routing.pushing import PUSHING_RULES
from pinyon.runtime.metrics import show_policies
from pinyon.runtime.setting_sources import load_settings
from services.conductor.settings import ConductorSettings
from services.kvstore.settings import KvStoreSettings
from services.lb.settings import LbSettings
from services.worker.settings import WorkerSettings

SEAMS = [
    (WorkerSettings, "eviction", EVICTION_POLICIES),
    (WorkerSettings, "batching", BATCHING_POLICIES),
    (KvStoreSettings, "eviction", EVICTION_POLICIES),
    (ConductorSettings, "placement", PLACEMENT_POLICIES),
    (LbSettings, "routing", ROUTING_POLICIES),
    (LbSettings, "pushing", PUSHING_RULES),
]


@pytest.mark.parametrize(("settings", "field", "registry"), SEAMS)
def test_every_known_one_can_be_chosen(settings, field, registry):
    default = getattr(load_settings(settings, [], {}), field)
    assert default == "auto" or registry.make(default) is not None
    for name in registry.names:
        by_line = load_settings(settings, [f"--{field}", name], {})
        by_environment = load_settings(settings, [], {f"{settings.env_prefix()}{field.upper()}": name})
        assert getattr(by_line, field) == getattr(by_environment, field) == name


@pytest.mark.parametrize(("settings", "field", "registry"), SEAMS)
@pytest.mark.parametrize("choice", ["nonsense", "{name}:nonsense=1"])
def test_nonsense_ends_with_status_2_and_a_list(settings, field, registry, choice, capsys):
    with pytest.raises(SystemExit) as stopped:
        load_settings(settings, [f"--{field}", choice.format(name=registry.names[0])], {})
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert f"--{field}: " in message
    assert f"{registry.kind} policy" in message
    assert "known: " in message
    assert "{" in choice or all(name in message for name in registry.names)
    assert message.count("nonsense") == 1 + ("{" in choice), "a message that names what was given does not repeat it"


def test_a_value_out_of_bounds_names_option_bounds_and_policy(capsys):
    with pytest.raises(SystemExit) as stopped:
        load_settings(ConductorSettings, ["--placement", "kvcache_centric:balancing_threshold=0.5"], {})
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert "placement policy kvcache_centric: balancing_threshold must be at least 1, got 0.5" in message


def test_help_lists_the_choices(capsys):
    with pytest.raises(SystemExit) as stopped:
        load_settings(ConductorSettings, ["--help"], {})
    assert stopped.value.code == 0
    assert "kvcache_centric, least_loaded" in " ".join(capsys.readouterr().out.split())


def test_what_runs_is_shown():
    registry = CollectorRegistry()
    show_policies(registry, "worker", eviction="lru", batching="fcfs")
    labels = {"eviction": "lru", "batching": "fcfs"}
    assert registry.get_sample_value("pinyon_worker_policies_info", labels) == 1
