"""The settings of the controller."""

from __future__ import annotations

import shlex
from typing import Annotated, ClassVar

from pydantic import Field

from pinyon.federation.registry import MEMBERS_MAX
from pinyon.federation.watched import Timing
from pinyon.runtime.settings import Address, ServiceSettings, checked, service_config


class ControllerSettings(ServiceSettings):
    """The regional controller: knows the load balancers of all regions, and who stands in for one that failed."""

    model_config = service_config("controller")
    everyday: ClassVar[dict[str, str]] = {
        "regions": "http_listen state_file geography distances",
        "failures": "silence_s probe_timeout_s probes settle_s restart_hook",
    }
    further: ClassVar[dict[str, str]] = {
        "regions": "lbs_max",
        "failures": "grace_s lease_s restart_timeout_s restart_attempts",
    }

    http_listen: Address = Field(
        "127.0.0.1:0",
        description="host:port of /v1/regions, the list of load balancers for clients; empty turns it off",
    )
    state_file: str = Field(
        "", description="file that keeps what it knows for a restart; empty: load balancers tell it then"
    )
    geography: str = Field(
        "", description="file with the policy of regions (JSON, docs/design/controller.md): who may stand in for whom"
    )
    distances: str = Field(
        "", description='file with round trips between regions that nobody measures: JSON {"REGION": {"REGION": MS}}'
    )
    lbs_max: int = Field(MEMBERS_MAX, ge=1, le=MEMBERS_MAX, description="load balancers known at once")
    silence_s: float = Field(
        2.0, ge=1.5, le=600, description="time without a report after which a load balancer is suspected"
    )
    probe_timeout_s: float = Field(1.0, gt=0, le=60, description="time that a probe's answer may take")
    probes: int = Field(2, ge=1, le=100, description="probes in a row that a suspected one may leave unanswered")
    grace_s: float = Field(
        10.0, ge=0, le=3600, description="time after a start in which nobody has failed who is only known from before"
    )
    settle_s: float = Field(
        5.0,
        ge=0,
        le=3600,
        description="time that a load balancer serves again before it gets its clusters back; doubles with each "
        "failure in a row",
    )
    lease_s: float = Field(
        5.0, ge=1, le=3600, description="time that an adopter which does not hear the controller goes on in any case"
    )
    restart_hook: Annotated[str, checked(shlex.split)] = Field(
        "",
        description="command, without a shell, that starts a failed load balancer again; PINYON_FAILED_* say which "
        "(docs/design/controller.md)",
    )
    restart_timeout_s: float = Field(60.0, gt=0, le=3600, description="time after which that command is killed")
    restart_attempts: int = Field(10, ge=1, le=1000, description="times that it is run for one failure, at most")

    def timing(self) -> Timing:
        return Timing(
            silence_s=self.silence_s,
            probes=self.probes,
            grace_s=self.grace_s,
            settle_s=self.settle_s,
            settle_max_s=12 * self.settle_s,
            lease_s=self.lease_s,
        )

    def listeners(self) -> dict[str, str]:
        return {**super().listeners(), "http_listen": self.http_listen}
