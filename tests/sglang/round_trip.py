"""Pages of SGLang's own host pools go into the KV store and back, by its own controller; run by the Python that has it.

    python -m tests.sglang.round_trip REDIS_URL MODEL_FOLDER

It prints one JSON object: for each kind of pool what came back, and whether the bytes are equal."""

from __future__ import annotations

import json
import sys
import threading
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host import base
from sglang.srt.mem_cache.pool_host.group import HostPoolGroup, PoolEntry
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost, get_mha_host_pool_cls
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.utils import get_hash_str
from sglang.srt.runtime_context import get_parallel, publish
from sglang.srt.server_args import ServerArgs

PAGE, LAYERS, TOKENS = 16, 3, 256
WAIT_S = 60.0
POOLS = [
    *(("mha", layout, torch.bfloat16) for layout in ("layer_first", "page_first", "page_first_direct", "page_head")),
    *(("mla", layout, torch.float16) for layout in ("layer_first", "page_first", "page_first_direct")),
    *(("uneven", layout, torch.bfloat16) for layout in ("page_first", "page_first_direct")),
    ("mha", "page_first", torch.float8_e4m3fn),
]


def pools(kind: str, layout: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """Returns a pool of the device, which is the CPU, and the host pool that SGLang makes for it."""
    common: dict[str, Any] = {"size": TOKENS, "page_size": PAGE, "dtype": dtype, "layer_num": LAYERS, "device": "cpu"}
    where: dict[str, Any] = {"device_capacity_tokens": TOKENS, "start_layer": 0, "end_layer": LAYERS}
    if kind == "mla":
        device = MLATokenToKVPool(kv_lora_rank=32, qk_rope_head_dim=16, enable_memory_saver=False, **common)
        make, where = MLATokenToKVPoolHost, {**where, "target_layer_num": LAYERS}
    else:
        common |= {"enable_memory_saver": False, "enable_alt_stream": False, "head_num": 2, "head_dim": 16}
        device = MHATokenToKVPool(v_head_dim=8 if kind == "uneven" else 16, **common)
        make = MHATokenToKVPoolHost if kind == "mha" else get_mha_host_pool_cls(_info(device))
    return device, make(_info(device), 2.0, 0, PAGE, layout, pin_memory=False, device="cpu", **where)


def _info(device: Any) -> Any:
    return device.get_device_pool_infos()[0].buffer_info


def controller(device: Any, host: Any, extra: dict[str, Any]) -> HybridCacheController:
    """Returns SGLang's controller over the pools; it loads the backend by its name."""
    entry = PoolEntry(PoolName.KV, host, device, lambda layer: layer, is_primary_index_anchor=True)
    return HybridCacheController(
        PagedTokenToKVPoolAllocator(TOKENS, PAGE, device.dtype, "cpu", device, need_sort=False),
        HostPoolGroup([entry]), PAGE, None, threading.Event(), io_backend="direct", write_policy="write_through",
        storage_backend="dynamic", model_name="served", storage_backend_extra_config=dict(extra),
    )  # fmt: skip


def round_trip(kind: str, layout: str, dtype: torch.dtype, extra: dict[str, Any]) -> dict[str, Any]:
    """Puts three pages into the store by one controller, and gets them, and not a fourth one, by another."""
    (device, mine), (other_device, other) = pools(kind, layout, dtype), pools(kind, layout, dtype)
    for buffer, its in zip(_buffers(mine), _buffers(other), strict=True):
        view = buffer.view(torch.uint8)
        view.copy_(torch.randint(0, 256, view.shape, dtype=torch.uint8))
        its.view(torch.uint8).zero_()
    here, there = controller(device, mine, extra), controller(other_device, other, extra)
    tokens = list(range(4 * PAGE))
    hashes = [f"{kind}{layout}{dtype}{each}" for each in get_hash_str(tokens, None, PAGE)]
    mine.alloc(2 * PAGE)  # so that pages lie elsewhere in both pools
    from_, to = mine.alloc(3 * PAGE), other.alloc(4 * PAGE)
    here.write_storage(from_, tokens[: 3 * PAGE], hashes[:3])
    stored = here.ack_backup_queue.get(timeout=WAIT_S).completed_tokens
    found = 0
    while found < 3:  # the node lists its objects soon after the put; the test's own limit ends this
        found = there.storage_backend.batch_exists(hashes)
    operation = there.prefetch(SimpleNamespace(rid="a request"), tokens)
    there.prefetch_hit_queue.get(timeout=WAIT_S)
    operation.hash_value, operation.host_indices = hashes, to  # as the scheduler's thread does for what was found
    there.prefetch_buffer.put(operation)
    loaded = 0
    while not (ack := there.ack_prefetch_queue.get(timeout=WAIT_S)).completed_req:
        loaded = max(loaded, ack.completed_tokens or 0)
    equal = [_page(mine, int(a)) == _page(other, int(b)) for a, b in zip(from_[::PAGE], to[::PAGE], strict=False)]
    counts = [dict(each.storage_backend.counts) for each in (here, there)]
    for each in (here, there):
        each.detach_storage_backend()
    return {"stored": stored, "found": found, "loaded": loaded, "equal": equal, "counts": counts}


def _buffers(pool: Any) -> list[torch.Tensor]:
    return list(pool.kv_buffer) if isinstance(pool.kv_buffer, tuple) else [pool.kv_buffer]


def _page(pool: Any, slot: int) -> bytes:
    """Returns the content of a page, by the pool's own axes."""
    parts = []
    for buffer in (
        [pool.k_buffer, pool.v_buffer] if len(_buffers(pool)) == 2 or pool.kv_buffer.shape[0] == 2 else _buffers(pool)
    ):
        axis = 1 if pool.layout == "layer_first" else 0
        by_page = pool.layout in ("page_first_direct", "page_head")
        part = buffer.narrow(axis, slot // PAGE if by_page else slot, 1 if by_page else PAGE)
        parts.append(part.contiguous().view(torch.uint8).numpy().tobytes())
    return b"".join(parts)


def main(redis_url: str, model: str) -> None:
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0  # a small machine has not as much
    publish(ServerArgs(model_path=model, device="cpu", skip_tokenizer_init=True, page_size=PAGE), role="scheduler")
    ranks = ("tp_rank", "pp_rank", "attn_tp_rank", "attn_cp_rank", "attn_dp_rank", "dp_rank")
    get_parallel().override_permanently(**dict.fromkeys(ranks, 0))
    extra = {
        "backend_name": "pinyon", "module_path": "pinyon.sglang", "class_name": "PinyonHiCache", "interface_v1": 1,
        "redis_url": redis_url, "look_s": 10, "load_s": 60, "store_s": 60,
    }  # fmt: skip
    told = {f"{kind} {layout} {dtype}": round_trip(kind, layout, dtype, extra) for kind, layout, dtype in POOLS}
    json.dump(told, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
