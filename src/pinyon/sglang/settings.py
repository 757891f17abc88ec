"""The settings of the storage backend: ``--hicache-storage-backend-extra-config``, or the environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pinyon.core.errors import InvalidArgument
from pinyon.runtime.setting_sources import settings_inside
from pinyon.runtime.settings import service_config, setting
from pinyon.runtime.transfer_engine import TransferSettings

OPTION = "hicache-storage-backend-extra-config"
OF_SGLANG = ("backend_name", "module_path", "class_name", "interface_v1", "allocator", "file_storage_path")
"""The names that SGLang itself reads from the same option, or puts there."""


class SglangSettings(TransferSettings):
    """The KV store behind SGLang's HiCache."""

    model_config = service_config("sglang")
    everyday: ClassVar[dict[str, str]] = {"the suite": "redis_url"}
    further: ClassVar[dict[str, str]] = {"KV": "fingerprint look_s load_s store_s"}

    redis_url: str = setting("", "Redis with the KV store's metadata")
    fingerprint: str = setting("", "name of the weights and of what else changes KV; made up when empty")
    look_s: float = setting(0.5, "time limit of a question which pages the KV store has", gt=0, le=10)
    load_s: float = setting(2.0, "time in which pages must arrive, and a second more for each GiB", gt=0, le=60)
    store_s: float = setting(2.0, "time limit of a put, and a second more for each GiB", gt=0, le=60)


def load_sglang_settings(extra: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> SglangSettings:
    """Returns the settings; ``extra`` wins over the environment. Raises :class:`InvalidArgument`."""
    own = {name: value for name, value in extra.items() if name not in OF_SGLANG}
    settings = settings_inside(SglangSettings, own, OPTION, environ)
    if not extra.get("interface_v1") or not settings.redis_url:
        raise InvalidArgument(f'--{OPTION} needs "interface_v1": 1 and redis_url', field=OPTION)
    return settings
