"""The conductor's settings."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import AfterValidator

from pinyon.placement.cost_priors import parse_priors
from pinyon.placement.policies import PLACEMENT_DEFAULT, PLACEMENT_POLICIES
from pinyon.placement.scaling import parse_sizes
from pinyon.runtime.settings import ServiceSettings, checked, service_config, setting


class ConductorSettings(ServiceSettings):
    """The control plane: knows the instances and what they hold, and places requests."""

    model_config = service_config("conductor")
    everyday: ClassVar[dict[str, str]] = {
        "placement": "placement ttft_slo_ms tbt_slo_ms profile sizes",
        "instances": "lease_ms instances_max",
        "memory": "index_keys_max explain_max",
    }
    further: ClassVar[dict[str, str]] = {
        "placement": "inflight_max inflight_unclaimed_s inflight_prefill_s inflight_decode_s",
        "instances": "settle_ms lb_sessions_max",
        "memory": "index_stride_tokens explain_mib",
    }

    placement: Annotated[str, AfterValidator(PLACEMENT_POLICIES.checked)] = setting(
        PLACEMENT_DEFAULT, f"placement policy: {PLACEMENT_POLICIES.choices}; for one model: ;MODEL=POLICY"
    )
    ttft_slo_ms: int = setting(
        30_000,
        "limit of the predicted TTFT if a request names none; a prompt that alone takes longer may wait "
        "a quarter of its time; 0: off",
        ge=0,
    )
    sizes: Annotated[str, checked(parse_sizes)] = setting(
        "",
        "LEAST-MOST, as 2-8: report how many instances that compute prompts each model should have "
        "(pinyon_conductor_instances_wanted); empty: off",
    )
    profile: Annotated[str, checked(parse_priors)] = setting(
        "",
        "initial costs, until they are measured: a profile of docs/design/worker.md or a JSON file; for "
        "further models: ;MODEL=PROFILE",
    )
    tbt_slo_ms: int = setting(0, "limit of the time between tokens, for requests that name none; 0: off", ge=0)
    lease_ms: int = setting(3_000, "time without a report after which an instance is forgotten", ge=100, le=600_000)
    settle_ms: int = setting(
        3_000, "time after a start in which the list of instances counts as incomplete", ge=0, le=600_000
    )
    instances_max: int = setting(512, "most instances, store nodes included", ge=1, le=4096)
    index_keys_max: int = setting(10_000_000, "most blocks in the index: 22 to 35 bytes each", ge=1, le=1_000_000_000)
    index_stride_tokens: int = setting(
        64, "distance in tokens between the blocks of a prompt in the index; 1: it has all blocks", ge=1, le=4096
    )
    inflight_max: int = setting(100_000, "most placements in flight", ge=1)
    inflight_unclaimed_s: float = setting(
        10.0, "time after which a placement no longer counts if its decode instance never got the request", gt=0
    )
    inflight_prefill_s: float = setting(
        600.0, "time after which a placement's prefill no longer counts if nobody reported its end", gt=0
    )
    inflight_decode_s: float = setting(
        600.0, "time after which a placement's decode no longer counts if nobody reported its end", gt=0
    )
    explain_max: int = setting(4096, "placements and refusals kept for `pinyon explain`; 0: off", ge=0, le=1_000_000)
    explain_mib: int = setting(64, "approximate memory for the placements that `pinyon explain` knows", ge=1, le=65_536)
    lb_sessions_max: int = setting(256, "most load balancers connected at once", ge=1, le=4096)
