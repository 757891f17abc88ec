"""The settings of the connector: ``kv_connector_extra_config`` in ``--kv-transfer-config``, or the environment."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pinyon.core.errors import InvalidArgument
from pinyon.runtime.setting_sources import settings_inside
from pinyon.runtime.settings import Address, service_config, setting
from pinyon.runtime.transfer_engine import TransferSettings


class VllmSettings(TransferSettings):
    """vLLM as an instance of the suite."""

    model_config = service_config("vllm")
    everyday: ClassVar[dict[str, str]] = {"the suite": "role conductor redis_url server_url"}
    further: ClassVar[dict[str, str]] = {
        "KV": "save look_s load_s store_s store_queue_s pinned_share peers lease_s max_lease_s"
    }

    role: Literal["prefill", "decode", "mixed"] = setting(
        "mixed", "prefill: computes prompts for others; decode, mixed: computes and decodes"
    )
    conductor: Address = setting("", "host:port of the conductor to report to; empty: none")
    redis_url: str = setting("", "Redis with the KV store's metadata; empty: no KV store")
    server_url: str = setting(
        "", "base URL at which load balancers reach vLLM's server; empty: from its --host and --port", max_length=256
    )
    save: bool = setting(True, "put computed blocks into the KV store")
    peers: bool = setting(True, "lend blocks to other instances, and read from theirs")
    look_s: float = setting(0.2, "longest time for which a request waits to hear what the KV store has", gt=0, le=10)
    load_s: float = setting(2.0, "time in which blocks must arrive, and a second more for each GiB", gt=0, le=60)
    store_s: float = setting(2.0, "time limit of a put", gt=0, le=60)
    store_queue_s: float = setting(5.0, "time that a block may wait for its put", gt=0, le=60)
    pinned_share: float = setting(0.25, "largest share of the KV blocks that may wait for the store", gt=0, le=0.9)
    lease_s: float = setting(5.0, "how long another instance may read blocks if it names no time", gt=0, le=60)
    max_lease_s: float = setting(30.0, "longest lease that another instance gets", gt=0, le=600)


def load_vllm_settings(extra: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> VllmSettings:
    """Returns the settings; ``extra`` wins over the environment. Raises :class:`InvalidArgument`."""
    return settings_inside(VllmSettings, extra, "kv_connector_extra_config", environ)


def server_url(settings: VllmSettings, argv: Sequence[str] | None = None) -> str:
    """Returns where vLLM's server is reached: as set, or as its command line says.

    vLLM tells connectors nothing of its server, but its processes share one command line."""
    if settings.server_url:
        return settings.server_url.rstrip("/")
    argv = sys.argv if argv is None else argv
    said = {"--host": "", "--port": "", "--ssl-certfile": "", "--config": ""}
    for place, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if (name := name.replace("_", "-")) in said:
            said[name] = value if equals else next(iter(argv[place + 1 : place + 2]), "")
    if said["--config"] and not said["--port"]:
        raise InvalidArgument("give server_url: vLLM's --config may name another port", field="server_url")
    host = settings.advertise_host or said["--host"]
    if host in ("", "0.0.0.0", "::"):
        host = settings.listen.rpartition(":")[0]
    scheme = "https" if said["--ssl-certfile"] else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host and not host.startswith('[') else host}:{said['--port'] or '8000'}"
