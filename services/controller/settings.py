"""The settings of the controller."""

from __future__ import annotations

import shlex
from typing import Annotated, ClassVar

from pinyon.federation.registry import MEMBERS_MAX
from pinyon.federation.watched import Timing
from pinyon.runtime.settings import Address, ServiceSettings, checked, service_config, setting


class ControllerSettings(ServiceSettings):
    """The regional controller: it knows the load balancers of all regions, and which one stands in for a failed one."""

    model_config = service_config("controller")
    everyday: ClassVar[dict[str, str]] = {
        "regions": "http_listen state_file geography distances",
        "failures": "silence_s probe_timeout_s probes settle_s restart_hook",
    }
    further: ClassVar[dict[str, str]] = {
        "regions": "lbs_max",
        "failures": "grace_s lease_s restart_timeout_s restart_attempts",
    }

    http_listen: Address = setting(
        "127.0.0.1:0", "host:port of /v1/regions, the list of load balancers for clients; empty turns it off"
    )
    state_file: str = setting(
        "", "file that keeps the controller's state over a restart; empty: load balancers restore it"
    )
    geography: str = setting("", "JSON file that says which region may stand in for which (docs/design/controller.md)")
    distances: str = setting(
        "", 'file with round-trip times between regions, where none is measured: JSON {"REGION": {"REGION": MS}}'
    )
    lbs_max: int = setting(MEMBERS_MAX, "most load balancers known at once", ge=1, le=MEMBERS_MAX)
    silence_s: float = setting(2.0, "time without a report after which a load balancer is suspected", ge=1.5, le=600)
    probe_timeout_s: float = setting(1.0, "time that a probe's answer may take", gt=0, le=60)
    probes: int = setting(2, "probes in a row that a suspected load balancer may leave unanswered", ge=1, le=100)
    grace_s: float = setting(
        10.0, "time after a start before a load balancer known only from before may count as failed", ge=0, le=3600
    )
    settle_s: float = setting(
        5.0,
        "time for which a load balancer must serve again to get its clusters back; doubles with each failure in a row",
        ge=0,
        le=3600,
    )
    lease_s: float = setting(
        5.0, "time for which an adopter that does not hear the controller goes on in any case", ge=1, le=3600
    )
    restart_hook: Annotated[str, checked(shlex.split)] = setting(
        "",
        "command, without a shell, that restarts a failed load balancer; PINYON_FAILED_* say which "
        "(docs/design/controller.md)",
    )
    restart_timeout_s: float = setting(60.0, "time after which the restart command is killed", gt=0, le=3600)
    restart_attempts: int = setting(10, "most runs of the restart command for one failure", ge=1, le=1000)

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
