"""A double of SGLang for tests without it: its interface as recorded, and a host pool of NumPy arrays.

``tests/sglang`` compares the recorded interface, and where a page's pieces lie, with the real ones."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

RECORDED = Path(__file__).parent / "data" / "sglang_interface.json"
STORAGE = "sglang.srt.mem_cache.hicache_storage"
CONTEXT = "sglang.srt.runtime_context"
VERSION = "0.5.23"


def recorded() -> dict[str, dict[str, list[str]]]:
    """Returns the recorded names and arguments."""
    interface: dict[str, dict[str, list[str]]] = json.loads(RECORDED.read_text())
    return interface


class Storage:
    """The base class of backends."""

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host


def arguments(**changed: Any) -> Any:
    """Returns SGLang's arguments, as far as they count."""
    names = recorded()["ServerArgs"]["fields"]
    return SimpleNamespace(**{**dict.fromkeys(names), "model_path": "a-hub/a-model", "load_format": "auto", **changed})


def install() -> None:
    """Makes ``import sglang...`` find the double, where SGLang is not installed."""
    if STORAGE in sys.modules:
        return
    for name in ("sglang", "sglang.srt", "sglang.srt.mem_cache", STORAGE, CONTEXT):
        sys.modules[name] = types.ModuleType(name)
    double: Any = sys.modules
    double["sglang"].__version__ = VERSION
    double[STORAGE].HiCacheStorage = Storage
    double[CONTEXT].get_server_args = arguments


@contextmanager
def serving(**changed: Any) -> Iterator[None]:
    """Lets SGLang have other arguments meanwhile."""
    double: Any = sys.modules[CONTEXT]
    double.get_server_args = lambda: arguments(**changed)
    try:
        yield
    finally:
        double.get_server_args = arguments


def config(extra: dict[str, Any], **changed: Any) -> Any:
    """Returns the configuration that SGLang gives a backend: ``HiCacheStorageConfig``."""
    values = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1,
        "is_mla_model": False, "dp_rank": 0, "extra_config": {"interface_v1": 1, **extra},
    }  # fmt: skip
    assert set(values) <= set(recorded()["HiCacheStorageConfig"]["fields"])
    return SimpleNamespace(**values | changed)


class Pool:
    """A host pool, K and V in each of its layouts; ``tests/sglang`` has the real one."""

    storage_format_tag: str | None = None

    def __init__(
        self,
        layout: str = "page_first",
        pages: int = 8,
        page_size: int = 4,
        layers: int = 3,
        dtype: npt.DTypeLike = "f2",
    ) -> None:
        heads, dim = 2, 16
        self.layout, self.page_num, self.page_size, self.layers = layout, pages, page_size, layers
        self.start_layer, self.end_layer, self.dtype = 0, layers, np.dtype(dtype)
        self.size = pages * page_size
        self.token_bytes = heads * dim * self.dtype.itemsize
        self.size_per_token = 2 * layers * self.token_bytes
        shape = {
            "layer_first": (layers, self.size, heads, dim),
            "page_first": (self.size, layers, heads, dim),
            "page_first_direct": (pages, layers, page_size, heads, dim),
            "page_head": (pages, heads, page_size, layers, dim),
        }.get(layout, (self.size, layers * heads * dim))
        self.kv_buffer: Any = np.zeros((2, *shape), self.dtype)

    def get_page_buffer_meta(self, indices: npt.NDArray[np.int64]) -> tuple[list[int], list[int]]:
        """Returns the addresses and lengths of the pages' pieces, one page after the other."""
        base, v, page_bytes = (
            int(self.kv_buffer.ctypes.data),
            self.kv_buffer.nbytes // 2,
            self.page_size * self.token_bytes,
        )
        pointers: list[int] = []
        for slot in indices.tolist()[:: self.page_size]:
            if self.layout == "layer_first":
                starts = [base + (layer * self.size + slot) * self.token_bytes for layer in range(self.layers)]
            else:
                starts = [base + slot * self.layers * self.token_bytes]
            pointers += [place for start in starts for place in (start, start + v)]
        pieces = self.layers if self.layout == "layer_first" else 1
        return pointers, [page_bytes * self.layers // pieces] * len(pointers)

    def slots(self, *pages: int) -> npt.NDArray[np.int64]:
        return np.concatenate([np.arange(page * self.page_size, (page + 1) * self.page_size) for page in pages])

    def page(self, number: int) -> bytes:
        """Returns the content of a page, by the pool's own axes."""
        tokens = slice(number * self.page_size, (number + 1) * self.page_size)
        if self.layout == "layer_first":
            return bytes(self.kv_buffer[:, :, tokens].tobytes())
        return bytes(self.kv_buffer[:, tokens if self.layout == "page_first" else number].tobytes())
