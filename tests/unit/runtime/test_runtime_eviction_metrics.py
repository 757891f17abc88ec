from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry

from pinyon.eviction import NO_TRAITS, Lru
from pinyon.eviction.evictor import Evictor
from pinyon.eviction.fit import Fit
from pinyon.runtime.eviction import CATEGORIES_MAX, OTHER, show_eviction, shown


class Believing(Lru[bytes]):
    def __init__(self, beliefs: Mapping[str, Fit]) -> None:
        super().__init__()
        self._beliefs = beliefs

    def refit(self, now_s: float) -> None:
        return None

    def adopt(self, fit: object) -> None:
        raise AssertionError("there is no fit")

    def beliefs(self) -> Mapping[str, Fit]:
        return self._beliefs


def figures(evictor: Evictor[bytes]) -> dict[tuple[str, str], float]:
    registry = CollectorRegistry()
    show_eviction(registry, "worker", "blocks", evictor)
    return {
        (sample.name.removeprefix("pinyon_worker_"), sample.labels.get("category", "")): sample.value
        for metric in registry.collect()
        for sample in metric.samples
    }


def test_what_went_and_what_was_missed() -> None:
    evictor: Evictor[bytes] = Evictor(Lru())
    evictor.stored([b"a", b"b", b"c"], 1.0, NO_TRAITS, range(3))
    assert evictor.victims(2, 10.0) == [b"c", b"b"]
    evictor.stored([b"b", b"d"], 14.0, NO_TRAITS, range(2))
    evictor.stored([b"c"], 15.0, NO_TRAITS, range(1))
    assert figures(evictor) == {
        ("evicted_blocks_total", ""): 2,
        ("regretted_blocks_total", ""): 2,
        ("regretted_seconds_total", ""): 9.0,
    }


def test_what_a_policy_believes_follows_the_policy() -> None:
    evictor: Evictor[bytes] = Evictor(Lru())
    assert not evictor.beliefs()
    evictor.switch(Believing({"": Fit(0.5, 60.0), "chat/1": Fit(0.25, 9.0)}), (), lambda _: (NO_TRAITS, 0, None), 0.0)
    seen = figures(evictor)
    assert seen["eviction_reuse_share", "chat/1"] == 0.25
    assert seen["eviction_reuse_mean_seconds", "chat/1"] == 9.0
    assert seen["eviction_reuse_share", ""] == 0.5
    evictor.switch(Lru(), (), lambda _: (NO_TRAITS, 0, None), 1.0)
    assert len(figures(evictor)) == 3


def test_a_thousand_categories_are_few_series() -> None:
    beliefs = {f"chat/{turn}": Fit(1 / turn, float(turn)) for turn in range(1, 1001)}
    few = shown(beliefs)
    assert len(few) == CATEGORIES_MAX
    assert set(few) == {OTHER, *(f"chat/{turn}" for turn in range(1, CATEGORIES_MAX))}
    rest = range(CATEGORIES_MAX, 1001)
    assert abs(few[OTHER].share - sum(1 / turn for turn in rest) / len(rest)) < 1e-12
    assert few[OTHER].mean_s == sum(rest) / len(rest)
    exactly = dict(list(beliefs.items())[:CATEGORIES_MAX])
    assert shown(exactly) == exactly
