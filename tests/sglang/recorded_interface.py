"""Writes SGLang's interface as this version has it; run by the Python that has SGLang.

    python -m tests.sglang.recorded_interface > tests/data/sglang_interface.json

The names and arguments of what the backend implements, calls and reads."""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.storage import StorageBackendFactory
from sglang.srt.server_args import ServerArgs

from pinyon.sglang import PinyonHiCache
from pinyon.sglang.pages import CHANGING

CONFIGURED = (
    *("tp_rank", "tp_size", "pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size", "is_mla_model", "dp_rank"),
    "extra_config",
)
READ_OF_POOLS = (
    *("layout", "kv_buffer", "page_num", "page_size", "size_per_token", "start_layer", "end_layer", "dtype"),
    *("storage_format_tag", "get_page_buffer_meta"),
)


def arguments(method: Any) -> list[str]:
    return list(inspect.signature(method).parameters)


def interface() -> dict[str, Any]:
    implemented = [name for name in vars(PinyonHiCache) if not name.startswith("_") and hasattr(HiCacheStorage, name)]
    pools = "".join(inspect.getsource(each) for each in MHATokenToKVPoolHost.__mro__[:-1])
    there = [name for name in READ_OF_POOLS if f"self.{name} " in pools or hasattr(MHATokenToKVPoolHost, name)]
    config = {field.name for field in dataclasses.fields(HiCacheStorageConfig)}
    return {
        "HiCacheStorage": {name: arguments(getattr(HiCacheStorage, name)) for name in sorted(implemented)},
        "abstract": {"methods": sorted(HiCacheStorage.__abstractmethods__)},
        "factory": {"_create_dynamic_backend": arguments(StorageBackendFactory._create_dynamic_backend)},
        "HiCacheStorageConfig": {"fields": [name for name in CONFIGURED if name in config]},
        "HostKVCache": {"names": there},
        "ServerArgs": {
            "fields": [
                name
                for name in ("model_path", "revision", "random_seed", *CHANGING)
                if name in ServerArgs.__struct_fields__
            ]
        },
    }


if __name__ == "__main__":
    json.dump(interface(), sys.stdout, indent=1, sort_keys=True)
