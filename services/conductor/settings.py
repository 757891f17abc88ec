"""The conductor's settings."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field

from pinyon.placement.cost_priors import parse_priors
from pinyon.placement.policies import PLACEMENT_DEFAULT, PLACEMENT_POLICIES
from pinyon.placement.scaling import parse_sizes
from pinyon.runtime.settings import ServiceSettings, checked, service_config


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

    placement: Annotated[str, AfterValidator(PLACEMENT_POLICIES.checked)] = Field(
        PLACEMENT_DEFAULT,
        description=f"placement policy: {PLACEMENT_POLICIES.choices}; for one model: ;MODEL=POLICY",
    )
    ttft_slo_ms: int = Field(
        30_000,
        ge=0,
        description="time to first token for requests that name none; one that takes longer by itself may wait a "
        "quarter of that time; 0 is off",
    )
    sizes: Annotated[str, checked(parse_sizes)] = Field(
        "",
        description="LEAST-MOST, as 2-8: tell how many instances that compute prompts each model should have "
        "(pinyon_conductor_instances_wanted); empty is off",
    )
    profile: Annotated[str, checked(parse_priors)] = Field(
        "",
        description="what costs are taken to be before they are measured: a name of docs/design/worker.md or a JSON "
        "file; further ones: ;MODEL=PROFILE",
    )
    tbt_slo_ms: int = Field(0, ge=0, description="time between tokens for requests that name none; 0 is off")
    lease_ms: int = Field(3_000, ge=100, le=600_000, description="an instance is forgotten this long after a report")
    settle_ms: int = Field(
        3_000, ge=0, le=600_000, description="after a start, the list of instances may be incomplete for this long"
    )
    instances_max: int = Field(512, ge=1, le=4096, description="instances, store nodes among them")
    index_keys_max: int = Field(
        10_000_000, ge=1, le=1_000_000_000, description="blocks that the index knows at once: 22 to 35 bytes each"
    )
    index_stride_tokens: int = Field(
        64,
        ge=1,
        le=4096,
        description="the index is told of a block every so many tokens of a prompt, and of none behind the last; 1: of "
        "all blocks",
    )
    inflight_max: int = Field(100_000, ge=1, description="placements in flight")
    inflight_unclaimed_s: float = Field(
        10.0, gt=0, description="seconds after which a placement counts no longer if its decode instance never had it"
    )
    inflight_prefill_s: float = Field(
        600.0, gt=0, description="seconds after which a placement's prefill counts no longer if nobody reported its end"
    )
    inflight_decode_s: float = Field(600.0, gt=0, description="the same for its decode")
    explain_max: int = Field(
        4096, ge=0, le=1_000_000, description="placements and refusals that `pinyon explain` knows; 0 is off"
    )
    explain_mib: int = Field(64, ge=1, le=65_536, description="memory for these, in MiB, about")
    lb_sessions_max: int = Field(256, ge=1, le=4096, description="load balancers connected at once")
