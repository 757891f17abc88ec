"""The pages in SGLang's host memory: where they lie, and what must be equal for two servers to read each other's."""

from __future__ import annotations

from typing import Any

import numpy as np
from xxhash import xxh3_128_hexdigest

from pinyon.core.errors import InvalidArgument
from pinyon.model.card import weights_name
from pinyon.store.kv_memory import KvMemory, LayerMemory
from pinyon.transfer import Access, TransferEngine

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
CHANGING = (
    *("dtype", "quantization", "kv_cache_dtype", "load_format", "json_model_override_args", "context_length"),
    *("quantization_param_path", "speculative_draft_model_path"),
)
"""SGLang's options, besides the weights, that change KV."""


def register_pool(engine: TransferEngine, pool: Any) -> KvMemory:
    """Registers the pool's tensors, and returns where its pages lie. Raises :class:`InvalidArgument`."""
    name, size, last, layers = type(pool).__name__, pool.page_size, pool.page_num - 1, []
    if pool.layout not in LAYOUTS or pool.kv_buffer is None:
        raise InvalidArgument(f"{name} in layout {pool.layout} is not supported, only {', '.join(LAYOUTS)}")
    if not hasattr(pool, "storage_format_tag"):  # 0.5.21, whose keys do not tell tenants and adapters apart
        raise InvalidArgument("this SGLang is too old: its pages do not name their format")
    buffers = pool.kv_buffer if isinstance(pool.kv_buffer, list | tuple) else [pool.kv_buffer]
    regions = [engine.register_local_memory(buffer, access=Access.NONE) for buffer in buffers]
    # SGLang tells the address and length of each piece of a page. Three pages show the distances.
    slots = [np.arange(page * size, (page + 1) * size) for page in (0, min(1, last), last)]
    told = [zip(*pool.get_page_buffer_meta(each), strict=True) for each in slots]
    for (at, length), (second, _), (end, _) in zip(*told, strict=True):
        home = [each for each in regions if each.address <= at <= end <= each.address + each.length - length]
        if not home or end - at != last * (second - at):
            raise InvalidArgument(f"the pages of {name} do not lie at equal distances in its tensors")
        layers.append(LayerMemory(home[0], at - home[0].address, second - at, length))
    memory = KvMemory(layers)
    if memory.object_bytes != size * pool.size_per_token:
        raise InvalidArgument(f"a page of {name} has not {memory.object_bytes} bytes, but other KV beside")
    return memory


def layout_id(config: Any, pool: Any, memory: KvMemory, version: str) -> str:
    """Returns the name of this rank's part of a page. All ranks of an MLA model have the same KV, and share a copy."""
    minor = ".".join(version.split(".")[:2])
    parts = (
        *(f"sglang{minor}", pool.layout, pool.storage_format_tag, pool.dtype, pool.page_size, memory.object_bytes),
        *(len(memory.pieces(0)), f"layers{pool.start_layer}-{pool.end_layer}", f"pp{config.pp_rank}/{config.pp_size}"),
        f"cp{config.attn_cp_rank}/{config.attn_cp_size}",
        "mla" if config.is_mla_model else f"tp{config.tp_rank}/{config.tp_size}",
    )
    return ":".join(map(str, parts))


def model_fingerprint() -> str:
    """Returns a name for the weights and for what else changes KV, from the arguments of this process's SGLang."""
    from sglang.srt.runtime_context import get_server_args

    arguments = get_server_args()
    names = (*CHANGING, "random_seed") if arguments.load_format == "dummy" else CHANGING
    said = [f"{name}={getattr(arguments, name)}" for name in names]
    weights = weights_name(arguments.model_path, str(arguments.revision))
    return xxh3_128_hexdigest("\0".join([weights, *said]).encode())
