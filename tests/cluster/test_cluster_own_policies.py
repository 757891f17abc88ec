"""Processes that serve under policies from outside the suite, named in their arguments."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.cluster import LocalCluster
from launch.scrape import Scrape
from pinyon.cli.main import main
from pinyon.core.errors import InvalidArgument
from pinyon.core.policies import MODULES
from tests.cluster.asking import REPORT, complete
from tests.cluster.specs import PACED, cluster_spec
from tests.own_policies import MODULE

SMALL = {**PACED, "tls": False, "pool_blocks": 64}


def answered(cluster: LocalCluster) -> tuple[str, str]:
    """Returns how a completion ended, and the policy that placed it."""
    answer = complete(cluster, REPORT, max_tokens=6).json
    return answer["choices"][0]["finish_reason"], answer["pinyon"]["policy"]


def chosen(cluster: LocalCluster, service: str) -> set[str]:
    samples = Scrape(cluster).samples
    return {
        label
        for (_, name, labels), _ in samples.items()
        if name == f"pinyon_{service}_policies_info"
        for label in labels
    }


def test_a_conductor_places_by_it_and_is_told_of_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(MODULES, MODULE)
    policy = f"{MODULE}:AtEnd:end=last"
    with LocalCluster(cluster_spec(**{**SMALL, "mixed": 2}, placement=policy), tmp_path) as cluster:
        assert {answered(cluster) for _ in range(4)} == {("length", "at_end")}
        served = {
            service: value
            for (service, name, _), value in Scrape(cluster).samples.items()
            if name == "pinyon_worker_generated_tokens_total" and value
        }
        assert sum(served.values()) == 4 * 6
        assert len(served) == 1, "the last instance had all"
        assert policy in chosen(cluster, "conductor")
        tell = ["admin", "conductor", cluster.conductor]
        assert main([*tell, f"placement={MODULE}:AtEnd:end=first"]) == 0
        assert answered(cluster) == ("length", "at_end")
        capfd.readouterr()
        assert main([*tell, "placement=tests.long:usually"]) == 1
        assert f"tests.long may not be imported here: start the process with {MODULES}=tests.long" in "".join(
            capfd.readouterr().err.split("\n")
        )
        assert answered(cluster) == ("length", "at_end")


def test_a_worker_batches_orders_and_evicts_by_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MODULES, MODULE)
    own = {"batching": "Few:at_once=2", "service_order": "LastComes", "eviction": "Newest"}
    choices = {name: f"{MODULE}:{choice}" for name, choice in own.items()}
    routing = f"{MODULE}:ByLastName"
    with LocalCluster(cluster_spec(routing=routing, **choices, **SMALL), tmp_path) as cluster:
        assert answered(cluster)[0] == "length"
        assert chosen(cluster, "worker") >= set(choices.values())
        assert routing in chosen(cluster, "lb")


def test_what_was_not_named_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MODULES, "another")
    with pytest.raises(InvalidArgument, match=f"{MODULE} may not be imported here: start the process with {MODULES}"):
        cluster_spec(placement=f"{MODULE}:AtEnd", **SMALL)
