"""The settings of an agent."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pinyon.frontdoor.upstreams.url import parse_upstreams
from pinyon.runtime.identity import WORKER
from pinyon.runtime.settings import Address, ServiceSettings, checked, service_config, setting

_CONNECTABLE = r"^((tcp|ipc)://[^*\s]+)?$"


class AgentSettings(ServiceSettings):
    """The agent beside a vLLM or SGLang server, which reports the server's cache and load to the conductor."""

    model_config = service_config("agent")
    everyday: ClassVar[dict[str, str]] = {"the server": "server model events replay", "the suite": "conductor"}
    further: ClassVar[dict[str, str]] = {"the server": "topic block_tokens fingerprint gone_s upstream_api_key_file"}

    server: Annotated[str, checked(parse_upstreams)] = setting(
        "", "base URL of the server; required; each server has an agent of its own", pattern="^[^,]*$"
    )
    model: str = setting("", "the model's name at the server; empty: the first that it lists", max_length=256)
    events: str = setting(
        "", "ZeroMQ address of its KV cache events (tcp://127.0.0.1:5557); empty: none", pattern=_CONNECTABLE
    )
    replay: str = setting("", "ZeroMQ address at which missed events are replayed; empty: none", pattern=_CONNECTABLE)
    topic: str = setting("", "topic of the events; empty: all")
    block_tokens: int = setting(0, "tokens of a KV block; 0: as the server's metrics tell", ge=0, le=1 << 16)
    fingerprint: str = setting(
        "", "name of the weights, equal for all servers that have them; empty: made of name and path", max_length=64
    )
    gone_s: float = setting(15.0, "time without an answer after which the server counts as gone", ge=0.5, le=3600)
    upstream_api_key_file: str = setting("", "file with the server's API key")
    conductor: Address = setting("", "host:port of the conductor to report to; required")

    @classmethod
    def certified_role(cls) -> str:
        """Returns the role of workers, as an agent stands for one."""
        return WORKER
