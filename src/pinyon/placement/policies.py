"""The placement policies by name, and a choice of a policy for each model."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import ClassVar

from pinyon.core.policies import NoSettings, Registry
from pinyon.placement.dualmap import DualMap, DualMapSettings
from pinyon.placement.interface import LearningPlacement, PlacementPolicy, Rebalancing
from pinyon.placement.kvcache_centric import KvCacheCentric, KvCacheCentricSettings
from pinyon.placement.pinyon import Pinyon, PinyonSettings
from pinyon.placement.plain import LeastLoaded, RoundRobin
from pinyon.placement.policy import Move, PlacementDecision, PlacementRequest, Pool, Waiting
from pinyon.placement.prefix_match import PrefixMatch

MODELS_MAX = 32


class ByModel:
    """The policy that asks the policy of the request's model, or ``default`` if the model has none."""

    name: ClassVar[str] = "by_model"

    def __init__(self, default: PlacementPolicy, of_model: Mapping[str, PlacementPolicy]) -> None:
        self._default = default
        self._of_model = of_model

    def place(
        self, request: PlacementRequest, pool: Pool, match: PrefixMatch, now_s: float, rng: Random
    ) -> PlacementDecision:
        return self._of_model.get(request.model, self._default).place(request, pool, match, now_s, rng)

    def prefilled(self, decision: PlacementDecision, seconds: float) -> None:
        policy = self._of_model.get(decision.prefill.info.model, self._default)
        if isinstance(policy, LearningPlacement):
            policy.prefilled(decision, seconds)

    def moves(self, request: PlacementRequest, decision: PlacementDecision, waiting: Waiting) -> list[Move]:
        policy = self._of_model.get(request.model, self._default)
        return policy.moves(request, decision, waiting) if isinstance(policy, Rebalancing) else []


class ByModelRegistry(Registry[PlacementPolicy]):
    """A registry whose choices may end with ``;MODEL=POLICY`` for each model that has another policy."""

    def make(self, choice: str) -> PlacementPolicy:
        default, of_model = _parts(choice)
        if not of_model:
            return super().make(default)
        make = super().make
        return ByModel(make(default), {model: make(each) for model, each in of_model.items()})

    def checked(self, choice: str) -> str:
        default, of_model = _parts(choice)
        for each in (default, *of_model.values()):
            super().checked(each)
        return choice

    def with_default(self, choice: str, option: str, value: object) -> str:
        default, of_model = _parts(choice)
        add = super().with_default
        more = (f"{model}={add(each, option, value)}" for model, each in of_model.items())
        return ";".join((add(default, option, value), *more))


def _parts(choice: str) -> tuple[str, dict[str, str]]:
    default, *rest = choice.split(";")
    if len(rest) > MODELS_MAX:
        raise ValueError(f"at most {MODELS_MAX} models have a placement policy of their own, got {len(rest)}")
    of_model: dict[str, str] = {}
    for part in rest:
        model, equals, policy = part.partition("=")
        if not equals or not model.strip() or model.strip() in of_model:
            raise ValueError(f"a model's placement policy is written ;MODEL=POLICY, once for each, got {part!r}")
        of_model[model.strip()] = policy.strip()
    return default.strip(), of_model


PLACEMENT_DEFAULT = Pinyon.name
"""The default of a conductor and of a simulation."""

PLACEMENT_POLICIES = ByModelRegistry(
    "placement",
    {
        KvCacheCentric.name: (KvCacheCentricSettings, KvCacheCentric),
        LeastLoaded.name: (NoSettings, lambda _: LeastLoaded()),
        RoundRobin.name: (NoSettings, lambda _: RoundRobin()),
        DualMap.name: (DualMapSettings, DualMap),
        Pinyon.name: (PinyonSettings, Pinyon),
    },
    PlacementPolicy,
)
