"""A paced cluster with chosen policies, as ``./dev up --engine paced --eviction workload_aware ...`` starts it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from launch.cluster import POLICIES, LocalCluster
from launch.scrape import Scrape
from pinyon.core.errors import InvalidArgument
from tests.cluster.asking import REPORT, complete
from tests.cluster.specs import PACED, cluster_spec
from tests.forks import forked

CHOSEN = {"placement": "least_loaded", "routing": "round_robin", "batching": "fcfs", "eviction": "workload_aware"}


def completed(cluster: LocalCluster, number: int) -> tuple[str, str, str]:
    """Returns the text, the reason of its end, and the policy."""
    answer = complete(cluster, REPORT, max_tokens=12, seed=number % 2).json
    (choice,) = answer["choices"]
    return choice["text"], choice["finish_reason"], answer["pinyon"]["policy"]


def test_two_paced_instances_serve_with_the_chosen_policies(tmp_path):
    spec = cluster_spec(**{**PACED, "mixed": 2, "pool_blocks": 64, **CHOSEN})
    with LocalCluster(spec, tmp_path, forked) as cluster, ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda number: completed(cluster, number), range(16)))
        assert {(end, policy) for _, end, policy in answers} == {("length", "least_loaded")}
        # one text per seed, whichever instance generated it
        assert [text for text, *_ in answers] == [answers[number % 2][0] for number in range(16)]
        assert answers[0][0] != answers[1][0]
        scrape = Scrape(cluster)
        assert scrape.total("pinyon_worker_generated_tokens_total") == 16 * 12
        shown = {name: set(labels) for (_, name, labels), _ in scrape.samples.items() if name.endswith("policies_info")}
        assert shown == {
            "pinyon_worker_policies_info": {"paced", "fcfs", "workload_aware", "most_in_time"},
            "pinyon_conductor_policies_info": {"least_loaded"},
            "pinyon_lb_policies_info": {"round_robin", "blind"},
        }


@pytest.mark.parametrize("kind", POLICIES)
def test_an_unknown_policy_is_refused_before_anything_starts(kind):
    with pytest.raises(InvalidArgument, match=f"no {kind.replace('_', ' ')} policy 'nonsense'; known: ") as caught:
        cluster_spec(**{kind: "nonsense"})
    assert caught.value.field == kind
